"""This engine, as compare.py uses it; measure.py is its worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from allspark.quantize.blocked_fp8 import blocked_fp8
from peers.base import BF16, Engine, Precision
from peers.llama_cpp import LlamaCpp


def _rate(compute_method: str | None) -> str:
    """The rate that limits products."""
    return "int8_gop_s" if compute_method == "activate_quant" else "bf16_gflop_s"


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
    rate = _rate(compute_method)
    return Precision(bits + scale_bits, 8 + scale_bits, rate, config)


def _kept(source: str, body_bits: float, head_bits: float, **config: str) -> Precision:
    """A precision of weights that are stored as the file `source` has them."""
    options = {"source": source, "config": config}
    rate = _rate(config.get("compute_method"))
    return Precision(body_bits, head_bits, rate, options, only_by_name=True)


_INT8_ACTIVATIONS = {"quant_method": "gguf", "compute_method": "activate_quant"}

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
# Files of others, as they are. Bits of weights count their scales and offsets.
_OF_FILES: Mapping[str, Precision] = {
    "A8Q4_K_M": _kept("Q4_K_M", 5.0, 6.56, **_INT8_ACTIVATIONS),
    "A16Q4_K_M": _kept("Q4_K_M", 5.0, 6.56),
    "A8MXFP4": _kept("MXFP4", 4.25, 8.5, **_INT8_ACTIVATIONS),
    "A16MXFP4": _kept("MXFP4", 4.25, 8.5),
    "FP8": _kept("FP8", 8, 8, quant_method="fp8", lm_head="int8"),
}


class Allspark(Engine):
    """The package installed for this script's interpreter."""

    name = "allspark"
    module = "measure"
    precisions = {**PRECISIONS, **_OF_FILES}
    is_ours = True

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def install(self) -> None:
        pass

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        source = self.precisions[precision].options.get("source")
        if source is not None:
            self._make_source(source, checkpoint, model)
        self.run_worker(json.dumps(self.convert_job(checkpoint, precision, model)), 3600)

    def convert_job(self, checkpoint: Path, precision: str, model: Path) -> dict[str, Any]:
        options = dict(self.precisions[precision].options)
        if (source := options.get("source")) is not None:
            checkpoint, options = _source_path(source, model), options["config"]
        paths = {"checkpoint": str(checkpoint), "model": str(model)}
        return {"task": "convert", **paths, "options": options}

    def source_bytes(self, precision: str, model: Path) -> int | None:
        source = self.precisions[precision].options.get("source")
        if source is None:
            return None
        path = _source_path(source, model)
        files = [path] if path.is_file() else path.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)

    def _make_source(self, source: str, checkpoint: Path, model: Path) -> None:
        path = _source_path(source, model)
        if source != "FP8":
            if not path.is_file():
                llama_cpp = LlamaCpp(self.home.parent / LlamaCpp.name)
                llama_cpp.install()
                llama_cpp.prepare(checkpoint, source, path.parent)
        elif not path.is_dir():
            blocked_fp8(str(checkpoint), str(path))


def _source_path(source: str, model: Path) -> Path:
    """The file that llama.cpp is measured with, or for FP8 the checkpoint that this engine's tool
    writes."""
    if source == "FP8":
        return model.with_name("source-FP8")
    return LlamaCpp.file(model.with_name(f"{LlamaCpp.name}-{source}"))


class AllsparkServe(Allspark):
    """The same package behind its OpenAI server."""

    name = "allspark-serve"
    is_server = True
    module = "serve_worker"
