"""The translator in Python: windows, batches, long lines, failures, options, threads, scores."""

from __future__ import annotations

import itertools
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import exported, random_model
from searching import Copier, save_tiny
from tiny import sentences, tiny_model

from nmt.config import ExportFormat, SearchConfig, TooLong
from nmt.data.batch import bucket_by_length
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DataError
from nmt.runtime.prefetch import prefetch
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.stepper import ModelStepper
from nmt.translate.batch_search import MAX_FAILURES, BatchSearch, Failure, Segment
from nmt.translate.engines.native import NativeBackend
from nmt.translate.options import LineOptions
from nmt.translate.results import LineResult
from nmt.translate.translator import TranslationError, Translator
from nmt.translate.windows import WindowReader

CONFIG = SearchConfig(beam_size=2, max_length_a=1.0, max_length_b=8)
LINES = ["", *sentences(30, seed=8), " ", "the " * 60]


@pytest.fixture(scope="module")
def translator(tokenizer: Tokenizer) -> Translator:
    model = tiny_model(2, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    return Translator(ModelStepper(model), tokenizer, CONFIG)


@pytest.fixture
def copier(tokenizer: Tokenizer) -> Translator:
    return Translator(Copier(tokenizer.vocab_size), tokenizer, SearchConfig(beam_size=1))


def results_of(translator: Translator, lines: list[str], **options: Any) -> list[LineResult]:
    config = translator.search_config(alignment=True)
    windows = translator.translate_windows(WindowReader(lines), config, LineOptions(**options))
    return next(windows)[1]


# --- windows


def test_windows_hold_every_line_once_and_go_on_the_same_from_any_of_their_ends() -> None:
    lines = [str(i) * (i % 7) for i in range(700)]
    lines[333] = "x" * (1 << 22)  # ends its window
    for size in (1, 40, 100, 1000):
        windows = list(WindowReader(lines, window_lines=size, has_more=lambda: True))
        assert [line for window in windows for line in window.lines] == lines
        assert all(len(window.lines) <= size for window in windows)
        assert all(w.first_line // size == (w.next_line - 1) // size for w in windows)
        assert [w.first_line for w in windows[1:]] == [w.next_line for w in windows[:-1]]
        assert 334 in [w.first_line for w in windows]
        for k in range(1, len(windows), 1 + len(windows) // 9):
            start = windows[k].first_line
            resumed = WindowReader(lines, window_lines=size, has_more=lambda: True)
            resumed.skip(start)
            assert list(resumed) == windows[k:], (size, k)


def test_the_first_windows_of_a_stream_are_small_and_those_of_a_list_full() -> None:
    cases = ((None, [100, 100, 50]), (lambda: True, [64, 36, 100, 50]))
    for has_more, expected in cases:
        windows = WindowReader(["a"] * 250, window_lines=100, has_more=has_more)
        assert [len(window.lines) for window in windows] == expected


def test_batches_are_as_large_as_the_engine_wants_them_unless_a_size_is_given(
    copier: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = copier.backend.search
    sizes = []

    def recorded(request: SearchRequest) -> list[list[Hypothesis]]:
        sizes.append(len(request.sources))
        return search(request)

    monkeypatch.setattr(copier.backend, "max_tokens", 8)
    monkeypatch.setattr(copier.backend, "search", recorded)
    assert len(copier.tokenizer.src.encode("the")) + 1 == 2
    copier.translate(["the"] * 6)
    copier.translate(["the"] * 6, max_tokens=4)
    assert sizes == [4, 2, 2, 2, 2]


def test_a_stream_is_read_no_further_than_two_windows_ahead(translator: Translator) -> None:
    read: list[str] = []

    def endless() -> Iterator[str]:
        while True:
            read.append("the house")
            yield "the house"

    stream = translator.translate_stream(endless(), window_lines=10)
    first = list(itertools.islice(stream, 25))
    assert len(first) == 25
    assert len(read) <= 30 + 2 * 10 + 1
    num_threads = threading.active_count()
    stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 600
    while threading.active_count() >= num_threads:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_the_text_of_a_line_depends_on_no_window_batch_or_neighbor(translator: Translator) -> None:
    distinct_lines = [*LINES[:9], " ", "the " * 25]
    lines = random.Random(1).sample(distinct_lines * 2, 2 * len(distinct_lines))
    for beam_size in (1, 2):
        expected = {
            line: translator.translate([line], beam_size=beam_size)[0] for line in distinct_lines
        }
        assert expected[""] == expected[" "] == ""
        assert len(set(expected.values())) > 7
        for window_lines, max_tokens in ((1, 1), (7, 64), (5000, 100_000)):
            options = {"window_lines": window_lines, "max_tokens": max_tokens}
            n_best = list(translator.n_best_stream(iter(lines), beam_size=beam_size, **options))
            assert [best[0].text for best in n_best] == [expected[line] for line in lines], options
        for line, translations in zip(lines, n_best, strict=True):
            assert len(translations) == (beam_size if line.strip() else 1)
            scores = [t.score for t in translations if t.finished]
            assert scores == sorted(scores, reverse=True)


def test_a_model_that_copies_gives_back_the_text_or_what_the_limit_left_of_it(
    copier: Translator,
) -> None:
    lines = [line for line in LINES if line.strip()]
    tokenizer = copier.tokenizer
    for beam_size, a in ((1, 1.0), (3, 1.0), (1, 0.5)):
        settings = {"beam_size": beam_size, "max_length_a": a, "max_length_b": 1}
        for line, (best, *_) in zip(lines, copier.n_best(lines, **settings), strict=True):
            ids = tokenizer.src.encode(line)
            limit = int(a * len(ids)) + 1
            text = line.strip() if limit > len(ids) else tokenizer.tgt.decode(ids[:limit])
            assert (best.finished, best.text) == (limit > len(ids), text), settings
            assert best.tokens == tokenizer.tgt.pieces(ids[:limit])
            assert best.log_prob == pytest.approx(-0.01 * min(len(ids) + 1, limit), abs=1e-4)


# --- long lines


def test_a_cut_line_is_joined_and_reports_all_its_parts(
    translator: Translator, copier: Translator
) -> None:
    text = ("The small tree. A house sees the tree, the green house; über Haus! " * 9).strip()
    assert copier.translate([text, "a"], max_source_length=20) == [text, "a"]
    assert copier.translate([text], max_source_length=1000) == [text]
    first = "The small tree."
    second = "A house sees."
    lines = [f"{first} {second}", first, second]
    assert results_of(copier, lines, max_source_length=10)[0].text == lines[0]
    split_result, *single = results_of(translator, lines, max_source_length=10)
    assert [result.num_segments for result in (split_result, *single)] == [2, 1, 1]
    assert split_result.source_tokens == single[0].source_tokens + single[1].source_tokens
    best, first, second = (result.translations[0] for result in (split_result, *single))
    end = ["</s>"] if first.finished else []
    assert best.tokens == [*first.tokens, *end, *second.tokens]
    assert best.token_log_probs == pytest.approx(first.token_log_probs + second.token_log_probs)
    assert best.log_prob == pytest.approx(first.log_prob + second.log_prob)
    assert best.score == pytest.approx(first.score + second.score)
    alignment = best.alignment or []
    border = len(single[0].source_tokens)
    assert len(alignment) == len(best.tokens)
    assert alignment[: len(first.alignment or [])] == first.alignment
    assert alignment[-len(second.tokens) :] == [
        border + position for position in second.alignment or []
    ]


def test_a_line_that_is_too_long_is_truncated_or_named_by_its_number(copier: Translator) -> None:
    line = "the small house sees the tree the tree the tree"
    ids = copier.tokenizer.src.encode(line)
    translations = copier.translate([line], too_long="truncate", max_source_length=8)
    assert translations == [copier.tokenizer.tgt.decode(ids[:7])]
    (result,) = results_of(copier, [line], max_source_length=8, too_long=TooLong.truncate)
    assert result.num_truncated == len(ids) - 7
    lines = ["a"] * 4 + ["the " * 30, "a"]
    with pytest.raises(DataError, match=r"^line 5 has 30 tokens"):
        copier.translate(lines, too_long="error", max_source_length=16, window_lines=2)
    assert copier.translate(["a"], too_long="error", max_source_length=16) == ["a"]


# --- failures


class Fragile(NativeBackend):
    """Runs out of memory for some words, as a graphics card does for large batches."""

    def __init__(self, tokenizer: Tokenizer, max_rows: int = 1 << 30, num_workers: int = 1) -> None:
        super().__init__(Copier(tokenizer.vocab_size), tokenizer)
        self.word = tokenizer.encode("tree")[-1]
        self.max_rows = max_rows
        self.num_workers = num_workers
        self.num_calls = 0

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        self.num_calls += 1
        if len(request.sources) > self.max_rows or any(self.word in row for row in request.sources):
            raise torch.OutOfMemoryError("no memory\nfor this")
        return super().search(request)


def test_segments_share_batches_as_pairs_of_their_lengths_do(tokenizer: Tokenizer) -> None:
    random_numbers = random.Random(1)
    for case in range(40):
        count = random_numbers.randint(1, 60)
        segments = [Segment([5] * random_numbers.randint(1, 30), []) for _ in range(count)]
        max_tokens = random_numbers.choice((1, 40, 200, 100_000))
        batches = BatchSearch(Fragile(tokenizer), CONFIG, n_best=1, max_tokens=max_tokens)
        lengths = np.array([[segment.num_tokens] * 2 for segment in segments])
        bound = max(max_tokens // CONFIG.beam_size, int(lengths.max()))  # the longest one must fit
        expected = bucket_by_length(lengths, bound, np.arange(count))
        assert batches._form_batches(segments) == [rows.tolist() for rows in expected], case


def test_only_the_sentence_that_fails_is_lost(tokenizer: Tokenizer) -> None:
    lines = [line.replace("tree", "house") for line in sentences(40, seed=1)]
    lines[3] = lines[17] = "a tree"
    for num_workers, max_tokens in ((1, 4096), (3, 30)):
        backend = Fragile(tokenizer, num_workers=num_workers)
        batches = BatchSearch(backend, SearchConfig(beam_size=1), 1, max_tokens)
        outcomes = batches.translate([Segment(tokenizer.encode(line), []) for line in lines])
        for i, (line, outcome) in enumerate(zip(lines, outcomes, strict=True)):
            if i in (3, 17):
                assert outcome == Failure("OutOfMemoryError: no memory for this")
            else:
                assert not isinstance(outcome, Failure)
                assert tokenizer.decode(outcome[0].tokens) == line


def test_batches_that_are_too_large_are_translated_in_halves(tokenizer: Tokenizer) -> None:
    backend = Fragile(tokenizer, max_rows=3)
    lines = [line.replace("tree", "house") for line in sentences(MAX_FAILURES + 20, seed=1)]
    assert Translator(backend, tokenizer, SearchConfig(beam_size=1)).translate(lines) == lines
    assert backend.num_calls > len(lines) / 3


def test_many_sentences_that_fail_do_not_end_a_job_that_works(tokenizer: Tokenizer) -> None:
    """Sentences that are too long for the memory are neighbors once they are sorted."""
    house, tree = ([Segment(tokenizer.encode(word), [])] for word in ("house", "tree"))
    segments = tree * (MAX_FAILURES - 1) + house + tree * 2 * MAX_FAILURES
    decoder = BatchSearch(Fragile(tokenizer), SearchConfig(beam_size=1), 1, max_tokens=6)
    failed = [isinstance(outcome, Failure) for outcome in decoder.translate(segments)]
    assert failed == [segment in tree for segment in segments]
    for num_workers in (1, 3):  # one that fails with everything is not asked for ever
        backend = Fragile(tokenizer, max_rows=0, num_workers=num_workers)
        with pytest.raises(torch.OutOfMemoryError):
            Translator(backend, tokenizer, CONFIG).translate(["a house"] * 10 * MAX_FAILURES)


def test_a_broken_connection_ends_a_search_that_others_join_without_a_retry(
    tokenizer: Tokenizer,
) -> None:
    backend = Fragile(tokenizer)
    batches = BatchSearch(backend, SearchConfig(beam_size=2), n_best=1, max_tokens=4096)
    segments = [Segment(tokenizer.encode(word), []) for word in ("house", "the house")]

    def fail(_: object) -> list[Segment]:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        batches.translate_arriving(segments, take_new=fail, deliver=lambda _: None)
    with pytest.raises(ConnectionError):
        batches.translate_arriving(segments, take_new=lambda _: [], deliver=fail)
    assert backend.num_calls == 0


def test_in_python_a_sentence_that_fails_is_an_error_with_its_number(tokenizer: Tokenizer) -> None:
    translator = Translator(Fragile(tokenizer), tokenizer, CONFIG)
    with pytest.raises(TranslationError, match="line 2 cannot be translated: OutOfMemoryError"):
        translator.translate(["a house", "a tree"])


# --- prefixes, scores, settings


def test_prefixes_and_targets_must_be_as_many_as_the_lines(translator: Translator) -> None:
    for num_prefixes in (0, 4, 6, 7):
        with pytest.raises(DataError, match="prefixes than lines"):
            translator.translate(LINES[1:6], prefixes=["a"] * num_prefixes, window_lines=5)
    with pytest.raises(DataError, match="2 sources and 1 targets"):
        translator.score(["a", "b"], ["a"])
    assert translator.score([], []) == []


def test_scores_are_those_of_search_for_the_same_tokens(translator: Translator) -> None:
    sources = LINES[1:25]
    targets = sentences(24, seed=4)
    config = translator.search_config(beam_size=1, max_length_b=30)
    results = translator.n_best(sources, config, prefixes=targets)
    scored = translator.score(sources, targets)
    for (forced,), result, target in zip(results, scored, targets, strict=True):
        num_tokens = len(result.tokens)
        assert result.text == target
        assert forced.tokens[:num_tokens] == result.tokens
        expected = forced.token_log_probs[:num_tokens]
        assert result.token_log_probs[:-1] == pytest.approx(expected, abs=1e-4)
        assert result.log_prob == pytest.approx(sum(result.token_log_probs))
        penalty = ((5 + num_tokens + 1) / 6) ** translator.defaults.length_penalty
        assert result.score == pytest.approx(result.log_prob / penalty)
    without_target, without_source, empty = translator.score(
        ["a", "", " "], ["", "a", ""], normalization="average"
    )
    assert max(without_target.log_prob, without_source.log_prob) < 0
    assert [empty] == translator.n_best([""])[0]


CALLS: list[Callable[..., Any]] = [
    Translator.translate,
    lambda *args, **options: list(Translator.translate_stream(*args, **options)),
    Translator.n_best,
    lambda *args, **options: list(Translator.n_best_stream(*args, **options)),
]


def test_a_wrong_option_is_refused_by_name_wherever_it_is_given(translator: Translator) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"beamsize": 3}, ConfigError, "beamsize: no such option here; did you mean beam_size"),
        ({"max_token": 3}, ConfigError, "max_token: .*; did you mean max_tokens"),
        ({"too_long": "spli"}, ConfigError, "too_long=spli: no such choice; did you mean split"),
        ({"normalization": "mean"}, ConfigError, "normalization=mean: no such .*; valid: average"),
        ({"max_source_length": 7}, ConfigError, "max_source_length=7: must be at least 8"),
        ({"prefixes": "x"}, ConfigError, "prefixes is one text; give a list"),
        ({"beam_size": "4"}, TypeError, "beam_size='4': must be of type int"),
        ({"max_tokens": 4.5}, TypeError, "max_tokens=4.5: must be of type int"),
        ({"length_penalty": True}, TypeError, "length_penalty=True: must be of type float"),
        ({"sampling": 1}, TypeError, "sampling=1: must be of type bool"),
        ({"forbid": "Haus"}, TypeError, "forbid='Haus': must be of type list"),
        ({"suppress": "x"}, TypeError, "suppress='x': must be of type list"),
        ({"glossary": "a\tb"}, TypeError, r"glossary='a\\tb': must be of type list"),
        ({"glossary": ["terms.tsv"]}, ConfigError, "glossary=terms.tsv: must be a list of SOURCE"),
    ]
    for options, error, message in cases:
        for call in CALLS:
            with pytest.raises(error, match=message):
                call(translator, ["a"], **options)
        if not {"too_long", "max_source_length", "prefixes"} & set(options):
            with pytest.raises(error, match=message):
                translator.score(["a"], ["a"], **options)


def test_arguments_that_are_not_lists_of_texts_are_refused(translator: Translator) -> None:
    for call in CALLS:
        with pytest.raises(ConfigError, match="lines is one text; give a list"):
            call(translator, "the house")
    with pytest.raises(ConfigError, match="targets is one text; give a list"):
        translator.score(["a", "b"], "ab")
    with pytest.raises(ConfigError, match="prefixes: no such option here"):
        translator.score(["a"], ["a"], prefixes=["a"])
    for call in (*CALLS, lambda t, lines, *more: t.score(lines, ["a"], *more)):
        with pytest.raises(TypeError, match="config=4: give a SearchConfig"):
            call(translator, ["a"], 4)
        with pytest.raises(TypeError, match=r"\[0\]=5: must be a text \(str\), not int"):
            call(translator, [5])
        with pytest.raises(TypeError, match="=None: give a list of texts"):
            call(translator, None)
        with pytest.raises(DataError, match="has half a surrogate pair at character 1"):
            call(translator, ["a\ud800"])


@pytest.mark.slow
def test_all_methods_take_the_same_options(translator: Translator) -> None:
    lines = [*LINES[1:6], "The tree. A house."]
    prefixes = ["the", "", "a", "", "", "a"]
    options = {"beam_size": 3, "prefixes": prefixes, "max_source_length": 10, "max_tokens": 64}
    options |= {"too_long": "truncate", "length_penalty": 1, "window_lines": 4}
    texts, stream, n_best, n_best_stream = (call(translator, lines, **options) for call in CALLS)
    assert texts == stream == [best.text for best, *_ in n_best]
    assert n_best == n_best_stream
    assert {len(translations) for translations in n_best} == {3}
    config = translator.search_config(beam_size=3, length_penalty=1.0, max_length_b=None)
    assert config == replace(translator.defaults, beam_size=3, length_penalty=1.0)
    remaining_options = {key: options[key] for key in ("prefixes", "max_source_length", "too_long")}
    repeated = translator.n_best(lines, config, **remaining_options)
    assert [[t.text for t in ts] for ts in repeated] == [[t.text for t in ts] for ts in n_best]


def test_loading_refuses_unknown_choices_by_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = save_tiny(tmp_path / "model", tokenizer)
    for key in ("backend", "dtype", "combine"):
        with pytest.raises(ConfigError, match=f"{key}=xyz: no such choice; valid: "):
            Translator.load([folder, folder], device="cpu", **{key: "xyz"})


@pytest.mark.slow
def test_draws_depend_on_neither_batch_nor_number(translator: Translator) -> None:
    lines = LINES[1:12] * 2
    first = translator.translate(lines, sampling=True, max_tokens=1)
    assert translator.translate(lines, sampling=True) == first
    assert translator.translate(lines, sampling=True, seed=5) != first
    settings = translator.search_config(sampling=True, beam_size=5)
    assert [ts[0].text for ts in translator.n_best(lines, settings)] == first


# --- threads


@pytest.mark.slow
def test_threads_get_the_translations_of_a_single_thread(
    translator: Translator, tokenizer: Tokenizer
) -> None:
    """Also next to a sentence longer than the table of positions, which grows then."""
    texts = [random.Random(k).sample(LINES, 12) + ["the " * (520 + 40 * k)] for k in range(4)]
    options = {"max_source_length": 2000, "max_length_b": 3, "max_length_a": 0.01}
    fresh = tiny_model(2, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    shared = Translator(ModelStepper(fresh), tokenizer, CONFIG)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            translations = list(pool.map(lambda lines: shared.translate(lines, **options), texts))
    finally:
        sys.setswitchinterval(interval)
    assert translations == [translator.translate(lines, **options) for lines in texts]


def test_closing_a_prefetching_reader_ends_its_thread() -> None:
    """When Python ends while it is in torch, the process aborts."""
    threads_before = set(threading.enumerate())
    waiting = queue.Queue[int]()
    numbers = (time.sleep(0.1 * number) or number for number in range(9))
    reader = prefetch(numbers, join_seconds=600)
    assert next(reader) == 0
    reader.close()
    assert set(threading.enumerate()) <= threads_before
    waiting.put(0)
    reader = prefetch(iter(waiting.get, None), join_seconds=0.1)
    assert next(reader) == 0
    reader.close()  # though the next item never comes
    waiting.put(1)


FORK = """
import os, signal, sys
import torch
from nmt import Translator
from nmt.errors import NmtError

def translate_in_fork(model_dir, backend):
    translator = Translator.load(model_dir, backend=backend)
    torch.set_num_threads(2)

    def translate():
        torch.exp(torch.zeros(1 << 20))  # large enough for several threads
        return translator.translate(["the house"])[0]

    expected = translate()
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        assert torch.get_num_threads() == 1
        try:
            is_same = translate() == expected  # auto goes on with the weights of the native engine
            os._exit(0 if is_same or backend == "auto" else 1)
        except NmtError as error:
            print(error, flush=True)
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)

for argument in sys.argv[1:]:
    backend, _, model_dir = argument.partition("=")
    print(backend, translate_in_fork(model_dir, backend), flush=True)
"""


@pytest.fixture
def run_with_models(tokenizer: Tokenizer, tmp_path: Path) -> Callable[[str], str]:
    """Run a script with arguments BACKEND=MODEL_DIR for each backend; return its output."""
    folder = random_model(tmp_path / "model", tokenizer)
    export = exported(folder, ExportFormat.ctranslate2)
    arguments = [f"native={folder}", f"auto={folder}", f"ctranslate2={export}"]

    def run(code: str) -> str:
        script = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(script, capture_output=True, check=False, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_a_forked_process_translates_with_one_thread_or_says_what_to_do(
    run_with_models: Callable[[str], str],
) -> None:
    native, auto, refusal, ctranslate2 = run_with_models(FORK).splitlines()
    assert (native, auto, ctranslate2) == ("native 0", "auto 0", "ctranslate2 2")
    assert "process was forked after the model was loaded" in refusal


LOAD_IN_FORK = """
import os, signal, sys
import torch
from nmt import Translator

torch.set_num_threads(2)
torch.exp(torch.zeros(1 << 20))  # large enough for several threads
for argument in sys.argv[1:]:
    backend, _, model_dir = argument.partition("=")
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        [text] = Translator.load(model_dir, backend=backend).translate(["the house"])
        torch.exp(torch.zeros(1 << 20))
        os._exit(0 if text else 1)
    print(backend, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_forked_after_openmp_has_run_can_load_a_model(
    run_with_models: Callable[[str], str],
) -> None:
    output = run_with_models(LOAD_IN_FORK)
    assert output.splitlines() == ["native 0", "auto 0", "ctranslate2 0"]
