"""Which engines there are: whose environment each needs and which driver runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Engine:
    """One way to do the work."""

    environment: str
    driver: str
    options: dict[str, Any] = field(default_factory=dict)  # for the driver's job
    is_peer: bool = True  # ours are compared with the best of the peers
    devices: tuple[str, ...] = ("cpu",)


BOTH = ("cpu", "cuda")
TRAIN = {
    "nmt": Engine("nmt", "train_nmt.py", is_peer=False, devices=BOTH),
    "nmt-compiled": Engine(
        "nmt", "train_nmt.py", {"compile": True}, is_peer=False, devices=("cuda",)
    ),
    "fairseq": Engine("fairseq", "train_fairseq.py"),
    "transformers": Engine("transformers", "train_transformers.py", devices=BOTH),
    "opennmt": Engine("opennmt", "train_opennmt.py"),
    "joeynmt": Engine("joeynmt", "train_joeynmt.py"),
}
TRANSLATE = {
    "nmt": Engine("nmt", "translate_nmt.py", {"folder": "native"}, is_peer=False, devices=BOTH),
    "nmt-ctranslate2-int8": Engine(
        "nmt", "translate_nmt.py", {"folder": "ctranslate2-int8"}, is_peer=False
    ),
    "ctranslate2": Engine(
        "ctranslate2", "translate_ctranslate2.py", {"folder": "ctranslate2-float32"}
    ),
    "ctranslate2-int8": Engine(
        "ctranslate2", "translate_ctranslate2.py", {"folder": "ctranslate2-int8"}
    ),
    "ctranslate2-float16": Engine(
        "ctranslate2",
        "translate_ctranslate2.py",
        {"folder": "ctranslate2-float16"},
        devices=("cuda",),
    ),
    "transformers": Engine(
        "transformers", "translate_transformers.py", {"folder": "huggingface"}, devices=BOTH
    ),
    "fairseq": Engine("fairseq", "translate_fairseq.py", {"folder": "fairseq"}),
}
