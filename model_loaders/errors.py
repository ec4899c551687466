"""The exceptions of the model loaders.

Each is also a builtin exception (``ValueError``, ``KeyError``, ...), so a caller who does not know
this package can still catch it by kind of error.
"""

from __future__ import annotations

from typing import ClassVar

# Numeric codes of AsStatus, repeated here so that importing this module does not load the native
# one.
UNKNOWN_ERROR = 1
PARAM_ERROR = 2
IO_ERROR = 3


class ModelSerializerException(RuntimeError):
    """A model could not be loaded or serialised.

    ``code`` is the number of an ``AsStatus``, by default the class's; ``model_name`` the name the
    caller gave the model.
    """

    default_code: ClassVar[int] = UNKNOWN_ERROR

    def __init__(self, message: str, code: int | None = None, model_name: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.model_name = model_name

    def __str__(self) -> str:
        return f"{self.model_name}: {self.message}" if self.model_name else self.message


class CheckpointError(ModelSerializerException, ValueError):
    """A checkpoint is damaged, or has contents that the loader does not read; names the file and
    the tensor.
    """

    default_code = IO_ERROR


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A file that the checkpoint needs does not exist."""


class UnexplainedTensorError(CheckpointError):
    """The tensors of a checkpoint and the rules of its architecture do not match; names the
    tensors.
    """

    default_code = PARAM_ERROR


class ConfigError(ModelSerializerException, ValueError):
    """A field of a model's configuration has a value that cannot be used; names the file and the
    field.
    """

    default_code = PARAM_ERROR


class ConfigFieldMissingError(ConfigError, KeyError):
    """A model's configuration lacks a field; names the file and the field."""


class UnsupportedModelError(ModelSerializerException, NotImplementedError):
    """The model is well-formed, but asks for something that the engine does not do yet."""

    default_code = PARAM_ERROR
