"""Settings of random changes to training pairs: of their text, and of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.config.options import Settings, option


@dataclass(kw_only=True)
class NoiseConfig(Settings):
    """Noise on the tokens of training pairs, drawn again in every update (docs/synthesis.md)."""

    key_prefix = "noise."
    drop: float = option(0.0, "share of source tokens to leave out", low=0, below=1)
    mask: float = option(0.0, "share of source tokens to replace with <unk>", low=0, below=1)
    swap: int = option(0, "maximum distance that a source token moves; 0 disables", low=0)
    word_dropout: float = option(
        0.0, "share of decoder input tokens to replace with <unk>", low=0, below=1
    )

    @property
    def is_enabled(self) -> bool:
        """Whether any setting adds noise, as none does by default."""
        return self != NoiseConfig()


@dataclass(kw_only=True)
class AugmentConfig(Settings):
    """Changes of the text of training pairs, drawn again in every update (docs/augment.md).

    Each setting is the probability that a pair is changed.
    """

    key_prefix = "augment."
    upper: float = option(0.0, "both sides in capitals", low=0, high=1)
    title: float = option(
        0.0, "both sides with the first letter of each word capital", low=0, high=1
    )
    lower: float = option(0.0, "both sides without capitals", low=0, high=1)
    punct: float = option(
        0.0, "both sides without the mark at the end, if it is the same", low=0, high=1
    )
    typos: float = option(0.0, "1 to 4 typos in the source", low=0, high=1)
    spaces: float = option(0.0, "a wrong space at a punctuation mark of the source", low=0, high=1)
    inline_noise: float = option(
        0.0, "a random word, emoji, symbol or address inserted into both sides", low=0, high=1
    )
    noise: float = option(
        0.0, "both sides replaced by random words, emoji, symbols or addresses", low=0, high=1
    )
    terminology: float = option(
        0.0,
        "hints at 1 to 3 source words: the target words that translate them",
        low=0,
        high=1,
    )

    @property
    def is_enabled(self) -> bool:
        """Whether any change is possible."""
        return self != AugmentConfig()

    def check(self) -> None:
        # a pair gets at most one change of case
        total_probability = self.upper + self.title + self.lower
        problem = "upper, title and lower must add up to at most 1"
        self.require(total_probability <= 1, "upper", problem)
