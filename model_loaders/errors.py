"""The exceptions of the model loaders.

Each is also a builtin exception (``ValueError``, ``KeyError``, ...), so a caller who does not know
this package can still catch it by kind of error.
"""

from __future__ import annotations

# Numeric codes of AsStatus, repeated here so that reading a checkpoint needs no native module.
UNKNOWN_ERROR = 1
PARAM_ERROR = 2
IO_ERROR = 3


class ModelSerializerException(RuntimeError):
    """A model could not be loaded or serialised.

    ``code`` is the number of an ``AsStatus``; ``model_name`` the name the caller gave the model.
    """

    def __init__(self, message: str, code: int = UNKNOWN_ERROR, model_name: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.model_name = model_name

    def __str__(self) -> str:
        return f"{self.model_name}: {self.message}" if self.model_name else self.message


class CheckpointError(ModelSerializerException, ValueError):
    """A checkpoint is damaged, or has contents that the loader does not read; names the file and
    the tensor.
    """

    def __init__(self, message: str, code: int = IO_ERROR, model_name: str = "") -> None:
        super().__init__(message, code, model_name)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A file that the checkpoint needs does not exist."""


class UnexplainedTensorError(CheckpointError):
    """The tensors of a checkpoint and the rules of its architecture do not match; names the
    tensors.
    """

    def __init__(self, message: str, code: int = PARAM_ERROR, model_name: str = "") -> None:
        super().__init__(message, code, model_name)


class ConfigError(ModelSerializerException, ValueError):
    """A field of a model's configuration has a value that cannot be used; names the file and the
    field.
    """

    def __init__(self, message: str, code: int = PARAM_ERROR, model_name: str = "") -> None:
        super().__init__(message, code, model_name)


class ConfigFieldMissingError(ConfigError, KeyError):
    """A model's configuration lacks a field; names the file and the field."""


class UnsupportedModelError(ModelSerializerException, NotImplementedError):
    """The model is well-formed, but asks for something that the engine does not do yet."""

    def __init__(self, message: str, code: int = PARAM_ERROR, model_name: str = "") -> None:
        super().__init__(message, code, model_name)
