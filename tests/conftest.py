"""Fixtures that the tests share. What takes long to import is imported when it is used, since the
process that gives out the tests imports this file too.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nmt.data.tokenizer import Tokenizer


gc.disable()  # until all modules are imported, over which it would go again and again


def pytest_collection_finish() -> None:
    """Keep out of garbage collection what is there before the first test."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import tiny  # noqa: F401  # which sets it


@pytest.fixture(autouse=True)
def _plain_log() -> None:
    """Undo what a command that ran in this process has set for the logs of nmt."""
    logger = logging.getLogger("nmt")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    logging.root.setLevel(logging.WARNING)  # libraries that tests import change these
    logging.disable(logging.NOTSET)
    for name, found in logging.root.manager.loggerDict.items():
        if name.startswith("nmt") and isinstance(found, logging.Logger):
            found.disabled = False


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A joint BPE model of 330 pieces."""
    from tiny import sentences, tokenizer_config

    from nmt.data.vocabulary import train_tokenizer

    return train_tokenizer(sentences(200), tokenizer_config())


@pytest.fixture(scope="session")
def trained_models(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer
) -> dict[str, Path]:
    """Model folders of both norms and layouts of positions, trained until they are sure."""
    from exporting import trained_model

    from nmt.config import Norm, Positions

    place = tmp_path_factory.mktemp("trained")
    shape = {"d_model": 30, "d_ff": 42, "num_heads": 3, "num_decoder_layers": 1}
    return {
        name: trained_model(place / name, tokenizer, norm=norm, positions=layout, **shape)
        for name, norm, layout in (
            ("post-sinusoidal", Norm.post, Positions.sinusoidal),
            ("pre-sinusoidal_concat", Norm.pre, Positions.sinusoidal_concat),
        )
    }


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of the toy corpus (`toy.write_corpus`)."""
    from toy import command, write_corpus

    place = tmp_path_factory.mktemp("toy")
    assert command("preprocess", *write_corpus(place)) == 0
    return place / "data"
