"""A fake of the native writer, so that tests see what loaders write.

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


class FakeImage:
    def __init__(self, writer):
        self.tensors = writer.tensors


class FakeWriter:
    """Records every instance in ``made``; ``fail_on`` names a target whose addition fails."""

    made: list[FakeWriter] = []
    fail_on: str | None = None

    def __init__(self, spec, build, graph_path, param_path, search_scales):
        from allspark.model_loader.native import required_of
        from allspark.model_loader.spec import message_class

        self.spec = message_class("DecoderSpec").FromString(spec)
        self.build = message_class("BuildRecord").FromString(build)
        self.graph_path, self.param_path = graph_path, param_path
        self.shapes = {tensor.name: tensor.shape for tensor in required_of(self.spec)}
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
