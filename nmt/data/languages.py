"""The directions of a model or data folder, and the tags that request a direction.

Tags are symbols before each source, such as <2de> (Johnson et al., 2017), or before each target.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from nmt.config import LINE_SEPARATORS, DataConfig
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, DataError

_MULTILINGUAL_CODES = ("mul", "multi", "many", "any")
DEFAULT_LANGUAGES = ("src", "tgt")  # `data.src_lang` and `data.tgt_lang`, unless they are set
_MAX_LISTED_DIRECTIONS = 30  # largest number of directions in an error message
_TAG = re.compile(r"<2([A-Za-z]{2,8}(?:[_-][A-Za-z0-9]{1,8})*)>")
DIRECTION_OPTIONS = ("src_lang", "tgt_lang", "src_tag", "tgt_tag")
"""The options that request a direction, which are parameters of `choose_tags`."""


class Tags(NamedTuple):
    """The tags before each source and each target. An empty tag adds nothing."""

    src: str = ""
    tgt: str = ""
    src_choices: tuple[str, ...] = ()
    """If not empty, each source must already begin with one of these tags, and `src` is empty."""


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

    @property
    def has_tag(self) -> bool:
        """Whether at least one side has a tag."""
        return bool(self.src_tag or self.tgt_tag)

    @property
    def has_default_language(self) -> bool:
        """Whether the language of at least one side is not set."""
        return self.src_lang in DEFAULT_LANGUAGES or self.tgt_lang in DEFAULT_LANGUAGES

    def matches(self, src_lang: str, tgt_lang: str) -> bool:
        """Return whether the direction has the requested languages.

        An empty text requests any language. A language that is not set matches every request.
        """
        has_src_lang = not src_lang or self.src_lang in (src_lang, *DEFAULT_LANGUAGES)
        has_tgt_lang = not tgt_lang or self.tgt_lang in (tgt_lang, *DEFAULT_LANGUAGES)
        return has_src_lang and has_tgt_lang


def corpus_direction(data: DataConfig, name: str) -> LanguagePair:
    """Return the direction of the corpus `name`.

    If the corpus sets a target language, such as de, but no tags, its sources get the tag <2de>.
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
    """Return the keys of `meta.json` about languages.

    `src_lang` and `tgt_lang` join several languages, as in de+en. If any corpus has a tag,
    `directions` has the direction of each corpus.
    """
    corpora = sorted(data.corpora) or [""]  # "" is `data.train`
    directions = {name: corpus_direction(data, name) for name in corpora}
    src_langs = set()
    tgt_langs = set()
    for direction in directions.values():
        src_langs.add(direction.src_lang)
        tgt_langs.add(direction.tgt_lang)
    languages: dict[str, Any] = {
        "src_lang": "+".join(sorted(src_langs)),
        "tgt_lang": "+".join(sorted(tgt_langs)),
    }
    if any(direction.has_tag for direction in directions.values()):
        languages["directions"] = {
            name: asdict(direction) for name, direction in directions.items()
        }
    return languages


def target_tags(directions: Iterable[LanguagePair]) -> list[str]:
    """Return the tags that targets begin with and that are removed from translations."""
    return sorted({direction.tgt_tag for direction in directions} - {""})


