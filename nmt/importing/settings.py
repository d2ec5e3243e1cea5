"""Settings of a model of another toolkit, each asked for by name, so that none that changes what is
computed is passed over; and what a reader returns.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from nmt.config import ModelConfig, Normalization, SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, DamagedError, ModelError
from nmt.runtime import metadata

T = TypeVar("T")
_LARGEST = 1 << 20  # a width or depth above is a damaged file


@dataclass(frozen=True)
class Imported:
    """A model of another toolkit as one of ours."""

    model: ModelConfig
    tokenizers: Tokenizers
    weights: dict[str, Tensor]
    search: SearchConfig
    src_lang: str | None = None
    tgt_lang: str | None = None


class Settings:
    """The settings that a file holds; what cannot be honored is a `ModelError` with its name."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read a JSON object."""
        return cls(path, read_json(path))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting as it is; null is the default too."""
        value = self._values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 0."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
            raise self.refuse(name, value, "a whole number")
        return value

    def share(self, name: str, default: float = 0.0) -> float:
        """Return a dropout; of OpenNMT-py's list, one for each `dropout_steps`, the last."""
        value = self.get(name, default)
        value = value[-1] if isinstance(value, list) and value else value
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise self.refuse(name, value, "a share from 0 to below 1")
        return float(value)

    def choose(self, name: str, choices: Mapping[Any, T], default: Any = None) -> T:
        """Return what stands for the value of a setting."""
        value = self.get(name, default)
        if not isinstance(value, (str, bool)) or value not in choices:
            raise self.refuse(name, value, " or ".join(map(str, choices)))
        return choices[value]

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        return self.choose(name, {True: True, False: False}, default)

    def text(self, name: str) -> str | None:
        """Return a text, or None; transformers wraps that of some tokens in a mapping."""
        value = self.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if not isinstance(value, str | None):
            raise self.refuse(name, value, "a text")
        return value

    def file_names(self, name: str) -> list[str]:
        """Return a list of files without their folders, which were those of another machine."""
        values = self.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.refuse(name, values, "a list of files")
        return [Path(value).name for value in values]

    def demand(self, **wanted: Any) -> None:
        """Refuse other values of settings than these, which stand for missing ones too."""
        for name, value in wanted.items():
            if self.get(name, value) != value:
                raise self.refuse(name, self.get(name), repr(value))

    def search(self, *, beam_size: str, exponent: str, default: float) -> SearchConfig:
        """Return the defaults of a search that ranks by log P / length^exponent."""
        power = self.get(exponent, default)
        if isinstance(power, bool) or not isinstance(power, (int, float)) or abs(power) > 5:
            raise self.refuse(exponent, power, "a number from -5 to 5")
        plain = {0.0: Normalization.none, 1.0: Normalization.average}
        return SearchConfig(
            beam_size=max(1, self.number(beam_size, 1)),
            normalization=plain.get(float(power), Normalization.wu),
            # the inverse of `SearchConfig.length_exponent`
            length_penalty=0.6 if float(power) in plain else round(power / 0.7, 3),
            word_reward=0.0 - float(self.get("word-penalty", 0)),  # of Marian
        )

    def refuse(self, name: str, value: Any, wanted: str) -> ModelError:
        """Return the error for a setting that cannot be honored."""
        shown = reprlib.repr(value)[:60]  # never all of it, which YAML's aliases make endless
        return ModelError(f"{self.path}: {name}={shown} cannot be imported, only {wanted}")

    def architecture(self, **settings: Any) -> ModelConfig:
        """Make our settings; what contradicts itself is a `ModelError`."""
        try:
            return ModelConfig(**settings)
        except ConfigError as error:
            raise ModelError(f"{self.path} describes no model: {error}") from None


def read_text(path: Path) -> str:
    """Read a text file; one that is missing or no UTF-8 is a `ModelError`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; copy the whole folder") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path} is no text in UTF-8; copy it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing or damaged file is a `ModelError`."""
    try:
        return metadata.read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; copy the whole folder") from None
    except DamagedError:
        raise ModelError(f"{path} is no JSON object; copy it again") from None
