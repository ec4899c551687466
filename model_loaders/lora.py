"""LoraAdapter: a PEFT LoRA adapter, checked against its base model and written as NAME.aslora.

Opening reads only configuration and headers; matrices are read one pair at a time when the adapter
is serialised. A tensor of the adapter must be a module's lora_A or lora_B, or an unchanged copy of
a weight of the base model; anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint
from .convert import package_version
from .errors import CheckpointError, UnexplainedTensorError
from .native import RequiredTensor, native, required_of
from .notices import notice
from .peft_config import PeftConfig
from .spec import expand, find_architecture, message_class
from .storage import FLOATS, TensorEntry, as_float32, same_values

if TYPE_CHECKING:
    from .llm import LLM

_PREFIX = "base_model.model."
_EMBEDDING = "embedding"
_LM_HEAD = "lm_head"
# The module's name, A or B, and the adapter's name, which PEFT drops when it saves.
_MATRIX = re.compile(r"(.+)\.lora_(A|B)(?:\.([^.]+))?\.weight")
_EMBEDDING_MATRIX = re.compile(r"(.+)\.lora_embedding_(A|B)(?:\.([^.]+))?")
_WEIGHT = re.compile(r"(.+?)(?:\.base_layer)?\.weight")
_MAX_RANK = 4096  # kMaxLoraRank of csrc/weights/lora_format.h


@dataclass(frozen=True)
class Module:
    """A module of the base model: rows [row_begin, row_begin + rows) of the decoder's tensor.
    ``order`` is the module's order of these rows, if it differs. For the embedding, rows are the
    features and columns the tokens.
    """

    name: str
    tensor: str
    row_begin: int
    rows: int
    cols: int
    order: NDArray[np.intp] | None = None

    @property
    def is_output(self) -> bool:
        return self.tensor in (_EMBEDDING, _LM_HEAD)


@dataclass(frozen=True)
class AdapterPair:
    """The adapter's change to one module: ``scale`` * b * (a * x)."""

    module: Module
    rank: int
    scale: float
    a: TensorEntry
    b: TensorEntry

    def read(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """float32: a [rank, cols], for the embedding [cols, rank]; b [rows, rank], scaled."""
        with self.a.open() as values:
            a = _finite(as_float32(values, self.a.dtype), self.a)
        with self.b.open() as values:
            scaled = as_float32(values, self.b.dtype).astype(np.float64) * self.scale
            with np.errstate(over="ignore"):
                b = _finite(scaled.astype(np.float32), self.b)
        if self.module.order is not None:
            b = b[self.module.order]
        return np.ascontiguousarray(a.T if self.module.tensor == _EMBEDDING else a), b


def _finite(values: NDArray[Any], entry: TensorEntry) -> NDArray[Any]:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{entry.where} holds values that are not finite, scale included")
    return values


def _unexplained(entry: TensorEntry, why: str) -> UnexplainedTensorError:
    return UnexplainedTensorError(f"{entry.where}: {why}")


class LoraAdapter:
    """The adapter in ``directory`` for the model ``base``.

    ``base`` is the model's loader, or its serialised DecoderSpec, which has all names and shapes
    but no weights to compare copies with.
    """

    def __init__(self, directory: str | Path, base: LLM | bytes) -> None:
        self.directory = Path(directory).expanduser()
        self.config = PeftConfig.read(self.directory)
        spec = base if isinstance(base, bytes) else base.decoder_spec().SerializeToString()
        self._spec = message_class("DecoderSpec").FromString(spec)
        self._base = base
        tensors = Checkpoint.open_adapter(self.directory).tensors
        self._modules = _modules(self._spec)  # by the names in the adapter's keys
        if not any(key.removeprefix(_PREFIX).startswith("model.") for key in tensors):
            # An adapter of the model without its head: PEFT has shorter names for the modules.
            short = {name.removeprefix("model."): it for name, it in self._modules.items()}
            self._modules = short
        self.pairs = self._resolve(tensors)

    def serialize_to_memory(self) -> Any:
        """The adapter as an image that ``Engine.load_lora`` takes."""
        return self._write("")

    def serialize_to_path(self, path: str | Path) -> Path:
        """Writes the adapter as one file; the engine looks for ``<lora_name>.aslora``."""
        self._write(str(path))
        return Path(path)

    def _write(self, path: str) -> Any:
        build = message_class("BuildRecord")(
            version=package_version(), source=self.directory.resolve().name
        )
        writer = native().LoraWriter(build.SerializeToString(), path)
        for pair in self.pairs:
            writer.add_pair(pair.module.tensor, pair.module.row_begin, *pair.read())
        return writer.finish()

    # Parsing tensor names.

    def _resolve(self, tensors: Mapping[str, TensorEntry]) -> list[AdapterPair]:
        found: dict[str, dict[str, TensorEntry]] = {}
        adapter_names = set()
        for entry in tensors.values():
            name, kind, adapter_name = self._parse(entry)
            if kind == "weight":
                self._check_copy(entry, self._modules[name])
                continue
            if self._targets(name) is False:
                raise _unexplained(entry, f"{self.config.source} does not target {name!r}")
            adapter_names.add(adapter_name)
            other = found.setdefault(name, {}).setdefault(kind, entry)
            if other is not entry and len(adapter_names) == 1:
                raise _unexplained(entry, f"is the same as {other.name!r}")
        if len(adapter_names) > 1:
            names = ", ".join(sorted(repr(name) for name in adapter_names))
            raise UnexplainedTensorError(f"{self.directory}: holds several adapters: {names}")
        if not found:
            raise UnexplainedTensorError(f"{self.directory}: holds no adapter (lora_A and lora_B)")
        self._check_complete(found)
        return [self._pair(name, found[name]) for name in self._modules if name in found]

    def _parse(self, entry: TensorEntry) -> tuple[str, str, str | None]:
        """The module that a tensor belongs to; its part ("A", "B", or its own "weight"); and the
        adapter's name, if the key has one.
        """
        key = entry.name.removeprefix(_PREFIX)
        matrix, embedding = _MATRIX.fullmatch(key), _EMBEDDING_MATRIX.fullmatch(key)
        match = matrix or embedding or _WEIGHT.fullmatch(key)
        if match is None:
            raise _unexplained(entry, "no part of a LoRA adapter that is supported")
        name = match.group(1)
        module = self._modules.get(name)
        if module is None:
            raise _unexplained(
                entry, f"{self._spec.architecture} has no matrix {name!r} that takes adapters"
            )
        if match not in (matrix, embedding):
            return name, "weight", None
        if (module.tensor == _EMBEDDING) != (match is embedding):
            raise _unexplained(entry, f"the adapter of {name!r} must have other tensors")
        return name, match.group(2), match.group(3)

    def _targets(self, name: str) -> bool | None:
        return self.config.targets(name, self._modules[name].is_output)

    def _check_complete(self, found: Mapping[str, Mapping[str, TensorEntry]]) -> None:
        for entries in found.values():
            if len(entries) == 1:
                ((kind, entry),) = entries.items()
                raise _unexplained(entry, f"there is no {'B' if kind == 'A' else 'A'} to it")
        absent = [name for name in self._modules if name not in found and self._targets(name)]
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            notice(
                f"{self.directory}: no tensors for {absent[0]!r}{more}, which the configuration "
                "targets: they stay the base model's"
            )
        ends = {self._modules[name].tensor for name in found if self._modules[name].is_output}
        if self.config.weight_tying and self._spec.tie_embeddings and len(ends) == 1:
            raise UnexplainedTensorError(
                f"{self.config.source}: ensure_weight_tying is True, but there are tensors for "
                f"{ends.pop()} alone"
            )

    def _pair(self, name: str, entries: Mapping[str, TensorEntry]) -> AdapterPair:
        module, a, b = self._modules[name], entries["A"], entries["B"]
        for entry in (a, b):
            if entry.dtype not in FLOATS:
                raise UnexplainedTensorError(
                    f"{entry.where} has dtype {entry.dtype}, expected {', '.join(FLOATS)}"
                )
        rank = a.shape[0] if a.shape else 0
        for entry, shape in ((a, (rank, module.cols)), (b, (module.rows, rank))):
            if entry.shape != shape or rank == 0:
                raise UnexplainedTensorError(
                    f"{entry.where} has shape {list(entry.shape)}, expected "
                    f"{['rank', module.cols] if entry is a else list(shape)} for {name!r}"
                )
        if rank > _MAX_RANK:
            raise UnexplainedTensorError(
                f"{a.where} has rank {rank}; it must be at most {_MAX_RANK}"
            )
        return AdapterPair(module, rank, self.config.scale(name, rank), a, b)

    # Copies of base model weights, which PEFT saves with adapters of embedding and lm_head.

    def _check_copy(self, entry: TensorEntry, module: Module) -> None:
        original = None if isinstance(self._base, bytes) else self._original(module)
        if original is None:
            raise _unexplained(
                entry,
                "a whole weight, which may be the base model's own; to compare them, the adapter "
                "must be opened with the loader of the base model's checkpoint",
            )
        if entry.shape != original.shape:
            raise _unexplained(
                entry,
                f"a whole weight of shape {list(entry.shape)}, the base model's has "
                f"{list(original.shape)}; changed vocabularies are not supported",
            )
        if entry.dtype not in FLOATS or not same_values(entry, original):
            raise _unexplained(
                entry,
                "a whole weight that differs from the base model's; only adapters are supported",
            )

    def _original(self, module: Module) -> TensorEntry | None:
        assert not isinstance(self._base, bytes)
        tensors = self._base.checkpoint_tensors()
        if tensors is None:
            return None
        tensors = find_architecture(self._spec.architecture).full_names(tensors)
        entry = tensors.get(f"{module.name}.weight")
        if entry is None and module.tensor == _LM_HEAD:  # A tied embedding.
            embedding = next(m for m in self._modules.values() if m.tensor == _EMBEDDING)
            entry = tensors.get(f"{embedding.name}.weight")
        return entry


def _modules(spec: Any) -> dict[str, Module]:
    """The modules of a decoder that an adapter may change, by the checkpoint's names."""
    weights = {tensor.name: tensor for tensor in required_of(spec) if tensor.modules}
    if spec.tie_embeddings:
        embedding = weights[_EMBEDDING]
        weights[_LM_HEAD] = embedding._replace(modules=embedding.shape[:1])
    modules = {}
    architecture = find_architecture(spec.architecture)
    for rule in expand(architecture.weights, spec.num_layers):
        tensor, names, weight = rule.target, rule.modules, weights.get(rule.target)
        if weight is None:
            continue  # It takes no adapters, or is not in this model.
        shape = weight.shape
        if rule.transform is not None:
            continue  # The change of a computed weight is not a product of two matrices.
        if tensor == _EMBEDDING:
            modules[names[0]] = Module(names[0], tensor, 0, shape[1], shape[0])
            continue
        begin, order = 0, None if rule.order is None else rule.order(spec)
        sizes = rule.rows(spec) if rule.rows else _source_rows(weight, len(names))
        if sum(sizes) != shape[0] or 0 in sizes:
            continue  # The rule of another model's layout.
        for name, size in zip(names, sizes, strict=True):
            modules[name] = Module(name, tensor, begin, size, shape[1], order)
            begin += size
    return modules


def _source_rows(weight: RequiredTensor, num_sources: int) -> list[int]:
    """The rows of each source of a weight: of its modules, or all of them of a single source."""
    ends = weight.modules if num_sources > 1 else weight.modules[-1:]
    return [end - begin for begin, end in pairwise((0, *ends))]


def open_adapters(
    lora_cfg: dict[str, Any] | None, base: LLM
) -> tuple[dict[str, LoraAdapter], bool]:
    """Reads ``lora_cfg`` of the serialize methods. Returns the adapters by name, and whether only
    they are to be written.

    Its keys: ``input_base_dir``, with a directory for each of ``lora_names``; ``lora_only``.
    """
    if not lora_cfg:
        return {}, False
    unknown = lora_cfg.keys() - {"input_base_dir", "lora_names", "lora_only"}
    if unknown:
        raise ValueError(
            f"lora_cfg has the keys {sorted(unknown)}; known are input_base_dir, lora_names, "
            "lora_only"
        )
    folder, names = lora_cfg.get("input_base_dir"), lora_cfg.get("lora_names")
    if not isinstance(folder, (str, Path)):
        raise ValueError(f"lora_cfg has input_base_dir {folder!r}, expected a directory")
    if not isinstance(names, (list, tuple)) or not names:
        raise ValueError(f"lora_cfg has lora_names {names!r}, expected a list of names")
    for name in names:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise ValueError(f"lora_cfg has the name {name!r}, expected the name of a directory")
    adapters = {name: LoraAdapter(Path(folder) / name, base) for name in names}
    return adapters, bool(lora_cfg.get("lora_only", False))