def find_directions(
    config_directions: Sequence[LanguagePair],
    src_lang: str,
    tgt_lang: str,
    src_tokenizer: Tokenizer,
) -> list[LanguagePair]:
    """Return the directions of a model, from its config or else from its languages and vocabulary.

    Args:
        config_directions: the directions in the config of the model, returned if there are any.
        src_lang: the source languages, such as en+de; mul stands for all target languages.
        tgt_lang: the target languages, used if the source vocabulary has no tags.
        src_tokenizer: the tokenizer of the source.
    """
    if config_directions:
        return list(config_directions)
    if src_tokenizer.language_ids:  # M2M100 or NLLB
        # The tokenizers put the languages that the user chose for `nmt-import` before all texts, as
        # their `prefix_ids`. The direction between these languages therefore needs no tags.
        imported_direction = LanguagePair(src_lang, tgt_lang)
        return [imported_direction, *list_language_directions(src_tokenizer)]
    tags = {}  # keyed by target language
    for piece in src_tokenizer.all_pieces():
        match = _TAG.fullmatch(piece)
        if match is not None:
            tags[match[1]] = piece
    tgt_codes = list(tags) or _split_codes(tgt_lang)
    src_codes = _split_codes(src_lang)
    if any(code.lower() in _MULTILINGUAL_CODES for code in src_codes):
        src_codes = tgt_codes
    directions = []
    for tgt_code in tgt_codes:
        for src_code in src_codes:
            if src_code != tgt_code:
                directions.append(LanguagePair(src_code, tgt_code, tags.get(tgt_code, "")))
    return directions


def list_language_directions(src_tokenizer: Tokenizer) -> list[LanguagePair]:
    """Return the directions between all languages of M2M100 or NLLB, and none for other models."""
    directions = []
    tags = list(src_tokenizer.language_ids)  # pieces such as __en__ or eng_Latn
    for src_tag, tgt_tag in itertools.permutations(tags, 2):
        direction = LanguagePair(src_tag.strip("_"), tgt_tag.strip("_"), src_tag, tgt_tag)
        directions.append(direction)
    return directions


def default_directions(directions: Sequence[LanguagePair]) -> list[LanguagePair]:
    """Return the directions to choose from if no language is requested.

    These are the directions without tags, or all directions if each has a tag.
    """
    untagged = [direction for direction in directions if not direction.has_tag]
    return untagged or list(directions)


def _split_codes(languages: str) -> list[str]:
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
    """Return the tags of the direction that the arguments request, by its languages or its tags.

    If nothing is requested, but directions differ in their source tags, the result has these tags
    as `src_choices`. Raises a `ConfigError` if no direction of the model matches the request, or if
    several match and have different tags.
    """
    if src_tag and src_tag not in tokenizers.src.all_pieces():
        raise ConfigError(f"src_tag={src_tag}: the model has no such symbol")
    if tgt_tag and tgt_tag not in tokenizers.tgt.all_pieces():
        raise ConfigError(f"tgt_tag={tgt_tag}: the model has no such symbol")
    if src_tag or tgt_tag:
        return Tags(src_tag, tgt_tag)
    requested_options = []
    if src_lang:
        requested_options.append(f"src_lang={src_lang}")
    if tgt_lang:
        requested_options.append(f"tgt_lang={tgt_lang}")
    request = " ".join(requested_options)
    matches = default_directions(directions)
    if request:
        matches = _find_matches(directions, tokenizers.src, src_lang, tgt_lang)
        if directions and not matches:
            raise ConfigError(f"{request}: the model translates {_list_directions(directions)}")
    matching_tags = {direction.tags for direction in matches}
    if not matching_tags or Tags() in matching_tags:  # no known direction, or one without tags
        return Tags()
    if len(matching_tags) == 1:
        return matching_tags.pop()
    src_choices = tuple(sorted({tags.src for tags in matching_tags} - {""}))
    if src_choices and not request:
        return Tags(src_choices=src_choices)
    advice = "give its tags, src_tag=... and tgt_tag=..."
    if not tgt_lang:
        advice = "give tgt_lang=... or its tags, src_tag=... and tgt_tag=..."
    elif not src_lang:
        advice = "give src_lang=... or its tags, src_tag=... and tgt_tag=..."
    raise ConfigError(
        f"{request or 'no language'}: the model translates {_list_directions(directions)}; {advice}"
    )


