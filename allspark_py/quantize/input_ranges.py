"""Writes the ranges of all weights' inputs to a file, for people and for other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from allspark.eval.files import Text
from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.serialised import INPUT_RANGES
from allspark.pipeline.fields import whole
from allspark.quantize.calibration import read_ids
from allspark.quantize.checks import check_others
from allspark.quantize.layers import LayerSource, quantizable
from allspark.quantize.moves import has_experts
from allspark.quantize.stream import Stream
from allspark.whole_file import write_whole
from numpy.typing import NDArray


def write_input_ranges(
    loader: HuggingFaceModel,
    output: str | Path,
    texts: Sequence[Text],
    samples: int,
    length: int,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Path:
    """Of each weight `layers.N.NAME`: `.num_tokens`, and of each of its input features `.absmean`
    and `.absmax` (float32). Of experts, `.N` follows the weight's name. Returns the file.

    Raises:
        ValueError: a text is too short, or a number is not finite.
    """
    from safetensors.numpy import save

    whole(1)("calib_samples", samples)
    plan = loader.plan()
    source = LayerSource(plan)
    ids = read_ids(loader, texts, samples, length)
    check_others(source)
    stream = Stream(plan.spec, source, ids, threads=0)
    found: dict[str, NDArray[np.generic]] = {}
    for layer in range(plan.spec.num_layers):
        tensors = source.layer(layer)
        names = quantizable(plan.spec, layer)
        statistics = stream.statistics(layer, tensors, names, products=False)
        for (name, expert), inputs in statistics.items():
            weight = f"layers.{layer}.{name}"
            if has_experts(name):
                weight += f".{expert}"
            found[f"{weight}.num_tokens"] = np.array([inputs.num_tokens])
            found[f"{weight}.absmean"] = inputs.mean_abs.astype(np.float32)
            found[f"{weight}.absmax"] = np.array(inputs.max_abs)
        stream.advance(layer, tensors, {})
        progress(layer + 1, plan.spec.num_layers)
    path = Path(output).expanduser() / INPUT_RANGES
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(found))
    return path
