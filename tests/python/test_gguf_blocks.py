"""Types of GGUF blocks that the engine keeps: the integers, scales and offsets found in them stand
for the weights that llama.cpp's own package computes.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("allspark._allspark")

from allspark.model_loader import derived  # noqa: E402
from allspark.model_loader.gguf.blocks import tensor_entry  # noqa: E402
from allspark.model_loader.gguf.file import _BLOCK_TYPES, GgufTensor  # noqa: E402
from allspark.model_loader.gguf.kept import KEPT_TYPES  # noqa: E402
from allspark.model_loader.quantized import keep_quantized  # noqa: E402
from allspark.model_loader.spec import Part, Weight  # noqa: E402
from allspark.model_loader.storage import MappedFile, TensorEntry  # noqa: E402
from support import oracles  # noqa: E402
from support.gguf_files import SCALES, random_blocks  # noqa: E402
from support.model_file import dequantise  # noqa: E402

BLOCKS = {block.name: block for block in _BLOCK_TYPES.values() if block.name in KEPT_TYPES}
# Bits per weight in the engine, with scales and offsets.
BITS_PER_WEIGHT = {
    "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 6.5, "Q5_1": 7, "Q2_K": 5.125, "Q3_K": 4.5625,
    "Q4_K": 4.625, "Q5_K": 6.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.25,
    "NVFP4": 5,
}  # fmt: skip


def blocks_of(kind, rows, count, seed=0):
    """uint8 [rows, count blocks] with random integers, and scales of all sizes and both signs."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, count, BLOCKS[kind].nbytes), np.uint8)
    for begin in SCALES.get(kind, ()):
        # 65504 / 128 and below, so that no product is beyond float16; many are subnormal.
        halves = rng.uniform(-1, 1, (rows, count)) * 2.0 ** rng.integers(-24, 9, (rows, count))
        raw[..., begin : begin + 2] = halves.astype("<f2")[..., None].view(np.uint8)
    if kind == "MXFP4":  # Twelve times the largest of all scales is beyond float32.
        raw[..., 0] = rng.integers(2, 250, (rows, count))
    return raw.reshape(rows, -1)


