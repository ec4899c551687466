"""Rotary position embedding: the inverse frequencies that a configuration defines.

NumPy only. Every step is float32 in the order of transformers, because the frequencies determine
the positions: an engine that computes them a little more exactly than the training code computes a
different model. The one exception is the power, which is rounded once from float64; torch's
vectorised power is within one unit in the last place of that (99 % of the values of common bases
and sizes are equal).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .errors import UnsupportedModelError

Float32Array = NDArray[np.float32]

ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0
# There is a frequency for each pair of dimensions, so the number is bounded first.
_MAX_HEAD_DIM = 1 << 16


@dataclass(frozen=True)
class Rope:
    """``inv_freq`` is [rotary_dim / 2]. ``window_inv_freq``, if given, has the same shape and holds
    for layers with a window. ``attention_scaling`` multiplies cosine and sine.
    """

    inv_freq: Float32Array
    attention_scaling: float = 1.0
    window_inv_freq: Float32Array | None = None


def rope_section(config: ModelConfig) -> tuple[ModelConfig, float]:
    """The rope parameters and the base, from either place where config.json may have them.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one
    ``rope_parameters``.
    """
    section = config.section("rope_scaling") or config.part("rope_parameters")
    nested = [key for key in section if key.endswith("_attention")]
    if nested:
        raise UnsupportedModelError(
            f"{section.source}: frequencies per layer type ({', '.join(nested)}) are not "
            "supported, "
            "only one set for all layers"
        )
    theta = section.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    return section, theta


def partial_rotary_dim(config: ModelConfig, head_dim: int, default_factor: float = 1.0) -> int:
    """The rotated dimensions of a head, for architectures that read ``partial_rotary_factor``."""
    section, _ = rope_section(config)
    return int(head_dim * _rotary_factor(section, _rotary_factor(config, default_factor)))


def _rotary_factor(where: ModelConfig, default: float) -> float:
    """The rotated part of a head."""
    factor = where.number("partial_rotary_factor", default)
    if factor > 1:
        raise where.error("partial_rotary_factor", f"is {factor}, expected at most 1")
    return factor


def compute_rope(config: ModelConfig, head_dim: int, rotary_dim: int) -> Rope:
    """The frequencies for ``rotary_dim`` (even) rotated dimensions of each head.

    Raises UnsupportedModelError (a NotImplementedError) for an unknown kind of scaling.
    """
    section, theta = rope_section(config)
    if head_dim > _MAX_HEAD_DIM:
        raise config.error("head_dim", f"is {head_dim}, expected at most {_MAX_HEAD_DIM}")
    if rotary_dim > head_dim:
        raise config.error(
            "partial_rotary_factor", f"rotates {rotary_dim} of the {head_dim} dimensions of a head"
        )
    if rotary_dim % 2:
        raise config.error("head_dim", f"is {rotary_dim}; rotary embedding needs an even number")
    for where in (config, section):
        if int(head_dim * _rotary_factor(where, rotary_dim / head_dim)) != rotary_dim:
            raise where.refuse("partial_rotary_factor", rotary_dim / head_dim)
    kind = _kind(section)
    if "long_factor" in section:  # Phi-3 has used several names for it.
        kind = "longrope"
    inv_freq = _base_inv_freq(theta, rotary_dim)
    # Dynamic frequencies change only beyond max_position_embeddings. Sequences that are longer get
    # these, too, unless the runtime config scales them (rope_scaling_factor).
    if kind in ("default", "dynamic"):
        return Rope(inv_freq)
    if kind == "longrope":
        return _longrope(inv_freq, section, config)
    if kind == "linear":
        return Rope((inv_freq / np.float32(section.number("factor"))).astype(np.float32))
    if kind == "llama3":
        return Rope(_llama3(inv_freq, section, config))
    if kind == "yarn":
        return _yarn(inv_freq, section, config, theta)
    raise UnsupportedModelError(
        f"{section.source}: rope_type is {kind!r}, supported are {', '.join(ROPE_TYPES)}"
    )


def _kind(section: ModelConfig) -> str:
    """The kind of scaling, under the newer name or the older one."""
    return section.text("rope_type", section.text("type", "default"))


def with_window_rope(rope: Rope, config: ModelConfig, head_dim: int, rotary_dim: int) -> Rope:
    """``rope`` with the frequencies that ``window_rope_parameters`` describe."""
    parameters = config["window_rope_parameters"]
    window = compute_rope(
        config.with_fields(rope_scaling=None, rope_parameters=parameters), head_dim, rotary_dim
    )
    if window.attention_scaling != rope.attention_scaling:
        raise UnsupportedModelError(
            f"{config.source}: rope_parameters: layers with and without a window have different "
            f"attention factors, {window.attention_scaling} and {rope.attention_scaling}"
        )
    return replace(rope, window_inv_freq=window.inv_freq)


def _base_inv_freq(theta: float, rotary_dim: int) -> Float32Array:
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    power = np.power(float(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)
    inv_freq: Float32Array = np.float32(1.0) / power
    return inv_freq


def _original_length(section: ModelConfig, config: ModelConfig) -> int:
    """The context length of pretraining; the model's own field precedes that of the section."""
    name = "original_max_position_embeddings"
    if config.get(name) is not None:
        return config.integer(name)
    return section.integer(name, config.integer("max_position_embeddings"))


