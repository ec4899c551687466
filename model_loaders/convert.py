"""Streams a checkpoint into the native model writer: one source tensor in memory at a time.

The plan (spec and parts) is made and checked before the first tensor is read. So a checkpoint that
does not fit its configuration is refused at once and leaves no files behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import CheckpointError
from .native import RequiredTensor, native, required_of
from .notices import notice
from .quantization import TABLES, MatrixWeight, Quantization
from .quantized import (
    checkpoint_format,
    checkpoint_method,
    dequantized_targets,
    is_quantized,
    keep_quantized,
    warn_of_dequantized,
    without_idle_biases,
)
from .rope import compute_rope, with_window_rope
from .spec import (
    Architecture,
    Part,
    Weight,
    expand,
    find_architecture,
    message_class,
    resolve,
    with_architecture,
)
from .storage import as_float32, same_values

COMPUTE_TYPES = {
    "float32": "COMPUTE_FLOAT32",
    "bfloat16": "COMPUTE_BFLOAT16",
    "float16": "COMPUTE_FLOAT16",  # weights; all else is float32
}
INV_FREQ = "rope.inv_freq"
WINDOW_INV_FREQ = "rope.window_inv_freq"
ALIBI_SLOPES = "alibi.slopes"

# No progress bar for loads that are faster.
_PROGRESS_DELAY_S = 1


def checked_data_type(data_type: str) -> str:
    """Returns ``data_type`` if the engine can compute in it."""
    if data_type in COMPUTE_TYPES:
        return data_type
    raise ValueError(f"data type is {data_type!r}, expected one of {', '.join(COMPUTE_TYPES)}")


def data_type_of(spec: Any) -> str:
    """The data type of a DecoderSpec."""
    enum = spec.DESCRIPTOR.fields_by_name["compute_type"].enum_type
    name = enum.values_by_number[spec.compute_type].name
    return next(data_type for data_type, value in COMPUTE_TYPES.items() if value == name)


@dataclass(frozen=True)
class Plan:
    """A conversion that was checked: the decoder, the computed tensors, and the parts to copy."""

    spec: Any  # proto.DecoderSpec
    build: Any  # proto.BuildRecord
    search: bool  # for the scales of 4-bit weights that are quantised here
    computed: dict[str, NDArray[Any]]  # tensors that are not in the checkpoint
    parts: list[Part] = field(repr=False)


@dataclass(frozen=True)
class DecoderDescription:
    """What a configuration says of its decoder: the same for all conversions of the model."""

    config: ModelConfig
    architecture: Architecture
    fields: dict[str, Any]  # of DecoderSpec
    computed: dict[str, NDArray[Any]]  # tensors that are not in the checkpoint

    def spec(self, data_type: str) -> Any:
        """A new DecoderSpec message, not quantised."""
        compute_type = COMPUTE_TYPES[checked_data_type(data_type)]
        return message_class("DecoderSpec")(**self.fields, compute_type=compute_type)


def describe_decoder(config: ModelConfig) -> DecoderDescription:
    """The decoder that ``config`` describes. Errors name the file and the field."""
    checkpoint_format(config)
    standard = with_architecture(config)
    standard = find_architecture(standard.architecture()).standard(standard)
    architecture = find_architecture(standard.architecture())  # One name may mean several.
    fields = {"architecture": architecture.name, **architecture.decoder(standard)}
    computed = {}
    slopes = fields.pop("alibi_slopes", None)
    if slopes is not None:
        fields["alibi"] = True
        computed[ALIBI_SLOPES] = slopes
    rotary_dim = fields.setdefault("rotary_dim", fields["head_dim"])
    if rotary_dim:
        rope = compute_rope(standard, fields["head_dim"], rotary_dim)
        if fields.get("window_rope"):
            rope = with_window_rope(rope, standard, fields["head_dim"], rotary_dim)
        computed[INV_FREQ] = rope.inv_freq
        if rope.window_inv_freq is not None:
            computed[WINDOW_INV_FREQ] = rope.window_inv_freq
        fields["rope_attention_scaling"] = rope.attention_scaling
    return DecoderDescription(config, architecture, fields, computed)


def has_own_head(described: DecoderDescription, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a head although ``described`` ties it to the embedding: a tensor
    with other values. Such a head was trained, so the configuration is wrong.
    """
    if not described.fields["tie_embeddings"]:
        return False
    architecture = described.architecture
    tensors = architecture.full_names(checkpoint.tensors)
    found = {
        rule.target: tensors[rule.sources[0]]
        for rule in architecture.weights
        if rule.target in ("embedding", "lm_head") and rule.sources[0] in tensors
    }
    if len(found) < 2:
        return False
    head, embedding = found["lm_head"], found["embedding"]
    if head.shape == embedding.shape and same_values(head, embedding):
        return False
    notice(
        f"{head.where} differs from {embedding.name!r}, which the configuration ties it to: it is "
        "used as the head (tie_word_embeddings false)"
    )
    return True


