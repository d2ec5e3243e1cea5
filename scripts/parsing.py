"""Constituency parsing as translation (section 6.3 of the paper).

    python scripts/parsing.py prepare --wsj treebank_3/parsed/mrg/wsj
    nmt-train experiment=parsing
    nmt-average experiment=parsing
    nmt-translate experiment=parsing input=data/raw/parsing/test.src output=test.out
    python scripts/parsing.py score --gold data/raw/parsing/test.trees --output test.out

`prepare` turns the bracket files of a treebank into parallel text. `score` turns translations into
trees again and prints the labeled F1 of EVALB.

The source is the words of a sentence. The target is its tree as in Vinyals et al. (2015): each
constituent begins and ends with its label, and each word is written XX. A beginning is `NP` and an
end is `endNP`, since SentencePiece would cut `(NP` and `)NP` into two pieces.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORD_TOKEN = "XX"
END_PREFIX = "end"
EMPTY_LABEL = "-NONE-"
ROOT_LABELS = {"", "TOP", "ROOT", "S1"}
PUNCTUATION_TAGS = {",", ":", "``", "''", "."}  # deleted by EVALB's COLLINS.prm
EVALB_LABELS = {"PRT": "ADVP"}  # EVALB counts PRT as ADVP
DEFAULT_FOLDER = Path("data/raw/parsing")
WSJ_SECTIONS = {"train": range(2, 22), "valid": [22], "test": [23]}

Span = tuple[str, int, int]  # label, first word, end


@dataclass
class Tree:
    """A constituent with children, or a part-of-speech tag with a word. A root has the label ""."""

    label: str
    children: list[Tree] = field(default_factory=list)
    word: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has no words: an empty element, or a constituent of empty elements only."""
        return self.label == EMPTY_LABEL or (self.word is None and not self.children)

    def leaves(self) -> Iterator[Tree]:
        """Yield the tags with their words, in order."""
        if self.word is not None:
            yield self
        for child in self.children:
            yield from child.leaves()

    def __str__(self) -> str:
        inner = self.word if self.word is not None else " ".join(map(str, self.children))
        return f"({self.label} {inner})"


# --- treebank to text


def read_trees(text: str) -> Iterator[Tree]:
    """Yield the trees of a bracket file, each below a root.

    Drops empty elements and function tags. Raises ValueError for brackets that do not match.
    """
    open_trees: list[Tree] = []
    tokens = re.findall(r"[()]|[^\s()]+", text)
    for i, token in enumerate(tokens):
        if token == "(":
            next_token = tokens[i + 1] if i + 1 < len(tokens) else ""
            has_label = next_token not in ("(", ")")
            open_trees.append(Tree(next_token if has_label else ""))
        elif not open_trees:
            raise ValueError(f"token {i + 1}, {token}, is outside of brackets")
        elif token == ")":
            tree = open_trees.pop()
            tree.label = strip_function_tags(tree.label)
            if tree.is_empty:
                continue
            if open_trees:
                open_trees[-1].children.append(tree)
            elif tree.label in ROOT_LABELS:
                yield tree
            else:
                yield Tree("", [tree])
        elif tokens[i - 1] != "(":  # not a label
            open_trees[-1].word = token
    if open_trees:
        raise ValueError(f"{len(open_trees)} brackets are not closed")


def strip_function_tags(label: str) -> str:
    """Strip function tags and indices: NP-SBJ-1 and NP=2 become NP, -LRB- stays."""
    return label if label.startswith("-") else re.split("[-=]", label)[0]


def linearize(root: Tree) -> str:
    """Return the target side of a sentence."""
    tokens: list[str] = []
    for child in root.children:
        tokens += target_tokens(child)
    return " ".join(tokens)


def target_tokens(tree: Tree) -> Iterator[str]:
    """Yield the target tokens of a constituent or a word."""
    if tree.word is not None:
        yield WORD_TOKEN
        return
    yield tree.label
    for child in tree.children:
        yield from target_tokens(child)
    yield END_PREFIX + tree.label


# --- text to trees


def parse_output(output: str, leaves: list[Tree]) -> Tree:
    """Parse a line that the model wrote for a sentence with these leaves, and repair it.

    The end of a constituent also closes the open constituents inside it. Ends without a beginning,
    constituents without words and superfluous words are dropped. Missing words are added to the
    last constituent.
    """
    unused_leaves = leaves[::-1]
    root = Tree("")
    open_trees = [root]
    for token in output.split():
        if token == WORD_TOKEN:
            if unused_leaves:
                open_trees[-1].children.append(unused_leaves.pop())
        elif not token.startswith(END_PREFIX):
            open_trees.append(Tree(token))
        else:
            label = token.removeprefix(END_PREFIX)
            open_labels = {tree.label for tree in open_trees[1:]}
            needs_closing = label in open_labels  # otherwise an end without a beginning
            while needs_closing:
                needs_closing = close_innermost(open_trees) != label
    while len(open_trees) > 1:
        close_innermost(open_trees)
    last_tree = root
    if root.children and root.children[-1].word is None:
        last_tree = root.children[-1]
    last_tree.children += reversed(unused_leaves)
    return root


