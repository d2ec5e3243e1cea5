"""A server in a thread of the test process, with tiny models or an engine that tests control."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from exporting import random_model

from nmt.config import Engine, SearchConfig, ServeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.runtime.manifest import write_manifest
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.serve.app import make_app
from nmt.serve.models import Direction, Models
from nmt.serve.protocol import BoundedProtocol
from nmt.serve.server import Server
from nmt.serve.service import Service
from nmt.translate.translator import Translator

SPEC = b"GET /spec HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
GOOD = {"source": "xx", "target": "yy"}
"""Languages of a request to models of `one_model` or `loaded`."""


PATIENCE_SECONDS = 600.0
"""How long tests wait for what must happen: much longer than it takes on a busy machine."""


def eventually(claim: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a claim is true."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Running:
    """A server that runs, and its state."""

    port: int
    service: Service
    server: Server | None = None

    def num_connections(self) -> int:
        assert self.server is not None
        return len(self.server.server_state.connections)

    def connect(self, timeout_seconds: float = PATIENCE_SECONDS) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_seconds)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        connection = self.connect()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), dict(answer.getheaders()))
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, **params: Any) -> Answer:
        """Send JSON."""
        return self.send("POST", path, json.dumps(params).encode(), Content_Type="application/json")

    def form(self, path: str, **params: Any) -> Answer:
        """Send a form."""
        body = urllib.parse.urlencode(params).encode()
        return self.send("POST", path, body, Content_Type="application/x-www-form-urlencoded")

    def upload(self, name: str, content: bytes, **params: str) -> Answer:
        """Send a file to translate."""
        fields: dict[str, Any] = {**params, f'file"; filename="{name}': content}
        return self.multipart("/translate_file", fields)

    def multipart(self, path: str, fields: Mapping[str, Any]) -> Answer:
        """Send a form whose values, texts or bytes, are parts of the body."""
        boundary = "boundary17"
        body = b""
        for name, value in fields.items():
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
            content = value if isinstance(value, bytes) else str(value).encode()
            body += head.encode() + content + b"\r\n"
        body += f"--{boundary}--\r\n".encode()
        content_type = f"multipart/form-data; boundary={boundary}"
        return self.send("POST", path, body, Content_Type=content_type)

    def translate(self, q: Any, source: str = "xx", target: str = "yy", **params: Any) -> Any:
        """Return what /translate gives for `q`."""
        answer = self.post("/translate", q=q, source=source, target=target, **params)
        assert answer.status == 200, answer
        return answer.json["translatedText"]

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextlib.contextmanager
def running(models: Models, **settings: Any) -> Iterator[Running]:
    """Serve `models` on a free port for the time of the block."""
    defaults = {"access_log": False, "backend": Engine.native}
    defaults["timeout_seconds"] = PATIENCE_SECONDS
    config = ServeConfig(model_dir=["unused"], port=0, **defaults | settings)
    service = Service(config, models)
    options = {"log_config": None, "timeout_graceful_shutdown": 5, "lifespan": "on"}
    options["limit_concurrency"] = config.max_connections
    served = uvicorn.Config(make_app(service), port=0, http=BoundedProtocol, **options)  # type: ignore[arg-type]
    server = Server(served)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(port, service, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def start_server(
    folder: Path, *settings: str, cwd: Path
) -> tuple[subprocess.Popen[str], Running, Iterator[str]]:
    """Start nmt-serve with the native engine in a process; wait until it serves.

    Returns the process, the server, and the further lines of its log.
    """
    code = "import sys; from nmt.cli.main import main, COMMANDS; sys.exit(main(COMMANDS['serve']))"
    command = [sys.executable, "-c", code, f"model_dir={folder}", "port=0", "backend=native"]
    process = subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True, cwd=cwd)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    try:
        serving_line = next(line for line in lines if "serving on" in line)
    except BaseException:
        process.kill()
        raise
    port = int(serving_line.rsplit(":", 1)[1])
    return process, Running(port, None), lines  # type: ignore[arg-type]


def tiny_folder(folder: Path, tokenizer: Tokenizer, seed: int = 3) -> Path:
    """Write a model folder with random weights that translates to at most 12 tokens."""
    random_model(folder, tokenizer, seed)
    search = json.loads((folder / "config.json").read_text())["search"]
    change_config(folder, search=search | {"max_length_a": 0, "max_length_b": 12})
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Change config.json of a model folder."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    write_manifest(folder)


def one_model(translator: Translator, source: str = "xx", target: str = "yy") -> Models:
    """Return models of one direction."""
    return Models({(source, target): Direction(translator, "a folder")})


def loaded(folder: Path, num_workers: int = 0, backend: Engine = Engine.native) -> Models:
    """Return the model of a folder, from xx to yy: in this process or in `num_workers` others."""
    config = ServeConfig(
        model_dir=[str(folder)], device="cpu", num_workers=num_workers, backend=backend
    )
    return Models.load(config)


class Copying:
    """An engine that gives each sentence back; it waits while `gate` is closed, fails with
    sentences that hold the id `poison`, and records its batches.
    """

    num_workers = 1
    max_tokens = 4096

    def __init__(self, tokenizer: Tokenizer, poison: int | None = None) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches: list[tuple[SearchConfig, list[list[int]]]] = []
        self._eos = tokenizer.eos_id
        self._poison = poison

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        pass

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        rows = request.sources
        config = request.config
        self.entered.set()
        self.gate.wait(PATIENCE_SECONDS)
        self.batches.append((config, [list(row) for row in rows]))
        if self._poison is not None and any(self._poison in row for row in rows):
            raise ValueError("a poisoned sentence")
        hypotheses = []
        for row in rows:
            alignment = list(range(len(row) + 1)) if config.alignment else None
            tokens = [*row, self._eos]
            hypotheses.append(
                [Hypothesis(tokens, -1.0, -1.0, True, [-0.1] * len(tokens), alignment)]
            )
        return hypotheses

    def batch_sizes(self) -> list[int]:
        """Return the number of sentences of each batch."""
        return [len(rows) for _, rows in self.batches]

    def score(self, *_: Any) -> list[Hypothesis]:
        raise NotImplementedError


def copying(tokenizer: Tokenizer, poison: str | None = None) -> tuple[Models, Copying]:
    """Return models whose translation is the text itself, and their engine."""
    engine = Copying(tokenizer, None if poison is None else tokenizer.encode(poison)[0])
    return one_model(Translator(engine, tokenizer, SearchConfig())), engine
