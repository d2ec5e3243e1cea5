"""Each setting that a message proposes, such as "use backend=native", is typed unchanged in the
folder where it was printed, and the command then succeeds.

`test_hints.py` types "next:", "make it with" and "did you mean"; `test_wrong_turns.py` types
"write KEY=VALUE".
"""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from test_hints import PACKAGE, read_corpus_arguments, type_words
from test_hints import workspace as workspace  # a fixture
from test_import_huggingface import M2M100, write_m2m100
from toy import TINY, command

# the proposal in a message: words of advice, and settings up to the end of the clause
SETTING = r"[a-z_][\w.]*=(?:'[^']*'|\[[^\]]*\]|[^\s,;)]*[^\s,;:)])"
VERBS = "set|use|give|choose|needs|leave|only works with|take pairs|such as"
PROPOSAL = re.compile(rf"\b(?:{VERBS})\b[^;]*?{SETTING}[^;\n]*")
OTHER_COMMAND = re.compile(r"nmt-(\w+) (.*)")
ANOTHER = re.compile(r"\banother (data_dir|run_dir|output)\b")  # typed as KEY=another

# Commands that print proposals. Commands before " && " prepare the folder. The words after " | "
# completes the command that is typed with a proposal; of several completions one must succeed.
# Capitals abbreviate the words in `ABBREVIATIONS`.
PROVOCATIONS = """
TRAIN data_dir=letter
train run_dir=run data_dir=missing
TRAIN run_dir=run/checkpoints/latest
TRAIN run_dir=data dry_run=false
TRAIN run_dir=run/checkpoints/new dry_run=false
TRAIN run_dir=run dry_run=false model.d_model=32
TRAIN run_dir=broken dry_run=false max_updates=6
CHECK freeze=[decoder]
CHECK adapter=lora
CHECK adapter_rank=4 | init_from=run
CHECK init_from=run adapter=lora ema_decay=0.9
CHECK optimizer.weight_decay=0.1
CHECK optimizer.peak_learning_rate=0.001
CHECK optimizer.schedule=inverse_sqrt
CHECK optimizer.name=schedule_free
CHECK valid_bleu=false best_metric=bleu
CHECK model.dropout=0 r_drop=1
CHECK sharding=full max_tokens=auto
TRAIN max_tokens=4
TRAIN device=cuda
FLAT && FLAT
preprocess data=files data_dir=new | TEXT | TEXT NO_TRAIN |
preprocess TEXT data_dir=new data.valid.src=null data.valid.tgt=null
PREPROCESS filter.min_score=0.5 | | data.train.tsv=scored.tsv NO_TRAIN
PREPROCESS data=numbers
PREPROCESS data.corpora.news.weight=2 NO_TRAIN
PREPROCESS tokenizer.separate=true tokenizer.model=data/tokenizer.model
PREPROCESS tokenizer.tgt_model=data/tokenizer.model
PREPROCESS tokenizer.byte_fallback=false tokenizer.vocab_size=80 UNKNOWN | tokenizer.vocab_size=310
PREPROCESS tokenizer.vocab_size=9000
PREPROCESS data.train.src=letters data.train.tgt=letters
PREPROCESS data_dir=data max_length=50 overwrite=false
PREPROCESS data.train.src=latin data.train.tgt=latin tokenizer.vocab_size=270
PREPROCESS data.train.tsv=bad.tsv NO_TRAIN
PREPROCESS data.train.jsonl=fields.jsonl NO_TRAIN
TRANSLATE quantization=int8 backend=native
TRANSLATE temperature=2
TRANSLATE beam_size=1 glossary=terms.tsv
TRANSLATE diversity_penalty=0.7
TRANSLATE candidates=4
TRANSLATE rerank=noisy_channel
TRANSLATE reverse_weight=2 | reverse_model=reverse
TRANSLATE rerank=command -c job
TRANSLATE rerank_command=cat -c job
TRANSLATE rerank=mbr candidates=8
TRANSLATE n_best=8
TRANSLATE seed=3
TRANSLATE combine=log_probabilities
TRANSLATE alignment=true
TRANSLATE context=1 format=json -c job
TRANSLATE backend=ctranslate2 coverage_penalty=0.1
TRANSLATE backend=ctranslate2 model_dir=[run,run]
TRANSLATE backend=ctranslate2 model_dir=odd
TRANSLATE input=long too_long=error max_source_length=8
TRANSLATE model_dir=several
TRANSLATE model_dir=several src_lang=en
TRANSLATE model_dir=damaged
TRANSLATE model_dir=several rerank=noisy_channel reverse_model=several
backtranslate | model_dir=run output=another max_ratio=0 max_repeats=0
BACKTRANSLATE output=foreign
BACKTRANSLATE output=made && BACKTRANSLATE output=made input=valid.src.txt
BACKTRANSLATE sampling=true backend=ctranslate2 output=another
score model_dir=run
SCORE measure=dual
SCORE reverse_model=reverse
SCORE alignment=true
evaluate model_dir=run | | references=in.en
evaluate | references=in.en
evaluate model_dir=run data_dir=data references=in.en | data_dir=null
evaluate model_dir=run src=in.en references=in.en tune=true | reverse_model=reverse
evaluate hypotheses=in.en references=in.en glossary=terms.tsv
evaluate hypotheses=in.en references=in.en lemmas=terms.tsv | src=in.en
evaluate hypotheses=tokenized references=tokenized
average checkpoints=[run/checkpoints/latest,flat/checkpoints/latest]
average run_dir=letter | output=another
average run_dir=notrun | output=another
average run_dir=flat && average checkpoints=[flat/checkpoints/latest]
export model_dir=run shortlist_data=data format=onnx output=another
export model_dir=run format=bergamot quantization=int8 output=another
export model_dir=several format=argos output=another
export model_dir=separate format=huggingface output=another
export model_dir=several format=marian output=another
export model_dir=run format=web output=another
export model_dir=imported format=web output=another runtime=ort
export model_dir=run output=exported && export model_dir=exported
import | src_lang=de tgt_lang=fr
import input=run
import input=m2m output=another src_lang=de tgt_lang=fr tgt_tokenizer=m2m/sentencepiece.bpe.model
import input=bare output=another src_lang=de tgt_lang=fr
visualize what=attention model_dir=run src=''
visualize what=run run_dir=empty
visualize what=data data_dir=empty
visualize what=upload run_dir=run
""".strip().splitlines()
SPM = "m2m/sentencepiece.bpe.model"
ABBREVIATIONS = {
    "TRAIN": f"train data_dir=data run_dir=new {shlex.join(TINY)} max_updates=4 dry_run=true",
    "CHECK": "TRAIN -c job",  # only reads the settings and checks them
    "FLAT": "TRAIN run_dir=flat dry_run=false max_updates=60 patience=1 validate_every_updates=4 "
    "optimizer.schedule=constant optimizer.peak_learning_rate=1e-12",
    "NO_TRAIN": "data.train.src=null data.train.tgt=null",
    "UNKNOWN": "data.valid.src=other data.valid.tgt=other",
    "PREPROCESS": "preprocess overwrite=true data_dir=new TEXT num_threads=1",
    "TRANSLATE": "translate model_dir=run input=in.en output=out.txt beam_size=4",
    "BACKTRANSLATE": "backtranslate model_dir=run input=train.src.txt max_ratio=0 max_repeats=0",
    "SCORE": "score model_dir=run src=in.en tgt=in.en",
}
# the words to type for a placeholder
VALUES = {
    "checkpoints=[FOLDER,...]": "[run/checkpoints/latest]",
    "data.train.score=COLUMN": "3",
    "data.train.scores=FILE": "scores.txt",
    "data.train.tsv=FILE": "scored.tsv",
    "data.valid.tsv=FILE": "scored.tsv",
    "data.valid.num_pairs=2000": "20",
    "glossary=FILE": "terms.tsv",
    "init_from=FOLDER": "run",
    "input=FILE": "train.src.txt",
    "input=FOLDER": "m2m",
    "max_tokens=N": "100",
    "model_dir=[a,b]": "[run,run]",
    "model_dir=FOLDER": "run",
    "data_dir=FOLDER": "data",
    "run_dir=FOLDER": "run",
    "optimizer.peak_learning_rate=N": "0.001",
    "output=FILE": "another",
    "output=FOLDER": "another",
    "rerank_command=PROGRAM": "cat",
    "reverse_model=FOLDER": "reverse",
    "runtime=FOLDER": "ort",
    "src_lang=...": "en",
    "src_tag=...": "<2de>",
    "src_tokenizer=FILE": SPM,
    "tgt_lang=...": "de",
    "tgt_tag=...": "",
    "tgt_tokenizer=FILE": SPM,
    "tokenizer.model=FILE": "data/tokenizer.model",
    "tokenizer.tgt_model=FILE": "data/tokenizer.model",
}
VALUES |= dict.fromkeys(["hypotheses=FILE", "src=FILE", "tgt=FILE"], "in.en")
for split in ("data.train", "data.valid", "data.corpora.news"):
    for side in ("src", "tgt"):
        VALUES[f"{split}.{side}=FILE"] = f"{split[5:10].replace('corpo', 'train')}.{side}.txt"

