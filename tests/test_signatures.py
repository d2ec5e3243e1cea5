"""Signed exports are loaded with their public key; changed folders are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exporting import random_model
from toy import command

from nmt import Translator
from nmt.config import DType
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, ModelError
from nmt.runtime.signatures import set_verify_key

pytest.importorskip("model_signing")
pytest.importorskip("ctranslate2")


@pytest.fixture(autouse=True)
def _no_key() -> Iterator[None]:
    """Reset the key that a command in this process has set."""
    yield
    set_verify_key(None)


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write an elliptic-curve key pair; return the files of the private and the public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private_key = ec.generate_private_key(ec.SECP256R1())
    private = private_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = private_key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / f"{name}.pem").write_bytes(private)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / f"{name}.pem", folder / f"{name}.pub"


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_signed_export_is_loaded_unless_anything_differs(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = write_keys(tmp_path, "mine")
    _, foreign_key = write_keys(tmp_path, "other")
    model = random_model(tmp_path / "model", tokenizer)
    folder = tmp_path / "export"
    assert command("export", f"model_dir={model}", f"output={folder}", f"sign={private}") == 0
    assert (folder / "manifest.json").is_file()  # it is signed as well

    def load(key: Path) -> Translator:
        return Translator.load(folder, device="cpu", dtype=DType.float32, verify_key=key)

    translation = load(public).translate(["the house"])
    assert translation == Translator.load(folder, device="cpu").translate(["the house"])
    with pytest.raises(ModelError, match="does not match its signature"):
        load(foreign_key)
    for key in (private, tmp_path / "none.pub", tmp_path):
        with pytest.raises((ConfigError, ModelError), match=f"{key}"):
            load(key)

    def add_file(folder: Path) -> None:
        (folder / "more.txt").write_text("x")

    paths = sorted(folder.iterdir())
    changes: list[tuple[str, Callable[[Path], object]]] = [
        ("", add_file),
        ("README.md", Path.unlink),
        ("", lambda path: path.joinpath("link").symlink_to("/etc/passwd")),
        ("model.sig", Path.unlink),
        ("model.sig", lambda path: path.write_text("{")),
    ]
    changes += [(path.name, flip_bit) for path in paths]
    for name, change in changes:
        backups = {path: path.read_bytes() for path in paths}
        change(folder / name)
        with pytest.raises(ModelError) as caught:
            load(public)
        assert "\n" not in str(caught.value), name
        for path in folder.iterdir():
            path.unlink()
        for path, content in backups.items():
            path.write_bytes(content)

    source = tmp_path / "source"
    source.write_text("the house\n")
    arguments = [f"model_dir={folder}", "backend=ctranslate2", f"input={source}", "num_threads=1"]
    capsys.readouterr()
    assert command("translate", arguments, f"verify_key={public}") == 0
    assert capsys.readouterr().out == f"{translation[0]}\n"
    assert command("translate", arguments, f"verify_key={foreign_key}") == 2
    assert "does not match its signature" in capsys.readouterr().err


def test_a_model_without_signature_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _, public = write_keys(tmp_path, "mine")
    model = random_model(tmp_path / "model", tokenizer)
    with pytest.raises(ModelError, match=r"has no model.sig; get the signed folder"):
        Translator.load(model, device="cpu", backend="native", verify_key=public)
    Translator.load(model, device="cpu", backend="native")  # no key is left from before
