"""Eight journeys of a user in one fresh folder, typed only from the pages: each command finds the
files that the commands before it have written.

`test_page_commands.py` runs every command of the pages, in a folder that has the files for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import PAGES, parse_command, shell_lines
from test_import_huggingface import MARIAN
from test_import_huggingface import write_marian as write_opus
from test_page_commands import run, write_text, write_yaml
from toy import read_values, write_corpus

# The beginnings of the commands of each journey, as the pages show them. After " + " are
# settings that let the toy corpus do.
JOURNEYS = {
    "first run": """
nmt-preprocess data.train.src=a.en data.train.tgt=a.de data.valid.src=v.en
nmt-train +model=base data_dir=data/mine run_dir=runs/mine
nmt-average run_dir=runs/mine
nmt-translate model_dir=runs/mine beam_size=4
nmt-evaluate hypotheses=out.de references=ref.de
""",
    "continue": """
nmt-train run_dir=runs/mine max_updates=280 + max_updates=8
""",
    "import and fine-tune": """
nmt-import input=opus-mt-en-de output=runs/opus
nmt-preprocess experiment=finetune tokenizer.model=runs/opus
nmt-train experiment=finetune init_from=runs/opus
nmt-average run_dir=runs/finetune
nmt-export model_dir=runs/finetune
""",
    "sweep": """
nmt-train --multirun experiment=copy seed=1,2 model.dropout=0,0.1
nmt-evaluate model_dir=runs/sweep
nmt-evaluate model_dir='runs/sweep/*seed=1' data_dir=data/copy
nmt-visualize what=run run_dir=runs/sweep
""",
    "own YAML": """
nmt-train experiment=path/to/mine.yaml + run_dir=runs/yaml
nmt-train --config-dir my experiment=mine + run_dir=runs/yaml
nmt-train model=path/to/wide.yaml data_dir=data/mine
""",
    "compare": """
nmt-evaluate hypotheses=out.de references=ref.de baseline=old.de
nmt-evaluate hypotheses=[old.de,out.de] references=ref.de
nmt-evaluate model_dir=runs/mine data_dir=data/mine
""",
    "back-translate": """
nmt-preprocess data.train.src=train.de data.train.tgt=train.en
nmt-train +model=base data_dir=data/de-en run_dir=runs/de-en
nmt-backtranslate model_dir=runs/de-en 'input=mono-*.de.gz' + max_ratio=0 max_repeats=0
nmt-preprocess data.corpora.parallel.src=train.en + tokenizer.vocab_size=400
nmt-train +model=base data_dir=data/with-bt run_dir=runs/with-bt mix.bt=0.5
""",
    "export": """
nmt-export model_dir=runs/mine format=ctranslate2 quantization=int8
nmt-translate backend=ctranslate2 model_dir=exported
nmt-export model_dir=runs/mine format=huggingface
""",
}


def find_line(start: str) -> str:
    """Return the first command on a page that begins so."""
    lines = [line for page in PAGES for line in shell_lines(page) if line.startswith(start)]
    assert lines, f"no page has: {start}"
    return lines[0]


@pytest.mark.long
def test_journeys_typed_from_the_pages_work_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy").mkdir()
    write_corpus(tmp_path / "toy")
    write_text(tmp_path)
    write_yaml(tmp_path)
    write_opus(tmp_path / "opus-mt-en-de", 0, MARIAN["swish, bias"])
    for name, starts in JOURNEYS.items():
        for start in starts.strip().splitlines():
            text, _, toy_settings = start.partition(" + ")
            shell = parse_command(find_line(text))
            assert shell is not None
            status = run(shell, toy_settings.split())
            assert status == 0, (name, start)
    updates = read_values(Path("runs/mine"), "loss")
    assert max(updates) == 8
