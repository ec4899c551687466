"""This engine, as compare.py asks it; measure.py is its worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.base import BF16, Engine, Precision


def _quantised(body_bits: float, rate: str, **options: Any) -> Precision:
    """A precision whose options are the serialiser's customized_quant_config. Only weights in 8
    bits a channel have scales that are not worth counting; the head has 8 bits always."""
    config = {"quant_method": "instant_quant", "lm_head": "int8", **options}
    return Precision(body_bits, 8, rate, config)


# bits of activations, bits of weights; 4 bits with a 16-bit scale for 64 weights
PRECISIONS: Mapping[str, Precision] = {
    "bf16": BF16,
    "A16W8": _quantised(8, "bf16_gflop_s", weight_format="int8", compute_method="weight_only"),
    "A8W8": _quantised(8, "int8_gop_s", weight_format="int8", compute_method="activate_quant"),
    "A16W4": _quantised(
        4.25, "bf16_gflop_s",
        weight_format="int4", compute_method="weight_only", group_size=64,
    ),
    "A8W4": _quantised(
        4.25, "int8_gop_s",
        weight_format="int4", compute_method="activate_quant", group_size=64,
    ),
}  # fmt: skip


class Allspark(Engine):
    """The package that is installed beside this script's interpreter."""

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
