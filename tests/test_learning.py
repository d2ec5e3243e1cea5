"""The corpora that come along are learned as promised; minutes, so only in make test-all."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy import command

from nmt import Translator
from nmt.data.text import read_lines


def exact_share(data_dir: Path, run_dir: Path) -> float:
    """Return the share of test sentences whose translation is the reference to the letter."""
    sources = list(read_lines(data_dir / "test.src"))
    references = list(read_lines(data_dir / "test.tgt"))
    hypotheses = Translator.load(run_dir, device="cpu", backend="native").translate(sources)
    pairs = zip(hypotheses, references, strict=True)
    return sum(hypothesis == reference for hypothesis, reference in pairs) / len(references)


@pytest.mark.long
def test_the_corpora_that_come_along_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate = ["tokenizer.separate=true", "tokenizer.vocab_size=500"]
    cases = (("copy", [], 1.0), ("numbers", [], 0.99), ("numbers", separate, 0.95))
    for i, (corpus, tokenizer, least) in enumerate(cases):
        settings = [f"experiment={corpus}", "num_threads=2"]
        (tmp_path / str(i)).mkdir()
        monkeypatch.chdir(tmp_path / str(i))
        assert command("preprocess", settings, tokenizer) == 0
        assert command("train", settings, "device=cpu") == 0
        assert command("average", f"experiment={corpus}") == 0
        share = exact_share(Path(f"data/{corpus}"), Path(f"runs/{corpus}"))
        assert share >= least, (corpus, tokenizer)
