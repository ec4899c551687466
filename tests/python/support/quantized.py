"""Quantised checkpoints for tests: random integers, packed as each format says."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from support.checkpoints import CONFIG, llama_tensors

# Groups of 32 divide the rows of its weights.
GROUPED = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 101}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Quantized:
    """The weight (values - zeros) * scales, with scales and zeros by row and group. ``groups``: the
    group of each input feature; None: consecutive groups.
    """

    values: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray  # float16
    bits: int
    group_size: int
    groups: np.ndarray | None = None

    @property
    def group_of(self):
        following = np.arange(self.values.shape[1]) // self.group_size
        return following if self.groups is None else self.groups

    def weight(self):
        """Its values in float64."""
        zero = self.zeros.astype(np.int64)[:, self.group_of]
        return (self.values - zero) * self.scales.astype(np.float64)[:, self.group_of]


def draw(rng, shape, bits, group_size, symmetric):
    rows, cols = shape
    size = cols if group_size == -1 else group_size
    groups = (rows, cols // size)
    half = 1 << (bits - 1)
    zeros = np.full(groups, half) if symmetric else rng.integers(1, 2 * half - 1, groups)
    scales = rng.uniform(0.5, 1.5, groups) * cols**-0.5 / half
    return Quantized(
        rng.integers(0, 2 * half, shape, np.uint8), zeros.astype(np.uint8),
        scales.astype(np.float16), bits, size,
    )  # fmt: skip


def pack(fields, bits):
    """Packs the last axis into int32 words, the first field lowest."""
    count = 32 // bits
    words = np.zeros((*fields.shape[:-1], fields.shape[-1] // count), np.uint32)
    for i in range(count):
        words |= fields[..., i::count].astype(np.uint32) << np.uint32(bits * i)
    return words.view("<i4")


def gptq(q, offset=1):
    return {
        "qweight": pack(q.values, q.bits).T.copy(),
        "qzeros": pack((q.zeros.astype(np.int64) - offset).T, q.bits),
        "scales": q.scales.T.copy(),
        "g_idx": q.group_of.astype("<i4"),
    }


def awq(q):
    def packed(fields):
        words = fields.T.reshape(fields.shape[1], -1, 8)[:, :, AWQ_ORDER]
        return pack(words.reshape(fields.shape[1], -1), 4)

    return {"qweight": packed(q.values), "qzeros": packed(q.zeros), "scales": q.scales.T.copy()}


def symmetric(q):
    return (q.zeros == 1 << (q.bits - 1)).all()


def packed(q):
    """compressed-tensors' pack-quantized."""
    return {
        "weight_packed": pack(q.values, q.bits),
        "weight_scale": q.scales,
        **({} if symmetric(q) else {"weight_zero_point": pack(q.zeros.T, q.bits).T}),
        "weight_shape": np.array(q.values.shape, "<i8"),
        **({} if q.groups is None else {"weight_g_idx": q.groups.astype("<i4")}),
    }


def signed(q):
    """compressed-tensors' int-quantized."""
    middle = 1 << (q.bits - 1)
    return {
        "weight": (q.values.astype(np.int16) - middle).astype("i1"),
        "weight_scale": q.scales,
        "weight_zero_point": (q.zeros.astype(np.int16) - middle).astype("i1"),
    }


def act_order(name, cols, group_size):
    """Random groups as with desc_act; modules with the same input have the same groups."""
    reads = re.sub(r"(q|k|v)_proj", "attention", re.sub(r"(gate|up)_proj", "mlp", name))
    rng = np.random.default_rng(list(reads.encode()))
    return rng.permutation(np.arange(cols) // group_size)


def quantized_llama(make, bits, group_size, symmetric=False, config=GROUPED, in_act_order=False):
    """(tensors of the quantised checkpoint, {weight: Quantized}, tensors that are not
    quantised)."""
    rng = np.random.default_rng(7)
    tensors, quantized, plain = {}, {}, {}
    for name, values in llama_tensors(config).items():
        module = name.removesuffix(".weight")
        if "_proj" not in name:
            plain[name] = values if "norm" in name else values * np.float32(0.125)
            tensors[name] = plain[name]
            continue
        quantized[name] = draw(rng, values.shape, bits, group_size, symmetric)
        if in_act_order:
            quantized[name].groups = act_order(name, values.shape[1], group_size)
        for part, array in make(quantized[name]).items():
            tensors[f"{module}.{part}"] = array
    return tensors, quantized, plain
