"""Which engines there are: whose environment each needs and which driver runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to do the work."""

    environment: str
    driver: str
    options: dict[str, Any] = field(default_factory=dict)  # for the driver's job
    bar: str = ""  # what figures are compared with: the best of all peers with the same bar
    devices: tuple[str, ...] = ("cpu",)


def _translate(environment: str, folder: str, **settings: Any) -> Engine:
    driver = f"translate_{environment}.py"
    return Engine(environment=environment, driver=driver, options={"folder": folder}, **settings)


_BOTH, _GPU = ("cpu", "cuda"), ("cuda",)
_PEER, _TORCH = "best peer", "best PyTorch peer"
_NMT = {"environment": "nmt", "driver": "train_nmt.py"}

TRAIN = {
    "nmt": Engine(**_NMT, devices=_BOTH),
    "nmt-uncompiled": Engine(**_NMT, options={"compile": False}, devices=_GPU),
    "nmt-padded": Engine(**_NMT, options={"pads_attention": True}, devices=_GPU),
    "fairseq": Engine(environment="fairseq", driver="train_fairseq.py", bar=_PEER),
    "transformers": Engine(
        environment="transformers", driver="train_transformers.py", bar=_PEER, devices=_BOTH
    ),
    "opennmt": Engine(environment="opennmt", driver="train_opennmt.py", bar=_PEER),
    "joeynmt": Engine(environment="joeynmt", driver="train_joeynmt.py", bar=_PEER),
}
TRANSLATE = {
    "nmt": _translate("nmt", "native", devices=_BOTH),
    "nmt-ctranslate2-int8": _translate("nmt", "ctranslate2-int8"),
    "transformers": _translate("transformers", "huggingface", bar=_TORCH, devices=_BOTH),
    "fairseq": _translate("fairseq", "fairseq", bar=_TORCH),
    "ctranslate2": _translate("ctranslate2", "ctranslate2-float32", bar="CTranslate2 float32"),
    "ctranslate2-int8": _translate("ctranslate2", "ctranslate2-int8", bar="CTranslate2 int8"),
    "ctranslate2-float16": _translate(
        "ctranslate2", "ctranslate2-float16", bar="CTranslate2 float16", devices=_GPU
    ),
}
