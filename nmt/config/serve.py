"""Settings of `nmt-serve`."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.config.options import DEFAULT_RUN_DIR, check_ranges, option, require
from nmt.config.runtime import InferenceConfig


@dataclass(kw_only=True)
class ServeConfig(InferenceConfig):
    """Settings of `nmt-serve`."""

    model_dir: list[str] = option(
        [DEFAULT_RUN_DIR],
        "run, checkpoint or model folders, each of one or more language pairs: [a,b]",
    )
    num_workers: int | None = option(
        None,
        "processes that search with backend=native on a CPU of Linux and share num_threads; 0: "
        "this one does; null: one a thread, at most 4",
        low=0,
        high=1024,
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every IPv4 address")
    port: int = option(5000, "port to listen on; 0 takes a free one and logs it", low=0, high=65535)
    trusted_proxies: str = option(
        "", "addresses of reverse proxies whose X-Forwarded-For and -Proto count, comma-separated"
    )
    split_sentences: bool = option(
        True, "translate a line sentence by sentence; false: as a whole, as nmt-translate does"
    )
    max_source_length: int = option(256, "most source tokens at a time, EOS included", low=8)
    max_beam_size: int = option(16, "largest beam that a request may ask for", low=1, high=1000)
    api_keys: str | None = option(
        None, "file of keys, one a line: KEY [requests a minute, 0 no limit] [characters]"
    )
    key_required: bool = option(True, "with api_keys: refuse requests that have no key")
    requests_per_minute: int = option(0, "limit for an address without a key; 0 is none", low=0)
    char_limit: int = option(100_000, "most characters of one request; 0 is no limit", low=0)
    batch_limit: int = option(10_000, "most texts of one request; 0 is no limit", low=0)
    max_queue: int = option(
        20_000, "sentences that may wait; a client may hold half of them", low=2
    )
    max_body_bytes: int = option(4 << 20, "largest body of a request that is no file", low=1024)
    max_file_bytes: int = option(16 << 20, "largest file to translate; 0 turns files off", low=0)
    max_connections: int = option(512, "connections served at a time; more are answered 503", low=1)
    body_timeout_seconds: float = option(
        20.0, "time for a client to send its request's body", above=0
    )
    timeout_seconds: float = option(120.0, "time for a translation to finish; then 503", above=0)
    drain_seconds: int = option(60, "time that requests have to finish after SIGTERM", low=0)
    file_minutes: float = option(30.0, "time after which a translated file is deleted", above=0)
    suggestions: str | None = option(
        None, "file that /suggest appends to, JSONL; null turns it off"
    )
    frontend: bool = option(True, "serve the web page at /")
    metrics: bool = option(True, "serve Prometheus metrics at /metrics")
    metrics_token: str | None = option(None, "file with the bearer token that /metrics asks for")
    access_log: bool = option(True, "log one JSON line a request to stderr")
    log_texts: bool = option(False, "access log: the texts too")

    def __post_init__(self) -> None:
        check_ranges(self)
        require(bool(self.model_dir), "model_dir", "[]", "name at least one model folder")
