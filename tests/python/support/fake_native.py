"""A fake native writer, so that loaders are tested without the engine.

It keeps its input and checks the loader against the writer's rules: known names, right shapes, no
row twice, none left out.
"""

from __future__ import annotations

import numpy as np


def to_float32(array, dtype):
    """The values of an array as the loader passes it; bfloat16 is passed as uint16."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def required_tensors(spec_bytes):
    """The tensors that the engine requires for a spec: (name, dtype, layout, shape,
    quantizable, modules)."""
    from allspark.model_loader.spec import message_class

    spec = message_class("DecoderSpec").FromString(spec_bytes)
    dtype = {1: "float32", 2: "bfloat16", 3: "float16"}[spec.compute_type]
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size = spec.num_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    qkv_size = q_size + 2 * kv_size
    vocab = spec.vocab_size
    tensors = [("embedding", dtype, int(spec.tie_embeddings), (vocab, hidden), True, (hidden,))]
    modules = {
        "qkv": (q_size, q_size + kv_size, qkv_size),
        "o": (hidden,),
        "gate_up": (inner, 2 * inner),
        "down": (hidden,),
    }
    for layer in range(spec.num_layers):
        rows = [
            ("attention_norm", (hidden,), True),
            ("qkv", (qkv_size, hidden), True),
            ("qkv_bias", (qkv_size,), spec.qkv_bias),
            ("q_norm", (spec.head_dim,), spec.qk_norm),
            ("k_norm", (spec.head_dim,), spec.qk_norm),
            ("o", (hidden, q_size), True),
            ("o_bias", (hidden,), spec.o_bias),
            ("mlp_norm", (hidden,), True),
            ("gate_up", (2 * inner, hidden), True),
            ("gate_up_bias", (2 * inner,), spec.mlp_bias),
            ("down", (hidden, inner), True),
            ("down_bias", (hidden,), spec.mlp_bias),
        ]
        for name, shape, wanted in rows:
            if wanted:
                full = f"layers.{layer}.{name}"
                if len(shape) == 2:
                    tensors.append((full, dtype, 1, shape, True, modules[name]))
                else:
                    tensors.append((full, "float32", 0, shape, False, ()))
    tensors.append(("final_norm", "float32", 0, (hidden,), False, ()))
    if not spec.tie_embeddings:
        tensors.append(("lm_head", dtype, 1, (vocab, hidden), True, (vocab,)))
    if spec.rotary_dim:
        tensors.append(("rope.inv_freq", "float32", 0, (spec.rotary_dim // 2,), False, ()))
    return tensors


class FakeImage:
    def __init__(self, writer):
        self.tensors = writer.tensors


class FakeWriter:
    """Records every instance in ``made``; ``fail_on`` names a target whose addition fails."""

    made: list[FakeWriter] = []
    fail_on: str | None = None

    def __init__(self, spec, build, graph_path, param_path, search_scales):
        from allspark.model_loader.spec import message_class

        self.spec = message_class("DecoderSpec").FromString(spec)
        self.build = message_class("BuildRecord").FromString(build)
        self.graph_path, self.param_path = graph_path, param_path
        self.shapes = {name: shape for name, _, _, shape, *_ in required_tensors(spec)}
        self.tensors: dict[str, np.ndarray] = {}
        self.order: list[tuple[str, int]] = []
        FakeWriter.made.append(self)

    def add_tensor(self, name, row_begin, data, dtype):
        if name == self.fail_on:
            raise ValueError(f"{name}: refused")
        assert data.flags.c_contiguous
        assert data.itemsize == (4 if dtype == "float32" else 2)
        assert data.shape[1:] == self.shapes[name][1:]
        assert row_begin + data.shape[0] <= self.shapes[name][0]
        rows = self.tensors.setdefault(name, np.full(self.shapes[name], np.nan, np.float32))
        assert np.isnan(rows[row_begin : row_begin + data.shape[0]]).all(), f"{name}: rows twice"
        rows[row_begin : row_begin + data.shape[0]] = to_float32(data, dtype)
        self.order.append((name, row_begin))

    def finish(self):
        for name in self.shapes:
            assert name in self.tensors, f"{name}: not added"
            assert not np.isnan(self.tensors[name]).any(), f"{name}: rows left out"
        if self.graph_path:
            for path in (self.graph_path, self.param_path):
                with open(path, "wb") as file:
                    file.write(b"fake")
            return None
        return FakeImage(self)


class FakeEngine:
    def __init__(self):
        self.images = {}

    def register_image(self, name, image):
        self.images[name] = image
