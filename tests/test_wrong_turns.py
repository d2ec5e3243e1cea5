"""Wrong turns of a newcomer: each is answered in one line that names the right key or command."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from nmt.cli.main import nmt

# Words that a newcomer types after `nmt`, and texts that the answer has. They know fairseq, Marian,
# Sockeye, JoeyNMT, OpenNMT-py or transformers, or misspell, or are in another folder.
WRONG_TURNS = {
    # commands
    "trian": ["nmt: no command trian; did you mean train?"],
    "generate --path m.pt": ["did you mean translate"],
    "test config.yaml": ["did you mean evaluate"],
    "build-vocab": ["did you mean preprocess?"],
    # fairseq
    "preprocess --trainpref a --validpref v": ["data.train.src=FILE data.train.tgt=FILE"],
    "preprocess -s en -t de": ["write data.train.src=FILE data.src_lang=en"],
    "preprocess --srcdict dict.txt": ["write tokenizer.model=FILE"],
    "preprocess --joined-dictionary": ["tokenizer.separate=true"],
    "train data-bin/x": ["write data_dir=data-bin/x"],
    "train --arch transformer_iwslt_de_en": ["write model=base, big, small, tiny"],
    "train --max-epoch 3": ["max_updates=N"],
    "train --update-freq 8": ["tokens_per_update"],
    "train --lr 5e-4": ["write optimizer.peak_learning_rate=5e-4 optimizer.schedule=inverse_sqrt"],
    "train --optimizer adam": ["such as optimizer.name=adam"],
    "train --adam-betas '(0.9, 0.98)'": ["write optimizer.beta1=0.9 optimizer.beta2=0.98"],
    "train --criterion label_smoothed_cross_entropy": ["write label_smoothing=0.1"],
    "train --share-all-embeddings": ["model.tied_output=false"],
    "train --restore-file x": ["the same command resumes by itself; init_from=FOLDER"],
    "train --memory-efficient-fp16": ["write dtype=bfloat16 (or float16)"],
    "train --save-interval 1": ["write checkpoint_every_updates=N"],
    "train --lr-scheduler polynomial_decay": ["optimizer.schedule=polynomial_decay", "cosine"],
    "translate --path ckpt.pt --remove-bpe": ["detokenized text already"],
    "translate data-bin/x --path m.pt": ["write input=data-bin/x output=FILE"],
    "translate --gen-subset test": ["write input=FILE"],
    "translate -s en -t de": ["write src_lang=en"],
    "translate --max-len-a x": ["max_length_a=x: must be a number"],
    # Marian
    "train --train-sets a.en a.de": ["write data.train.src=FILE data.train.tgt=FILE"],
    "train --vocabs a.yml b.yml": ["write tokenizer.model=FILE"],
    "train -w 9000": ["write max_tokens=N", "dry_run=true"],
    "train --mini-batch-fit": ["write max_tokens=N"],
    "train --mini-batch 64": ["a batch is counted in tokens: max_tokens"],
    "train --after 10e": ["max_updates=N"],
    "train --enc-depth six": ["model.num_encoder_layers=six: must be a whole number"],
    "train --tied-embeddings-all": ["tokenizer.separate=true"],
    "train --devices 0 1 2 3": ["1 is not a setting; devices takes one value"],
    "train --exponential-smoothing": ["write ema_decay=0.9999"],
    "translate --models m1 m2": ["write 'model_dir=[m1,m2]'"],
    "translate --vocabs v.yml v.yml": ["the model folder holds the vocabulary"],
    "translate --normalize 0.6": ["write length_penalty=0.6"],
    "translate -b 6": ["write beam_size=6"],
    # Sockeye
    "train -d prepared": ["write data_dir=prepared"],
    "train --prepared-data x": ["make it with: ", "data_dir=x"],
    "train --num-layers 6": ["write model.num_encoder_layers=6 model.num_decoder_layers=6"],
    "train --weight-tying-type src_trg_softmax": ["model.tied_output=false"],
    "train --decode-and-evaluate 500": ["valid_bleu=true is the default"],
    "translate -i in.en -o out.de": ["write input=in.en"],
    "evaluate -i out.de -r ref.de": ["write hypotheses=out.de"],
    # JoeyNMT
    "train config.yaml": ["write experiment=config.yaml"],
    "train config=joey.yaml": ["joey.yaml sets name", "write run_dir=runs/transformer"],
    # OpenNMT-py
    "train -config onmt.yaml": ["onmt.yaml sets save_data", "did you mean data_dir"],
    "train -data data/demo -save_model demo": [
        "data=data/demo: there is no such choice",
        "numbers",
    ],
    "train -gpu_ranks 0": ["write devices=1"],
    "train -encoder_type transformer": ["write model=base, big, small, tiny"],
    "train -share_vocab": ["tokenizer.separate=true"],
    "train -src_vocab vocab.src": ["write tokenizer.model=FILE"],
    "translate -src in.en -output x -model m.pt": ["write input=in.en"],
    "translate -gpu 0": ["device=cuda:0 chooses this one"],
    "translate --unkpen 3": ["tokenizer.byte_fallback=true"],
    # transformers
    "train --per_device_train_batch_size 8": ["max_tokens"],
    "train --num_train_epochs 3": ["max_updates=N"],
    "train --report_to wandb": ["write tracker=[tensorboard] (or wandb"],
    "translate block_ngram_repeat=x": ["no_repeat_ngram"],
    # settings that a command lacks, or that have no effect
    "train lr=5e-4": ["write optimizer.peak_learning_rate=5e-4 "],
    "train batch_size=64": ["max_tokens (as many as fit in memory), and in training tokens_per"],
    "translate --batch-size 64": ["a batch is counted in tokens: max_tokens"],
    "train epochs=3": ["max_updates=N; dry_run=true shows"],
    "train use_cuda=true": ["device=cuda or device=cpu"],
    "train gpu=1": ["device=cuda:1"],
    "train gpu_ranks=[0]": ["write devices=1, or the number of GPUs"],
    "train --resume": ["the same command resumes by itself"],
    "train zzqqz=1": ["nmt-train --help lists all"],
    "average model=base": ["model=base: does nothing in nmt-average"],
    "translate data=copy": ["data=copy: does nothing in nmt-translate"],
    "preprocess model=tiny": ["model=tiny: does nothing in nmt-preprocess"],
    "train scheduler=x": ["nmt-train has no such setting"],
    "translate alignment=true": ["alignment=true: needs format=json"],
    "translate combine=log_probabilities": ["needs several models"],
    "evaluate num_samples=50 hypotheses=a.de references=a.de": [
        "num_samples=50: does nothing without baseline"
    ],
    "evaluate device=cuda hypotheses=a.de references=a.de": [
        "device=cuda: does nothing without model_dir"
    ],
    "train max_updates=1.5": ["max_updates"],
    # words without a key, and keys apart from their value
    "preprocess a.en a.de": ["write data.train.src=a.en data.train.tgt=a.de"],
    "preprocess my/mine.yml": ["write experiment=my/mine.yml"],
    "translate in.en": ["in.en is not a setting; write input=in.en output=FILE"],
    "translate model_dir=M in.en out.de": [
        "in.en is not a setting; write input=in.en output=out.de"
    ],
    "translate input= in.en": ["in.en is not a setting; write input=in.en output=FILE"],
    "translate 'hello world'": ["echo 'hello world' | nmt-translate"],
    "distill in.en": ["write input=in.en"],
    "evaluate out.de ref.de": ["write hypotheses=out.de references=ref.de"],
    "score a.en a.de": ["write src=a.en tgt=a.de"],
    "average runs/x": ["write run_dir=runs/x"],
    "average words": ["words is not a setting; write key=value (nmt-average --help"],
    "export runs/x": ["write model_dir=runs/x"],
    "serve runs/x": ["write model_dir=runs/x"],
    "import Helsinki-NLP/opus-mt-en-de": ["write input=Helsinki-NLP/opus-mt-en-de output=FILE"],
    "visualize attention": ["write what=attention"],
    "visualize what=run runs/x": ["write run_dir=runs/x"],
    "train max_updates": ["write max_updates=VALUE"],
    "train max_updates = 100": ["write max_updates=100"],
    "train max_updates:100": ["write max_updates=100"],
    "preprocess data.train.src: a.en": ["write data.train.src=a.en"],
    # misspelled keys and values
    "train max_updte=3": ["did you mean max_updates"],
    "train max-updates=100": ["did you mean max_updates"],
    "train MAX_UPDATES=100": ["did you mean max_updates"],
    "train model.d_modle=64": ["did you mean model.d_model?"],
    "train model.layers=3": ["write model.num_encoder_layers=3 model.num_decoder_layers=3"],
    "train max_updates=ten": ["max_updates=ten: must be a whole number"],
    "train max_updates=1,000": ["max_updates=1,000: must be a whole number"],
    "train dropout=0,3": ["model.dropout=0,3: must be a number"],
    "train model=Tiny": ["did you mean tiny?"],
    "train model.norm=Pre": ["model.norm=Pre: no such choice; did you mean pre?"],
    "train dtype=float8": ["dtype=float8: no such choice; did you mean float32"],
    "train tracker=tensorbord": ["did you mean tensorboard?"],
    "train optimizer.peak_learning_rate=nan": ["optimizer.peak_learning_rate=nan: is not a number"],
    "train optimizer.peak_learning_rate=0.001": ["noam has its own peak; set optimizer.schedule="],
    "train config=bad.yaml": ["bad.yaml sets max_update,", "did you mean max_updates"],
    "train experiment=mine": ["did you mean mine.yaml?"],
    "translate backend=ct2": ["backend=ct2: no such choice", "ctranslate2"],
    "export format=tflite": ["format=tflite: no such choice", "huggingface"],
    "preprocess tokenizer=unigram": ["such as tokenizer.type=unigram"],
    # wrong files and folders
    "preprocess data=a.en": ["write data.train.src=FILE data.train.tgt=FILE for text"],
    "preprocess src=a.en tgt=a.de": ["write data.train.src=a.en"],
    "preprocess data.train.src=a.en data.train.tgt=short.de data.valid.num_pairs=1": [
        "a.en has 2 lines, short.de 1"
    ],
    "preprocess data.train.src=a.en data.train.tgt=a.de": ["data.valid.num_pairs=2000"],
    r"preprocess 'data.train.tsv=C:\data\a.tsv' data.valid.num_pairs=1": ["/mnt/c/data/a.tsv"],
    r"train 'data_dir=C:\Users\me\data'": ["is a Windows path", "/mnt/c/Users/me/data"],
    "train data_dir=letter": ["letter is a file; give data_dir=FOLDER"],
    "train data_dir=empty": ["is not a data folder; make it with: ", "data_dir=empty"],
    "train model=letter": ["write init_from=letter to start from a trained model"],
    "translate model=runs/x": ["it reads a folder: model_dir=runs/x"],
    "translate src=in.en": ["write input=in.en"],
    "translate layers=6": ["nmt-translate has no such setting; nmt-translate --help"],
    "average run_dir=letter": ["letter is a file; "],
    "export model_dir=letter": ["letter is a file; "],
    "translate model_dir=letter": ["letter is a file; give a run, a checkpoint or a model folder"],
    "evaluate hypotheses=a.de references=short.de": ["hypotheses: 2 lines, reference set 1: 1"],
}


def write_files() -> None:
    """Write the files of the wrong turns into the current folder."""
    for name in ("a.en", "a.de", "in.en", "letter"):
        Path(name).write_text("a house\na red house\n", encoding="utf-8")
    Path("short.de").write_text("a house\n", encoding="utf-8")
    Path("mine.yaml").write_text("max_updates: 90\n", encoding="utf-8")
    Path("bad.yaml").write_text("max_update: 90\n", encoding="utf-8")
    Path("joey.yaml").write_text("name: transformer\ntraining: {epochs: 3}\n", encoding="utf-8")
    Path("onmt.yaml").write_text("save_data: run\ntrain_steps: 9\n", encoding="utf-8")
    Path("config.yaml").write_text("max_updates: 90\n", encoding="utf-8")
    Path("my").mkdir()
    Path("my/mine.yml").write_text("max_updates: 90\n", encoding="utf-8")
    Path("empty").mkdir()


ADVICE = re.compile(r"(?:write|set|such as|a folder:) ((?!key=)(?:'?[a-z_.0-9]+=\S+ ?)+)")
# settings that advice leaves to the user, and the setting of the same kind that is typed
PLACEHOLDERS = {"=N": "=7", "=VALUE": "=7", "base,": "base"}
# the words that a command needs in addition to the settings of an advice
COMPLETIONS = {
    "preprocess": ["data.train.src=a.en", "data.train.tgt=a.de", "data.valid.num_pairs=1"],
    "distill": ["input=in.en"],
    "backtranslate": ["input=in.en"],
    "evaluate": ["references=a.de"],
    "score": ["src=a.en", "tgt=a.de"],
    "import": ["input=letter"],
    "visualize": ["what=run"],
}


def type_words(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> int:
    """Run `nmt WORDS` and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["nmt", *words])
    return nmt()


