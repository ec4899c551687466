"""LoraSources: where the adapters of an engine's models are found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allspark._allspark import AsModelConfig, AsStatus, LoraImage
from allspark.error_text import wrong_type


class LoraSources:
    """The adapters that were serialised with the models, in memory or beside their files."""

    def __init__(self) -> None:
        # By installed model: the folder of its weights; None for one in memory.
        self._folders: dict[str, Path | None] = {}
        self._images: dict[tuple[str, str], LoraImage] = {}  # by model and adapter

    def add(self, model_name: str, lora_name: str, image: LoraImage) -> None:
        """Keeps an adapter that was serialised in memory."""
        self._images[model_name, lora_name] = image

    def find(
        self, model_name: str, lora_name: str, lora: Any, model_spec: Callable[[str], bytes]
    ) -> str | LoraImage:
        """The file path or the image that the native call takes."""
        if lora is None:
            image = self._images.get((model_name, lora_name))
            if image is not None:
                return image
            folder = self._folders.get(model_name)
            if folder is None:
                raise ValueError(
                    f"lora is None, and no adapter {lora_name!r} was serialised with the model "
                    f"{model_name!r}; name its file or its directory"
                )
            if os.path.basename(lora_name) != lora_name:
                raise ValueError(
                    f"lora is None and lora_name is {lora_name!r}, which is not the name of a file "
                    f"in {folder}; name the adapter's file or directory"
                )
            return str(folder / f"{lora_name}.aslora")
        if isinstance(lora, LoraImage):
            return lora
        if isinstance(lora, (str, os.PathLike)):
            if not os.path.isdir(lora):
                return os.fspath(lora)
            from allspark import LoraAdapter  # by the package's name: the loaders are a layer above

            lora = LoraAdapter(os.fspath(lora), model_spec(model_name))
        if not hasattr(lora, "serialize_to_memory"):
            raise wrong_type("lora", lora, "a path, a LoraAdapter, a LoraImage or None")
        return lora.serialize_to_memory()

    def forget(self, model_name: str) -> None:
        """Drops the adapters that were serialised with a model, when it is released. Its loader has
        added them under its own names, too; they stay where a model of such a name is installed.
        """
        self._folders.pop(model_name, None)
        images = list(self._images.items())
        dropped = {image for (name, _), image in images if name == model_name}
        for key, image in images:
            if image in dropped and key[0] not in self._folders:
                self._images.pop(key, None)

    def note_folder(self, config: AsModelConfig) -> None:
        """Remembers an installed model, and the folder in which its adapters are searched if it is
        one of files."""
        path = config.weights_path
        self._folders[config.model_name] = Path(path).parent if path else None


def to_status(error: Exception) -> tuple[AsStatus, str]:
    """The status and the message for an exception of `find`."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    is_io = isinstance(error, OSError)
    code = AsStatus.ALLSPARK_IO_ERROR if is_io else AsStatus.ALLSPARK_PARAM_ERROR
    # An exception of a loader has the status that it stands for.
    return AsStatus(getattr(error, "code", code)), str(message)
