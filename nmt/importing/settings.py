"""`Settings` of another toolkit's model, with checks of their values, and `ImportedModel`."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from nmt.config import ModelConfig, Normalization, SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, DamagedError, ModelError
from nmt.runtime import metadata
from nmt.runtime.reading import read_regular_file

Choice = TypeVar("Choice")
_MAX_NUMBER = 1 << 20  # a file with a larger width or depth is damaged


@dataclass(frozen=True)
class ImportedModel:
    """A model of another toolkit, converted to the format of nmt."""

    model: ModelConfig
    tokenizers: Tokenizers
    weights: dict[str, Tensor]
    search: SearchConfig
    src_lang: str | None = None
    tgt_lang: str | None = None


class Settings:
    """The settings of a model, from the file `path`.

    Methods raise `ModelError` for values that cannot be imported.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the settings from a file with a JSON object."""
        return cls(path, read_json(path))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting without checks. Returns the default if it is missing or null."""
        value = self._values.get(name)
        return default if value is None else value

    def get_int(self, name: str, default: int | None = None) -> int:
        """Return a setting that must be an integer, 0 or more."""
        value = self.get(name, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not 0 <= value <= _MAX_NUMBER:
            raise self.make_error(name, value, "a whole number")
        return int(value)

    def get_dropout(self, name: str, default: float = 0.0) -> float:
        """Return a dropout probability.

        OpenNMT-py stores a list with a value for each phase of training. Returns the last value.
        """
        value = self.get(name, default)
        if isinstance(value, list) and value:
            value = value[-1]
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise self.make_error(name, value, "a share from 0 to below 1")
        return float(value)

    def get_choice(self, name: str, choices: Mapping[Any, Choice], default: Any = None) -> Choice:
        """Return `choices[value]` for the value of a setting, which must be one of the keys."""
        self.require_choice(name, choices, default)
        return choices[self.get(name, default)]

    def require_choice(self, name: str, choices: Collection[Any], default: Any = None) -> None:
        """Raise `ModelError` if a setting is not one of `choices`, which are texts or booleans."""
        value = self.get(name, default)
        if not isinstance(value, (str, bool)) or value not in choices:
            raise self.make_error(name, value, " or ".join(map(str, choices)))

    def get_number(self, name: str, default: float, max_size: float) -> float:
        """Return a setting that must be a number from -max_size to max_size."""
        value = self.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= max_size:  # `not <=` is also true for NaN
            raise self.make_error(name, value, f"a number from {-max_size} to {max_size}")
        return float(value)

    def get_bool(self, name: str, default: bool) -> bool:
        """Return a setting that must be true or false."""
        self.require_choice(name, (True, False), default)
        return bool(self.get(name, default))

    def get_text(self, name: str) -> str | None:
        """Return a text, or None if it is missing.

        transformers wraps some texts in a mapping with the key `content`.
        """
        value = self.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if not isinstance(value, str | None):
            raise self.make_error(name, value, "a text")
        return value

    def get_file_names(self, name: str) -> list[str]:
        """Return the file names of a list of paths, whose folders are on another machine."""
        paths = self.get(name, [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise self.make_error(name, paths, "a list of files")
        return [Path(path).name for path in paths]

    def require_values(self, **expected: Any) -> None:
        """Raise `ModelError` if a setting is present and differs from its expected value."""
        for name, value in expected.items():
            if self.get(name, value) != value:
                raise self.make_error(name, self.get(name), repr(value))

    def make_search_config(
        self, *, beam_size_name: str, exponent_name: str, default_exponent: float
    ) -> SearchConfig:
        """Convert the search settings.

        Other toolkits divide the log-probability of a hypothesis by length^exponent.

        Args:
            beam_size_name: name of the setting with the beam size.
            exponent_name: name of the setting with the exponent.
            default_exponent: exponent of the toolkit if that setting is missing.
        """
        exponent = self.get_number(exponent_name, default_exponent, max_size=5)
        length_penalty = 0.6  # the default; only `Normalization.wu` uses it
        if exponent == 0:
            normalization = Normalization.none
        elif exponent == 1:
            normalization = Normalization.average
        else:
            normalization = Normalization.wu
            length_penalty = round(exponent / 0.7, 3)  # inverts `SearchConfig.length_exponent`
        # only Marian has this setting, with the opposite sign of `word_reward`
        word_penalty = self.get_number("word-penalty", 0, max_size=_MAX_NUMBER)
        return SearchConfig(
            beam_size=max(1, self.get_int(beam_size_name, 1)),
            normalization=normalization,
            length_penalty=length_penalty,
            word_reward=0.0 - word_penalty,  # avoids -0.0
        )

    def make_error(self, name: str, value: Any, valid: str) -> ModelError:
        """Return the error for a setting that cannot be imported.

        `valid` describes the values that can be imported.
        """
        text = reprlib.repr(value)[:60]  # through aliases, a YAML value can contain itself
        return ModelError(f"{self.path}: {name}={text} cannot be imported, only {valid}")

    def make_model_config(self, **settings: Any) -> ModelConfig:
        """Return a `ModelConfig`. Raises `ModelError` if it is not valid."""
        try:
            return ModelConfig(**settings)
        except ConfigError as error:
            raise ModelError(f"{self.path} describes no model: {error}") from None


def read_text(path: Path) -> str:
    """Read a text file. Raises `ModelError` if it is missing or not UTF-8."""
    try:
        return read_regular_file(path).decode("utf-8")
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; copy the whole folder") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path} is not text in UTF-8; copy it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelError` for a missing or damaged file."""
    try:
        return metadata.read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; copy the whole folder") from None
    except DamagedError:
        raise ModelError(f"{path} is not a JSON object; copy it again") from None