def advised_words(turn: str, answer: str) -> list[str]:
    """Return the command that the answer to a wrong turn advises, or an empty list."""
    advice = ADVICE.search(answer)
    if advice is None:
        return []
    settings = advice[1]
    for placeholder, value in PLACEHOLDERS.items():
        settings = settings.replace(placeholder, value)
    name, *refused_words = shlex.split(turn)
    words = [name, "-c", "job", *COMPLETIONS.get(name, []), *shlex.split(settings.rstrip(",; "))]
    if "; set optimizer.schedule" in answer:  # in addition to the setting that was refused
        words += refused_words
    return words


@pytest.mark.slow
def test_a_wrong_turn_is_one_line_that_names_the_right_key_and_settings_that_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files()
    failures: list[object] = []
    num_advised = 0
    for turn, expected in WRONG_TURNS.items():
        status = type_words(monkeypatch, shlex.split(turn))
        answer = capfd.readouterr().err
        lines = [line for line in answer.splitlines() if "other processes are busy" not in line]
        if status != 2 or len(lines) != 1 or not all(text in lines[0] for text in expected):
            failures.append((turn, expected, status, lines))
        words = advised_words(turn, answer)
        if words:
            num_advised += 1
            if type_words(monkeypatch, words) != 0:
                failures.append((turn, words, capfd.readouterr().err))
    assert not failures, "\n".join(map(str, failures))
    assert num_advised > 50
