"""Choose other lines of a text, to compare the scores of pairs with the scores of wrong pairs."""

from __future__ import annotations

from collections.abc import Sequence

from nmt.errors import ConfigError


class OtherLines:
    """Chooses `count` other lines of about the same length for each line of a text.

    The text comes in windows. Lines are chosen from the current window and the one before, so that
    a last window of a single line also has others. The choice depends on the text alone.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._last_window: Sequence[str] = []

    def choose(self, window: Sequence[str]) -> list[list[str]]:
        """Return `count` lists of lines, aligned with the lines of `window`.

        Each list has another line for each line of the window. Without enough different lines,
        there are fewer lists. Raises a `ConfigError` if all lines are equal.
        """
        different_lines = {line for line in [*self._last_window, *window] if line.strip()}
        different_lines.update(window)
        self._last_window = window
        sorted_lines = sorted(different_lines, key=lambda line: (len(line), line))
        if len(sorted_lines) == 1:
            raise ConfigError("measure=contrast: needs at least two different lines on each side")
        positions = {line: i for i, line in enumerate(sorted_lines)}
        choices = []
        for distance in range(1, 1 + min(self._count, len(sorted_lines) - 1)):
            choice = []
            for line in window:
                position = (positions[line] + distance) % len(sorted_lines)
                choice.append(sorted_lines[position])
            choices.append(choice)
        return choices
