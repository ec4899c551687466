"""Opens the weights of a Hugging Face directory: one file or shards, safetensors or ``.bin``.

Opening reads and checks only the headers; a tensor is read when TensorEntry.open is called, one at
a time.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import read_json_object
from .errors import CheckpointError, CheckpointNotFoundError
from .safetensors_file import read_safetensors
from .storage import TensorEntry


class LoadFormat(str, enum.Enum):
    """Which files of a checkpoint to read."""

    AUTO = "auto"  # safetensors if there are any, else .bin
    PT = "pt"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True)
class _Layout:
    single: str
    index: str
    read: Callable[[Path], list[TensorEntry]]


def _read_pickle(path: Path) -> list[TensorEntry]:
    from .pickle_file import read_pickle  # Rarely needed, and its imports are slow.

    return read_pickle(path)


_SAFETENSORS = _Layout("model.safetensors", "model.safetensors.index.json", read_safetensors)
_PICKLE = _Layout("pytorch_model.bin", "pytorch_model.bin.index.json", _read_pickle)
_ADAPTER_LAYOUTS = tuple(
    _Layout(f"adapter_model{ending}", f"adapter_model{ending}.index.json", layout.read)
    for ending, layout in ((".safetensors", _SAFETENSORS), (".bin", _PICKLE))
)
_LAYOUTS = {
    LoadFormat.AUTO: (_SAFETENSORS, _PICKLE),
    LoadFormat.SAFETENSORS: (_SAFETENSORS,),
    LoadFormat.PT: (_PICKLE,),
}


class Checkpoint:
    """The tensors of a checkpoint by name. Only files that have been read from are mapped."""

    def __init__(
        self,
        directory: Path,
        files: list[Path],
        tensors: Mapping[str, TensorEntry],
        quant_method: str | None = None,
    ) -> None:
        self.directory = directory
        self.files = files
        self.tensors = tensors
        # How its weights are quantised, where the files say it and not ``config.json``.
        self.quant_method = quant_method

    @classmethod
    def open(cls, directory: Path, load_format: LoadFormat | str = LoadFormat.AUTO) -> Checkpoint:
        """Errors (CheckpointError, a ValueError) name the file and the tensor."""
        return cls._open(directory, _LAYOUTS[LoadFormat(load_format)])

    @classmethod
    def open_adapter(cls, directory: Path) -> Checkpoint:
        """Opens the weights of an adapter in PEFT's layout; errors as for open."""
        return cls._open(directory, _ADAPTER_LAYOUTS)

    @classmethod
    def _open(cls, directory: Path, layouts: Sequence[_Layout]) -> Checkpoint:
        wanted = []
        for layout in layouts:
            for name in (layout.single, layout.index):
                path = directory / name
                # A broken link counts too: opening it gives the right error message.
                if path.is_symlink() or path.exists():
                    if name == layout.single:
                        return cls(directory, [path], _collect([path], layout))
                    return cls._open_shards(directory, path, layout)
                wanted.append(name)
        raise CheckpointNotFoundError(
            f"{directory}: holds no weights; looked for {', '.join(wanted)}{_others(directory)}"
        )

    @classmethod
    def _open_shards(cls, directory: Path, index: Path, layout: _Layout) -> Checkpoint:
        weight_map = read_json_object(index, "an index of weight files").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or not an object")
        for name, shard in weight_map.items():
            if not _is_file_name(shard):
                raise CheckpointError(
                    f"{index}: tensor {name!r} lies in {shard!r}, expected the name of a file"
                )
        files = [directory / shard for shard in sorted(set(weight_map.values()))]
        tensors = _collect(files, layout)
        for name, shard in weight_map.items():
            if name not in tensors:
                raise CheckpointError(
                    f"{directory / shard}: tensor {name!r} is missing, {index.name} lists it there"
                )
            if tensors[name].file.path.name != shard:
                raise CheckpointError(
                    f"{tensors[name].where} should lie in {shard!r} according to {index.name}"
                )
        return cls(directory, files, tensors)


def _is_file_name(value: Any) -> bool:
    """Whether a file of a directory can have the name; half a surrogate pair has no bytes."""
    if not isinstance(value, str) or value in ("", ".", "..") or Path(value).name != value:
        return False
    return re.search("[\0\ud800-\udfff]", value) is None


# Other files of saved weights, by the end of the file's name.
_SAVED = "a file of torch.save; if it is the model's state dict, name it pytorch_model.bin"
_OTHERS = {
    ".pt": _SAVED,
    ".pth": _SAVED,
    ".ckpt": _SAVED,
    ".npz": "a file of NumPy arrays, as early versions of MLX wrote; save it as safetensors",
    ".h5": "a file of TensorFlow's weights, which is not read",
    ".msgpack": "a file of Flax's weights, which is not read",
    ".onnx": "an ONNX graph, which is not read",
}


def _others(directory: Path) -> str:
    """What ``directory`` has instead of weights, as the end of a message."""
    for path in sorted(directory.iterdir()):
        if path.suffix in _OTHERS:
            return f"; {path.name} is {_OTHERS[path.suffix]}"
    return ""


def _collect(files: list[Path], layout: _Layout) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for path in files:
        for entry in layout.read(path):
            if entry.name in tensors:
                raise CheckpointError(f"{entry.where} is also in {tensors[entry.name].file.path}")
            tensors[entry.name] = entry
    return tensors