# Messages that no command prints here: why, and a command that takes the proposed settings
_DEVICE = "needs a device that this machine lacks"
_MEMORY = "needs a model that is too large for the device; test_preflight.py"
_DISK = "needs a disk that refuses to write"
_LOCKED = "needs another process that uses the folder"
_IDS = "needs a vocabulary that no command of nmt makes"
UNPROVOKED = {
    "stdout is closed": ("needs a shell; test_streams.py", "TRANSLATE"),
    "type a line and Enter": ("needs a terminal", "TRANSLATE"),
    "fix this, or choose another run_dir": (_DISK, "TRAIN"),
    "choose another data_dir": (_DISK, "PREPROCESS"),
    "another nmt-train uses it": (_LOCKED, "TRAIN"),
    "another nmt-preprocess": (_LOCKED, "PREPROCESS"),
    "is being written by another": (_LOCKED, "TRANSLATE"),
    "can be written, to convert": (_DISK, "TRANSLATE"),
    "is damaged and cannot be removed": (_DISK, "TRANSLATE"),
    "verify_key: CTranslate2 needs": ("needs a signature; test_signatures.py", ""),
    "same ids of control symbols": (_IDS, "export model_dir=run output=another"),
    "control symbols <unk> and </s>": (_IDS, "export model_dir=run output=another"),
    "exceeds 2 GiB": ("needs a model of 2 GiB", "export model_dir=run output=another"),
    "must hold one .pt file": ("needs weights of fairseq; test_import_toolkits.py", ""),
    "is a single device": (_DEVICE, ""),
    "this machine has x GPUs": (_DEVICE, ""),
    "dtype=x: the device": (_DEVICE, "TRAIN"),
    "does not support mps": (_DEVICE, "TRANSLATE"),
    "does not support it on this": (_DEVICE, "TRANSLATE"),
    "the process may open": ("names a limit of the shell; test_serve_connections.py", ""),
    "give another port": ("needs a port in use; test_hints.py", ""),
    "not even the longest pair fits in memory": (_MEMORY, "TRAIN"),
    "set sharding=full on": (_MEMORY, "TRAIN"),
    "set max_tokens=x, which fits": (_MEMORY, ""),
    "in a row the loss or the gradient": ("needs numbers that are not finite", "TRAIN"),
    "this engine shows no attention": ("is for the server; test_serve_page.py", "TRANSLATE"),
    "is an export of format=x": ("is about the model, not about this command", ""),
    "was forked after the model": ("needs a fork; test_translator.py", "TRANSLATE"),
    "give a SearchConfig": ("is for Python; test_translator.py", "TRANSLATE"),
    "is damaged: it differs": ("needs a damaged manifest; test_damage.py", "TRANSLATE"),
}
# The usage of commands, whose examples test_page_commands.py runs
USAGE = "cli/commands.py"