def make_plan(
    described: DecoderDescription,
    checkpoint: Checkpoint,
    data_type: str,
    quantization: Quantization | None = None,
) -> Plan:
    """Checks that decoder and checkpoint make a complete model of ``data_type``, and that it can be
    quantised as requested.
    """
    config, architecture = described.config, described.architecture
    computed = dict(described.computed)
    spec = described.spec(data_type)
    required = required_of(spec)
    named = architecture.arranged(checkpoint.tensors, spec)
    rules = expand(architecture.weights, spec.num_layers, spec.num_experts, named)
    tensors = without_idle_biases(named, _sources(rules, required))
    parts = resolve(architecture, rules, required, tensors, computed)
    if quantization is not None:
        method = checkpoint.quant_method or checkpoint_method(config)
        quantization.check_method(method, is_quantized(tensors))
    weights = _matrix_weights(rules, spec.tie_embeddings, required)
    if is_quantized(tensors) and (quantization is None or quantization.keeps_checkpoint):
        activations = None if quantization is None else quantization.quantize_activations
        parts, quants, orders = keep_quantized(parts, activations, spec.tie_embeddings)
        if quantization is not None:
            quantization.check_kept(quants, spec.tie_embeddings)
            quantization.set_activation_groups(quants, weights)
        spec.weight_quant.extend(quants)
        computed.update(orders)
        # Weights that are dequantised can be quantised again, and tables that are in floats.
        left = {*dequantized_targets(parts), *TABLES} - {quant.tensor for quant in quants}
        weights = [weight for weight in weights if weight.names[0] in left]
    if quantization is not None:
        spec.weight_quant.extend(quantization.weight_quants(weights, spec.tie_embeddings))
    warn_of_dequantized(parts, [quant.tensor for quant in spec.weight_quant], data_type)
    if spec.weight_quant:
        required_of(spec)  # The engine's own checks, before data is read.
    options = {"data_type": data_type, "fingerprint": fingerprint(config, checkpoint)}
    search = quantization is not None and quantization.searches(spec.weight_quant)
    if search:
        options["search"] = "true"
    build = message_class("BuildRecord")(
        version=package_version(), source=checkpoint.directory.name, options=options
    )
    return Plan(spec, build, search, computed, parts)


def _sources(rules: Iterable[Weight], required: list[RequiredTensor]) -> set[str]:
    """The checkpoint's names of the tensors that the spec requires."""
    names = {tensor.name for tensor in required}
    return {source for rule in rules if rule.target in names for source in rule.sources}


def _matrix_weights(
    rules: Iterable[Weight], tie_embeddings: bool, required: list[RequiredTensor]
) -> list[MatrixWeight]:
    """The weights that can be quantised, by the decoder's name and the checkpoint's modules."""
    modules: dict[str, tuple[str, ...]] = {}
    for rule in rules:
        modules[rule.target] = modules.get(rule.target, ()) + rule.modules
    if tie_embeddings:  # One weight with both names.
        modules["embedding"] += ("lm_head",)
    return [
        MatrixWeight((tensor.name, *modules[tensor.name]), tensor.shape[1])
        for tensor in required
        if tensor.quantizable
    ]


