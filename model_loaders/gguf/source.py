"""Gives the declarations of GGUF architectures access to a file's metadata."""

from __future__ import annotations

import math
from typing import Any

from ..config import ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..storage import as_float32
from .blocks import tensor_entry
from .file import GgufFile, GgufTensor

_MAX_FACTORS = 1 << 15  # one for each pair of a head's dimensions

# Keys that do not matter to a decoder.
_IDLE = ("tensor_data_layout", "rope.scaling.finetuned", "vocab_size", "attention.scale_type")


class Source:
    """The metadata under the prefix of a model's architecture. It records which keys were read; the
    others are unknown to this loader.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.path = file.paths[0]
        self.config = ModelConfig(file.metadata, str(self.path))
        self.kind = self.config.text("general.architecture")
        self._asked = {self._key(key) for key in _IDLE}

    def _key(self, key: str) -> str:
        return f"{self.kind}.{key}"

    def _ask(self, key: str) -> str:
        self._asked.add(self._key(key))
        return self._key(key)

    def integer(self, key: str, *default: Any) -> int:
        return self.config.integer(self._ask(key), *default)

    def number(self, key: str, *default: Any) -> float:
        return self.config.number(self._ask(key), *default)

    def text(self, key: str, *default: Any) -> str:
        return self.config.text(self._ask(key), *default)

    def flag(self, key: str, *default: Any) -> bool:
        return self.config.flag(self._ask(key), *default)

    def has(self, key: str) -> bool:
        return self._key(key) in self.config

    def ignore(self, key: str) -> None:
        self._ask(key)

    def require(self, key: str, *values: Any) -> None:
        """Refuses a key that is present with a value other than ``values``."""
        if self.config.get(self._ask(key), values[0]) not in values:
            raise self.config.refuse(self._key(key), ", ".join(map(str, values)))

    def check_all_asked(self) -> None:
        for key, value in self.config.items():
            if key.startswith(self._key("")) and key not in self._asked:
                raise UnsupportedModelError(
                    f"{self.path}: the key {key!r} ({str(value)[:80]}) is not known for this "
                    "architecture"
                )

    def tensor(self, name: str) -> GgufTensor | None:
        return self.file.tensors.get(name)

    def factors(self, name: str) -> list[float] | None:
        tensor = self.tensor(name)
        if tensor is None:
            return None
        entry = tensor_entry(tensor)
        count = math.prod(entry.shape)
        if count > _MAX_FACTORS:
            raise CheckpointError(
                f"{entry.where} has {count} elements; it must have at most {_MAX_FACTORS}"
            )
        with entry.open() as array:
            return [float(value) for value in as_float32(array, entry.dtype).ravel()]
