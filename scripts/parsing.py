"""Constituency parsing as translation (section 6.3 of the paper): a treebank's bracket files become
text, and the output of a model becomes trees again, scored by EVALB's labeled F1.

    python scripts/parsing.py prepare --wsj treebank_3/parsed/mrg/wsj
    nmt-train experiment=parsing
    nmt-average experiment=parsing
    nmt-translate experiment=parsing input=data/raw/parsing/test.src output=test.out
    python scripts/parsing.py score --gold data/raw/parsing/test.trees --output test.out

The source is the words. The target is the tree as in Vinyals et al. (2015): each constituent begins
with its label and ends with it, and each word is written XX, whatever its tag. An end is written
`endNP`, and a beginning `NP`: SentencePiece cuts `(NP` and `)NP` into two pieces.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORD, END = "XX", "end"
EMPTY = "-NONE-"
ROOTS = {"", "TOP", "ROOT", "S1"}
PUNCTUATION = {",", ":", "``", "''", "."}  # tags that EVALB's COLLINS.prm deletes
SAME = {"PRT": "ADVP"}  # labels that it counts as one
FOLDER = Path("data/raw/parsing")
SECTIONS = {"train": range(2, 22), "valid": [22], "test": [23]}


@dataclass
class Tree:
    """A constituent, or with a word a tag; the root has the label ''."""

    label: str
    children: list[Tree] = field(default_factory=list)
    word: str | None = None

    def leaves(self) -> Iterator[Tree]:
        """Yield the tags with their words, in order."""
        if self.word is not None:
            yield self
        for child in self.children:
            yield from child.leaves()

    def __str__(self) -> str:
        inner = self.word if self.word is not None else " ".join(map(str, self.children))
        return f"({self.label} {inner})"


# --- a treebank


def read_trees(text: str) -> Iterator[Tree]:
    """Yield the trees of a bracket file, without empty elements and function tags, each with a root
    of its own. Raises ValueError for brackets that do not match.
    """
    stack: list[Tree] = []
    tokens = re.findall(r"[()]|[^\s()]+", text)
    for i, token in enumerate(tokens):
        if token == "(":
            is_labeled = tokens[i + 1 : i + 2] not in (["("], [")"], [])
            stack.append(Tree(tokens[i + 1] if is_labeled else ""))
        elif not stack:
            raise ValueError(f"token {i + 1}, {token}, is outside of brackets")
        elif token == ")":
            done = stack.pop()
            done.label = strip_function(done.label)
            is_kept = done.label != EMPTY and (done.children or done.word is not None)
            if stack and is_kept:
                stack[-1].children.append(done)
            elif is_kept:
                yield done if done.label in ROOTS else Tree("", [done])
        elif tokens[i - 1] != "(":
            stack[-1].word = token
    if stack:
        raise ValueError(f"{len(stack)} brackets are not closed")


def strip_function(label: str) -> str:
    """Return a label without function tags and indices: NP-SBJ-1 and NP=2 are NP, -LRB- stays."""
    return label if label.startswith("-") else re.split("[-=]", label)[0]


def write(tree: Tree) -> str:
    """Return the target side of a tree."""
    return " ".join(token for child in tree.children for token in tokens_of(child))


def tokens_of(tree: Tree) -> Iterator[str]:
    """Yield the tokens of a constituent or a word."""
    if tree.word is not None:
        yield WORD
        return
    yield tree.label
    for child in tree.children:
        yield from tokens_of(child)
    yield END + tree.label


# --- output of a model


def read(output: str, leaves: Iterable[Tree]) -> Tree:
    """Parse the output of a model for a sentence with these leaves, and repair it.

    An end also closes the open constituents inside it. Ends without a beginning, constituents
    without words, and superfluous words are dropped. Missing words are added to the last
    constituent.
    """
    words = list(leaves)[::-1]
    root = Tree("")
    stack = [root]
    for token in output.split():
        label = token.removeprefix(END)
        if token == WORD:
            stack[-1].children += [words.pop()] if words else []
        elif label == token:
            stack.append(Tree(label))
        elif label in {tree.label for tree in stack[1:]}:
            while close(stack) != label:
                pass
    while len(stack) > 1:
        close(stack)
    last_child = root.children[-1] if root.children else root
    (root if last_child.word is not None else last_child).children += words[::-1]
    return root


def close(stack: list[Tree]) -> str:
    """Move the innermost constituent into the one around it, if it has words; return its label."""
    done = stack.pop()
    stack[-1].children += [done] if done.children else []
    return done.label


@dataclass
class Score:
    """Sums over sentences, from which EVALB computes its figures."""

    gold: int = 0  # constituents
    output: int = 0
    matched: int = 0
    sentences: int = 0
    complete: int = 0  # sentences with the constituents of the treebank

    def add(self, gold: Tree, output: Tree) -> None:
        """Count the constituents of two trees over the same tagged words."""
        gold_spans = brackets(gold)
        output_spans = brackets(output)
        self.gold += gold_spans.total()
        self.output += output_spans.total()
        self.matched += (gold_spans & output_spans).total()
        self.sentences += 1
        self.complete += gold_spans == output_spans

    def percent(self) -> dict[str, float]:
        """Return recall, precision, F1 and complete match in percent."""
        recall, precision = self.matched / max(1, self.gold), self.matched / max(1, self.output)
        f1 = 2 * self.matched / max(1, self.gold + self.output)
        shares = (recall, precision, f1, self.complete / max(1, self.sentences))
        names = ("recall", "precision", "F1", "complete match")
        return {name: 100 * share for name, share in zip(names, shares, strict=True)}


def brackets(tree: Tree) -> Counter[tuple[str, int, int]]:
    """Return label, first word and end of each constituent as EVALB counts them: without
    punctuation, the root, and constituents that have no other words.
    """
    spans: Counter[tuple[str, int, int]] = Counter()

    def walk(node: Tree, start: int) -> int:
        if node.word is not None:
            return start + (node.label not in PUNCTUATION)
        end = start
        for child in node.children:
            end = walk(child, end)
        if node.label not in ROOTS and end > start:
            spans[SAME.get(node.label, node.label), start, end] += 1
        return end

    walk(tree, 0)
    return spans


# --- commands


def prepare(paths: list[Path], split: str, output: Path) -> None:
    """Write words, targets and trees of a split, a line each."""
    trees = [tree for path in paths for tree in read_trees(path.read_text(encoding="utf-8"))]
    output.mkdir(parents=True, exist_ok=True)
    words = [" ".join(str(leaf.word) for leaf in tree.leaves()) for tree in trees]
    texts = {"src": words, "tgt": map(write, trees), "trees": map(str, trees)}
    for end, lines in texts.items():
        text = "".join(f"{line}\n" for line in lines)
        (output / f"{split}.{end}").write_text(text, encoding="utf-8", newline="\n")
    print(f"{split}: {len(trees):,} trees of {len(paths):,} files")


def score(gold: Path, output: Path, trees: Path | None) -> None:
    """Print the figures of a model's output, and write its trees."""
    lines = output.read_text(encoding="utf-8").split("\n")[:-1]
    gold_trees = list(read_trees(gold.read_text(encoding="utf-8")))
    if len(lines) != len(gold_trees):
        raise SystemExit(f"{output} has {len(lines)} lines, {gold} {len(gold_trees)} trees")
    output_trees = [read(line, tree.leaves()) for line, tree in zip(lines, gold_trees, strict=True)]
    figures = Score()
    for tree, output_tree in zip(gold_trees, output_trees, strict=True):
        figures.add(tree, output_tree)
    for name, value in figures.percent().items():
        print(f"{name}\t{value:.2f}")
    repaired = sum(write(tree) != line for tree, line in zip(output_trees, lines, strict=True))
    print(f"repaired\t{repaired} of {len(lines)}")
    if trees:
        text = "".join(f"{tree}\n" for tree in output_trees)
        trees.write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """Prepare a treebank, or score a translation."""
    sys.setrecursionlimit(10_000)  # a tree may be as deep as its output is long
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    make = commands.add_parser("prepare", help="make text of bracket files")
    make.add_argument("--wsj", type=Path, help="folder with the sections 00 to 24 of the WSJ")
    for split in SECTIONS:
        make.add_argument(f"--{split}", type=Path, nargs="+", metavar="FILE", default=[])
    make.add_argument("--output", type=Path, default=FOLDER)
    rate = commands.add_parser("score", help="F1 of output against trees")
    rate.add_argument("--gold", type=Path, required=True, help="trees, as prepare writes them")
    rate.add_argument("--output", type=Path, required=True, help="what nmt-translate wrote")
    rate.add_argument("--trees", type=Path, help="file for the trees, repaired")
    options = parser.parse_args()
    if options.command == "score":
        score(options.gold, options.output, options.trees)
        return
    for split, sections in SECTIONS.items():
        paths = getattr(options, split)
        if options.wsj:
            paths = [p for i in sections for p in sorted((options.wsj / f"{i:02}").glob("*.mrg"))]
        if not paths:
            parser.error(f"no files for {split}; give --wsj FOLDER, or --train, --valid and --test")
        prepare(paths, split, options.output)


if __name__ == "__main__":
    main()
