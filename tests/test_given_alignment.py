"""Word alignments that come with the text: from files to the links of pieces in batches."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from toy import assert_resumes_exactly, command, make_run, write_corpus

from nmt.config import AugmentConfig, NoiseConfig, SplitConfig
from nmt.data.binary import ParallelData, read_meta
from nmt.data.word_links import link_pieces, parse_links
from nmt.errors import DataError
from nmt.runtime.manifest import write_manifest
from nmt.training.loss import alignment_loss


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Write the toy corpus with its alignment, word by word; return folder and arguments."""
    folder = tmp_path_factory.mktemp("aligned")
    arguments = write_corpus(folder)
    lines = (folder / "train.src.txt").read_text(encoding="utf-8").splitlines()
    alignments = [" ".join(f"{i}-{i}" for i in range(len(line.split()))) for line in lines]
    (folder / "train.align").write_text("\n".join(alignments) + "\n", encoding="utf-8")
    assert command("preprocess", arguments, f"data.train.alignments={folder / 'train.align'}") == 0
    return folder, arguments


def words_of(starts: Any) -> Any:
    return np.cumsum(starts) - 1


def test_each_piece_of_a_word_is_linked_to_its_share_of_the_other_word() -> None:
    src_starts = np.array([True, False, False, True])  # words of 3 pieces and 1 piece
    tgt_starts = np.array([True, True, False, True])  # words of 1, 2 and 1 pieces
    links = link_pieces(parse_links("0-1 1-0"), src_starts, tgt_starts)
    assert sorted(links.tolist()) == [[0, 3], [1, 0], [2, 1]]
    assert link_pieces(parse_links(""), src_starts, tgt_starts).shape == (0, 2)
    links = link_pieces(parse_links("0-2 1-2"), src_starts, tgt_starts)
    assert sorted(links.tolist()) == [[3, 0], [3, 3]]


def test_the_links_of_a_token_share_its_probability() -> None:
    weights = torch.tensor([[[0.5, 0.25, 0.25]]])  # one token, (B, T, S)
    loss = alignment_loss(weights, torch.tensor([[0, 0, 0]]))
    two = alignment_loss(weights, torch.tensor([[0, 0, 0], [0, 0, 1]]))
    assert loss.item() == pytest.approx(-np.log(0.5), abs=1e-5)
    assert two.item() == pytest.approx(-(np.log(0.5) + np.log(0.25)) / 2, abs=1e-5)


def test_batches_have_the_given_alignment_in_any_segmentation(
    corpus: tuple[Path, list[str]], tmp_path: Path
) -> None:
    for sampling in (0.0, 0.5):
        run = make_run(
            corpus[0] / "data", tmp_path, guided_alignment=0.3, subword_sampling=sampling
        )
        maker = run.learner.batch_maker
        assert maker.aligner is None
        batch = maker.make_micro_batch(np.arange(6), update_id=1)
        assert batch.alignment is not None
        src_first = tgt_first = 0
        num_links = 0
        for pair, (src_length, tgt_length) in enumerate(batch.lengths.tolist()):
            src = batch.src[src_first : src_first + src_length - 1].numpy()
            tgt = batch.tgt_out[tgt_first : tgt_first + tgt_length - 1].numpy()
            links = [(t, s) for i, t, s in batch.alignment.tolist() if i == pair]
            assert [t for t, _ in sorted(links)] == list(range(len(tgt)))
            src_words = words_of(maker.src_starts[src])
            tgt_words = words_of(maker.tgt_starts[tgt])
            assert all(src_words[s] == tgt_words[t] for t, s in links)
            num_links += len(links)
            src_first += src_length
            tgt_first += tgt_length
        assert num_links == len(batch.alignment) > 20


