"""A simple reader of NAME.asgraph and NAME.asparam: a few lines of NumPy, written from
csrc/weights/README.md.
"""

from __future__ import annotations

import numpy as np

UINT8, UINT4, UINT2, BFLOAT16, FLOAT16, FLOAT8, INT32 = 10, 13, 15, 9, 2, 11, 5
PANEL64, PANEL64_SCALE = 1, 2


def bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def floats(array):
    """The numbers of scales as ``read_tensors`` gives them: float16, or the bits of bfloat16."""
    return bfloat16(array) if array.dtype == np.uint16 else array


def e4m3(codes):
    """The numbers of codes of E4M3, but for NaN."""
    exponent, fraction = codes >> 3 & 15, codes & 7
    numbers = np.where(exponent > 0, 8 + fraction, fraction) * 2.0 ** (np.maximum(exponent, 1) - 10)
    return np.where(codes & 128, -numbers, numbers)


def unpack(record, raw):
    """One record of a file as a row-major array; quantised values as they are stored."""
    rows, cols = record.shape[0], record.shape[1] if len(record.shape) > 1 else 1
    panels = -(-rows // 64)
    if record.layout == PANEL64_SCALE:
        values = raw.view({BFLOAT16: "<u2", FLOAT16: "<f2"}.get(record.dtype, "u1"))
        values = values.reshape(panels, cols, 64).transpose(0, 2, 1)
    elif record.layout == PANEL64:
        lanes = raw.reshape(panels, -1, 64, 4)
        if record.dtype == UINT4:
            lanes = np.concatenate([lanes & 15, lanes >> 4], axis=-1)
        elif record.dtype == UINT2:
            lanes = np.concatenate([lanes >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
        elif record.dtype not in (UINT8, FLOAT8):
            lanes = lanes.view("<u2" if record.dtype == BFLOAT16 else "<f4")
        values = lanes.transpose(0, 2, 1, 3)
    else:
        plain = {BFLOAT16: "<u2", INT32: "<i4"}.get(record.dtype, "<f4")
        return raw.view(plain).reshape(record.shape)
    values = values.reshape(panels * 64, cols)
    assert not values[rows:].any(), f"{record.name}: the padding is not zero"
    return values[:rows]


def read_tensors(graph):
    from allspark.model_loader.serialised import read_graph

    file = read_graph(graph)
    param = np.fromfile(graph.with_suffix(".asparam"), np.uint8)
    return file, {
        record.name: unpack(record, param[record.offset : record.offset + record.bytes])
        for record in file.tensors
    }


def _spread(tensors, name, quant):
    """A scale, zero point or offset for each element of the weight ``quant``, as float64."""
    per_group, cols = floats(tensors[name]).astype(np.float64), tensors[quant.tensor].shape[1]
    size = cols // per_group.shape[1]
    end = name.removeprefix(f"{quant.tensor}_")
    if quant.scale_codes and end in ("scale", "offset"):
        blocks = floats(tensors[f"{quant.tensor}_block_{end}"]).astype(np.float64)
        assert cols == 256 * blocks.shape[1]
        per_group = (per_group - 128) * np.repeat(blocks, 256 // size, axis=1)
    elif quant.power_scales and end == "scale":
        per_group = np.where(per_group == 0, 0, np.ldexp(1.0, per_group.astype(int) - 127))
    assert size == (quant.group_size or cols)
    return np.repeat(per_group, size, axis=1)


def dequantise(tensors, quant):
    """The weight as float64, with the scale of each of its elements."""
    name = quant.tensor
    values = tensors[name].astype(np.int64)
    if quant.bits == 6:
        values |= tensors[name + "_high"].astype(np.int64) << 4
    scale = _spread(tensors, name + "_scale", quant)
    if quant.float8:
        return e4m3(values) * scale, scale
    if quant.table:
        return np.frombuffer(quant.table, np.int8)[values] * scale, scale
    if quant.offset:
        return values * scale + _spread(tensors, name + "_offset", quant), scale
    zero = 1 << (quant.bits - 1)
    if quant.asymmetric:
        zero = _spread(tensors, name + "_zero", quant)
    return (values - zero) * scale, scale


def rounding(tensors, quant):
    """By how much scales and offsets that are rounded to the file's types move each element, at
    most; doubled, since these are the rounded ones."""
    moved = np.abs(dequantise(tensors, quant)[0])
    if quant.offset:
        moved += 2 * np.abs(_spread(tensors, quant.tensor + "_offset", quant))
    return moved * 2 * 2.0 ** (-11 if quant.half_scales else -9)


PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def parts_of(target):
    """The names of the checkpoint's tensors that make up the decoder's weight ``target``."""
    if target in ("embedding", "lm_head"):
        return ["lm_head.weight" if target == "lm_head" else "model.embed_tokens.weight"]
    _, layer, name = target.split(".")
    return [f"model.layers.{layer}.{part}.weight" for part in PARTS[name]]


def _in_place(values, quant, stored):
    """Undoes the order of the columns, and that of the rows of gate and up, which is down's."""
    if quant.reordered:
        values = values[:, np.argsort(stored[f"{quant.tensor}_order"])]
    layer, _, target = quant.tensor.rpartition(".")
    order = stored.get(f"{layer}.down_order")
    if order is None or target not in ("gate_up", "up"):
        return values
    parts = values.reshape(-1, len(order), values.shape[1])
    return parts[:, np.argsort(order)].reshape(values.shape)


def restore(tensors, graph):
    """Replaces the tensors of a checkpoint by the values in a quantised file of it. Returns for
    each by how much they may differ, see ``rounding``.
    """
    file, stored = read_tensors(graph)
    bounds = {}
    for quant in file.spec.weight_quant:
        restored = _in_place(dequantise(stored, quant)[0].astype(np.float32), quant, stored)
        bound, row = _in_place(rounding(stored, quant), quant, stored), 0
        for name in parts_of(quant.tensor):
            end = row + len(tensors[name])
            tensors[name], bounds[name], row = restored[row:end], bound[row:end], end
    return bounds
