"""Reads a model's ``config.json``, and returns its fields after checking them.

The file itself is read, not transformers' configuration class: fields moved between transformers 4
and 5 (``rope_theta`` into ``rope_parameters``), and a checkpoint may have either form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    ConfigFieldMissingError,
    UnsupportedModelError,
)
from .files import check_no_pointer, read_file

# Far more than any configuration has; a larger file is not a configuration.
MAX_JSON_BYTES = 64 << 20

_UNSET = object()


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in ``path``; errors name the file and say that it should be ``what``."""
    try:
        value = json.loads(read_file(path, MAX_JSON_BYTES).decode("utf-8"))
    except CheckpointError as error:
        raise ConfigError(f"{error}, so not {what}") from None
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path}: no such file ({what})") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply, so not {what}") from None
    except ValueError as error:  # Also for a number with more digits than Python reads.
        check_no_pointer(path)
        raise ConfigError(f"{path}: not valid JSON ({what}): {error}") from None
    except OSError as error:  # a symlink loop, no permission, a directory
        raise CheckpointNotFoundError(f"{path}: cannot be read ({what}): {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, expected an object ({what})")
    return value


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer too large for a float.
        return False


class ModelConfig(Mapping[str, Any]):
    """The fields of one ``config.json``; ``source`` is its name in messages."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        source: str = "config.json",
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._fields = dict(fields)
        self.source = source
        self._names = dict(names or {})

    def with_names(self, **names: str) -> ModelConfig:
        """The same fields under more names: ``hidden_size="n_embd"`` makes ``hidden_size`` read
        ``n_embd``, and messages speak of ``n_embd``.
        """
        fields = {name: self._fields[own] for name, own in names.items() if own in self._fields}
        return ModelConfig({**self._fields, **fields}, self.source, {**self._names, **names})

    def with_fields(self, **fields: Any) -> ModelConfig:
        return ModelConfig({**self._fields, **fields}, self.source, self._names)

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        path = directory / "config.json"
        return cls(read_json_object(path, "a model configuration"), str(path))

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def own_name(self, field: str) -> str:
        """The name of ``field`` in the file."""
        return self._names.get(field, field)

    def error(self, field: str, message: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.own_name(field)} {message}")

    def refuse(self, field: str, supported: Any) -> UnsupportedModelError:
        """The error for a field whose value changes the model in a way that is not served."""
        value = self._fields.get(field)
        message = f"{self.source}: {self.own_name(field)} is {value!r}, supported: {supported}"
        return UnsupportedModelError(message)

    def _value(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is not None:
            return value
        if default is _UNSET:
            own = self.own_name(name)
            raise ConfigFieldMissingError(f"{self.source}: the field {own!r} is missing")
        return default

    def integer(
        self, name: str, default: Any = _UNSET, minimum: int = 1, maximum: int = 1 << 31
    ) -> int:
        """An integer field within [minimum, maximum]; null counts as absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"is {value!r}, expected an integer")
        if not minimum <= value <= maximum:
            raise self.error(name, f"is {value}, expected {minimum} to {maximum}")
        return value

    def number(self, name: str, default: Any = _UNSET, above: float = 0.0) -> float:
        """A finite number greater than ``above``; null counts as absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"is {value!r}, expected a number")
        if not _is_finite(value) or value <= above:
            raise self.error(name, f"is {value}, expected a finite number above {above}")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """A list of ``count`` finite numbers above 0."""
        values = self._value(name, _UNSET)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(name, f"is not a list of {count} numbers")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self.error(name, f"has {value!r}, expected a number")
            if not _is_finite(value) or value <= 0:
                raise self.error(name, f"has {value}, expected a finite number above 0")
        return [float(value) for value in values]

    def flag(self, name: str, default: Any = _UNSET) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}, expected true or false")
        return value

    def text(self, name: str, default: Any = _UNSET) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"is {value!r}, expected a string")
        return value

    def section(self, name: str) -> ModelConfig | None:
        """An object field as a configuration of its own; None where absent or null."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r}, expected an object")
        return ModelConfig(value, f"{self.source}: {name}")

    def part(self, name: str) -> ModelConfig:
        """As section, but without fields where it is absent."""
        return self.section(name) or ModelConfig({}, f"{self.source}: {name}")

    def architecture(self) -> str:
        names = self._value("architectures", _UNSET)
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self.error("architectures", f"is {names!r}, expected a list of class names")
        if len(names) > 1:
            raise self.error("architectures", f"names several: {names}")
        return names[0]