def test_handmade_alignments_are_refused_before_they_are_used(
    corpus: tuple[Path, list[str]], tmp_path: Path
) -> None:
    draw = random.Random(4)
    original = corpus[0] / "data"
    [shard] = original.glob("train-*.arrow")
    with pa.ipc.open_stream(shard.read_bytes()) as reader:
        table = reader.read_all()
    num_refused = 0
    for case in range(20):
        data_dir = tmp_path / f"data-{case}"
        shutil.copytree(original, data_dir)
        numbers = [draw.choice([0, 0, 1, -1, 40, 1 << 30]) for _ in range(draw.randint(1, 4))]
        rows = table["alignment"].to_pylist()
        rows[draw.randrange(3)] = numbers
        lists = pa.array(rows, pa.list_(pa.int32()))
        changed = table.set_column(table.schema.names.index("alignment"), "alignment", lists)
        with pa.ipc.new_stream(data_dir / shard.name, changed.schema) as writer:
            writer.write_table(changed)
        meta = json.loads((data_dir / "meta.json").read_text())
        [entry] = meta["splits"]["train"][0]["shards"]
        entry["bytes"] = (data_dir / shard.name).stat().st_size
        (data_dir / "meta.json").write_text(json.dumps(meta))
        write_manifest(data_dir)
        is_valid = len(numbers) % 2 == 0 and set(numbers) <= {0, 1}
        expectation = (
            contextlib.nullcontext() if is_valid else pytest.raises(DataError, match="align")
        )
        with expectation:
            run = make_run(data_dir, tmp_path / "run", guided_alignment=0.3)
            run.learner.batch_maker.make_micro_batch(np.arange(3))
        num_refused += not is_valid
    assert 10 < num_refused < 20


def test_pairs_that_noise_or_augmentation_change_have_no_links(
    corpus: tuple[Path, list[str]], tmp_path: Path
) -> None:
    noise = NoiseConfig(drop=0.5)
    run = make_run(corpus[0] / "data", tmp_path, guided_alignment=0.3, noise=noise)
    maker = run.learner.batch_maker
    batch = maker.make_micro_batch(np.arange(50), update_id=1)
    assert batch.alignment is not None
    linked = set(batch.alignment[:, 0].tolist())
    expected = set()
    for row in range(50):
        num_src = len(maker.data[row][0]) + 1
        if batch.lengths[row, 0] == num_src:
            expected.add(row)
    assert linked == expected
    assert 0 < len(linked) < 25
    run = make_run(
        corpus[0] / "data", tmp_path, guided_alignment=0.3, augment=AugmentConfig(upper=1.0)
    )
    augment = run.augmenter_at(0)
    batch = run.learner.batch_maker.make_micro_batch(np.arange(6), 1, augment)
    assert batch.alignment is not None
    assert len(batch.alignment) == 0


