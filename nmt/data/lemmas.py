"""Lemmas of word forms, from a file of a tagger or a morphological lexicon."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from nmt.data.text import read_lines
from nmt.errors import DataError


class Lemmas:
    """The lemmas of word forms: the forms that dictionaries list, such as "Haus" for "Häuser".

    Args:
        pairs: word forms and their lemmas. A form may have several lemmas; `lemmatize` takes the
            first.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._lemmas: dict[str, list[str]] = {}  # keyed by form
        self._forms: dict[str, list[str]] = {}  # keyed by lemma
        for form, lemma in pairs:
            lemmas = self._lemmas.setdefault(form, [])
            if lemma not in lemmas:
                lemmas.append(lemma)
                self._forms.setdefault(lemma, []).append(form)

    def lemmatize(self, text: str) -> str:
        """Replace each word by its lemma; a word without a lemma stays unchanged."""
        return " ".join(self._find_lemmas(word)[0] for word in text.split(" "))

    def forms(self, word: str) -> list[str]:
        """Return `word`, its lemmas, and all forms of these lemmas."""
        forms = [word]
        for lemma in [*self._find_lemmas(word), word]:  # the word may be a lemma itself
            forms += [lemma, *self._forms.get(lemma, [])]
        return list(dict.fromkeys(forms))

    def _find_lemmas(self, word: str) -> list[str]:
        """Return the lemmas of a word, or the word itself if it has none."""
        # a lowercase form has a capital at the start of a sentence
        return self._lemmas.get(word) or self._lemmas.get(word.lower()) or [word]


def read_lemmas(path: str) -> Lemmas:
    """Read lines of a form, a tab and its lemma; further columns are ignored.

    Leaves out empty lines and lines that begin with #. Raises `DataError` for other lines.
    """
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        # tokenizers and glossaries normalize text in the same way
        columns = [column.strip() for column in unicodedata.normalize("NFKC", line).split("\t")]
        if len(columns) < 2 or not columns[0] or not columns[1]:
            raise DataError(f"{path}:{number}: {line!r:.80} is not FORM<TAB>LEMMA")
        pairs.append((columns[0], columns[1]))
    return Lemmas(pairs)