def close_innermost(open_trees: list[Tree]) -> str:
    """Close the innermost open constituent, dropping it if it has no words; return its label."""
    tree = open_trees.pop()
    if tree.children:
        open_trees[-1].children.append(tree)
    return tree.label


@dataclass
class Score:
    """Counts over all sentences, from which EVALB computes its metrics."""

    num_gold: int = 0  # constituents of the treebank
    num_output: int = 0  # constituents of the model
    num_matched: int = 0  # constituents in both
    num_sentences: int = 0
    num_exact: int = 0  # sentences with the same constituents in both

    def add(self, gold: Tree, output: Tree) -> None:
        """Count the constituents of two trees over the same words."""
        gold_spans = count_spans(gold)
        output_spans = count_spans(output)
        self.num_gold += gold_spans.total()
        self.num_output += output_spans.total()
        self.num_matched += (gold_spans & output_spans).total()
        self.num_sentences += 1
        if gold_spans == output_spans:
            self.num_exact += 1

    def percentages(self) -> dict[str, float]:
        """Return recall, precision, F1 and complete match in percent."""
        return {
            "recall": 100 * self.num_matched / max(1, self.num_gold),
            "precision": 100 * self.num_matched / max(1, self.num_output),
            "F1": 200 * self.num_matched / max(1, self.num_gold + self.num_output),
            "complete match": 100 * self.num_exact / max(1, self.num_sentences),
        }


def count_spans(root: Tree) -> Counter[Span]:
    """Count the constituents that EVALB counts, by label and span.

    Positions do not count punctuation. The root and constituents of punctuation are left out.
    """
    spans: Counter[Span] = Counter()

    def count_below(tree: Tree, start: int) -> int:
        """Count the constituents of a tree that begins at word `start`; return its end."""
        if tree.word is not None:
            return start if tree.label in PUNCTUATION_TAGS else start + 1
        end = start
        for child in tree.children:
            end = count_below(child, end)
        if tree.label not in ROOT_LABELS and end > start:
            spans[EVALB_LABELS.get(tree.label, tree.label), start, end] += 1
        return end

    count_below(root, 0)
    return spans


# --- commands


def main() -> None:
    """Run the subcommand."""
    sys.setrecursionlimit(10_000)  # a tree may be as deep as its line is long
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    prepare_parser = commands.add_parser("prepare", help="turn bracket files into parallel text")
    prepare_parser.add_argument("--wsj", type=Path, help="folder with sections 00 to 24 of the WSJ")
    for split in WSJ_SECTIONS:
        prepare_parser.add_argument(f"--{split}", type=Path, nargs="+", metavar="FILE", default=[])
    prepare_parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER)
    score_parser = commands.add_parser("score", help="compute the F1 of translations")
    score_parser.add_argument("--gold", type=Path, required=True, help=".trees file of prepare")
    score_parser.add_argument("--output", type=Path, required=True, help="output of nmt-translate")
    options = parser.parse_args()
    if options.command == "score":
        score(options.gold, options.output)
        return
    for split, sections in WSJ_SECTIONS.items():
        paths = getattr(options, split)
        if options.wsj:
            paths = []
            for section in sections:
                paths += sorted((options.wsj / f"{section:02}").glob("*.mrg"))
        if not paths:
            parser.error(f"no files for {split}; give --wsj FOLDER, or --train, --valid and --test")
        prepare(paths, split, options.output)


def prepare(paths: list[Path], split: str, folder: Path) -> None:
    """Write the words, targets and trees of a split to `folder`, one sentence per line."""
    folder.mkdir(parents=True, exist_ok=True)
    trees: list[Tree] = []
    for path in paths:
        trees += read_trees(path.read_text(encoding="utf-8"))
    sentences = []
    for tree in trees:
        words = [str(leaf.word) for leaf in tree.leaves()]
        sentences.append(" ".join(words))
    write_lines(folder / f"{split}.src", sentences)
    write_lines(folder / f"{split}.tgt", [linearize(tree) for tree in trees])
    write_lines(folder / f"{split}.trees", trees)
    print(f"{split}: {len(trees):,} trees of {len(paths):,} files")


def score(gold_path: Path, output_path: Path) -> None:
    """Print the metrics of translations, whose trees are repaired where they are not whole."""
    lines = output_path.read_text(encoding="utf-8").split("\n")[:-1]
    gold_trees = list(read_trees(gold_path.read_text(encoding="utf-8")))
    if len(lines) != len(gold_trees):
        raise SystemExit(
            f"{output_path} has {len(lines)} lines, {gold_path} {len(gold_trees)} trees"
        )
    total = Score()
    num_repaired = 0
    for gold_tree, line in zip(gold_trees, lines, strict=True):
        output_tree = parse_output(line, list(gold_tree.leaves()))
        total.add(gold_tree, output_tree)
        if linearize(output_tree) != line:
            num_repaired += 1
    for name, percentage in total.percentages().items():
        print(f"{name}\t{percentage:.2f}")
    print(f"repaired\t{num_repaired} of {len(lines)}")


def write_lines(path: Path, lines: list[str] | list[Tree]) -> None:
    """Write one line per item."""
    text = "".join(f"{line}\n" for line in lines)
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