def fingerprint(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """A hash that changes with the configuration, and with the size or time of a weight file;
    contents are not read.
    """
    digest = hashlib.sha256(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    for path in checkpoint.files:
        info = os.stat(path)
        digest.update(f"{path.name}\0{info.st_size}\0{info.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def package_version() -> str:
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("allspark")
    return "unknown"


def write_model(plan: Plan, graph_path: str = "", param_path: str = "") -> Any:
    """Runs the plan. With empty paths it returns an image of the model in memory; otherwise it
    writes the files and returns None.
    """
    writer = native().ModelWriter(
        plan.spec.SerializeToString(),
        plan.build.SerializeToString(),
        graph_path,
        param_path,
        plan.search,
    )
    try:
        with _progress(sum(part.source.nbytes for part in plan.parts)) as advance:
            for part in plan.parts:
                for piece in _pieces(part):
                    _add(writer, piece, plan.spec)
                    advance(piece.source.nbytes)
        for name, values in plan.computed.items():
            writer.add_tensor(name, 0, values, str(values.dtype))
        return writer.finish()
    finally:
        # An unfinished writer removes its files when it is deleted; a traceback would keep it
        # alive.
        del writer


def _pieces(part: Part) -> Iterator[Part]:
    """The parts to read and write one at a time; a single one if the rule needs all rows."""
    if part.rule.order is not None or part.rule.transform is not None:
        yield part
        return
    for row, source in part.source.pieces():
        yield replace(part, row_begin=part.row_begin + row, source=source)


def _add(writer: Any, part: Part, spec: Any) -> None:
    with part.source.open() as source:
        array: NDArray[Any] | None = None  # for the `del`, whatever is raised before
        try:
            array, dtype = _rows(part, source, spec)
            writer.add_tensor(part.rule.target, part.row_begin, array, dtype)
        except ValueError as error:
            raise CheckpointError(f"{part.source.where}: {error}") from error
        finally:
            del source, array, writer


def _rows(part: Part, array: NDArray[Any], spec: Any) -> tuple[NDArray[Any], str]:
    """The rows of the target that a part makes of its source, and their type."""
    rule, dtype = part.rule, part.source.dtype
    if array.ndim == 3:
        array = array.reshape(-1, array.shape[-1])
    if rule.transposed:
        array = np.ascontiguousarray(array.T)
    if rule.order is not None:
        array = array[rule.order(spec)]
    if rule.transform is not None:
        return rule.transform(as_float32(array, dtype)), "float32"
    return array, dtype


def read_rows(parts: Iterable[Part], spec: Any) -> Iterator[tuple[Part, NDArray[np.float32]]]:
    """The rows of their targets that parts make, as arrays of their own, in pieces."""
    for part in parts:
        for piece in _pieces(part):
            with piece.source.open() as source:
                array, dtype = _rows(piece, source, spec)
                rows = np.array(as_float32(array, dtype))
                del source, array
            yield piece, rows


@contextlib.contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A progress bar for work that takes longer than a second, where stderr is a terminal; none if
    tqdm is not installed.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _: None
        return

    class Bar(tqdm):
        # The lock of tqdm is common to a process and its forks. If one of them is killed while it
        # holds the lock, the others wait for ever.
        _lock = threading.RLock()
        # No thread that redraws a bar of few steps: it would live as long as the process.
        monitor_interval = 0

    with Bar(
        total=total_bytes,
        desc="serializing",
        unit="B",
        unit_scale=True,
        delay=_PROGRESS_DELAY_S,
        miniters=1,
        leave=False,
        disable=None,  # unless stderr is a terminal
    ) as bar:
        yield bar.update
