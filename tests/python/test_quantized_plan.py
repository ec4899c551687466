"""How weights that are quantised already are stored, and parts of a weight in several formats: in
one format they stand for the same numbers.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("allspark._allspark")

from allspark.model_loader import derived  # noqa: E402
from allspark.model_loader.derived import derive  # noqa: E402
from allspark.model_loader.errors import UnsupportedModelError  # noqa: E402
from allspark.model_loader.quantized import (  # noqa: E402
    dequantized_targets,
    keep_quantized,
    warn_of_dequantized,
)
from allspark.model_loader.quantized.tensor import quantize_view  # noqa: E402
from allspark.model_loader.quantized.unify import unify  # noqa: E402
from allspark.model_loader.spec import Part, Weight  # noqa: E402
from allspark.model_loader.storage import MappedFile, TensorEntry  # noqa: E402
from support.model_file import dequantise  # noqa: E402

ROWS, COLS = 5, 128
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@pytest.fixture
def entry(tmp_path):
    """A function that makes the entry of an array in a file."""
    numbers = itertools.count()

    def make(array, dtype=None):
        path = tmp_path / f"{next(numbers)}"
        path.write_bytes(array.tobytes())
        name = dtype or str(array.dtype)
        return TensorEntry("w", name, array.shape, MappedFile(path), 0, array.nbytes)

    return make


@pytest.fixture
def weight(entry):
    """A function that makes a random quantised weight."""
    seeds = itertools.count()

    def make(bits, size, zeros=False, offsets=False, dtype="float16", rows=ROWS, **options):
        rng = np.random.default_rng(next(seeds))
        groups = (rows, COLS // size if size else 1)
        most = 15 if "table" in options else (1 << bits) - 1

        def floats():
            numbers = rng.uniform(-1, 1, groups).astype(np.float16)
            if dtype == "bfloat16":
                bits = numbers.astype(np.float32).view(np.uint32) >> 16
                return entry(bits.astype("<u2"), dtype)
            return entry(numbers.astype(dtype), dtype)

        return quantize_view(
            bits,
            size or COLS,
            entry(rng.integers(0, most, (rows, COLS), np.uint8, endpoint=True)),
            floats(),
            entry(rng.integers(0, most, groups, np.uint8, endpoint=True)) if zeros else None,
            offsets=floats() if offsets else None,
            **options,
        )

    return make


def read(source):
    with source.open() as array:
        return np.array(array)


def keep(*sources, target="layers.0.qkv", activations=None, tied=False):
    parts, row = [], 0
    for source in sources:
        parts.append(Part(Weight(target, ("w",)), row, source))
        row += source.shape[0]
    kept, quants, orders = keep_quantized(parts, activations, tied)
    return kept, {quant.tensor: quant for quant in quants}, orders


def stored(parts):
    """{tensor's name: its rows}."""
    found = {}
    for part in parts:
        rows = read(part.source)
        assert part.row_begin == sum(map(len, found.get(part.rule.target, [])))
        found.setdefault(part.rule.target, []).append(rows)
    return {name: np.concatenate(rows) for name, rows in found.items()}


# Formats.


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"bits": 4, "group_size": 32}, {}),
        ({"bits": 4}, {}),
        ({"bits": 8, "group_size": 16}, {}),
        ({"bits": 8, "group_size": 64, "asymmetric": True}, {"zeros": True}),
        ({"bits": 8, "group_size": 32, "offset": True}, {"offsets": True}),
        ({"bits": 6, "group_size": 16}, {}),
        ({"bits": 6, "group_size": 128, "offset": True}, {"offsets": True}),
        ({"bits": 4, "group_size": 32, "table": np.array(TABLE, "i1").tobytes()}, {"table": TABLE}),
        ({"bits": 8, "group_size": 64, "float8": True}, {"is_float8": True}),
        ({"bits": 8, "float8": True}, {"is_float8": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_formats(weight, fields, options, dtype):
    source = weight(fields["bits"], fields.get("group_size", 0), dtype=dtype, **options)
    parts, quants, _ = keep(source)
    quant = quants["layers.0.qkv"]
    found = {field.name: value for field, value in quant.ListFields()}
    expected = {"tensor": "layers.0.qkv", **fields}
    if dtype == "float16":
        expected["half_scales"] = True
    assert found == expected
    ends = {"": True, "_high": fields["bits"] == 6, "_scale": True,
            "_zero": "zeros" in options, "_offset": "offsets" in options}  # fmt: skip
    types = {part.rule.target.removeprefix("layers.0.qkv"): part.source.dtype for part in parts}
    floats = {"_scale": dtype, "_offset": dtype}
    assert types == {end: floats.get(end, "uint8") for end, is_there in ends.items() if is_there}
    if dtype == "bfloat16":
        return
    if quant.float8:
        nan = np.isnan(read(source))
        np.testing.assert_array_equal(nan, (stored(parts)["layers.0.qkv"] & 127) == 127)
        assert nan.any()
    else:
        exact = dequantise(stored(parts), quant)[0]
        assert (np.abs(read(source) - exact) <= 2.0**-23 * np.abs(exact)).all()


def test_int8_activations_are_for_matrix_products_of_integers(weight):
    def found(target, tied=False, **options):
        source = weight(8, 32, **options)
        _, quants, _ = keep(source, target=target, activations=True, tied=tied)
        return quants[target].quantize_activations

    assert found("layers.0.o") and found("layers.0.o", offsets=True)
    assert not found("layers.0.o", is_float8=True)
    assert not found("embedding")
    assert found("embedding", tied=True)
    assert not found("embedding", tied=True, is_float8=True)


def test_scales_that_are_exact_in_float32_alone(entry):
    """The writer rounds them to float16; floats are made of the exact ones."""
    scales = np.full((ROWS, 4), 1 + 2.0**-12, "<f4")
    values = entry(np.full((ROWS, COLS), 9, np.uint8))
    source = quantize_view(4, 32, values, entry(scales), half_scales=True)
    parts, quants, _ = keep(source)
    assert quants["layers.0.qkv"].half_scales
    np.testing.assert_array_equal(stored(parts)["layers.0.qkv_scale"], scales)
    np.testing.assert_array_equal(read(source), np.full((ROWS, COLS), scales[0, 0]))


@pytest.mark.parametrize(
    ("bits", "size", "options", "problem"),
    [
        (4, 8, {}, "its group size is 8, the engine has 0, 16, 32, 64, 128"),
        (6, 32, {"zeros": True}, "it has 6 bits and zero points"),
    ],
)
def test_formats_that_the_engine_does_not_have(weight, bits, size, options, problem):
    with pytest.raises(UnsupportedModelError, match=f"'w' cannot stay as it is: {problem}"):
        keep(weight(bits, size, **options))


@pytest.mark.parametrize(
    ("bits", "options"), [(6, {}), (4, {"offsets": True}), (4, {"table": TABLE})]
)
def test_formats_that_have_groups(entry, bits, options):
    def make(cols, size):
        groups = entry(np.ones((2, cols // size), np.float16))
        values = entry(np.zeros((2, cols), np.uint8))
        own = {**options, "offsets": groups} if "offsets" in options else options
        return quantize_view(bits, size, values, groups, **own)

    _, quants, _ = keep(make(32, 32))  # a single group
    assert quants["layers.0.qkv"].group_size == 32
    with pytest.raises(UnsupportedModelError, match="its group size is 256"):
        keep(make(256, 256))


# Parts of one weight.

# Name -> the parts' arguments, and the common format.
MIXTURES = {
    "Q4_K and Q6_K": ([(4, 32, {"offsets": True}), (6, 16, {})], (6, 16, "offset")),
    "Q5_K and Q6_K": ([(6, 32, {"offsets": True}), (6, 16, {})], (6, 16, "offset")),
    "Q3_K and Q5_K": ([(4, 16, {}), (6, 32, {"offsets": True})], (6, 16, "offset")),
    "Q2_K and Q3_K": ([(4, 16, {"offsets": True}), (4, 16, {})], (4, 16, "offset")),
    "Q4_K and Q8_0": ([(8, 32, {}), (4, 32, {"offsets": True})], (8, 32, "offset")),
    "Q4_0 and Q5_0": ([(4, 32, {}), (6, 32, {})], (6, 32, "")),
    "Q4_0 and Q8_0": ([(4, 32, {}), (8, 32, {})], (8, 32, "")),
    "Q6_K and Q8_0": ([(6, 16, {}), (8, 32, {})], (8, 16, "")),
    "three types": ([(4, 32, {}), (6, 16, {}), (8, 64, {})], (8, 16, "")),
    "channels and groups": ([(4, 0, {}), (4, 32, {})], (4, 32, "")),
    "channels": ([(4, 0, {}), (8, 0, {})], (8, 0, "")),
    "zero points": ([(4, 32, {"zeros": True}), (8, 128, {"zeros": True})], (8, 32, "zero")),
    "zero points in one": ([(4, 32, {"zeros": True}), (8, 64, {})], (8, 32, "zero")),
    "IQ4_NL and smaller groups": (
        [(4, 32, {"table": TABLE}), (4, 16, {"table": TABLE})], (4, 16, "table"),
    ),
    "IQ4_XS and Q5_K": (
        [(4, 32, {"table": TABLE}), (6, 32, {"offsets": True})], (8, 32, "offset"),
    ),
    "IQ4_XS and NVFP4": ([(4, 32, {"table": TABLE}), (4, 16, {"table": E2M1})], (8, 16, "")),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("row", MIXTURES)
def test_mixtures_in_one_format(weight, row, reverse, dtype):
    arguments, (bits, size, kind) = MIXTURES[row]
    sources = [
        weight(*first, dtype=dtype, rows=rows, **options)
        for rows, (*first, options) in zip((3, 5, 2), arguments, strict=False)
    ]
    if reverse:
        sources.reverse()
    parts, quants, _ = keep(*sources)
    quant = quants["layers.0.qkv"]
    assert (quant.bits, quant.group_size, quant.half_scales) == (bits, size, dtype == "float16")
    fields = {"offset": quant.offset, "zero": quant.asymmetric, "table": bool(quant.table)}
    assert fields == {name: name == kind for name in fields}
    exact = np.concatenate([read(source) for source in sources]).astype(np.float64)
    found = dequantise(stored(parts), quant)[0]
    # The sum of a product and an offset is rounded once where the part is read.
    np.testing.assert_array_equal(found.astype(np.float32), exact)


@pytest.mark.parametrize("row", MIXTURES)
def test_unified_parts_are_read_as_before(weight, row):
    sources = [weight(*first, **options) for *first, options in MIXTURES[row][0]]
    unified = unify(sources)
    assert len({(part.bits, part.group_size, part.table) for part in unified}) == 1
    for before, after in zip(sources, unified, strict=True):
        assert after.problem() is None
        # float32 has the digits of all products, and so of their sums with a zero point's.
        np.testing.assert_array_equal(read(after), read(before))


def test_scales_in_bfloat16_are_unified(weight):
    sources = [weight(4, 32, dtype="bfloat16", offsets=True), weight(6, 16, dtype="bfloat16")]
    parts, quants, _ = keep(*sources)
    assert not quants["layers.0.qkv"].half_scales
    offsets = [part for part in parts if part.rule.target.endswith("_offset")]
    assert [part.source.dtype for part in offsets] == ["bfloat16", "float32"]
    scales = read(sources[1].scales).astype(np.uint32) << 16
    np.testing.assert_array_equal(read(offsets[1].source), -32 * scales.view(np.float32))


@pytest.mark.parametrize(
    "arguments",
    [
        [(4, 32, {"zeros": True}), (4, 32, {"offsets": True})],
        [(8, 32, {"is_float8": True}), (8, 32, {})],
        [(4, 32, {"table": E2M1, "dtype": "float32"}), (8, 32, {})],
    ],
)
def test_formats_that_have_no_common_one(weight, arguments):
    sources = [weight(*first, **options) for *first, options in arguments]
    assert unify(sources) is None
    with pytest.raises(UnsupportedModelError, match="'layers.0.qkv' are quantised in another way"):
        keep(*sources)
    mixing = [
        weight(*first, stored_as=name, **options)
        for name, (*first, options) in zip("AB", arguments, strict=True)
    ]
    parts, quants, _ = keep(*mixing)
    assert not quants and [part.source for part in parts] == mixing
    assert dequantized_targets(parts) == {"layers.0.qkv"}
    with pytest.warns(UserWarning, match="2 weights are A, B, and become bfloat16"):
        warn_of_dequantized(parts, [], "bfloat16")


def test_scales_of_several_types(weight):
    """Of one format; in float16 only if all are."""
    sources = [weight(4, 32, dtype=dtype) for dtype in ("float16", "float32")]
    _, quants, _ = keep(*sources)
    assert not quants["layers.0.qkv"].half_scales


def test_parts_keep_the_order_of_the_file(weight):
    targets = ("layers.0.qkv", "layers.0.o", "layers.0.qkv", "layers.0.o")
    parts = [Part(Weight(target, ("w",)), 0, weight(4, 32)) for target in targets]
    kept, _, _ = keep_quantized(parts, None)
    found = [part.rule.target for part in kept if "_" not in part.rule.target]
    assert found == list(targets)


def test_columns_and_rows_in_act_order(entry):
    """All tensors of gate and up follow the order of down's columns, and both halves of six bits
    their own weight's."""
    rng = np.random.default_rng(3)
    order = rng.permutation(np.arange(64) // 32)

    def make(rows, cols, order=None, **options):
        values = entry(rng.integers(0, 64, (rows, cols), np.uint8))
        scales = entry(rng.uniform(1, 2, (rows, cols // 32)).astype(np.float16))
        if options.pop("offsets", False):
            options["offsets"] = entry(rng.uniform(1, 2, (rows, cols // 32)).astype(np.float16))
        return quantize_view(6, 32, values, scales, None, order, **options)

    down, gate_up = make(32, 64, order), make(64, 32, offsets=True)
    parts = [Part(Weight("layers.0.down", ("w",)), 0, down),
             Part(Weight("layers.0.gate_up", ("w",)), 0, gate_up)]  # fmt: skip
    kept, quants, orders = keep_quantized(parts, None)
    assert [quant.reordered for quant in quants] == [True, False]
    columns = orders["layers.0.down_order"]
    tensors = stored([part for part in kept if "down" in part.rule.target])
    u = tensors["layers.0.down"] + (tensors["layers.0.down_high"] << 4)
    np.testing.assert_array_equal(u, read(down.values)[:, columns])
    rows = [part for part in kept if "gate_up" in part.rule.target]
    ends = {part.rule.target.removeprefix("layers.0.gate_up") for part in rows}
    assert ends == {"", "_high", "_scale", "_offset"}
    for part in rows:
        np.testing.assert_array_equal(part.rule.order(None), columns)


def test_pieces_of_unified_weights(weight, entry, monkeypatch):
    """A panel of rows at a time, however many steps are between the file and the engine's form."""
    monkeypatch.setattr(derived, "_PIECE_ELEMENTS", 64 * COLS)

    def make(bits, size, **options):
        raw = entry(np.random.default_rng(bits).integers(0, 16, (150, COLS), np.uint8))
        scales = entry(np.ones((150, COLS // size), np.float16))
        offsets = scales if options.get("offsets") else None
        values = derive(lambda rows: rows ^ 1, "uint8", raw.shape, raw, by_rows=True)
        return quantize_view(bits, size, values, scales, offsets=offsets)

    parts, _, _ = keep(make(4, 32, offsets=True), make(6, 16))
    for part in parts:
        pieces = list(part.source.pieces())
        if part.source.shape[1] == COLS:
            assert [begin for begin, _ in pieces] == [0, 64, 128]
        found = np.concatenate([read(piece) for _, piece in pieces])
        np.testing.assert_array_equal(found, read(part.source))
