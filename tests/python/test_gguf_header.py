"""Headers of GGUF files: the reader refuses everything malformed, and nothing takes forever."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
from allspark.model_loader.errors import CheckpointError
from allspark.model_loader.gguf import read_gguf
from allspark.model_loader.gguf.source import Source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

UINT16, UINT32, STRING, ARRAY, FLOAT32 = 2, 4, 8, 9, 6
MOST = (1 << 64) - 1


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def info(name="a", shape=(4, 3), kind=0, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


ALIGNMENT = key("general.alignment", UINT32, struct.pack("<I", 32))
WORDS = key("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yz"))
NUMBERS = key("numbers", ARRAY, struct.pack("<IQ3f", FLOAT32, 3, 1, 2, 3))
A = np.arange(12, dtype="<f4").tobytes()


def file(keys=(ALIGNMENT, WORDS, NUMBERS), infos=None, data=A, counts=None, begin=b"GGUF\3\0\0\0"):
    infos = [info()] if infos is None else infos
    counts = counts or (len(infos), len(keys))
    header = begin + struct.pack("<QQ", *counts) + b"".join(keys) + b"".join(infos)
    return header + bytes(-len(header) % 32) + data + bytes(-len(data) % 32)


GOOD = file()


def read(tmp_path, data):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def test_a_whole_file(tmp_path):
    found = read(tmp_path, GOOD)
    assert found.metadata == {
        "general.alignment": 32, "words": ["x", "yz"], "numbers": [1.0, 2.0, 3.0]
    }  # fmt: skip
    assert found.tensors["a"].shape == (3, 4) and found.tensors["a"].block.name == "F32"
    with found.tensors["a"].raw.open() as raw:
        assert raw.tobytes() == A
    read(tmp_path, GOOD[:-16])  # The padding at the end may be missing.
    read(tmp_path, file(begin=b"GGUF\2\0\0\0"))


def long_text(length):
    return struct.pack("<Q", length) + b"x"


MALFORMED = {
    "another magic": (file(begin=b"GGML\3\0\0\0"), "offset 0: begins with b'GGML', not a GGUF"),
    "version 1": (file(begin=b"GGUF\1\0\0\0"), "offset 4: GGUF version is 1, supported are 2, 3"),
    "big-endian": (file(begin=b"GGUF\0\0\0\3"), "GGUF version is 50331648, .*big-endian"),
    "more keys than there are": (file(counts=(1, 4)), "truncated|appears twice|of type|bytes"),
    "more tensors than there are": (file(counts=(2, 3)), "truncated|dimensions|of .* bytes"),
    "too many keys": (file(counts=(1, MOST)), f"there are {MOST} keys, expected at most 131072"),
    "too many tensors": (
        file(counts=((1 << 17) + 1, 3)), "there are 131073 tensors, expected at most 131072",
    ),
    "a long key": (file([long_text(1 << 40)]), "a key is of 1099511627776 bytes, expected at most"),
    "a long string": (
        file([key("k", STRING, long_text(1 << 62))]), "'k' takes 4611686018427387904 bytes, but",
    ),
    "a key twice": (file([ALIGNMENT, ALIGNMENT]), "the key 'general.alignment' appears twice"),
    "an unknown type": (file([key("k", 13, b"")]), "'k' is of type 13, expected 0 to 12"),
    "an array of arrays": (
        file([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "'k' is an array of type 9",
    ),
    "a long array": (
        file([key("k", ARRAY, struct.pack("<IQ", UINT32, 1 << 60))]), "'k' takes .* bytes, but",
    ),
    "an endless array": (
        file([key("k", ARRAY, struct.pack("<IQ", 0, MOST))]), "'k' takes .* bytes, but",
    ),
    "a long array of strings": (
        file([key("k", ARRAY, struct.pack("<IQ", STRING, 1 << 60))]), "'k' has .* strings, more",
    ),
    "no alignment": (
        file([key("general.alignment", UINT32, struct.pack("<I", 0))]), "alignment is 0, expected",
    ),
    "an odd alignment": (
        file([key("general.alignment", UINT32, struct.pack("<I", 48))]), "alignment is 48, expect",
    ),
    "alignment in words": (
        file([key("general.alignment", STRING, text("32"))]), "alignment is '32', expected a pow",
    ),
    "no dimensions": (file(infos=[info(shape=())]), "tensor 'a' has 0 dimensions, expected 1 to 4"),
    "many dimensions": (file(infos=[info(shape=(1,) * 5)]), "tensor 'a' has 5 dimensions"),
    "a dimension of nothing": (file(infos=[info(shape=(4, 0))]), r"tensor 'a' has shape \[0, 4\]"),
    "a shape too large": (
        file(infos=[info(shape=(1 << 40, 1 << 40))]), r"tensor 'a' has shape \[1099511627776,",
    ),
    "an unknown tensor type": (file(infos=[info(kind=250)]), "tensor 'a' .*GGUF type 250"),
    "blocks that are not whole": (
        file(infos=[info(kind=8)]), "tensor 'a' has rows of 4 elements, but Q8_0 has blocks of 32",
    ),
    "beyond the end": (file(infos=[info(shape=(4, 99))]), "tensor 'a' ends at offset .* truncated"),
    "another offset": (file(infos=[info(offset=32)]), "tensor 'a' is at offset 32 .*expected 0"),
    "an offset far off": (file(infos=[info(offset=MOST)]), "tensor 'a' is at offset 18446744"),
    "overlap": (file(infos=[info(), info("b")]), "tensor 'b' is at offset 0 .*expected 64"),
    "a tensor twice": (file(infos=[info(), info()]), "tensor 'a' appears twice"),
    "more at the end": (GOOD + bytes(64), "data ends at offset"),
    "less at the end": (GOOD[:-17], "tensor 'a' ends at offset .* truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.timeout(20)
def test_malformed_headers(tmp_path, case):
    data, message = MALFORMED[case]
    with pytest.raises(RuntimeError if "unknown tensor" in case else CheckpointError) as caught:
        read(tmp_path, data)
    assert caught.match(message)
    assert str(tmp_path / "m.gguf") in str(caught.value)
    assert len(str(caught.value)) < 1000


def array(name, item, count, data=b""):
    return key(name, ARRAY, struct.pack("<IQ", item, count) + data)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            [array("k", UINT16, 256 << 20)],
            "'k' takes 536870912 bytes; a header has at most 268435456",
        ),
        (
            [key("k", STRING, struct.pack("<Q", 256 << 20))],
            "'k' takes 268435456 bytes; a header has at most 268435456",
        ),
        (
            [array("k", UINT16, (4 << 20) + 1)],
            "the arrays up to 'k' have 4194305 elements, expected at most 4194304",
        ),
        (
            [array("k", STRING, (4 << 20) + 1)],
            "the arrays up to 'k' have 4194305 elements, expected at most 4194304",
        ),
        (
            [array("j", 0, 1, b"x"), array("k", UINT16, 4 << 20)],
            "the arrays up to 'k' have 4194305 elements, expected at most 4194304",
        ),
    ],
)
def test_the_contents_of_a_header_are_bounded(tmp_path, keys, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(file(keys))
    os.truncate(path, 768 << 20)  # Zeros follow that take no room on the disk.
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


@pytest.mark.parametrize("count", [1 << 15, (1 << 15) + 1])
def test_factors_of_rope_are_bounded(tmp_path, count):
    name = "rope_freqs.weight"
    keys = [key("general.architecture", STRING, text("llama"))]
    source = Source(read(tmp_path, file(keys, [info(name, (count,))], bytes(4 * count))))
    if count == 1 << 15:
        assert source.factors(name) == [0.0] * count
        return
    with pytest.raises(CheckpointError, match=f"'{name}' has 32769 elements; it must have at most"):
        source.factors(name)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(GOOD)),
    st.booleans(),
)
def test_any_damage_is_an_error_or_harmless(tmp_path, changes, length, is_cut):
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    try:
        found = read(tmp_path, bytes(data[:length] if is_cut else data))
    except RuntimeError as error:  # Also for a type that only the package 'gguf' knows.
        assert str(tmp_path) in str(error)
    else:
        for tensor in found.tensors.values():
            with tensor.raw.open() as raw:
                raw.sum()
