"""The types of blocks that the engine keeps: where in a block its integers and scales lie.

Functions take blocks, uint8 [.., bytes of a block], and return one number for each element or
group. Scales and offsets are exact in float32: they are products of a float16 and a small integer.
The engine keeps such products as the two factors where a block has 256 elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..quantized.e4m3 import E4M3_VALUES
from ..quantized.float4 import E2M1_DOUBLED

Octets = NDArray[np.uint8]
Floats = NDArray[np.float32]
Numbers = Callable[[Octets], Floats]


@dataclass(frozen=True)
class Products:
    """Numbers that are integers from -128 to 127 times a float16 of their block."""

    half: Numbers
    integers: Callable[[Octets], NDArray[Any]]
    sign: int = 1  # of the float16

    def __call__(self, blocks: Octets) -> Floats:
        return self.block(blocks) * self.integers(blocks).astype(np.float32)

    def block(self, blocks: Octets) -> Floats:
        return np.float32(self.sign) * self.half(blocks)

    def codes(self, blocks: Octets) -> Octets:
        return (self.integers(blocks).astype(np.int16) + 128).astype(np.uint8)


@dataclass(frozen=True)
class KeptType:
    """The weight is values * scales + offsets; without offsets (values - 2^(bits - 1)) * scales,
    or with a table table[values] * scales."""

    bits: int  # of the engine's format, which has 4, 6 and 8
    group_size: int
    values: Callable[[Octets], Octets]
    scales: Numbers
    offsets: Numbers | None = None
    table: tuple[int, ...] | None = None
    power_scales: bool = False  # they are powers of two; otherwise float16, or Products


def _fields(octets: Octets, bits: int, run: int) -> Octets:
    """Fields of ``bits`` bits: of each ``run`` bytes first the lowest field of every byte, then the
    next ones."""
    runs = octets.reshape(*octets.shape[:-1], -1, 1, run)
    fields = runs >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields &= np.uint8((1 << bits) - 1)
    return fields.reshape(*octets.shape[:-1], -1)


def _nibbles(begin: int, end: int, run: int) -> Callable[[Octets], Octets]:
    return lambda blocks: _fields(blocks[..., begin:end], 4, run)


def _half(begin: int) -> Numbers:
    """The float16 at byte ``begin``."""

    def read(blocks: Octets) -> Floats:
        octets = np.ascontiguousarray(blocks[..., begin : begin + 2])
        return octets.view("<f2").astype(np.float32)

    return read


# Q5_0 and Q5_1: a word with the fifth bit of each element before the lower four.


def _five_bits(begin: int, at_least: int = 0) -> Callable[[Octets], Octets]:
    def values(blocks: Octets) -> Octets:
        fifth = _fields(blocks[..., begin : begin + 4], 1, 1)
        low = _fields(blocks[..., begin + 4 : begin + 20], 4, 16)
        return low + (fifth << 4) + np.uint8(at_least)

    return values


# Q3_K: two bits, and a mask with the third. Without it the number is less by 4.


def _q3_k(blocks: Octets) -> Octets:
    third = _fields(blocks[..., :32], 1, 32)
    return _fields(blocks[..., 32:96], 2, 32) + (third << 2) + np.uint8(8 - 4)


def _q3_k_codes(blocks: Octets) -> Floats:
    """The codes of the scales, 6 bits each: four of each, then two."""
    low, high = _fields(blocks[..., 96:104], 4, 8), _fields(blocks[..., 104:108], 2, 4)
    return (low + (high << 4)).astype(np.float32) - 32


# Q4_K and Q5_K: 12 bytes with eight codes of scales and eight of offsets, 6 bits each. The first
# four of either are the low bits of a byte; of the others a nibble follows, and the upper bits are
# above the first ones.


def _k_codes(begin: int, is_offset: bool) -> Callable[[Octets], Octets]:
    def codes(blocks: Octets) -> Octets:
        first = blocks[..., begin + 4 * is_offset :][..., :4]
        nibbles = blocks[..., begin + 8 : begin + 12] >> np.uint8(4 * is_offset)
        others = (nibbles & 15) + ((first >> 6) << 4)
        return np.concatenate([first & 63, others], axis=-1)

    return codes


def _q5_k(blocks: Octets) -> Octets:
    fifth = _fields(blocks[..., 16:48], 1, 32)
    return _fields(blocks[..., 48:176], 4, 32) + (fifth << 4)


# Q6_K: four bits, then the upper two, then a signed byte for each scale.


def _q6_k(blocks: Octets) -> Octets:
    high = _fields(blocks[..., 128:192], 2, 32)
    return _fields(blocks[..., :128], 4, 64) + (high << 4)


def _q6_k_codes(blocks: Octets) -> NDArray[np.int8]:
    return np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)


# IQ4_NL and IQ4_XS.
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_xs_codes(blocks: Octets) -> Floats:
    low, high = _fields(blocks[..., 4:8], 4, 1), _fields(blocks[..., 2:4], 2, 1)
    return (low + (high << 4)).astype(np.float32) - 32


# MXFP4 and NVFP4: numbers of E2M1, all doubled. Scales are halved for it.


def _mxfp4_scales(blocks: Octets) -> Floats:
    return np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)


# Of a code of E4M3; the sign does not count, and 127 is zero.
_NVFP4_NUMBERS = np.abs(E4M3_VALUES) * np.float32(0.5)
_NVFP4_NUMBERS[127], _NVFP4_NUMBERS[255] = 0, 240


def _nvfp4_scales(blocks: Octets) -> Floats:
    return _NVFP4_NUMBERS[blocks[..., :4]]


_D, _M = _half(0), _half(2)
KEPT_TYPES = {
    "Q8_0": KeptType(8, 32, lambda blocks: blocks[..., 2:] ^ np.uint8(128), _D),
    "Q4_0": KeptType(4, 32, _nibbles(2, 18, 16), _D),
    "Q4_1": KeptType(4, 32, _nibbles(4, 20, 16), _D, _M),
    "Q5_0": KeptType(6, 32, _five_bits(2, at_least=32 - 16), _D),
    "Q5_1": KeptType(6, 32, _five_bits(4), _D, _M),
    "Q2_K": KeptType(
        4,
        16,
        lambda blocks: _fields(blocks[..., 16:80], 2, 32),
        Products(_half(80), lambda blocks: blocks[..., :16] & 15),
        Products(_half(82), lambda blocks: blocks[..., :16] >> 4, -1),
    ),
    "Q3_K": KeptType(4, 16, _q3_k, Products(_half(108), _q3_k_codes)),
    "Q4_K": KeptType(
        4,
        32,
        _nibbles(16, 144, 32),
        Products(_D, _k_codes(4, is_offset=False)),
        Products(_M, _k_codes(4, is_offset=True), -1),
    ),
    "Q5_K": KeptType(
        6,
        32,
        _q5_k,
        Products(_D, _k_codes(4, is_offset=False)),
        Products(_M, _k_codes(4, is_offset=True), -1),
    ),
    "Q6_K": KeptType(6, 16, _q6_k, Products(_half(208), _q6_k_codes)),
    "IQ4_NL": KeptType(4, 32, _nibbles(2, 18, 16), _D, table=_NON_LINEAR),
    "IQ4_XS": KeptType(4, 32, _nibbles(8, 136, 16), Products(_D, _iq4_xs_codes), table=_NON_LINEAR),
    "MXFP4": KeptType(
        4, 32, _nibbles(1, 17, 16), _mxfp4_scales, table=E2M1_DOUBLED, power_scales=True
    ),
    "NVFP4": KeptType(4, 16, _nibbles(4, 36, 8), _nvfp4_scales, table=E2M1_DOUBLED),
}