def tensor_of(directory, kind, raw):
    path = directory / "blocks"
    path.write_bytes(raw.tobytes())
    entry = TensorEntry("w", "uint8", raw.shape, MappedFile(path), 0, raw.nbytes)
    block = BLOCKS[kind]
    return GgufTensor(block, (len(raw), raw.shape[1] // block.nbytes * block.elements), entry)


def read(entry):
    with entry.open() as array:
        return np.array(array)


def dequantized(kind, raw):
    with np.errstate(invalid="ignore", over="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


def kept(entry, target="layers.0.o"):
    """What is given to the writer, by the ends of its names, and the weight's WeightQuant."""
    parts = [Part(Weight(target, ("w",)), 0, entry)]
    parts, (quant,), _ = keep_quantized(parts, None)
    return {part.rule.target.removeprefix(target): read(part.source) for part in parts}, quant


def integers_of(stored, quant):
    """The integers in their planes, each of which has as many bits as the format says."""
    u = stored[""].astype(np.int64)
    assert u.min() >= 0 and u.max() < (256 if quant.bits == 8 else 16)
    if quant.bits == 6:
        assert stored["_high"].max() < 4
        u += stored["_high"].astype(np.int64) << 4
    return u


def rounded(stored, quant):
    """``stored`` with scales and offsets as the writer stores them."""
    is_half = quant.half_scales or quant.scale_codes
    return {
        quant.tensor + end: array.astype(np.float16)
        if array.dtype == np.float32 and is_half
        else array
        for end, array in stored.items()
    }


def test_the_types_are_those_of_the_package():
    assert BLOCKS.keys() == KEPT_TYPES.keys()
    for name, block in BLOCKS.items():
        kind = gguf.GGMLQuantizationType[name]
        assert block.code == kind
        assert (block.elements, block.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    read = set()
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            gguf.quants.dequantize(np.zeros(size, np.uint8), kind)
            read.add(kind.name)
    left = {name for name in read - KEPT_TYPES.keys() if not name.startswith(("F", "BF"))}
    assert all(name.startswith(("IQ1", "IQ2", "IQ3", "TQ")) for name in left)


@pytest.mark.parametrize("kind", KEPT_TYPES)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (7, 1), (3, 5), (65, 2)])
def test_weights_are_those_of_the_package_bit_by_bit(tmp_path, kind, rows, count):
    raw = blocks_of(kind, rows, count)
    entry = tensor_entry(tensor_of(tmp_path, kind, raw))
    np.testing.assert_array_equal(read(entry), dequantized(kind, raw))


@pytest.mark.parametrize("kind", KEPT_TYPES)
@pytest.mark.parametrize("octet", [0, 255, 0x80, 0x7F, 0x55, 0xAA])
def test_extreme_codes(tmp_path, kind, octet):
    raw = np.full((2, 3, BLOCKS[kind].nbytes), octet, np.uint8)
    for begin in SCALES.get(kind, ()):
        raw[..., begin : begin + 2] = np.array([-0.375], "<f2").view(np.uint8)
    raw = raw.reshape(2, -1)
    entry = tensor_entry(tensor_of(tmp_path, kind, raw))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(read(entry), dequantized(kind, raw))


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_what_is_stored_stands_for_the_weights(tmp_path, kind):
    raw = blocks_of(kind, 37, 3)
    entry = tensor_entry(tensor_of(tmp_path, kind, raw))
    stored, quant = kept(entry)
    u = integers_of(stored, quant)
    if kind == "Q3_K":
        assert u.min() == 4 and u.max() == 11
    found = dequantise(rounded(stored, quant), quant)[0]
    # float32 holds a block's number times a scale's code, and that times an integer, and rounds the
    # sum with an offset once.
    np.testing.assert_array_equal(found.astype(np.float32), dequantized(kind, raw))
    assert not quant.asymmetric and not quant.float8 and not quant.quantize_activations


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_bits_per_weight(tmp_path, kind):
    stored, quant = kept(tensor_entry(tensor_of(tmp_path, kind, blocks_of(kind, 4, 2))))
    elements = stored[""].size
    is_coded, has_offset = quant.scale_codes, quant.offset
    ends = {"": True, "_high": quant.bits == 6, "_scale": True, "_offset": has_offset,
            "_block_scale": is_coded, "_block_offset": is_coded and has_offset}  # fmt: skip
    assert stored.keys() == {end for end, is_there in ends.items() if is_there}
    beside = [array for end, array in stored.items() if end not in ("", "_high")]
    bits = sum(array.size * (8 if array.dtype == np.uint8 else 16) for array in beside)
    assert quant.bits + bits / elements == BITS_PER_WEIGHT[kind]


def test_scales_of_mxfp4_are_exponents(tmp_path):
    raw = blocks_of("MXFP4", 25, 10)
    raw.reshape(25, 10, -1)[..., 0] = np.arange(6, 256).reshape(25, 10)
    raw.reshape(25, 10, -1)[0, :6, 0] = np.arange(6)
    stored, quant = kept(tensor_entry(tensor_of(tmp_path, "MXFP4", raw)))
    assert quant.power_scales and not quant.half_scales
    expected = np.arange(6, 256) - 1
    expected[:6] = [0, 0, 1, 2, 3, 4]  # 2^-128 and 2^-127 are no normal numbers.
    np.testing.assert_array_equal(stored["_scale"].ravel(), expected)


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_rows_in_another_order(tmp_path, kind):
    raw = blocks_of(kind, 12, 2)
    order = np.random.default_rng(1).permutation(12)
    entry = tensor_entry(tensor_of(tmp_path, kind, raw), order)
    np.testing.assert_array_equal(read(entry), dequantized(kind, raw[order]))
    plain, _ = kept(tensor_entry(tensor_of(tmp_path, kind, raw)))
    stored, _ = kept(entry)
    assert stored.keys() == plain.keys()
    for name, rows in plain.items():
        np.testing.assert_array_equal(stored[name], rows[order])


@pytest.mark.parametrize("kind", ["Q5_1", "Q4_K", "Q6_K"])
def test_large_tensors_are_unpacked_in_pieces(tmp_path, kind, monkeypatch):
    raw = blocks_of(kind, 150, 1)
    entry = tensor_entry(tensor_of(tmp_path, kind, raw))
    monkeypatch.setattr(derived, "_PIECE_ELEMENTS", 64 * entry.shape[1])
    parts, _, _ = keep_quantized([Part(Weight("layers.0.o", ("w",)), 0, entry)], None)
    assert len(parts) > 2
    for part in parts:
        pieces = list(part.source.pieces())
        if part.rule.target != "layers.0.o" and not part.rule.target.endswith("_high"):
            assert [begin for begin, _ in pieces] == [0]  # few elements
        else:
            assert [begin for begin, _ in pieces] == [0, 64, 128]
        found = np.concatenate([read(piece) for _, piece in pieces])
        np.testing.assert_array_equal(found, read(part.source))


def test_a_type_that_is_not_kept_becomes_floats(tmp_path):
    values = np.zeros((3, 256), np.float32)
    raw = random_blocks(values, gguf.GGMLQuantizationType.IQ2_XS)
    path = tmp_path / "blocks"
    path.write_bytes(raw.tobytes())
    entry = TensorEntry("w", "uint8", raw.shape, MappedFile(path), 0, raw.nbytes)
    block = BLOCKS["Q4_0"].__class__(17, "IQ2_XS", 256, raw.shape[1])
    found = tensor_entry(GgufTensor(block, (3, 256), entry))
    parts, quants, _ = keep_quantized([Part(Weight("layers.0.o", ("w",)), 0, found)], None)
    assert not quants and parts[0].source is found
    np.testing.assert_array_equal(
        read(found), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.IQ2_XS)
    )


@pytest.fixture(scope="module")
def made_by_libgguf(tmp_path_factory):
    """{type: raw blocks, and type.floats: what they stand for}, of rows as weights are: most are
    small, some columns are larger, and one row is zero."""
    folder = tmp_path_factory.mktemp("libgguf")
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 0.04, (48, 1024)) * rng.lognormal(0, 0.8, 1024)
    rows[5] = 0
    np.save(folder / "rows.npy", rows.astype(np.float32))
    files = (folder / "rows.npy", folder / "made.npz")
    oracles.run(oracles.environment("libgguf"), "libgguf_rows.py", *files, *KEPT_TYPES)
    return np.load(files[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_blocks_of_libgguf_are_what_it_says(made_by_libgguf, tmp_path, kind):
    """Also NVFP4, which llama.cpp's own quantiser does not make."""
    raw, exact = made_by_libgguf[kind], made_by_libgguf[f"{kind}.floats"]
    entry = tensor_entry(tensor_of(tmp_path, kind, raw))
    np.testing.assert_array_equal(read(entry), exact)
    stored, quant = kept(entry)
    integers_of(stored, quant)
    found = dequantise(rounded(stored, quant), quant)[0]
    np.testing.assert_array_equal(found.astype(np.float32), exact)
