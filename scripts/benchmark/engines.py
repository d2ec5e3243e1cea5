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
    has_own_limit: bool = False  # measured with the options of this engine


def _translate(environment: str, folder: str, **settings: Any) -> Engine:
    driver, options = (
        f"translate_{environment}.py",
        {"folder": folder, **settings.pop("options", {})},
    )
    return Engine(environment=environment, driver=driver, options=options, **settings)


_BOTH, _GPU = ("cpu", "cuda"), ("cuda",)
_PEER, _TORCH = "best peer", "best PyTorch peer"
# other products than those of the row `nmt`, each with a limit of its own
_BFLOAT16: dict[str, Any] = {"options": {"dtype": "bfloat16"}, "has_own_limit": True}
_MKL: dict[str, Any] = {"options": {"leaves_onednn_out": True}, "has_own_limit": True}
_NMT = {"environment": "nmt", "driver": "train_nmt.py"}

TRAIN = {
    "nmt": Engine(**_NMT, devices=_BOTH),
    "nmt-bfloat16": Engine(**_NMT, **_BFLOAT16),
    "nmt-mkl": Engine(**_NMT, **_MKL),
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
    "nmt-bfloat16": _translate("nmt", "native", **_BFLOAT16),
    "nmt-mkl": _translate("nmt", "native", **_MKL),
    "nmt-ctranslate2-int8": _translate("nmt", "ctranslate2-int8"),
    "transformers": _translate("transformers", "huggingface", bar=_TORCH, devices=_BOTH),
    "fairseq": _translate("fairseq", "fairseq", bar=_TORCH),
    "ctranslate2": _translate("ctranslate2", "ctranslate2-float32", bar="CTranslate2 float32"),
    "ctranslate2-int8": _translate("ctranslate2", "ctranslate2-int8", bar="CTranslate2 int8"),
    "ctranslate2-float16": _translate(
        "ctranslate2", "ctranslate2-float16", bar="CTranslate2 float16", devices=_GPU
    ),
}
