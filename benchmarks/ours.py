"""This engine, as compare.py uses it; measure.py is its worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.base import BF16, Engine, Precision


def _quantised(bits: int, compute_method: str, group_size: int = 0) -> Precision:
    """A precision whose options are the serialiser's customized_quant_config; lm_head has 8 bits.
    Groups have scales of 16 bits; a single scale per output feature is too small to count."""
    scale_bits = 16 / group_size if group_size else 0
    config = {
        "quant_method": "instant_quant",
        "weight_format": f"int{bits}",
        "compute_method": compute_method,
        "group_size": group_size,
        "lm_head": "int8",
    }
    rate = "int8_gop_s" if compute_method == "activate_quant" else "bf16_gflop_s"
    return Precision(bits + scale_bits, 8 + scale_bits, rate, config)


# Named by the bits of activations and weights, and of the KV cache if it is quantised.
PRECISIONS: Mapping[str, Precision] = {
    "bf16": BF16,
    "bf16-kv8": replace(BF16, cache_mode="AsCacheQuantI8"),
    "bf16-kv4": replace(BF16, cache_mode="AsCacheQuantU4"),
    "A16W8": _quantised(8, "weight_only"),
    "A8W8": _quantised(8, "activate_quant"),
    "A8W8-kv8": replace(_quantised(8, "activate_quant"), cache_mode="AsCacheQuantI8"),
    "A16W4": _quantised(4, "weight_only", group_size=64),
    "A8W4": _quantised(4, "activate_quant", group_size=64),
}


class Allspark(Engine):
    """The package installed for this script's interpreter."""

    name = "allspark"
    module = "measure"
    precisions = PRECISIONS
    is_ours = True

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def install(self) -> None:
        pass

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        self.run_worker(json.dumps(self.convert_job(checkpoint, precision, model)), 3600)

    def convert_job(self, checkpoint: Path, precision: str, model: Path) -> dict[str, Any]:
        options = dict(self.precisions[precision].options)
        paths = {"checkpoint": str(checkpoint), "model": str(model)}
        return {"task": "convert", **paths, "options": options}


class AllsparkServe(Allspark):
    """The same package behind its OpenAI server."""

    name = "allspark-serve"
    is_server = True
    module = "serve_worker"
