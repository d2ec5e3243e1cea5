"""Settings of `nmt-serve`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from nmt.config.options import DEFAULT_RUN_DIR, option
from nmt.config.runtime import BACKEND_HELP, Engine, InferenceConfig


@dataclass(kw_only=True)
class ServeConfig(InferenceConfig):
    """Settings of `nmt-serve`."""

    model_dir: list[str] = option(
        [DEFAULT_RUN_DIR],
        "run, checkpoint or model folders, each for one or more language pairs: [a,b]",
    )
    backend: Engine = option(Engine.auto, BACKEND_HELP)
    num_workers: int | None = option(
        None,
        "processes that search (native backend, Linux CPU); 2 or more, since one is kept for short "
        "requests; 0: search in the server process; null: one per thread, at most 4",
        low=0,
        high=1024,
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every IPv4 address")
    port: int = option(5000, "port to listen on; 0: a free one, which is logged", low=0, high=65535)
    trusted_proxies: str = option(
        "",
        "addresses of reverse proxies whose X-Forwarded-For and -Proto are trusted, "
        "comma-separated",
    )
    split_sentences: bool = option(
        True, "translate a line sentence by sentence; false: as a whole, like nmt-translate"
    )
    context: int = option(
        0,
        "number of preceding sentences given to models trained with data.context",
        low=0,
        high=100,
    )
    max_source_length: int = option(
        256, "maximum number of source tokens translated at once, EOS included", low=8
    )
    max_beam_size: int = option(16, "largest beam that a request may ask for", low=1, high=1000)
    api_keys: str | None = option(
        None, "file of keys, one per line: KEY [requests per minute, 0: no limit] [characters]"
    )
    key_required: bool = option(True, "with api_keys: refuse requests without a key")
    requests_per_minute: int = option(0, "limit per address without a key; 0: no limit", low=0)
    char_limit: int = option(100_000, "maximum characters per request; 0: no limit", low=0)
    batch_limit: int = option(10_000, "maximum texts per request; 0: no limit", low=0)
    max_queue: int = option(
        20_000, "maximum number of waiting sentences; at most half of them from one client", low=2
    )
    max_body_bytes: int = option(4 << 20, "maximum body of a request without a file", low=1024)
    max_file_bytes: int = option(16 << 20, "maximum file to translate; 0: no files", low=0)
    max_connections: int = option(
        512, "maximum number of open connections; more are answered with 503", low=1
    )
    body_timeout_seconds: float = option(
        20.0, "time for a client to send the body of a request", above=0
    )
    timeout_seconds: float = option(
        120.0, "time for a translation to finish; then the answer is 503", above=0
    )
    drain_seconds: int = option(60, "time for requests to finish after SIGTERM", low=0)
    file_minutes: float = option(30.0, "time until a translated file is deleted", above=0)
    glossaries: str | None = option(
        None, "folder of glossaries, NAME.tsv, that a request may name; needs the native engine"
    )
    protect: bool = option(
        False,
        "keep placeholders, tags, addresses and emoji, such as {name} and %s; their sentences "
        "need the native engine",
    )
    suggestions: str | None = option(
        None, "JSONL file to which /suggest appends; null: /suggest is off"
    )
    frontend: bool = option(True, "serve the web page at /")
    metrics: bool = option(True, "serve Prometheus metrics at /metrics")
    metrics_token: str | None = option(
        None, "file with the bearer token that /metrics requires; null: none is required"
    )
    access_log: bool = option(True, "log a JSON line per request to stderr")
    log_texts: bool = option(False, "include texts in the access log")

    def check(self) -> None:
        super().check()
        self.require(bool(self.model_dir), "model_dir", "name at least one model folder")
        if not self.trusted_proxies:
            return
        for word in self.trusted_proxies.split(","):
            proxy = word.strip()
            problem = f"{proxy!r} is not an IP address or network; write 10.0.0.1,192.168.0.0/16"
            self.require(_is_network(proxy), "trusted_proxies", problem)


def _is_network(text: str) -> bool:
    """Return whether `text` is an IP address or a network, such as 10.0.0.0/8."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
