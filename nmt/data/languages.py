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
"""The options that request a direction: arguments of `choose_tags`."""


class Tags(NamedTuple):
    """The tags before each source and each target; an empty tag adds nothing."""

    src: str = ""
    tgt: str = ""
    choices: tuple[str, ...] = ()
    """If not empty, the text of each source begins with one of these tags itself."""


@dataclass(frozen=True)
class LanguagePair:
    """A direction, from one language to another, and the tags that request it."""

    src_lang: str
    tgt_lang: str
    src_tag: str = ""
    tgt_tag: str = ""

    @property
    def tags(self) -> Tags:
        """The tags of both sides."""
        return Tags(self.src_tag, self.tgt_tag)


def corpus_direction(data: DataConfig, name: str) -> LanguagePair:
    """Return the direction of a corpus. One with its own target language and no tags gets the tag
    of that language.
    """
    corpus = data.corpora.get(name)
    if corpus is None:
        return LanguagePair(data.src_lang, data.tgt_lang)
    src_tag = corpus.src_tag
    if src_tag is None and corpus.tgt_tag is None and corpus.tgt_lang is not None:
        src_tag = f"<2{corpus.tgt_lang}>"
    return LanguagePair(
        src_lang=corpus.src_lang or data.src_lang,
        tgt_lang=corpus.tgt_lang or data.tgt_lang,
        src_tag=src_tag or "",
        tgt_tag=corpus.tgt_tag or "",
    )


def describe_languages(data: DataConfig) -> dict[str, Any]:
    """Return the keys of `meta.json` about languages: `src_lang` and `tgt_lang`, several languages
    as de+en, and, if any corpus has a tag, the direction of each in `directions`.
    """
    directions = {name: corpus_direction(data, name) for name in sorted(data.corpora) or [""]}
    src_langs = set()
    tgt_langs = set()
    for direction in directions.values():
        src_langs.add(direction.src_lang)
        tgt_langs.add(direction.tgt_lang)
    languages: dict[str, Any] = {
        "src_lang": "+".join(sorted(src_langs)),
        "tgt_lang": "+".join(sorted(tgt_langs)),
    }
    if any(any(direction.tags) for direction in directions.values()):
        languages["directions"] = {name: asdict(d) for name, d in directions.items()}
    return languages


def target_tags(directions: Iterable[LanguagePair]) -> list[str]:
    """Return the tags that targets begin with; a translation does not include them."""
    return sorted({direction.tgt_tag for direction in directions} - {""})


def find_directions(
    recorded: Sequence[LanguagePair], src_lang: str, tgt_lang: str, src: Tokenizer
) -> list[LanguagePair]:
    """Return the directions of a model: the recorded ones, else those that its languages and source
    vocabulary imply.

    A model with several target languages has a tag for each in its source vocabulary. Several
    source languages are written as en+de, or as mul if they are the target languages. M2M100 and
    NLLB translate between all of their languages; the direction that was imported comes first and
    needs no tags.
    """
    if recorded:
        return list(recorded)
    directions = []
    if src.languages:
        directions.append(LanguagePair(src_lang, tgt_lang))
        for src_tag, tgt_tag in itertools.permutations(src.languages, 2):
            direction = LanguagePair(src_tag.strip("_"), tgt_tag.strip("_"), src_tag, tgt_tag)
            directions.append(direction)
        return directions
    tags = {match[1]: match[0] for match in map(_TAG.fullmatch, src.all_pieces()) if match}
    targets = list(tags) or _codes(tgt_lang)
    sources = _codes(src_lang)
    if any(code.lower() in _MANY for code in sources):
        sources = targets
    for target in targets:
        for source in sources:
            if source != target:
                directions.append(LanguagePair(source, target, tags.get(target, "")))
    return directions


def default_directions(directions: Sequence[LanguagePair]) -> list[LanguagePair]:
    """Return the directions to choose from if no language is requested: untagged ones, or all."""
    return [direction for direction in directions if not any(direction.tags)] or list(directions)


def _codes(languages: str) -> list[str]:
    """Split a text such as en+de into language codes."""
    return re.findall(r"[^+,\s]+", languages)


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
    if src_tag and src_tag not in tokenizers.src.all_pieces():
        raise ConfigError(f"src_tag={src_tag}: the model has no such symbol")
    if tgt_tag and tgt_tag not in tokenizers.tgt.all_pieces():
        raise ConfigError(f"tgt_tag={tgt_tag}: the model has no such symbol")
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
    matching_tags = {direction.tags for direction in matches}
    if not matching_tags or Tags() in matching_tags:
        return Tags()
    if len(matching_tags) == 1:
        return matching_tags.pop()
    choices = tuple(sorted({tags.src for tags in matching_tags} - {""}))
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
    names = dict.fromkeys(f"{d.src_lang} to {d.tgt_lang}" for d in directions[:_MAX_LISTED])
    more = ", and more" if len(directions) > _MAX_LISTED else ""
    return ", ".join(names) + more


def tag_lines(lines: Sequence[str], tag: str) -> list[str]:
    """Return lines with `tag` before each; an empty tag adds nothing."""
    if not tag:
        return list(lines)
    return [f"{tag} {line}" if line else tag for line in lines]


def encode_starts(tokenizer: Tokenizer, texts: Sequence[str], tag: str) -> list[list[int]]:
    """Return the ids that targets are forced to begin with: the tag, or else the prefix of the
    tokenizer, and then each of `texts`, which may be empty.
    """
    return [ids or tokenizer.prefix for ids in tokenizer.encode_batch(tag_lines(texts, tag))]


def encode_sources(
    tokenizer: Tokenizer, lines: Sequence[str], tags: Tags, *, first_line: int = 0
) -> list[list[int]]:
    """Return the ids of the tag and each line; an empty list for a line without tokens.

    If there are `tags.choices`, raises a `DataError` for a line that begins with none of them;
    `first_line` is the number of lines before these.
    """
    if tags.choices:
        for number, line in enumerate(lines, start=first_line + 1):
            if line.strip() and not line.startswith(tags.choices):
                raise DataError(
                    f"line {number} names no direction; give tgt_lang=..., or begin it with one "
                    f"of {' '.join(tags.choices)}"
                )
    rows = tokenizer.encode_batch(tag_lines(lines, tags.src))
    tag_ids = tokenizer.encode(tags.src)
    return [row if row != tag_ids else [] for row in rows]
