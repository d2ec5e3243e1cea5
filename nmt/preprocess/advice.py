"""Says what in a report is off, and what to do about it: one line each.

It reads the content of report.json alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MOST_DROPPED = 0.05
MOST_UNKNOWN = 0.001
_MOST_BYTES = 0.01
_MOST_DUPLICATES = {"pairs": 0.1, "sources": 0.3, "targets": 0.3}  # a side has many translations
_MOST_STEEP = 0.01
_MOST_RATIO = 2.0
_MOST_ODD = 0.001
_MOST_OVERLAP = 0.01  # of sources or targets of a held-out set, which short sentences share
_MOST_TOKENS_A_WORD = 3.0
_MOST_PADDING = 0.2
_FEWEST_UPDATES = 20
_MOST_EPOCHS = 1000
_UNSPACED = {"Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar"}
_SIDES = (("src", "source"), ("tgt", "target"))


def give_advice(report: dict[str, Any]) -> list[str]:
    """Return a line for everything that is off, the gravest first."""
    parts = (_overlap, _drops, _tokens, _characters, _duplicates, _ratio, _training)
    return [line for part in parts for line in part(report)]


def _overlap(report: dict[str, Any]) -> Iterator[str]:
    for name, found in report["overlap"].items():
        size = found["num_rows"]
        pairs = found["normalised"]["pairs"]["held_out_rows"]
        if pairs:
            yield (
                f"{pairs:,} of {size:,} {name} pairs ({pairs / size:.1%}) are in the training "
                f"text, so scores on {name} will be too high: take them out of it{_first(found)}."
            )
        for kind in ("sources", "targets"):
            rows = found["normalised"][kind]["held_out_rows"]
            if rows > pairs and rows > _MOST_OVERLAP * size:
                yield (
                    f"{rows:,} of {size:,} {name} {kind} ({rows / size:.1%}) are in the training "
                    f"text: state it beside scores, or take these pairs out."
                )


def _first(found: dict[str, Any]) -> str:
    examples = found["examples"]["normalised pairs"]
    return f" (first {examples[0]['file']}:{examples[0]['line']})"


def _drops(report: dict[str, Any]) -> Iterator[str]:
    train = report["train"]
    num_dropped = train["read"] - train["kept"]
    if num_dropped > MOST_DROPPED * train["read"]:
        reason, number = max(train["dropped"].items(), key=lambda item: item[1])
        yield (
            f"{num_dropped / train['read']:.1%} of the training pairs were dropped, most for "
            f"'{reason}' ({number:,}): look at the examples, mend the input or the filter."
        )


def _tokens(report: dict[str, Any]) -> Iterator[str]:
    for split in _splits(report):
        for key, side in _SIDES:
            counts = report[split][key]
            if counts["unknown_share"] > MOST_UNKNOWN:
                yield (
                    f"{counts['unknown_share']:.2%} of the {split} {side} tokens are unknown: set "
                    "tokenizer.byte_fallback=true, or train the tokenizer on such text."
                )
            if counts["byte_share"] > _MOST_BYTES:
                yield (
                    f"{counts['byte_share']:.1%} of the {split} {side} tokens are single bytes, "
                    f"{_worst(counts)}: raise tokenizer.character_coverage or vocab_size, or "
                    "train the tokenizer on such text."
                )
    for key, side in _SIDES:
        yield from _fertility(report["train"][key], side)


def _worst(counts: dict[str, Any]) -> str:
    if not counts["uncovered"]:
        return "all of known characters"
    worst = counts["uncovered"][0]
    return f"most for {worst['code']} {worst['name']}"


def _fertility(counts: dict[str, Any], side: str) -> Iterator[str]:
    has_spaces = not _UNSPACED & {name for name, share in counts["scripts"].items() if share > 0.2}
    if has_spaces and counts["tokens_per_word"] > _MOST_TOKENS_A_WORD:
        yield (
            f"A {side} word takes {counts['tokens_per_word']:.1f} tokens: raise "
            "tokenizer.vocab_size, unless words of this language are that long."
        )


def _characters(report: dict[str, Any]) -> Iterator[str]:
    for key, side in _SIDES:
        counts = report["train"][key]
        if counts["odd_characters"] > _MOST_ODD * counts["characters"]:
            first = counts["odd"][0]
            what = f"{first['code']} {first['name']}, {first['count']:,} times, {first['why']}"
            cure = "filter.max_foreign drops such pairs"
            if first["why"] != "other script":
                cure = "the text was decoded or extracted wrongly; make it again from its source"
            yield (
                f"{counts['odd_characters'] / counts['characters']:.2%} of the {side} characters "
                f"are odd (first {what}): {cure}."
            )


def _duplicates(report: dict[str, Any]) -> Iterator[str]:
    size = report["train"]["read"]
    for kind, option in (("pairs", "pair"), ("sources", "src"), ("targets", "tgt")):
        number = (report["duplicates"] or {}).get(kind, 0)
        if number > _MOST_DUPLICATES[kind] * size:
            yield (
                f"{number / size:.0%} of the training {kind} came before: "
                f"filter.duplicates={option} keeps the first of each."
            )
            return  # those of one side are more, for the same cause


def _ratio(report: dict[str, Any]) -> Iterator[str]:
    train = report["train"]
    ratio, steep = train["length_ratio"], train["steep_pairs"]
    if not 1 / _MOST_RATIO <= ratio <= _MOST_RATIO:
        yield (
            f"There are {ratio:.2f} target tokens for each source token: see that the sides "
            "belong together and are not exchanged."
        )
    elif steep > _MOST_STEEP * train["kept"]:
        yield (
            f"{steep / train['kept']:.1%} of the training pairs have a side more than three times "
            "as long as the other: filter.max_ratio=3 drops what is hardly a translation."
        )


def _training(report: dict[str, Any]) -> Iterator[str]:
    training = report["training"]
    epoch, settings = training["epoch"], training["settings"]
    if training["longest"] is None:
        yield "The weights leave no training pair an epoch: give a corpus a larger one."
        return
    if epoch is None:
        yield (
            f"The longest sentence has {training['longest']} tokens, more than "
            f"max_tokens={settings['max_tokens']}: raise it for nmt-train, or lower max_length."
        )
        return
    if epoch["padding_share"] > _MOST_PADDING:
        yield (
            f"{epoch['padding_share']:.0%} of what training computes will be padding: the sides "
            "differ much in length, or max_tokens is small for this text."
        )
    if epoch["num_updates"] < _FEWEST_UPDATES:
        yield (
            f"An epoch is {epoch['num_updates']} updates: tokens_per_update="
            f"{settings['tokens_per_update']} is much for this corpus; set it lower."
        )
    if settings["max_updates"] > _MOST_EPOCHS * epoch["num_updates"]:
        yield (
            f"max_updates={settings['max_updates']} is "
            f"{settings['max_updates'] / epoch['num_updates']:,.0f} epochs: set it lower."
        )


def _splits(report: dict[str, Any]) -> list[str]:
    return [name for name in ("train", "valid", "test") if name in report]
