"""quantize_model(): from a checkpoint to a quantised model, one layer in memory at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from allspark._allspark import __version__
from allspark.eval.accuracy import remove_accuracy
from allspark.eval.files import Texts, to_texts
from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.convert import Plan
from allspark.model_loader.spec import Part, Weight
from allspark.pipeline.fields import whole
from allspark.quantize.calibration import read_ids
from allspark.quantize.checks import check_others, check_space, model_bytes
from allspark.quantize.config import QuantizeConfig
from allspark.quantize.effects import weight_effects
from allspark.quantize.export import check_export, export_checkpoint
from allspark.quantize.layers import LayerSource, formats_of
from allspark.quantize.solver import LayerSolver
from allspark.quantize.source import (
    check_floats,
    check_output,
    check_serialised_target,
    open_checkpoint,
)
from allspark.quantize.statistics import LayerStatistics
from allspark.quantize.stream import Stream
from allspark.quantize.target_bits import HIGH_FORMAT, choose_upgrades, room_for, weight_bits
from allspark.quantize.work import FOLDER, Work
from allspark.quantize.workers import workers
from numpy.typing import NDArray

# The engine's own format.
SAVE_FORMAT = "allspark"
# Read to learn what rounding each weight costs.
_EFFECT_TOKENS = 512


@dataclass(frozen=True)
class QuantizedModel:
    """What quantize_model made."""

    paths: list[Path]  # the files with its weights
    num_samples: int  # calibration sequences that there were
    # Weights that fell back to `search`, and why.
    fallbacks: dict[str, str] = field(default_factory=dict)
    # Weights that `target_bits` made int8.
    upgrades: list[str] = field(default_factory=list)


def quantize_model(
    model: str,
    output: str | Path,
    config: QuantizeConfig | None = None,
    texts: Texts | None = None,
    *,
    name: str | None = None,
    save_format: str = SAVE_FORMAT,
    resume: bool = False,
    threads: int = 0,
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> QuantizedModel:
    """Quantises a checkpoint, and writes a model that the engine serves.

    The same arguments give the same bytes, with any number of threads, and after an interruption
    with `resume`. Nothing has the model's name before all is done.

    Args:
        model: a directory, a GGUF file, or a name on a hub.
        output: the directory of the new model. Finished layers wait there in `quantize.partial`.
        config: how; None: the defaults.
        texts: calibration texts, files or `allspark.eval.Text`. None only where the config needs
            none.
        name: of the files; None: the last part of `model`.
        save_format: allspark, a serialised model; compressed-tensors, gptq or awq: a checkpoint in
            Hugging Face layout that other programs read, too.
        resume: go on with the layers that an earlier run finished.
        threads: 0: all cores.
        trust_remote_code: run code that comes with the tokenizer, and copy it with the model.
        revision, download_dir: of a model on a hub.
        progress: called with the number of finished layers, and of all.

    Raises:
        TypeError, ValueError: an argument, the checkpoint, a weight or a text does not fit; the
            message says which, and the bound. A number that is not finite, in a weight or in its
            input.
        OSError: files cannot be read or written, or there is not enough space for them.
    """
    loader = open_checkpoint(
        model,
        name,
        "bfloat16" if config is None else config.data_type,
        trust_remote_code,
        revision,
        download_dir,
    )
    return quantize_checkpoint(
        loader,
        output,
        config,
        texts,
        save_format=save_format,
        resume=resume,
        threads=threads,
        progress=progress,
    )


def quantize_checkpoint(
    loader: HuggingFaceModel,
    output: str | Path,
    config: QuantizeConfig | None = None,
    texts: Texts | None = None,
    *,
    save_format: str = SAVE_FORMAT,
    resume: bool = False,
    threads: int = 0,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> QuantizedModel:
    """quantize_model() of a checkpoint that is open; its `data_type` is that of the loader."""
    config = config or QuantizeConfig()
    whole(0)("threads", threads)
    if not config.requantize:
        check_floats(loader, ", or set requantize")
    folder = check_output(output, loader)
    plan = loader.plan(config.customized_quant_config())
    needed = _check_model(plan, config, loader, folder, save_format)
    check_space(plan.spec, needed, folder, folder / FOLDER)
    ids, digests = _calibration(loader, config, texts)
    settings = _settings(config, plan, ids, digests)
    check_others(LayerSource(plan))
    work = Work(folder / FOLDER, settings, resume)
    upgrades: list[str] = []
    if config.target_bits is not None:
        assert ids is not None
        upgrades = _upgrades(config.target_bits, plan, ids, work, threads)
        plan = _mixed_plan(loader, config, upgrades)
    read = ids if config.reads_inputs else None
    fallbacks = _quantize_layers(config, plan, read, work, threads, progress)
    if save_format == SAVE_FORMAT:
        paths = list(loader.write_plan(_with_layers(plan, work, settings), folder))
    else:
        paths = export_checkpoint(plan, work, config, loader, folder, save_format)
    work.remove()
    remove_accuracy(folder)
    return QuantizedModel(paths, 0 if ids is None else len(ids), fallbacks, upgrades)


def _check_model(
    plan: Plan, config: QuantizeConfig, loader: HuggingFaceModel, folder: Path, save_format: str
) -> int:
    """Raises ValueError if there can be no such model, or not in this directory. Returns the bytes
    of its weights."""
    if save_format != SAVE_FORMAT:
        return check_export(plan, config, loader, folder, save_format)
    check_serialised_target(folder, loader)
    target = config.target_bits
    return model_bytes(plan.spec, room_for(weight_bits(plan.spec), target) if target else 0)


def _calibration(
    loader: HuggingFaceModel, config: QuantizeConfig, texts: Texts | None
) -> tuple[NDArray[np.int32] | None, list[str]]:
    """The sequences, and the digests of the texts; none where no text is read."""
    if not config.is_calibrated or (texts is None and not config.needs_text):
        return None, []
    if texts is None:
        raise ValueError(f"texts is None; method {config.method!r} needs a calibration text")
    found = to_texts(texts)
    ids = read_ids(loader, found, config.calib_samples, config.calib_seqlen, config.seed)
    return ids, [text.facts.sha256 for text in found]


def _upgrades(
    target_bits: float, plan: Plan, ids: NDArray[np.int32], work: Work, threads: int
) -> list[str]:
    """As many weights as `target_bits` allows to be HIGH_FORMAT."""

    def choose() -> list[str]:
        sequences = max(_EFFECT_TOKENS // ids.shape[1], 1)
        divergences = {
            effect.weight: effect.kl_divergence
            for effect in weight_effects(plan, ids[:sequences], threads)
        }
        return choose_upgrades(weight_bits(plan.spec), divergences, target_bits)

    return work.remembered("upgrades", choose)


def _mixed_plan(loader: HuggingFaceModel, config: QuantizeConfig, upgrades: list[str]) -> Plan:
    """The plan with these weights in HIGH_FORMAT."""
    chosen = {f"^{re.escape(name)}$": HIGH_FORMAT for name in upgrades}
    mixed = dataclasses.replace(
        config, format_settings={**chosen, **dict(config.format_settings or {})}
    )
    return loader.plan(mixed.customized_quant_config())


def _settings(
    config: QuantizeConfig, plan: Plan, ids: NDArray[np.int32] | None, digests: list[str]
) -> dict[str, Any]:
    """All that the result depends on."""
    made: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    made["checkpoint"] = dict(plan.build.options)["fingerprint"]
    made["texts"] = digests
    made["version"] = __version__
    made["tokens"] = None if ids is None else hashlib.sha256(ids.tobytes()).hexdigest()
    return made


def _with_layers(plan: Plan, work: Work, settings: Mapping[str, Any]) -> Plan:
    """The plan, with the finished layers instead of the checkpoint's."""
    parts = LayerSource(plan).others()
    for layer in range(plan.spec.num_layers):
        for name, entry in work.entries(layer).items():
            parts.append(Part(Weight(f"layers.{layer}.{name}", (name,)), 0, entry))
    plan.build.options["quantized"] = json.dumps(settings, sort_keys=True)
    return dataclasses.replace(plan, parts=parts)


