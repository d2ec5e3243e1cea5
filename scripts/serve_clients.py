"""Runs LibreTranslate's own API tests, its clients (libretranslatepy, deep-translator, npm
`translate`), and requests that schemathesis makes of our OpenAPI description against nmt-serve.

    python scripts/serve_clients.py --model RUN

The model is served as English to Spanish and back, which is what the tests ask for; what it really
translates does not matter. The clients come from PyPI and npm (where node is installed) into
~/.cache/nmt-benchmark. LibreTranslate's tests use a fixture `client` with the interface of Flask's
test client; as a pytest plugin, this file is that fixture, and sends real requests.
"""

from __future__ import annotations

import argparse
import json as json_module
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PORT = 5955
URL = f"http://127.0.0.1:{PORT}"
CACHE = Path.home() / ".cache/nmt-benchmark/serve-clients"
PACKAGES = ("libretranslatepy==2.1.4", "deep-translator==1.11.4", "pytest", "schemathesis>=4,<5")
TESTS = "libretranslate==1.9.6"  # for its tests, which need nothing of it

PYTHON_CLIENTS = f"""
from deep_translator import LibreTranslator
from libretranslatepy import LibreTranslateAPI

api = LibreTranslateAPI("{URL}/")
text = api.translate("half past three", "en", "es")
assert text, text
assert api.detect("half past three")[0]["language"] == "en"
assert {{language["code"] for language in api.languages()}} == {{"en", "es"}}
deep = LibreTranslator(source="en", target="es", custom_url="{URL}/", api_key="unused")
assert deep.translate("half past three") == text
print("libretranslatepy and deep-translator:", text)
"""
NODE_CLIENT = f"""
import translate from "translate";
translate.engine = "libre";
translate.url = "{URL}/translate";
console.log("npm translate:", await translate("half past three", {{ from: "en", to: "es" }}));
"""


@dataclass(frozen=True)
class Answer:
    """What LibreTranslate's tests look at."""

    status_code: int
    data: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json_module.loads(self.data)


class Client:
    """Sends requests to the running server."""

    def get(self, path: str) -> Answer:
        """Send a GET request."""
        return self._send(urllib.request.Request(URL + path))

    def post(self, path: str, data: dict[str, str] | None = None, json: Any = None) -> Answer:
        """Send a form, or JSON."""
        body, kind = urllib.parse.urlencode(data or {}), "application/x-www-form-urlencoded"
        if json is not None:
            body, kind = json_module.dumps(json), "application/json"
        return self._send(urllib.request.Request(URL + path, body.encode(), {"Content-Type": kind}))

    def _send(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read())


def pytest_configure() -> None:
    """Let the tests be imported without LibreTranslate itself, which they do not need."""
    package = types.ModuleType("libretranslate")
    package.__path__ = [str(path.parent.parent) for path in find_tests()]
    sys.modules["libretranslate"] = package


def find_tests() -> list[Path]:
    """Return the folder with LibreTranslate's tests, where pip has put it."""
    return list(CACHE.glob("lib/python*/site-packages/libretranslate/tests/test_api"))


@pytest.fixture
def client() -> Client:
    """A client of the server."""
    return Client()


def main() -> None:
    """Serve the model and run every client."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, type=Path, help="a run or a model folder")
    from nmt.checkpoint import find_model  # the environment of the clients, with pytest, has no nmt

    model = find_model(parser.parse_args().model)
    python = install()
    with tempfile.TemporaryDirectory() as folder:
        places = [renamed(model, Path(folder), *pair) for pair in (("en", "es"), ("es", "en"))]
        names = ",".join(map(str, places))
        command = [str(Path(sys.executable).with_name("nmt-serve")), f"model_dir=[{names}]"]
        server = subprocess.Popen([*command, f"port={PORT}", "access_log=false"])
        try:
            wait_for(server)
            run_clients(python)
        finally:
            server.terminate()
            server.wait(30)


def install() -> Path:
    """Install the clients where they are not; return the Python of their environment."""
    python = CACHE / "bin/python"
    if not (CACHE / "installed").exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", CACHE], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", TESTS], check=True)
        if shutil.which("npm"):
            subprocess.run(["npm", "install", "--prefix", CACHE, "translate@3.1.0"], check=True)
        (CACHE / "installed").touch()
    return python


def renamed(model: Path, folder: Path, source: str, target: str) -> Path:
    """Return a copy of a model folder that names other languages."""
    place = folder / f"{source}-{target}"
    shutil.copytree(model, place)
    config = json_module.loads((place / "config.json").read_text(encoding="utf-8"))
    config |= {"src_lang": source, "tgt_lang": target}
    (place / "config.json").write_text(json_module.dumps(config), encoding="utf-8")
    (place / "manifest.json").unlink(missing_ok=True)
    return place


def wait_for(server: subprocess.Popen[bytes], url: str = URL) -> None:
    """Wait until the server answers."""
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:  # a time limit is no URLError
            if server.poll() is not None:
                sys.exit("the server ended")
            time.sleep(0.2)
    sys.exit("the server does not answer")


def run_clients(python: Path) -> None:
    """Run every client; the first that fails ends the script."""
    [tests] = find_tests()
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parent)}
    options = ["-q", "--noconftest", "-p", "serve_clients", "-p", "no:cacheprovider"]
    options += ["-c", os.devnull, "--rootdir", str(tests)]
    command = [str(python), "-m", "pytest", *options, str(tests)]
    subprocess.run(command, env=environment, check=True, cwd=CACHE)
    subprocess.run([python, "-W", "ignore", "-c", PYTHON_CLIENTS], check=True)
    if (CACHE / "node_modules").exists():
        (CACHE / "client.mjs").write_text(NODE_CLIENT, encoding="utf-8")
        subprocess.run(["node", "client.mjs"], check=True, cwd=CACHE)
    schemathesis = [str(python.with_name("schemathesis")), "run", f"{URL}/spec"]
    schemathesis += ["--checks=not_a_server_error", "--suppress-health-check=all", "--no-color"]
    subprocess.run([*schemathesis, "--max-examples=50", "--seed=1"], check=True, cwd=CACHE)


if __name__ == "__main__":
    main()