def as_proposal(text: str) -> str:
    """Return a message with "another output" in the form of a setting."""
    return ANOTHER.sub(r"\1=another", text)


def find_messages() -> dict[str, str]:
    """Return the texts of the messages that propose settings, with x for a value, by pattern."""
    messages = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).as_posix() == USAGE:
            continue
        skipped: set[ast.AST] = set()  # docstrings, help of settings, and texts inside f-strings
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_help = isinstance(node, ast.Call) and ast.unparse(node.func) == "option"
            if is_help or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                skipped |= set(ast.walk(node))
            elif isinstance(node, ast.JoinedStr) and node not in skipped:
                skipped |= set(ast.walk(node)) - {node}
                values = node.values
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                values = [node]
            else:
                continue
            if node in skipped:
                continue
            texts = [value.value if isinstance(value, ast.Constant) else None for value in values]
            text = "".join("x" if value is None else str(value) for value in texts)
            if PROPOSAL.search(as_proposal(text)):
                pattern = "".join(".*?" if value is None else re.escape(value) for value in texts)
                messages[pattern] = text
    return messages


def read_proposals(message: str) -> list[tuple[str, list[str]]]:
    """Return the alternatives that a message proposes, each as a command and its settings.

    The command is "" if it is the command that printed the message.
    """
    proposals = []
    for match in PROPOSAL.finditer(as_proposal(message)):
        for alternative in re.split(r"\bor\b", match[0]):
            other_command = OTHER_COMMAND.search(alternative)
            name = ""
            if other_command is not None and re.search(SETTING, other_command[2]):
                name, alternative = other_command.groups()
            settings = re.findall(SETTING, alternative)
            if settings:
                settings = [word if word.endswith("...") else word.rstrip(".") for word in settings]
                proposals.append((name, settings))
    return proposals