def _find_matches(
    directions: Sequence[LanguagePair], src_tokenizer: Tokenizer, src_lang: str, tgt_lang: str
) -> list[LanguagePair]:
    """Return the directions that match a request of at least one language."""
    matches = [direction for direction in directions if direction.matches(src_lang, tgt_lang)]
    has_exact_match = any(not direction.has_default_language for direction in matches)
    if has_exact_match:
        return matches
    # M2M100 and NLLB also translate between the languages on which they were not fine-tuned
    all_pairs = list_language_directions(src_tokenizer)
    language_matches = [pair for pair in all_pairs if pair.matches(src_lang, tgt_lang)]
    return language_matches or matches


def _list_directions(directions: Sequence[LanguagePair]) -> str:
    """List directions for an error message."""
    names = []
    for direction in directions[:_MAX_LISTED_DIRECTIONS]:
        name = f"{direction.src_lang} to {direction.tgt_lang}"
        if name not in names:  # another direction may have the same languages and other tags
            names.append(name)
    if len(directions) > _MAX_LISTED_DIRECTIONS:
        names[-1] += ", and more"
    return ", ".join(names)


def tag_lines(lines: Sequence[str], tag: str) -> list[str]:
    """Return the lines with `tag` before each. An empty tag adds nothing."""
    if not tag:
        return list(lines)
    return [f"{tag} {line}" if line else tag for line in lines]


def split_tag(line: str, tags: Tags) -> tuple[str, str]:
    """Divide a source that begins with one of `tags.src_choices` into this tag and its text.

    The tag is empty without `src_choices`.
    """
    for tag in tags.src_choices:
        if line.startswith(tag):
            return tag, line.removeprefix(tag).removeprefix(" ")
    return "", line


@functools.lru_cache(8)
def find_line_separator(tokenizer: Tokenizer) -> str:
    """Return the symbol that separates the lines of a context, or "" if the tokenizer has none."""
    pieces = frozenset(tokenizer.all_pieces())
    for separator in LINE_SEPARATORS:
        if separator in pieces:
            return separator
    return ""


def find_source_prefix(tokenizer: Tokenizer, tags: Tags) -> str:
    """Return the text before each source: the tag, or else the pieces of `tokenizer.prefix_ids`."""
    pieces = [tags.src] if tags.src else tokenizer.pieces(tokenizer.prefix_ids)
    return "".join(f"{piece} " for piece in pieces)


def encode_target_prefixes(
    tokenizer: Tokenizer, prefixes: Sequence[str], tag: str
) -> list[list[int]]:
    """Return the ids with which each target must begin: the ids of the tag and of its prefix.

    If tag and prefix are both empty, returns the `prefix_ids` of the tokenizer, if it has any.
    """
    target_prefixes = []
    for ids in tokenizer.encode_batch(tag_lines(prefixes, tag)):
        target_prefixes.append(ids or tokenizer.prefix_ids)
    return target_prefixes


def encode_tag(tokenizer: Tokenizer, tag: str) -> list[int]:
    """Return the ids with which each target must begin; see `encode_target_prefixes`."""
    [ids] = encode_target_prefixes(tokenizer, [""], tag)
    return ids


def encode_sources(
    tokenizer: Tokenizer, lines: Sequence[str], tags: Tags, *, first_line: int = 0
) -> list[list[int]]:
    """Return the ids of each line, with the tag before it. A line without tokens gets no ids.

    If there are `tags.src_choices`, raises a `DataError` for a line that does not begin with one of
    them. `first_line` is the index of the first of the `lines` in the input. The error has the line
    number in the input.
    """
    if tags.src_choices:
        for number, line in enumerate(lines, start=first_line + 1):
            if line.strip() and not line.startswith(tags.src_choices):
                raise DataError(
                    f"line {number} names no direction; give tgt_lang=..., or begin it with one "
                    f"of {' '.join(tags.src_choices)}"
                )
    tag_ids = tokenizer.encode(tags.src)
    line_ids = []
    for ids in tokenizer.encode_batch(tag_lines(lines, tags.src)):
        has_text = ids != tag_ids
        line_ids.append(ids if has_text else [])
    return line_ids
