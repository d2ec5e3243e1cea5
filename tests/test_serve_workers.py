"""Worker processes of the server: the same answers, and none lost when one of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preprocessing import is_running, wait_until_gone
from serving import (
    GOOD,
    PATIENCE_SECONDS,
    change_config,
    copying,
    eventually,
    loaded,
    running,
    start_server,
    tiny_folder,
)
from tiny import sentences, tokenizer_config

from nmt.config import Engine, ServeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ModelError
from nmt.serve.models import Models
from nmt.serve.rounds import JoiningSearch, SearchRound, WorkerThreads
from nmt.serve.v1_attention import _check_index as check_index
from nmt.serve.worker_pool import WorkerDiedError, count_workers
from nmt.translate.batch_search import Segment
from nmt.translate.translator import Translator


def processes(parent: int) -> list[int]:
    """Return the processes that `parent` started and that still run."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = path.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(ppid) == parent and state != "Z":
            children.append(int(path.parent.name))
    return children


def loaders(server: int) -> list[int]:
    """Return the processes of a server that have loaded models."""
    children = processes(server)
    return [pid for pid in children if "run_loader" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
def test_workers_answer_as_one_process_does_and_lose_nothing_when_they_are_killed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    lines = sentences(60)
    translator = Translator.load(folder, device="cpu", backend="native")
    expected = {size: translator.translate(lines, beam_size=size) for size in (1, 4)}
    earlier = set(processes(os.getpid()))
    with running(loaded(folder, num_workers=2)) as server, ThreadPoolExecutor(16) as clients:
        (loader,) = set(processes(os.getpid())) - earlier

        numbers = itertools.count()
        started: set[int] = set()  # numbers of requests
        answered: set[int] = set()

        def ask(job: tuple[int, int]) -> tuple[tuple[int, int], str]:
            request_number = next(numbers)
            started.add(request_number)
            search = {"beam_size": job[0]}
            body = {"text": lines[job[1]], "search": search, "split_sentences": False}
            [translation] = server.post("/v1/translate", **body, **GOOD).json["translations"]
            answered.add(request_number)
            return job, translation["text"]

        def check(jobs: list[tuple[int, int]]) -> None:
            for (size, number), text in clients.map(ask, jobs):
                assert text == expected[size][number], (size, number)

        jobs = [(size, number) for number in range(len(lines)) for size in (4, 1)]
        check(jobs[:32])
        assert len(processes(loader)) == 2
        asking = ThreadPoolExecutor(1).submit(check, jobs * 2)
        pool = server.service.models.pool
        assert pool is not None

        def num_lost_workers() -> int:
            """Return the number of workers whose death the server has noticed."""
            lost = [worker for worker in pool._workers if worker and not worker.is_alive]
            return pool.num_deaths + len(lost)

        for num_killed in range(3):
            # no sentence loses its worker twice; one may be sent to a worker that is dead already
            eventually(lambda: num_lost_workers() >= num_killed)  # noqa: B023
            disturbed = set(started)
            goal = len(answered) + 40
            eventually(lambda: disturbed <= answered and len(answered) > goal)  # noqa: B023
            os.kill(processes(loader)[0], signal.SIGKILL)
        asking.result()
        assert server.metric("nmt_worker_deaths_total") >= 1
        for process in [loader, *processes(loader)]:  # who forks is gone too
            with contextlib.suppress(ProcessLookupError):  # a worker ends with its loader
                os.kill(process, signal.SIGKILL)
        check(jobs[:4])
        pair = {"text": lines[0], "translation": expected[4][0]}
        answer = server.post("/v1/attention", **pair, **GOOD, layer=0, head=0).json
        [attention] = translator.attention([lines[0]], [expected[4][0]])
        assert answer["columns"] == attention.src
        assert answer["weights"][0] == pytest.approx(attention.cross[0, 0, 0].tolist(), abs=1e-4)
        assert server.get("/v1/models").json["groups"][0]["attention"]["heads"] > 0
        wrong = {"text": lines[0], "translation": "a", "kind": "none"}
        assert server.post("/v1/attention", **wrong, **GOOD).status == 400
        ours = set(processes(os.getpid())) - earlier
        assert ours
    eventually(lambda: not set(processes(os.getpid())) & ours)


@pytest.mark.slow
def test_an_exception_that_cannot_be_unpickled_reaches_the_caller_as_its_text(
    tmp_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise, the server would wait forever for the answer of the worker."""
    models = loaded(tiny_folder(tmp_path / "model", tokenizer), num_workers=2)
    assert models.pool is not None
    [direction] = models.directions.values()

    async def call_twice() -> None:
        assert models.pool is not None
        for _ in range(2):
            call = models.pool.call_function(direction.translator, check_index, 5, 1)
            with pytest.raises(RuntimeError, match="HttpError.*no such"):
                await asyncio.wait_for(call, timeout=PATIENCE_SECONDS)
        models.pool.close()

    asyncio.run(call_twice())
    assert models.pool.num_deaths == 0
    assert "_check_index failed in a worker" in capfd.readouterr().err


def test_a_sentence_that_kills_its_worker_fails_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(WorkerThreads):
        async def search(self, worker_index: int, search_round: SearchRound, deliver: Any) -> None:
            segments = [
                request.segments[index] for request, index in search_round.unfinished.values()
            ]
            if any(poison in segment.ids for segment in segments):
                raise WorkerDiedError
            await super().search(worker_index, search_round, deliver)

    models, _ = copying(tokenizer)
    poison = tokenizer.encode("über")[0]
    with running(models) as server:
        monkeypatch.setattr(server.service.scheduler.rounds, "threads", Dying(1))
        text = ["a tree", "a über house", "the house"]
        translations = server.post("/v1/translate", text=text, **GOOD).json["translations"]
        assert [item["text"] for item in translations] == ["a tree", None, "the house"]
        assert "died twice" in translations[1]["sentences"][0]["error"]
        assert server.translate("the tree") == "the tree"
        assert server.service.scheduler.queues.num_waiting == 0


def test_sentences_join_when_they_are_a_quarter_or_after_four_steps() -> None:
    segment = Segment(ids=[5], prefix_ids=[])
    arrivals = [1, 0, 0, 0, 0, 1, 0, 1, 1]  # before each step of a search of eight sentences
    expected = [0, 0, 0, 0, 1, 0, 0, 2, 0]
    remaining = iter(arrivals)
    num_joined = []

    class FakeSearch:
        def translate_arriving(self, _: Any, take: Callable[[int], Any], deliver: Any) -> None:
            for _ in arrivals:
                num_joined.append(len(take(8)))

    search = JoiningSearch(
        FakeSearch(),  # type: ignore[arg-type]
        can_join=True,
        receive=lambda: [segment] * next(remaining, 0),
        deliver=lambda _: None,
    )
    search.search([segment])
    assert num_joined[: len(arrivals)] == expected


@pytest.mark.slow
def test_weights_that_a_worker_cannot_load_are_one_error(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    config = ServeConfig(
        model_dir=[str(folder)], device="cpu", num_workers=1, backend=Engine.native
    )
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(ModelError, match="model.safetensors"):
        Models.load(config)
    assert count_workers(config) == 1
    assert count_workers(replace(config, backend=Engine.ctranslate2)) == 0
    assert count_workers(replace(config, backend=Engine.auto)) == 0


@pytest.mark.slow
def test_no_process_is_left_after_failed_reloads_or_a_killed_server(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for stop in (signal.SIGTERM, signal.SIGKILL):
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        process, server, lines = start_server(folder, "num_workers=2", cwd=tmp_path)
        try:
            expected = server.translate("the house")
            damaged = ("config.json", "model.safetensors") if stop == signal.SIGTERM else ()
            for name in damaged:
                (folder / name).write_bytes(b"[damaged")
                process.send_signal(signal.SIGHUP)
                assert "were not reloaded" in next(line for line in lines if "reloaded" in line)
                assert server.get("/health").json["reload_failed"]
                assert server.translate("the house") == expected
            assert server.upload("a.txt", b"the house", **GOOD).status == 200
            eventually(lambda: len(loaders(process.pid)) == 1)  # noqa: B023
            (loader,) = loaders(process.pid)
            workers = processes(loader)
            assert workers
            children = processes(process.pid)
        finally:
            process.send_signal(stop)
            process.wait(PATIENCE_SECONDS)
        wait_until_gone([*children, *workers])


def test_weights_that_are_overwritten_do_not_reach_the_models_in_memory(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    translator = Translator.load(folder, device="cpu", backend="native")
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert translator.translate(["the house"])


@pytest.mark.slow
def test_a_worker_in_a_long_search_ends_with_a_killed_server(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    process, server, _ = start_server(folder, "num_workers=2", cwd=tmp_path)
    try:
        server.translate("the house")
        (loader,) = loaders(process.pid)
        search = {"sampling": True, "max_length_a": 4, "max_length_b": 500, "min_length": 200}
        body = json.dumps({"text": ["the house"] * 60, "n_best": 16, "search": search, **GOOD})
        connection = server.connect()
        connection.request("POST", "/v1/translate", body, {"Content-Type": "application/json"})
        busy: list[int] = []

        def find_busy() -> bool:
            busy[:] = [pid for pid in processes(loader) if cpu_ticks(pid) > 100]
            return bool(busy)

        eventually(find_busy)
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)
    eventually(lambda: not is_running(busy[0]), 15)  # the search takes longer


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process, in hundredths of a second."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


@pytest.mark.slow
def test_workers_do_not_protect_the_tag_of_a_source(tmp_path: Path) -> None:
    tagged = train_tokenizer(sentences(200), tokenizer_config(), ["<2de>", "<2fr>"])
    folder = tiny_folder(tmp_path / "model", tagged)
    change_config(folder, src_lang="en")
    translator = Translator.load(folder, device="cpu", backend="native")
    lines = [f"{sentence} {{name}}" for sentence in sentences(4)]
    search = {"protect": True}
    expected = translator.translate(lines, tgt_lang="de", **search)
    languages = {"source": "en", "target": "de"}
    with running(loaded(folder, num_workers=1)) as server:
        for line, translation in zip(lines, expected, strict=True):
            answer = server.post("/v1/translate", text=line, search=search, **languages)
            assert answer.json["translations"][0]["text"] == translation
