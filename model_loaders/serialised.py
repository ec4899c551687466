"""A serialised model's directory: reads its graph, and keeps the files beside the model's two."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspark.whole_file import temporary_file

from .companion_files import companion_names
from .config import ModelConfig
from .convert import Plan
from .errors import CheckpointError, ModelSerializerException
from .files import MAX_COMPANION_BYTES, check_file, file_size, read_file
from .notices import notice
from .spec import message_class
from .tokenizer import needs_code

GRAPH_MAGIC = b"ASGRAPH\0"
_GRAPH_HEADER_BYTES = 16
_GRAPH_CHECKSUM_BYTES = 8
_MAX_GRAPH_BYTES = 16 << 20

# What `allspark lite calibrate` writes: no weights, whatever its name ends in.
INPUT_RANGES = "inputs_stats.safetensors"
_WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "consolidated*.pth",
    "*.gguf",
)  # fmt: skip


def weight_files(directory: Path) -> list[str]:
    """The names of the files of checkpoints in a directory: loaders could take any for its
    model's."""
    found = (path.name for pattern in _WEIGHTS for path in sorted(directory.glob(pattern)))
    return [name for name in found if name != INPUT_RANGES]


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


@dataclass(frozen=True)
class Companions:
    """Tokenizer and configuration of ``source``, with which ``target`` is a complete model;
    ``with_code`` the Python files of both, too. A ``config`` that is in no file is one of them, and
    so are the files in ``made``.
    """

    source: Path
    target: Path
    config: ModelConfig
    graph: Path
    made: Mapping[str, str]
    with_code: bool = False

    def check(self) -> None:
        """Refuses to replace the files of another model in ``target``."""
        for _ in self._contents():
            pass

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Before the body of the ``with`` they are written to temporary files, which get their
        names after it. If either fails, ``target`` is as it was. Refuses what ``check`` refuses.
        """
        if not self.with_code and needs_code(self.source):
            notice(
                f"{self.source}: the tokenizer is code, which is copied only with trust_remote_code"
            )
        with contextlib.ExitStack() as stack:
            staged = []
            for data, end in self._contents():
                try:
                    file = stack.enter_context(temporary_file(self.target, end.name))
                    file.write(data)
                    file.flush()
                except OSError as error:
                    raise CheckpointError(f"{end}: cannot be written: {error.strerror}") from error
                staged.append((file.name, end))
            yield
            for partial, end in staged:
                end.parent.mkdir(exist_ok=True)
                os.replace(partial, end)

    def _contents(self) -> Iterator[tuple[bytes, Path]]:
        """The files that differ from what is there."""
        others = [
            path.name for path in self.target.glob("*.asgraph") if path.name != self.graph.name
        ]
        if self.target.resolve() != self.source.resolve():
            others += weight_files(self.target)
        for name in companion_names(self.source, self.config, self.with_code):
            begin, end = self.source / name, self.target / name
            if begin.is_file() and end.exists() and begin.samefile(end):
                continue
            if name in self.made:
                data = self.made[name].encode()
            elif os.path.lexists(begin):
                check_file(begin, MAX_COMPANION_BYTES)
                data = read_file(begin, MAX_COMPANION_BYTES)
            elif name == "config.json":
                data = json.dumps(dict(self.config), indent=2).encode()
            else:
                continue
            if end.exists() and end.read_bytes() == data:
                continue
            if end.exists() and others:
                raise ModelSerializerException(
                    f"{end}: belongs to another model ({', '.join(sorted(others))}) and differs; "
                    "serialise each model to a directory of its own"
                )
            yield data, end
