"""The directions of a model or data folder, and the tags that request one, such as <2de> before
each source (Johnson et al., 2017) or any symbol before each target. Only this module knows how the
tag of a language is written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from nmt.config import DataConfig
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, DataError

_MANY = ("mul", "multi", "many", "any")  # codes of "several languages" in a model's config
_UNNAMED = ("src", "tgt")  # the default languages of text
_MAX_LISTED = 30  # directions that an error names
_TAG = re.compile(r"<2([A-Za-z]{2,8}(?:[_-][A-Za-z0-9]{1,8})*)>")
SEPARATOR = "<sep>"
"""The symbol between a line and those before it, in models of documents."""
DIRECTION = ("src_lang", "tgt_lang", "src_tag", "tgt_tag")
"""The options that ask for a direction, of `choose_tags` and of all that use it."""


class Tags(NamedTuple):
    """The tags before each source and each target; an empty tag adds nothing."""

    src: str = ""
    tgt: str = ""
    choices: tuple[str, ...] = ()
    """If not empty, the text of each source begins with one of these tags itself."""


@dataclass(frozen=True)
class LanguagePair:
    """From one language to another, and the tags that ask for it."""

    src_lang: str
    tgt_lang: str
    src_tag: str = ""
    tgt_tag: str = ""

    @property
    def tags(self) -> Tags:
        """The tags of both sides."""
        return Tags(self.src_tag, self.tgt_tag)


def corpus_direction(data: DataConfig, name: str) -> LanguagePair:
    """Return the direction of a corpus; a target language of its own gives it that tag."""
    corpus = data.corpora.get(name)
    if corpus is None:
        return LanguagePair(data.src_lang, data.tgt_lang)
    src_tag, tgt_tag = corpus.src_tag, corpus.tgt_tag
    if src_tag is None and tgt_tag is None and corpus.tgt_lang is not None:
        src_tag = f"<2{corpus.tgt_lang}>"
    languages = (corpus.src_lang or data.src_lang, corpus.tgt_lang or data.tgt_lang)
    return LanguagePair(*languages, src_tag or "", tgt_tag or "")


def describe_languages(data: DataConfig) -> dict[str, Any]:
    """Return what `meta.json` holds: the languages, several as de+en, and the direction of each
    corpus where one has a tag.
    """
    directions = {name: corpus_direction(data, name) for name in sorted(data.corpora) or [""]}
    described: dict[str, Any] = {
        key: "+".join(sorted({getattr(d, key) for d in directions.values()}))
        for key in ("src_lang", "tgt_lang")
    }
    if any(any(direction.tags) for direction in directions.values()):
        described["directions"] = {name: asdict(d) for name, d in directions.items()}
    return described


def target_tags(directions: Iterable[LanguagePair]) -> list[str]:
    """Return the tags that targets begin with, which are no part of a translation."""
    return sorted({direction.tgt_tag for direction in directions if direction.tgt_tag})


def find_directions(
    recorded: Sequence[LanguagePair], src_lang: str, tgt_lang: str, src: Tokenizer
) -> list[LanguagePair]:
    """Return the directions of a model: those recorded with it, or else what its languages and
    source vocabulary say.

    A model to several languages has tags in its source vocabulary; one from several names them all,
    such as en+de, or mul for those that it translates to. M2M100 and NLLB translate each of their
    languages to each other; the direction that was imported comes first and needs no tags.
    """
    if recorded:
        return list(recorded)
    if src.languages:
        codes = [(piece.strip("_"), piece) for piece in src.languages]
        pairs = itertools.permutations(codes, 2)
        tagged = [LanguagePair(s, t, src_tag, tgt_tag) for (s, src_tag), (t, tgt_tag) in pairs]
        return [LanguagePair(src_lang, tgt_lang), *tagged]
    tags = {match[1]: match[0] for match in map(_TAG.fullmatch, src.all_pieces()) if match}
    targets = list(tags) or _codes(tgt_lang)
    sources = _codes(src_lang)
    if any(code.lower() in _MANY for code in sources):
        sources = targets
    return [LanguagePair(s, t, tags.get(t, "")) for t in targets for s in sources if s != t]


def default_directions(directions: Sequence[LanguagePair]) -> list[LanguagePair]:
    """Return the directions to choose from if no language is requested: untagged ones, or all."""
    return [direction for direction in directions if not any(direction.tags)] or list(directions)


def _codes(languages: str) -> list[str]:
    return [code for code in re.split(r"[+,\s]+", languages) if code]


def choose_tags(
    directions: Sequence[LanguagePair],
    tokenizers: Tokenizers,
    *,
    src_lang: str = "",
    tgt_lang: str = "",
    src_tag: str = "",
    tgt_tag: str = "",
) -> Tags:
    """Return the tags of the requested direction, which is given by its languages or its tags.

    Raises a `ConfigError` for directions that the model lacks, and if directions with different
    tags match. Without a request, sources may begin with their tags themselves.
    """
    for key, tag, side in (("src", src_tag, tokenizers.src), ("tgt", tgt_tag, tokenizers.tgt)):
        if tag and tag not in side.all_pieces():
            raise ConfigError(f"{key}_tag={tag}: the model has no such symbol")
    if src_tag or tgt_tag:
        return Tags(src_tag, tgt_tag)
    requested = {}
    if src_lang:
        requested["src_lang"] = src_lang
    if tgt_lang:
        requested["tgt_lang"] = tgt_lang
    candidates = directions if requested else default_directions(directions)
    matches = [direction for direction in candidates if _matches(direction, requested)]
    request = " ".join(f"{key}={value}" for key, value in requested.items())
    if request and directions and not matches:
        raise ConfigError(f"{request}: the model translates {_list_directions(directions)}")
    tags = {direction.tags for direction in matches}
    if not tags or Tags() in tags:
        return Tags()
    if len(tags) == 1:
        return tags.pop()
    choices = tuple(sorted({tag.src for tag in tags if tag.src}))
    if choices and not request:
        return Tags(choices=choices)
    hint = ""
    if not tgt_lang:
        hint = "tgt_lang=... or "
    elif not src_lang:
        hint = "src_lang=... or "
    raise ConfigError(
        f"{request or 'no language'}: the model translates {_list_directions(directions)}; give "
        f"{hint}its tags, src_tag=... and tgt_tag=..."
    )


def _matches(direction: LanguagePair, requested: Mapping[str, str]) -> bool:
    """Return whether a direction has the requested languages or the default ones."""
    return all(getattr(direction, key) in (value, *_UNNAMED) for key, value in requested.items())


def _list_directions(directions: Sequence[LanguagePair]) -> str:
    """List directions for an error message."""
    listed = [f"{d.src_lang} to {d.tgt_lang}" for d in directions[:_MAX_LISTED]]
    names = list(dict.fromkeys(listed))
    if len(directions) > _MAX_LISTED:
        names.append("and more")
    return ", ".join(names)


def tag_lines(lines: Sequence[str], tag: str) -> list[str]:
    """Return lines with the tag before each; without a tag the lines as they are."""
    return [f"{tag} {line}" if line else tag for line in lines] if tag else list(lines)


def encode_starts(tokenizer: Tokenizer, texts: Sequence[str], tag: str) -> list[list[int]]:
    """Return the ids that targets are forced to begin with: the tag, or else what every target of
    the tokenizer begins with, and then each of `texts`, which may be empty.
    """
    return [ids or tokenizer.prefix for ids in tokenizer.encode_batch(tag_lines(texts, tag))]


def encode_sources(
    tokenizer: Tokenizer, lines: Sequence[str], tags: Tags, *, first_line: int = 0
) -> list[list[int]]:
    """Return the ids of lines after their tag; none for a line without tokens of its own.

    Raises a `DataError` for a line without one of `tags.choices`, where there are such;
    `first_line` is the number of lines before these.
    """
    for number, line in enumerate(lines if tags.choices else (), start=first_line + 1):
        if line.strip() and not line.startswith(tags.choices):
            raise DataError(
                f"line {number} names no direction; give tgt_lang=..., or begin it with one of "
                f"{' '.join(tags.choices)}"
            )
    rows = tokenizer.encode_batch(tag_lines(lines, tags.src))
    bare = tokenizer.encode(tags.src)
    return [[] if row == bare else row for row in rows] if bare else rows
