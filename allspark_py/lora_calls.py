"""Engine's calls for LoRA adapters: load, unload and list them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allspark._allspark import AsModelConfig, AsStatus, LoraImage
from allspark.engine_calls import EngineCalls

if TYPE_CHECKING:
    from allspark import LoraAdapter


class LoraCalls(EngineCalls):
    """The part of Engine that handles adapters."""

    def __init__(self) -> None:
        super().__init__()
        self._lora_folders: dict[str, Path] = {}  # by model: the folder of its weights
        self._lora_images: dict[tuple[str, str], LoraImage] = {}  # by model and adapter

    def register_lora(self, model_name: str, lora_name: str, image: LoraImage) -> AsStatus:
        """Makes an adapter serialised in memory known to load_lora; loaders call this."""
        self._lora_images[model_name, lora_name] = image
        return AsStatus.ALLSPARK_SUCCESS

    def load_lora(
        self,
        model_name: str,
        lora_name: str,
        lora: str | os.PathLike[str] | LoraAdapter | LoraImage | None = None,
    ) -> AsStatus:
        """Loads an adapter into an installed model; requests choose it by `lora_name`.

        Args:
            lora: a file `.aslora`; a directory in PEFT's layout; a `model_loader.LoraAdapter`; or
                an image of one. None: the adapter that was serialised with the model, in memory or
                as <lora_name>.aslora beside its .asparam.
        """
        try:
            source = self._lora_source(model_name, lora_name, lora)
        except (OSError, RuntimeError, ValueError, KeyError, NotImplementedError) as error:
            message = error.args[0] if isinstance(error, KeyError) and error.args else error
            code = AsStatus.ALLSPARK_PARAM_ERROR
            if isinstance(error, OSError):
                code = AsStatus.ALLSPARK_IO_ERROR
            # An exception of a loader has the status that it stands for.
            return self._fail(AsStatus(getattr(error, "code", code)), str(message))
        return self._result(self._native.load_lora(model_name, lora_name, source))

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Frees an adapter; ALLSPARK_LORA_IN_USE while a request uses it."""
        return self._result(self._native.unload_lora(model_name, lora_name))

    def list_loras(self, model_name: str) -> list[str]:
        """The adapters that are loaded. Raises KeyError for a model that is not installed."""
        return self._native.list_loras(model_name)

    def _lora_source(self, model_name: str, lora_name: str, lora: Any) -> str | LoraImage:
        """The file path or the image that the native call takes."""
        if lora is None:
            image = self._lora_images.get((model_name, lora_name))
            if image is not None:
                return image
            folder = self._lora_folders.get(model_name)
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

            lora = LoraAdapter(os.fspath(lora), self._native.model_spec(model_name))
        if not hasattr(lora, "serialize_to_memory"):
            raise TypeError(
                f"lora is a {type(lora).__name__}; it must be a path, a LoraAdapter, a LoraImage "
                "or None"
            )
        return lora.serialize_to_memory()

    def _forget_loras(self, model_name: str) -> None:
        """Drops the adapters that were serialised with a model, when it is released."""
        self._lora_folders.pop(model_name, None)
        for key in list(self._lora_images):
            if key[0] == model_name:
                self._lora_images.pop(key, None)

    def _note_lora_folder(self, config: AsModelConfig) -> None:
        """Remembers the folder in which the adapters of a model installed from files are
        searched."""
        self._lora_folders.pop(config.model_name, None)
        if config.weights_path:
            self._lora_folders[config.model_name] = Path(config.weights_path).parent
