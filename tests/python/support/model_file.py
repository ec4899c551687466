"""A simple reader of NAME.asgraph and NAME.asparam: a few lines of NumPy, written from
csrc/weights/README.md.
"""

from __future__ import annotations

import numpy as np

UINT8, UINT4, BFLOAT16, INT32 = 10, 13, 9, 5
PANEL64, PANEL64_SCALE = 1, 2


def bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def unpack(record, raw):
    """One record of a file as a row-major array; quantised values as they are stored."""
    rows, cols = record.shape[0], record.shape[1] if len(record.shape) > 1 else 1
    panels = -(-rows // 64)
    if record.layout == PANEL64_SCALE:
        values = raw.view("<u2" if record.dtype == BFLOAT16 else "u1")
        values = values.reshape(panels, cols, 64).transpose(0, 2, 1)
    elif record.layout == PANEL64:
        lanes = raw.reshape(panels, -1, 64, 4)
        if record.dtype == UINT4:
            lanes = np.concatenate([lanes & 15, lanes >> 4], axis=-1)
        elif record.dtype != UINT8:
            lanes = lanes.view("<u2" if record.dtype == BFLOAT16 else "<f4")
        values = lanes.transpose(0, 2, 1, 3)
    else:
        plain = {BFLOAT16: "<u2", INT32: "<i4"}.get(record.dtype, "<f4")
        return raw.view(plain).reshape(record.shape)
    values = values.reshape(panels * 64, cols)
    assert not values[rows:].any(), f"{record.name}: the padding is not zero"
    return values[:rows]


def read_tensors(graph):
    from allspark.model_loader.export import read_graph

    file = read_graph(graph)
    param = np.fromfile(graph.with_suffix(".asparam"), np.uint8)
    return file, {
        record.name: unpack(record, param[record.offset : record.offset + record.bytes])
        for record in file.tensors
    }


def dequantise(tensors, quant):
    """The weight as float64, with the scale of each of its elements."""
    values = tensors[quant.tensor].astype(np.int64)
    scale = bfloat16(tensors[quant.tensor + "_scale"]).astype(np.float64)
    per_scale = values.shape[1] // scale.shape[1]
    assert per_scale == (quant.group_size or values.shape[1])
    scale = np.repeat(scale, per_scale, axis=1)
    zero = 1 << (quant.bits - 1)
    if quant.asymmetric:
        zero = np.repeat(tensors[quant.tensor + "_zero"].astype(np.int64), per_scale, axis=1)
    return (values - zero) * scale, scale


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
    """Replaces the tensors of a checkpoint by the values in a quantised file of it."""
    file, stored = read_tensors(graph)
    for quant in file.spec.weight_quant:
        restored, row = _in_place(dequantise(stored, quant)[0].astype(np.float32), quant, stored), 0
        for name in parts_of(quant.tensor):
            rows = len(tensors[name])
            tensors[name], row = restored[row : row + rows], row + rows
