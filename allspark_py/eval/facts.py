"""What a model is whose figures are reported: its files, its weights and their bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspark.batch.digests import model_files
from allspark.model_loader import LLM
from allspark.model_loader.convert import data_type_of
from allspark.model_loader.native import required_of
from allspark.model_loader.quantization import weight_formats
from allspark.pipeline.model_source import sha256_of
from allspark.pipeline.served_model import ServedModel


@dataclass(frozen=True)
class ModelFacts:
    """A model as it runs."""

    source: str
    sha256: str  # of the file; of several, of their digests and names as sha256sum prints them
    architecture: str
    compute_type: str  # a data type
    weights: list[str]  # the formats of weights that are quantised; none: in the compute type
    kv_cache: str
    num_weights: int  # a weight of embedding and head that is one counts once
    weight_bytes: int
    bits_per_weight: float
    model_digest: str  # the engine's, of what it computes with
    adapter: str | None


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint whose weights are read, but which does not run."""

    source: str
    sha256: str  # as that of ModelFacts
    architecture: str


def checkpoint_facts(loader: LLM) -> CheckpointFacts:
    """Reads the checkpoint's files, for their digest."""
    return CheckpointFacts(
        source=loader.pretrain_model_name_or_path,
        sha256=digest_of(model_files(loader)),
        architecture=loader.decoder_spec().architecture,
    )


def facts_of(model: ServedModel, adapter: str | None = None) -> ModelFacts:
    """Reads the model's files, for their digest."""
    info = model.engine.get_as_model_info(model.name)
    spec = type(model.loader.decoder_spec()).FromString(model.engine._native.model_spec(model.name))
    num_weights = _num_weights(spec)
    return ModelFacts(
        source=model.loader.pretrain_model_name_or_path,
        sha256=digest_of(model_files(model.loader)),
        architecture=info.architecture,
        compute_type=data_type_of(spec),
        weights=weight_formats(spec),
        kv_cache=info.cache_mode.name,
        num_weights=num_weights,
        weight_bytes=info.weight_bytes,
        bits_per_weight=8 * info.weight_bytes / num_weights,
        model_digest=info.model_digest,
        adapter=adapter,
    )


def digest_of(files: Iterable[Path]) -> str:
    """The sha256 of a file. Of several, that of the lines that `sha256sum` prints for them in the
    order of their names, from within their folder."""
    found = [(path.name, sha256_of(path)) for path in sorted(files)]
    if len(found) == 1:
        return found[0][1]
    lines = "".join(f"{digest}  {name}\n" for name, digest in found)
    return hashlib.sha256(lines.encode()).hexdigest()


def _num_weights(spec: Any) -> int:
    """How many numbers the model has, whatever they are stored as."""
    plain = type(spec)()
    plain.CopyFrom(spec)
    plain.ClearField("weight_quant")
    return sum(math.prod(tensor.shape) for tensor in required_of(plain))
