"""Sign model folders, and verify their signatures, in the format of OpenSSF Model Signing.

The signature `model.sig` covers all files of the folder. Checksums in a manifest find accidental
damage; a signature also finds changes by someone who does not have the private key.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmt.errors import ConfigError, ModelError, to_one_line
from nmt.runtime.manifest import SIGNATURE, write_manifest
from nmt.runtime.reading import check_regular, check_tree

_verify_key: Path | None = None


def set_verify_key(path: Path | None) -> None:
    """Set the public key with which `verify_signature` checks folders; None disables checks."""
    global _verify_key
    _verify_key = path


@contextlib.contextmanager
def using_verify_key(path: Path | None) -> Iterator[None]:
    """Verify with this public key inside the `with` block; None keeps the current key."""
    previous = _verify_key
    set_verify_key(path or previous)
    try:
        yield
    finally:
        set_verify_key(previous)


def needs_signatures() -> bool:
    """Return whether a public key is set, so that folders must be signed."""
    return _verify_key is not None


def sign_folder(folder: Path, private_key: Path) -> None:
    """Write `manifest.json` and `model.sig` to a folder, which must have all its other files."""
    model_signing = _import_model_signing()
    write_manifest(folder)
    hashing_config = model_signing.hashing.Config()
    hashing_config.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
    try:
        check_regular(private_key)
        signing_config = model_signing.signing.Config()
        signing_config.use_elliptic_key_signer(private_key=private_key)
    except (OSError, ValueError, TypeError) as error:
        raise _make_key_error("sign", private_key, "private", error) from None
    signing_config.set_hashing_config(hashing_config).sign(folder, folder / SIGNATURE)


def verify_signature(folder: Path) -> None:
    """Check the signature of a folder with the public key; does nothing if no key is set.

    Raises `ModelError` for a missing or wrong signature, and `ConfigError` for an unusable key.
    """
    if _verify_key is None:
        return
    model_signing = _import_model_signing()
    verifying_config = model_signing.verifying.Config()
    try:
        check_regular(_verify_key)
        verifying_config.use_elliptic_key_verifier(public_key=_verify_key)
    except (OSError, ValueError) as error:
        raise _make_key_error("verify_key", _verify_key, "public", error) from None
    check_tree(folder)
    try:
        check_regular(folder / SIGNATURE)
        with contextlib.redirect_stdout(sys.stderr):  # the library prints warnings
            verifying_config.verify(folder, folder / SIGNATURE)
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no {SIGNATURE}; get the signed folder, or leave out verify_key"
        ) from None
    # JSON, sigstore, protobuf and cryptography may raise any exception for a crafted signature
    except Exception as error:
        reason = to_one_line(error, 200) or "the signature is invalid"
        raise ModelError(
            f"{folder} does not match its signature ({reason}); get the folder again"
        ) from None


def _make_key_error(setting: str, path: Path, key_type: str, error: Exception) -> ConfigError:
    """Return the error for a setting whose file is not a usable public or private key."""
    reason = getattr(error, "strerror", None) or to_one_line(error, 100)
    return ConfigError(
        f"{setting}={path}: is not a {key_type} key ({reason}); give a PEM file of the curve "
        "P-256, P-384 or P-521 without a password"
    )


def _import_model_signing() -> Any:
    try:
        import model_signing
    except ModuleNotFoundError:
        raise ConfigError(
            "signatures need model-signing; install it with: pip install nmt[sign]"
        ) from None
    return model_signing
