"""A transformers model that computes with int8 weights and activations as the engine does
(csrc/weights/README.md, csrc/kernels/args.h), in float64. So its logits change by what quantisation
must change, and by nothing else.
"""

from __future__ import annotations

import pytest
from support.parity import exact_model

torch = pytest.importorskip("torch")


def quantized_weight(weight):
    """Symmetric, with one scale per output feature, rounded up to bfloat16."""
    scale = (weight.abs().amax(-1, keepdim=True) / 127).float()
    above = (scale.view(torch.int32) + 0xFFFF) & ~0xFFFF
    scale = above.view(torch.float32).double()
    return (weight / scale).round() * scale


def quantized_rows(x, size=None):
    """Symmetric, with a scale for every ``size`` elements. Default: 64 elements, or 32, or one per
    token: the largest number that divides (model_loaders/quantization.py)."""
    if size is None:
        size = next(size for size in (64, 32, x.shape[-1]) if x.shape[-1] % size == 0)
    groups = x.reshape(*x.shape[:-1], -1, size)
    largest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / largest)).round() * (largest / 127)).reshape(x.shape)


def int8_model(model):
    """A copy of ``model`` in float64 whose layers' matrix products are in int8; the head's is not,
    as with ``enable_quant=True``. Products are those of ``Linear`` and GPT-2's ``Conv1D``.
    """
    quantized = exact_model(model)
    head = quantized.get_output_embeddings()
    for module in quantized.modules():
        turned = type(module).__name__ == "Conv1D"
        if module is head or not (turned or isinstance(module, torch.nn.Linear)):
            continue
        weight = module.weight.data
        module.weight.data = quantized_weight(weight.T).T if turned else quantized_weight(weight)
        module.register_forward_pre_hook(lambda _, inputs: (quantized_rows(inputs[0]), *inputs[1:]))
    return quantized