def test_a_third_column_or_field_is_the_same_as_a_file(
    corpus: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, arguments = corpus
    sides = [folder / name for name in ("train.src.txt", "train.tgt.txt", "train.align")]
    rows = list(
        zip(*[side.read_text(encoding="utf-8").splitlines() for side in sides], strict=True)
    )
    (tmp_path / "train.tsv").write_text(
        "".join("\t".join(row) + "\n" for row in rows), encoding="utf-8"
    )
    with (tmp_path / "train.jsonl").open("w", encoding="utf-8") as file:
        for src, tgt, links in rows:
            file.write(json.dumps({"a": src, "b": tgt, "links": links}) + "\n")
    other_arguments = [argument for argument in arguments if "data.train" not in argument]
    expected = read_meta(folder / "data").data_sha256
    selections = {"tsv": "data.train.columns=[1,2,3]", "jsonl": "data.train.fields=[a,b,links]"}
    for name, options in selections.items():
        source = f"data.train.{name}={tmp_path / f'train.{name}'}"
        data_dir = tmp_path / name
        assert command("preprocess", other_arguments, options, source, f"data_dir={data_dir}") == 0
        assert read_meta(data_dir).data_sha256 == expected
    links = ParallelData(tmp_path / "tsv", "train").alignment(3)
    assert links is not None
    assert links.tolist() == parse_links(rows[3][2]).tolist()


def test_language_tags_move_the_numbers_of_words(
    corpus: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, arguments = corpus
    renamed = [argument.replace("data.train", "data.corpora.a") for argument in arguments]
    options = [
        f"data.corpora.a.alignments={folder / 'train.align'}",
        "data.corpora.a.src_tag=<2de>",
    ]
    held_out = ["data.corpora.a.valid", "data.corpora.a.test"]
    renamed = [argument.replace("data.valid", held_out[0]) for argument in renamed]
    renamed = [argument.replace("data.test", held_out[1]) for argument in renamed]
    data_dir = tmp_path / "data"
    assert command("preprocess", renamed, options, f"data_dir={data_dir}") == 0
    maker = make_run(data_dir, tmp_path, guided_alignment=0.3).learner.batch_maker
    batch = maker.make_micro_batch(np.arange(1))
    assert batch.alignment is not None
    [src, tgt] = maker.data[0]
    num_tag = len(src) - len(ParallelData(folder / "data", "train")[0][0])
    assert num_tag >= 1
    assert min(s for _, _, s in batch.alignment.tolist()) == num_tag
    assert len(batch.alignment) == len(tgt)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0-0 1-9\n", "train.align:1: a link is beyond the words of the pair"),
        ("0-0 1:1\n", "train.align:1: no alignment of words, such as 0-0 1-2"),
    ],
)
def test_a_wrong_alignment_is_refused_with_its_line(
    corpus: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    message: str,
) -> None:
    folder, arguments = corpus
    lines = (folder / "train.align").read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "train.align"
    path.write_text("".join([content, *lines[1:]]), encoding="utf-8")
    scores = tmp_path / "train.scores"  # another file of the source, which the error must not name
    scores.write_text("1\n" * len(lines), encoding="utf-8")
    options = [f"data.train.alignments={path}", f"data.train.scores={scores}"]
    assert command("preprocess", arguments, options, f"data_dir={tmp_path / 'data'}") == 2
    assert message in capsys.readouterr().err


def test_alignments_need_text_and_single_lines(
    corpus: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, arguments = corpus
    path = folder / "train.align"
    (tmp_path / "short").write_text("0-0\n")
    for options, message in (
        (["data.context=1", f"data.train.alignments={path}"], "does not work with an alignment"),
        ([f"data.train.alignments={tmp_path / 'short'}"], "has 200 lines"),
        ([f"data.train.alignments=[{path},{path}]"], "alignments: 2 files for 1 files of text"),
        (
            [f"data.valid.alignments={path}", "data.valid.src=null", "data.valid.tgt=null"],
            "needs src",
        ),
    ):
        assert command("preprocess", arguments, options, f"data_dir={tmp_path / 'data'}") == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_given_alignments_resumes_exactly(
    corpus: tuple[Path, list[str]], tmp_path: Path
) -> None:
    options = ["guided_alignment=0.1", "subword_sampling=0.2", "valid_bleu=false"]
    assert_resumes_exactly(corpus[0] / "data", tmp_path, options, ends=(5, 9))


def test_columns_and_fields_of_other_formats_name_no_alignment(tmp_path: Path) -> None:
    """Three fields, which only JSON and datasets have, ended in an AssertionError with a TSV."""
    columns = [1, 2, 3]
    fields = ["a", "b", "c"]
    assert not SplitConfig(tsv=["a.tsv"], fields=fields).has_alignment
    assert not SplitConfig(jsonl=["a.jsonl"], columns=columns).has_alignment
    assert not SplitConfig(src=["a"], tgt=["b"], columns=columns, fields=fields).has_alignment
    assert SplitConfig(tsv=["a.tsv"], columns=columns).has_alignment
    assert SplitConfig(jsonl=["a.jsonl"], fields=fields).has_alignment
    assert SplitConfig(dataset="a", fields=fields).has_alignment
    assert SplitConfig(src=["a"], tgt=["b"], alignments=["c"]).has_alignment