def _quantize_layers(
    config: QuantizeConfig,
    plan: Plan,
    ids: NDArray[np.int32] | None,
    work: Work,
    threads: int,
    progress: Callable[[int, int], object],
) -> dict[str, str]:
    """Finishes all layers; returns the weights that fell back, and why."""
    spec, source = plan.spec, LayerSource(plan)
    stream = None if ids is None else Stream(spec, source, ids, threads)
    fallbacks: dict[str, str] = {}
    with workers(threads) as pool:
        solver = LayerSolver(config, spec, pool)
        for layer in range(spec.num_layers):
            _finish(layer, solver, source, work, stream)
            found = work.fallbacks(layer)
            fallbacks |= {f"layers.{layer}.{name}": reason for name, reason in found.items()}
            progress(layer + 1, spec.num_layers)
    return fallbacks


def _finish(
    layer: int, solver: LayerSolver, source: LayerSource, work: Work, stream: Stream | None
) -> None:
    """One layer, no tensor of which is in memory afterwards."""
    formats = formats_of(solver.spec, layer)
    if work.has(layer):
        solved = None if stream is None else work.load(layer, formats)
    else:
        tensors = source.layer(layer)
        statistics: LayerStatistics = {}
        if stream is not None:
            reads_products = solver.config.reads_products
            statistics = stream.statistics(layer, tensors, list(formats), reads_products)
        solved = solver.solve(tensors, formats, statistics)
        del statistics, tensors
        work.save(layer, solved)
    if stream is not None and solved is not None:
        stream.advance(layer, solved.tensors, solved.quantized)
