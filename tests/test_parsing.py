"""scripts/parsing.py: trees to text and back, scored like EVALB, and learned by a model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from toy import command

SCRIPTS = Path(__file__).parents[1] / "scripts"
RULES: dict[str, list[tuple[int, str]]] = {  # weights and right sides; small letters are tags
    "S": [(7, "NP VP ."), (2, "PP , NP VP ."), (1, "`` S , '' NP VP .")],
    "NP": [(5, "dt nn"), (3, "nnp"), (2, "dt jj nn"), (2, "NP PP"), (1, "NP , NP ,")],
    "VP": [(4, "vb NP"), (3, "vb NP PP"), (2, "vb SBAR"), (1, "vb PRT NP")],
    "PP": [(1, "in NP")],
    "SBAR": [(1, "in S")],
    "PRT": [(1, "rp")],
}
WORDS = {
    "dt": ["the", "a", "every"],
    "nn": ["dog", "cat", "house", "man", "street", "ship"],
    "nnp": ["Ann", "Bob", "Prague"],
    "jj": ["old", "red", "small"],
    "vb": ["saw", "took", "says", "gave"],
    "in": ["in", "with", "of", "that", "on"],
    "rp": ["up"],
}


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("parsing")


def grow(draw: random.Random, label: str = "S", depth: int = 0) -> str:
    """Return a constituent of the grammar in brackets, with function tags and empty elements."""
    if label not in RULES:
        word = draw.choice(WORDS.get(label, [label]))
        return f"({label.upper()} {word})"
    rules = RULES[label][: 2 if depth > 5 else None]
    weights, right_sides = zip(*rules, strict=True)
    labels = draw.choices(right_sides, weights)[0].split()
    inner = [grow(draw, child, depth + 1) for child in labels]
    if draw.random() < 0.1:
        inner.append("(SBAR-2 (-NONE- 0) (S (-NONE- *T*-1)))")
    return f"({label}{draw.choice(['', '', '-SBJ', '=3'])} {' '.join(inner)})"


def treebank(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return "".join(f"( {grow(draw)} )\n" for _ in range(count))


def test_a_treebank_becomes_words_and_brackets_without_empty_elements(parsing: Any) -> None:
    text = """( (S-TPC=1
        (NP-SBJ-1 (NNP Ann) (-LRB- -LRB-))
        (VP (VBD ran) (SBAR (-NONE- 0) (S (NP (-NONE- *T*-1)))) (PRT (RP up))) (. .) ) )
      (TOP (NP (NN dog)))
      (X (SYM a) (PP=2 (IN b)))"""
    trees = list(parsing.read_trees(text))
    sentences = ["Ann -LRB- ran up .", "dog", "a b"]
    for tree, sentence in zip(trees, sentences, strict=True):
        assert [leaf.word for leaf in tree.leaves()] == sentence.split()
    assert list(map(parsing.linearize, trees)) == [
        "S NP XX XX endNP VP XX PRT XX endPRT endVP XX endS",
        "NP XX endNP",
        "X XX PP XX endPP endX",
    ]
    for wrong in ("(S (NP a)", "(S a))", "a"):
        with pytest.raises(ValueError, match="bracket"):
            list(parsing.read_trees(wrong))


def test_text_of_a_tree_gives_the_tree_and_any_text_one_of_all_words(
    parsing: Any,
) -> None:
    draw = random.Random(1)
    for tree in parsing.read_trees(treebank(50, seed=1)):
        output = parsing.linearize(tree)
        leaves = list(tree.leaves())
        assert str(parsing.parse_output(output, leaves)) == str(tree)
        tokens = output.split()
        for token in draw.choices(["S", "NP", "endS", "endNP", "XX", "?"], k=4):
            tokens[draw.randrange(len(tokens))] = token
        cut = tokens[draw.randrange(len(tokens)) :]
        for broken in (tokens, cut, tokens + cut, []):
            repaired = parsing.parse_output(" ".join(broken), leaves)
            assert list(repaired.leaves()) == leaves, broken
            (parsed,) = parsing.read_trees(str(repaired))  # no constituent is empty
            assert str(parsed) == str(repaired), broken
    leaf = parsing.Tree("NN", word="dog")
    assert str(parsing.parse_output("S NP XX endS XX endNP", [leaf] * 3)) == (
        "( (S (NP (NN dog))) (NN dog) (NN dog))"
    )


def test_brackets_are_counted_like_evalb(parsing: Any) -> None:
    pairs = [  # gold, output, constituents of each, matched
        ("(S (NP (DT a) (NN b)) (VP (VB c)))", "(S (NP (DT a)) (VP (NN b) (VB c)))", 3, 3, 1),
        ("(S (NP (DT a) (, ,)) (VB c))", "(S (NP (DT a)) (, ,) (VB c))", 2, 2, 2),  # punctuation
        ("(S (X (, ,)) (VB c))", "(S (, ,) (VB c))", 1, 1, 1),  # nothing else in it
        ("(VP (VB c) (PRT (RP up)))", "(VP (VB c) (ADVP (RP up)))", 2, 2, 2),
        ("(NP (NP (NN a)))", "(NP (NN a))", 2, 1, 1),  # the minimum of both counts
    ]
    for gold, output, num_gold, num_output, matched in pairs:
        score = parsing.Score()
        (gold_tree,) = parsing.read_trees(f"( {gold} )")
        (output_tree,) = parsing.read_trees(f"( {output} )")
        score.add(gold_tree, output_tree)
        assert (score.num_gold, score.num_output, score.num_matched) == (
            num_gold,
            num_output,
            matched,
        )
        f1 = 200 * matched / (num_gold + num_output)
        assert score.percentages()["F1"] == pytest.approx(f1), gold


@pytest.mark.long
def test_a_small_model_parses_text_of_a_small_grammar(
    parsing: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, (split, count) in enumerate((("train", 4000), ("valid", 100), ("test", 200))):
        Path(f"{split}.mrg").write_text(treebank(count, seed), encoding="utf-8")
        parsing.prepare([Path(f"{split}.mrg")], split, Path("data/raw/parsing"))
    experiment = ["experiment=parsing", "num_threads=1"]
    assert command("preprocess", experiment, "tokenizer.vocab_size=420") == 0
    sizes = "num_encoder_layers=2 num_decoder_layers=2 d_model=128 d_ff=512 num_heads=4 norm=pre"
    model = [f"model.{size}" for size in f"{sizes} dropout=0.1 attention_dropout=0".split()]
    rate = "warmup_steps=150 peak_learning_rate=0.0029 schedule=cosine max_grad_norm=1"
    optimizer = [f"optimizer.{setting}" for setting in rate.split()]
    run = ["max_updates=600", "device=cpu", "tokens_per_update=2500", "validate_every_updates=200"]
    assert command("train", experiment, run, model, optimizer) == 0
    files = ["input=data/raw/parsing/test.src", "output=test.out"]
    assert command("translate", experiment, files, "device=cpu") == 0
    capsys.readouterr()
    gold = Path("data/raw/parsing/test.trees")
    figures = {}
    Path("none.out").write_text("S XX endS\n" * 200, encoding="utf-8")
    for name in ("test", "none"):
        parsing.score(gold, Path(f"{name}.out"))
        lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
        figures[name] = float(lines["F1"])
    assert figures["test"] > figures["none"] + 40, figures