def _llama3(inv_freq: Float32Array, section: ModelConfig, config: ModelConfig) -> Float32Array:
    """Llama 3.1: frequencies of long wavelengths are divided by ``factor``, those of short ones
    kept, those between interpolated.
    """
    factor = np.float32(section.number("factor"))
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.error(
            "high_freq_factor", f"is {high}, expected more than low_freq_factor, {low}"
        )
    length = _original_length(section, config)
    # torch divides a number by a tensor as reciprocal times number: two roundings.
    one = np.float32(1)
    wavelength = one / inv_freq * np.float32(2 * math.pi)
    turns = one / wavelength * np.float32(length)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    between = (one - smooth) * inv_freq / factor + smooth * inv_freq
    slow, fast = wavelength > np.float32(length / low), wavelength < np.float32(length / high)
    return np.where(slow, inv_freq / factor, np.where(fast, inv_freq, between)).astype(np.float32)


def _yarn(inv_freq: Float32Array, section: ModelConfig, config: ModelConfig, theta: float) -> Rope:
    """YaRN: fast-rotating dimensions keep their frequency, slow ones are divided, with a ramp in
    between.
    """
    length = _original_length(section, config)
    factor = section.number("factor", config.integer("max_position_embeddings") / length)
    scaling = section.number("attention_factor", _yarn_attention_factor(section, factor))
    half = len(inv_freq)

    def dimension(name: str, default: float) -> float:
        """The dimension that makes this many full turns within the context of pretraining."""
        turns = section.number(name, default)
        try:
            found = half * math.log(length / (turns * 2 * math.pi)) / math.log(theta)
        except (ValueError, ZeroDivisionError):
            found = math.nan
        if not math.isfinite(found):
            raise section.error(name, f"is {turns}, which no dimension of base {theta} turns")
        return found

    first, last = dimension("beta_fast", 32.0), dimension("beta_slow", 1.0)
    if section.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = np.float32(last - first if last != first else 0.001)
    ramp = np.clip((np.arange(half, dtype=np.float32) - np.float32(first)) / width, 0, 1)
    # The base is divided by the factor before taking the reciprocal, as in the reference.
    divided = np.float32(1) / (np.float32(factor) * (np.float32(1) / inv_freq))
    keep = np.float32(1) - ramp
    mixed = divided * (np.float32(1) - keep) + inv_freq * keep
    return Rope(mixed.astype(np.float32), float(scaling))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(section: ModelConfig, factor: float) -> float:
    if not section.get("mscale") or not section.get("mscale_all_dim"):
        return _yarn_scale(factor, 1.0)
    above, below = section.number("mscale"), section.number("mscale_all_dim")
    return _yarn_scale(factor, above) / _yarn_scale(factor, below)


def score_scale(config: ModelConfig, head_dim: int) -> float:
    """The factor of attention scores in DeepSeek's models: it includes the part of YaRN's scale
    that is not in cosine and sine.
    """
    section, _ = rope_section(config)
    kind = _kind(section)
    if kind == "default" or not section.get("mscale_all_dim"):
        return float(head_dim**-0.5)
    scale = _yarn_scale(section.number("factor"), section.number("mscale_all_dim"))
    return float(head_dim**-0.5 * scale * scale)


def _longrope(inv_freq: Float32Array, section: ModelConfig, config: ModelConfig) -> Rope:
    """LongRoPE: each frequency is divided by its own factor, taken from one list up to the length
    of pretraining and from another beyond it.

    A token's bits may depend only on the tokens before it, so a model uses one list for all: the
    one for its longest sequences.
    """
    length, longest = _original_length(section, config), config.integer("max_position_embeddings")
    if length < 2:
        raise section.error("original_max_position_embeddings", f"is {length}, expected 2 or more")
    name = "long_factor" if longest > length else "short_factor"
    factors = section.numbers(name, len(inv_freq))
    factor = section.number("factor", longest / length)
    scaling = section.number(
        "attention_factor",
        1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length)),
    )
    divided = np.float32(1) / (np.array(factors, np.float32) * (np.float32(1) / inv_freq))
    return Rope(divided.astype(np.float32), scaling)
