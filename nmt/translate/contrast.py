"""Choose other lines of a text, to compare the scores of pairs with the scores of wrong pairs."""

from __future__ import annotations

from collections.abc import Sequence

from nmt.errors import ConfigError


class OtherLines:
    """Chooses `count` other lines of about the same length for each line of a text.

    The text comes in windows. Lines are chosen from the current window and the one before, so that
    a last window of a single line also has others. Equal windows give equal choices.

    Args:
        count: number of other lines for each line.
        name: name of the lines, for error messages.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._last_window: Sequence[str] = []

    def choose(self, window: Sequence[str]) -> list[list[str]]:
        """Return `count` lists of lines, aligned with the lines of `window`.

        Each list has another line for each line of the window. Empty lines are not chosen. Without
        enough different lines, there are fewer lists. Raises a `ConfigError` if there is only one.
        """
        different_lines = {line for line in [*self._last_window, *window] if line.strip()}
        candidates = sorted(different_lines, key=lambda line: (len(line), line))
        if len(candidates) < 2:
            raise ConfigError(f"measure=contrast: all {self._name} are equal")
        if len(set(window)) > 1:
            self._last_window = window
        num_others = min(self._count, len(candidates) - 1)
        positions = {line: i for i, line in enumerate(candidates)}
        choices: list[list[str]] = [[] for _ in range(num_others)]
        for line in window:
            position = positions.get(line, -1)  # -1 for an empty line
            # the candidates around the line, which are fewer on one side at either end
            start = max(0, position - num_others // 2)
            start = min(start, len(candidates) - 1 - num_others)
            end = start + num_others + 1  # 1 for the line itself
            neighbors = candidates[start:end]
            if line in neighbors:
                neighbors.remove(line)
            for i in range(num_others):
                choices[i].append(neighbors[i])
        return choices
