"""How a model is quantised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allspark.pipeline.fields import whole

METHODS = ("rtn", "search", "awq", "gptq", "awq+gptq")
_MIN_LENGTH = 8
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class QuantizeConfig:
    """What weights become, and how their integers are found.

    Args:
        method: `rtn` rounds to the nearest. `search` chooses the scale of each group by the error
            that it leaves. `awq` scales up what large inputs are multiplied with, `gptq` lets later
            columns take up the error of earlier ones; `awq+gptq` does both.
        weight_format: int8, uint8, int4 or uint4; of the layers' weights.
        group_size: input features per scale: 32, 64, 128, or 0: all.
        group_settings: other group sizes, by patterns of weights' names.
        format_settings: other weight formats, in the same way.
        modules_to_not_convert: patterns of weights that stay as they are.
        compute_method: `weight_only`, or `activate_quant`: int8 activations.
        activation_group_size: features per scale of these; None: the default.
        lm_head, embedding: formats of the two, which are rounded to the nearest; None: not
            quantised.
        smooth: SmoothQuant's alpha, in [0, 1]; None: activations are not smoothed.
        data_type: what the model computes in: bfloat16, float16 or float32.
        calib_samples: sequences of calibration text; 0: none, with methods rtn and search alone.
        calib_seqlen: tokens of each.
        target_bits: mean bits per quantised weight of the layers, scales included: the weights
            whose rounding does most harm become int8, as many as this mean allows (effects.py).
            None: all are in `weight_format`.
        seed: of the choice of sequences.
        requantize: a checkpoint that is quantised already is dequantised first, not refused.
    """

    method: str = "awq+gptq"
    weight_format: str = "uint4"
    group_size: int = 64
    group_settings: Mapping[str, int] | None = None
    format_settings: Mapping[str, str] | None = None
    modules_to_not_convert: Sequence[str] = ()
    compute_method: str = "weight_only"
    activation_group_size: int | None = None
    lm_head: str | None = None
    embedding: str | None = None
    smooth: float | None = None
    data_type: str = "bfloat16"
    calib_samples: int = 128
    calib_seqlen: int = 512
    target_bits: float | None = None
    seed: int = 0
    requantize: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        whole(0)("calib_samples", self.calib_samples)
        whole(_MIN_LENGTH)("calib_seqlen", self.calib_seqlen)
        whole(0, _MAX_SEED)("seed", self.seed)
        if self.target_bits is not None and not 0 < self.target_bits < math.inf:
            raise ValueError(f"target_bits is {self.target_bits!r}; it must be above 0, or None")
        if self.smooth is not None:
            if not 0 <= self.smooth <= 1:
                raise ValueError(f"smooth is {self.smooth!r}; it must be in [0, 1], or None")
            if self.has_awq:
                raise ValueError(
                    f"smooth is {self.smooth!r} and method is {self.method!r}; it must be None "
                    "there, since AWQ chooses these scales"
                )
            if self.compute_method != "activate_quant":
                raise ValueError(
                    f"smooth is {self.smooth!r} and compute_method is {self.compute_method!r}; "
                    "only 'activate_quant' has activations to smooth"
                )
        if self.calib_samples == 0 and self.needs_text:
            what = "target_bits" if self.smooth is None else "smooth"
            what = f"method {self.method!r}" if self.needs_statistics else what
            raise ValueError(f"calib_samples is 0; {what} needs at least 1")

    @property
    def has_awq(self) -> bool:
        return "awq" in self.method

    @property
    def has_gptq(self) -> bool:
        return "gptq" in self.method

    @property
    def needs_statistics(self) -> bool:
        return self.has_awq or self.has_gptq

    @property
    def needs_text(self) -> bool:
        """Whether there must be a calibration text."""
        return self.needs_statistics or self.smooth is not None or self.target_bits is not None

    @property
    def reads_inputs(self) -> bool:
        """Whether integers or scales depend on what weights are multiplied with, if a text is
        given."""
        return self.method != "rtn" or self.smooth is not None

    @property
    def reads_products(self) -> bool:
        """Whether the products of inputs with each other are needed, not only their ranges."""
        return self.method != "rtn"

    @property
    def is_calibrated(self) -> bool:
        """Whether a text is read."""
        return self.calib_samples > 0 and (self.method == "search" or self.needs_text)

    def customized_quant_config(self) -> dict[str, Any]:
        """The same formats as `serialize` takes them."""
        modules = self.modules_to_not_convert
        given = {
            "weight_format": self.weight_format,
            "group_size": self.group_size,
            "compute_method": self.compute_method,
            "activation_group_size": self.activation_group_size,
            "group_settings": dict(self.group_settings or {}),
            "format_settings": dict(self.format_settings or {}),
            "modules_to_not_convert": modules if isinstance(modules, str) else list(modules),
            "lm_head": self.lm_head,
            "embedding": self.embedding,
        }
        return {key: value for key, value in given.items() if value not in (None, {}, [])}
