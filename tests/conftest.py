"""Fixtures that the tests share.

Slow imports are inside fixtures, since the main process of pytest-xdist imports this file too.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis  # noqa: F401  # its import traverses all objects; there are few now
import pytest

if TYPE_CHECKING:
    from nmt.data.tokenizer import Tokenizer


SHAPE = {"d_model": 30, "d_ff": 42, "num_heads": 3, "num_decoder_layers": 1}
"""Settings of the trained models."""

LONGEST = ("first_tutorial", "page_commands", "onnx", "web_export", "hints", "build_docs", "search")
LONGEST += ("serve_workers", "serve_load", "protect", "translator", "foreign_commands", "exported")
"""Files whose slow tests take longest, which pytest-xdist hands out first."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of tests inherit it

gc.disable()  # collection would traverse all modules again and again while they are imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; otherwise one worker may run a long file after all others."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection."""
    gc.freeze()
    gc.enable()


def copy_shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a copy of a folder that `make` fills once for all workers of pytest-xdist."""
    from filelock import FileLock

    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    shared = root / "shared" / name
    shared.parent.mkdir(exist_ok=True)
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            make(shared.with_suffix(".incomplete"))
            shared.with_suffix(".incomplete").rename(shared)
    return Path(shutil.copytree(shared, factory.mktemp("shared") / name))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import tiny  # noqa: F401  # sets the number of threads


@pytest.fixture(scope="session", autouse=True)
def _no_waits_for_the_disk() -> Iterator[None]:
    """Let os.fsync only check its descriptor: no test loses power, so no test needs the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Let a test draw the same numbers whichever tests ran before."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _plain_log() -> None:
    """Reset the loggers that a command in this process has configured."""
    logger = logging.getLogger("nmt")
    logger.handlers = []
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    logging.root.setLevel(logging.WARNING)  # libraries that tests import change these
    logging.disable(logging.NOTSET)
    for name, child in logging.root.manager.loggerDict.items():
        if name.startswith("nmt") and isinstance(child, logging.Logger):
            child.disabled = False


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """Limit the size in bytes of files that this process writes, to simulate a full disk.

    -1 removes the limit.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A joint BPE model of 330 pieces."""
    from tiny import sentences, tokenizer_config

    from nmt.data.vocabulary import train_tokenizer

    return train_tokenizer(sentences(200), tokenizer_config())


@pytest.fixture(scope="session")
def trained_model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A post-norm model with sinusoidal positions, trained until it is certain."""
    from exporting import trained_model

    def make(folder: Path) -> None:
        trained_model(folder, tokenizer, **SHAPE)

    return copy_shared(tmp_path_factory, "post-sinusoidal", make)


@pytest.fixture(scope="session")
def trained_models(
    tmp_path_factory: pytest.TempPathFactory, trained_model_dir: Path, tokenizer: Tokenizer
) -> dict[str, Path]:
    """Models of both norms and both sinusoidal layouts, trained until they are certain."""
    from exporting import trained_model

    from nmt.config import Norm, Positions

    name = "pre-sinusoidal_concat"
    changes: dict[str, Any] = {"norm": Norm.pre, "positions": Positions.sinusoidal_concat}

    def make(folder: Path) -> None:
        trained_model(folder, tokenizer, **SHAPE, **changes)

    pre_norm = copy_shared(tmp_path_factory, name, make)
    return {trained_model_dir.name: trained_model_dir, name: pre_norm}


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of the toy corpus (`toy.write_corpus`)."""
    from toy import command, write_corpus

    folder = tmp_path_factory.mktemp("toy")
    assert command("preprocess", write_corpus(folder)) == 0
    return folder / "data"


@pytest.fixture(scope="session")
def random_data(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A data folder of 40 random pairs of 3 to 11 tokens."""
    import numpy as np
    from toy import write_data

    folder = tmp_path_factory.mktemp("random")
    write_data(folder, tokenizer, np.random.default_rng(0).integers(3, 12, (40, 2)).tolist())
    return folder
