"""The forms of SmolLM2 that documents have figures of, by the rows of their tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from allspark import Engine
from allspark.pipeline import EngineConfig
from allspark.pipeline.engine_config import PRECISIONS
from allspark.pipeline.served_model import ServedModel
from allspark.quantize import QuantizeConfig, quantize_model
from support import oracles
from support.tables import held_table

_UINT4 = {"weight_format": "uint4", "group_size": 64}
_INT4 = {"weight_format": "int4", "group_size": 32}
_A8W8 = {"weight_format": "int8", "group_size": 0, "compute_method": "activate_quant"}
_FEW = {"calib_samples": 10}  # of 512 tokens

# What differs from the defaults, in the engine's config and in its precision A8W8.
OPENED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ({}, {}),
    "int8, A16": ({"precision": "A16W8"}, {}),
    "int8, A8, one scale per token": ({"precision": "A8W8"}, {"activation_group_size": 0}),
    "int8, A8": ({"precision": "A8W8"}, {}),
    "KV cache of 8 bits": ({"kv_cache_bits": 8}, {}),
    "KV cache of 8 bits for keys, 4 bits for values": ({"kv_cache_bits": 6}, {}),
    "KV cache of 4 bits": ({"kv_cache_bits": 4}, {}),
}
# Settings of quantize_model.
QUANTISED: dict[str, dict[str, Any]] = {
    "uint4, groups of 64: `rtn`": {**_UINT4, "method": "rtn"},
    "`awq`": {**_UINT4, **_FEW, "method": "awq"},
    "`gptq`": {**_UINT4, **_FEW, "method": "gptq"},
    "`awq+gptq`": {**_UINT4, **_FEW, "method": "awq+gptq"},
    "`awq+gptq`, 128 sequences": {**_UINT4, "method": "awq+gptq"},
    "`awq+gptq`, 5.3 bits": {**_UINT4, **_FEW, "method": "awq+gptq", "target_bits": 5.3},
    "int4, groups of 32: `rtn`": {**_INT4, "method": "rtn"},
    "int4, `awq+gptq`": {**_INT4, **_FEW, "method": "awq+gptq"},
    "int8, A8, one scale per token: `rtn`": {**_A8W8, "method": "rtn", "activation_group_size": 0},
    "int8, A8: `rtn`, smoothed": {**_A8W8, **_FEW, "method": "rtn", "smooth": 0.5},
}


def gguf_file():
    """The checkpoint, of which the forms are made; skips where it is not installed."""
    (file,) = oracles.environment("smollm2").rglob("SmolLM2-135M-Instruct.Q4_1.gguf")
    return file


def rise(comparison):
    """The change of perplexity against float32, as a part of that."""
    return np.expm1(comparison.log_ratio.value)


def divergence(comparison):
    return comparison.kl_divergence.mean.value


def documented(repo_root, test):
    """{row: figures} of the table of docs/quantization.md that is held to a test file."""
    return held_table(repo_root / "docs" / "quantization.md", test)


def check_figures(row, found, expected, change_within, same_within):
    """Processors round otherwise, and methods then choose other integers: a fourth of a divergence
    and half of an error. The others are in percent: of the change of perplexity, and of how often
    the likeliest token is the same."""
    change, kl, same = found.ratio, found.kl_divergence.mean, found.same_top
    print(
        f"| {row} | {100 * rise(found):+.1f} ± {100 * change.error:.1f} % | {kl.value:.4f} ± "
        f"{kl.error:.4f} | {100 * same.value:.1f} ± {100 * same.error:.1f} % |"
    )
    values, errors = expected[::2], expected[1::2]
    assert 100 * rise(found) == pytest.approx(values[0], abs=change_within), row
    assert kl.value == pytest.approx(values[1], rel=0.25, abs=1e-4), row
    assert 100 * same.value == pytest.approx(values[2], abs=same_within), row
    measured = (100 * change.error, kl.error, 100 * same.error)
    for error, own, smallest in zip(errors, measured, (0.1, 1e-4, 0.1), strict=True):
        assert own == pytest.approx(error, rel=0.5, abs=smallest), row


class Forms:
    """Opens the forms in one engine, and the model in float32, which they are compared with."""

    def __init__(self, folder, calibration_text):
        self._file = gguf_file()
        self._folder, self._text = folder, calibration_text
        self._engine = Engine()
        self.exact = self._open(self._file, "exact", data_type="float32")

    def opened(self, row):
        """A form of OPENED."""
        fields, of_a8w8 = OPENED[row]
        name = f"opened {list(OPENED).index(row)}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PRECISIONS, "A8W8", {**PRECISIONS["A8W8"], **of_a8w8})
            return self._open(self._file, name, **fields)

    def quantised(self, row):
        """A form of QUANTISED, which is made anew."""
        settings = QuantizeConfig(requantize=True, **QUANTISED[row])
        output = self._folder / f"quantised {list(QUANTISED).index(row)}"
        quantize_model(str(self._file), output, settings, [self._text], name="form")
        return self._open(output, output.name)

    def _open(self, path, name, **fields):
        config = EngineConfig(session_len=512, **fields)
        return ServedModel.open(str(path), config, name, self._engine)
