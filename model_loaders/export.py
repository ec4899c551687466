"""A serialised model's directory: the files beside the model's two, and whether all are current."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import ModelConfig
from .convert import Plan
from .errors import CheckpointError, ModelSerializerException
from .spec import message_class
from .storage import file_size
from .tokenizer import TOKENIZER_FILES

COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)

GRAPH_MAGIC = b"ASGRAPH\0"
_GRAPH_HEADER_BYTES = 16
_GRAPH_CHECKSUM_BYTES = 8
_MAX_GRAPH_BYTES = 16 << 20


def read_graph(path: Path) -> Any:
    """The ModelFile message of ``NAME.asgraph``. Its checksum is not checked here; the engine
    checks both files.
    """
    size = file_size(path)
    if not _GRAPH_HEADER_BYTES + _GRAPH_CHECKSUM_BYTES <= size <= _MAX_GRAPH_BYTES:
        raise CheckpointError(f"{path}: {size} bytes, not a serialised model")
    data = path.read_bytes()
    if data[:8] != GRAPH_MAGIC:
        raise CheckpointError(f"{path}: offset 0: not a serialised model (wrong magic)")
    try:
        return message_class("ModelFile").FromString(
            data[_GRAPH_HEADER_BYTES:-_GRAPH_CHECKSUM_BYTES]
        )
    except Exception as error:  # protobuf's DecodeError has no stable import path
        raise CheckpointError(f"{path}: offset {_GRAPH_HEADER_BYTES}: damaged: {error}") from None


def is_current(plan: Plan, graph: Path, param: Path, engine: Any) -> bool:
    """Whether the files contain what ``plan`` would write: same decoder, same checkpoint,
    undamaged.
    """
    try:
        file = read_graph(graph)
        if file.spec != plan.spec or dict(file.build.options) != dict(plan.build.options):
            return False
        if file_size(param) != file.param_bytes:
            return False
    except ModelSerializerException:
        return False
    return engine_accepts(graph, param, engine)


def engine_accepts(graph: Path, param: Path, engine: Any = None) -> bool:
    """Whether an engine opens the files; it checks all checksums."""
    from allspark.engine import Engine, TargetDevice
    from allspark.runtime_config import AsModelRuntimeConfigBuilder

    if engine is None:
        engine = Engine()
    name = f"check:{graph}:{os.getpid()}"
    builder = AsModelRuntimeConfigBuilder()
    builder.model_name(name)
    builder.model_file_path(str(graph), str(param))
    builder.compute_unit(TargetDevice.CPU, [0])
    builder.max_length(16)
    builder.max_batch(1)
    if int(engine.install_model(builder.build())) != 0:
        return False
    engine.release_model(name)
    return True


def copy_companions(
    source: Path, target: Path, config: ModelConfig, graph: Path, made: Mapping[str, str]
) -> None:
    """Copies tokenizer and configuration from ``source``, so that ``target`` is a complete model. A
    ``config`` that is in no file is written, and so are the files in ``made``.

    Refuses to replace the files of another model in ``target``.
    """
    others = [path.name for path in target.glob("*.asgraph") if path.name != graph.name]
    for name in COMPANIONS:
        begin, end = source / name, target / name
        if begin.is_file() and end.exists() and begin.samefile(end):
            continue
        if name in made:
            data = made[name].encode()
        elif begin.is_file():
            data = begin.read_bytes()
        elif name == "config.json":
            data = json.dumps(dict(config), indent=2).encode()
        else:
            continue
        if end.exists() and end.read_bytes() == data:
            continue
        if end.exists() and others:
            raise ModelSerializerException(
                f"{end}: belongs to another model ({', '.join(sorted(others))}) and differs; "
                "serialise each model to a directory of its own"
            )
        _write(data, end)


def _write(data: bytes, end: Path) -> None:
    """Writes a file atomically: a reader of ``end`` sees the old file or the new one."""
    partial = end.with_name(f".{end.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(data)
        os.replace(partial, end)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