def fill_in(settings: list[str]) -> str:
    """Return settings as a user types them, with values in place of placeholders."""
    words = []
    for setting in settings:
        key, _, value = setting.partition("=")
        words.append(f"{key}={VALUES.get(setting, value.strip(chr(39)))}")
    return shlex.join(words)


def expand(line: str) -> list[str]:
    """Return the words of a command without settings that a later word replaces."""
    words = {}
    for word in shlex.split(line):
        expanded = [word]
        if word == "TEXT":
            expanded = read_corpus_arguments()
        elif word in ABBREVIATIONS:
            expanded = expand(ABBREVIATIONS[word])
        for inner in expanded:
            words[inner.partition("=")[0]] = inner
    return list(words.values())


def remove_output() -> None:
    """Remove the files and folders that typed commands write."""
    for name in ("another", "new", "out.txt"):
        if Path(name).is_dir():
            shutil.rmtree(name)
        Path(name).unlink(missing_ok=True)


def write_texts() -> None:
    """Write texts, folders that are no runs, and a damaged run."""
    for name in ("letter", "empty/x", "foreign/src.txt", "notrun/config.yaml"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("a: house\n", encoding="utf-8")
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        Path("ort/dist").mkdir(parents=True, exist_ok=True)
        Path("ort/dist", name).write_text("", encoding="utf-8")
    Path("terms.tsv").write_text("red\trot\n", encoding="utf-8")
    Path("tokenized").write_text("a house .\n" * 200, encoding="utf-8")
    Path("other").write_text("kwxyz ž\n" * 20, encoding="utf-8")
    letters = "\n".join(map(chr, range(0x4E00, 0x4F00)))  # characters of Chinese
    Path("letters").write_text(f"{letters}\n", encoding="utf-8")
    Path("long").write_text("red house " * 9, encoding="utf-8")
    Path("latin").write_bytes(b"gr\xfcn\nred\n" * 40)
    src_lines = Path("train.src.txt").read_text("utf-8").splitlines()
    tgt_lines = Path("train.tgt.txt").read_text("utf-8").splitlines()
    pairs = list(zip(src_lines, tgt_lines, strict=True))
    scored = [f"{src}\t{tgt}\t0.9\n" for src, tgt in pairs]
    Path("scored.tsv").write_text("".join(scored), encoding="utf-8")
    Path("bad.tsv").write_text("".join([*scored, "lonely\n"]), encoding="utf-8")
    Path("scores.txt").write_text("0.9\n" * len(pairs), encoding="utf-8")
    records = [json.dumps({"english": src, "german": tgt}) + "\n" for src, tgt in pairs]
    Path("fields.jsonl").write_text("".join(records), encoding="utf-8")


def write_models(folder: Path) -> None:
    """Write runs and models for messages about them.

    There are runs of the other direction, of several directions, with separate vocabularies and
    with damaged files, a foreign model, and a model that CTranslate2 does not support.
    """
    write_m2m100(folder / "m2m", 0, M2M100["m2m"])
    assert command("import", "input=m2m", "output=imported", "src_lang=de", "tgt_lang=fr") == 0
    shutil.copytree("m2m", "bare")
    Path("bare/sentencepiece.bpe.model").unlink()
    several = ["data.valid.num_pairs=20", "tokenizer.vocab_size=310"]
    for direction in ("en-de", "de-en", "en-fr"):
        key = f"data.corpora.{direction}"
        names = ("tgt", "src") if direction == "de-en" else ("src", "tgt")
        languages = direction.split("-")
        for side, name, language in zip(("src", "tgt"), names, languages, strict=True):
            several += [f"{key}.{side}=train.{name}.txt", f"{key}.{side}_lang={language}"]
    several.append("data.corpora.en-fr.tgt_tag=<fr>")
    swapped = [
        f"data.{split}.{side}={split}.{name}.txt"
        for split in ("train", "valid")
        for side, name in (("src", "tgt"), ("tgt", "src"))
    ]
    runs = {
        "several": several,
        "reverse": [*swapped, "data.src_lang=de", "data.tgt_lang=en", "tokenizer.vocab_size=310"],
        "separate": [
            *read_corpus_arguments(),
            "tokenizer.separate=true",
            "data.src_lang=src",
            "data.tgt_lang=tgt",
        ],
        "odd": [*read_corpus_arguments()],
    }
    model = {"odd": "model.head_size=4", "separate": "model.norm=pre"}
    for name, text in runs.items():
        text = expand(shlex.join([*text, f"data_dir={name}-data"]))
        assert command("preprocess", text, "tokenizer.vocab_size=300") == 0
        run = [f"data_dir={name}-data", f"run_dir={name}", "max_updates=1", "valid_bleu=false"]
        assert command("train", run, TINY, model.get(name, [])) == 0
    for name, file in {"damaged": "config.json", "broken": "trainer.pt"}.items():
        shutil.copytree("run", name, symlinks=True)
        path = Path(name, "checkpoints/latest", file)
        path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_each_proposed_setting_is_accepted_as_it_stands(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_texts()
    write_models(workspace)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))  # no input
    messages = find_messages()
    unprovoked = dict(messages)
    failures = []

    def run(line: str) -> tuple[int, str]:
        """Run a command; return its exit status and its output."""
        capfd.readouterr()
        status = type_words(monkeypatch, expand(line))
        return status, "".join(capfd.readouterr())

    def try_proposals(line: str, completions: list[str], message: str) -> None:
        for name, settings in read_proposals(message):
            errors = []
            for completion in completions:
                remove_output()
                typed = f"{name or line} {completion} {fill_in(settings)}"
                status, output = run(typed)
                if status == 0:
                    break
                errors.append((typed, output[-300:]))
            else:
                failures.append((line, *errors))

    for provocation in PROVOCATIONS:
        commands, *completions = provocation.split(" |")
        *preparations, line = commands.split(" && ")
        for preparation in preparations:
            assert run(preparation)[0] == 0, preparation
        remove_output()
        _, message = run(line)
        if not read_proposals(message):
            failures.append((provocation, "proposes nothing", message[-300:]))
        line_of_message = " ".join(message.split())  # the report of a corpus breaks lines
        for pattern in messages:
            if re.search(pattern, line_of_message):
                unprovoked.pop(pattern, None)
        try_proposals(line, completions or [""], message)
    for fragment, (_, line) in UNPROVOKED.items():
        patterns = [pattern for pattern, text in unprovoked.items() if fragment in text]
        assert patterns, f"{fragment}: no such message, or it is provoked"
        for pattern in patterns:
            text = unprovoked.pop(pattern)
            if line:
                try_proposals(line, [""], text)
    assert not failures, "\n".join(map(str, failures))
    assert not unprovoked, unprovoked.values()
