"""The states of XLIFF that say whether a text has been translated."""

from __future__ import annotations

from collections.abc import Mapping

UNTRANSLATED_STATES = frozenset({"new", "needs-translation", "initial"})


def read_state(element: str, attributes: Mapping[str, str]) -> str:
    """Return the state of an element, or "" if it has none.

    In XLIFF 1.2, a `target` has a state. In XLIFF 2, a `segment` has one, by default `initial`.
    """
    default = "initial" if element == "segment" else ""
    return attributes.get("state", default)
