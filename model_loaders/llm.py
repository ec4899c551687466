"""LLM: the methods that every loader has, wherever the model comes from.

A loader knows the directory of a model. It provides the model's configuration and tokenizer, and
config builders filled with the model's own values. A loader may be used by one thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ModelConfig, read_json_object
from .storage import TensorEntry
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from allspark.generation_config import ASGenerationConfigBuilder
    from allspark.runtime_config import AsModelRuntimeConfigBuilder


class LLM:
    """Base of the loaders. Methods that change the loader return it, so calls can be chained."""

    def __init__(
        self,
        pretrain_model_name_or_path: str,
        pretrain_model_name: str,
        trust_remote_code: bool = False,
    ) -> None:
        if not isinstance(pretrain_model_name, str) or not pretrain_model_name:
            raise ValueError(f"pretrain_model_name is {pretrain_model_name!r}, expected a name")
        if "\0" in pretrain_model_name + str(pretrain_model_name_or_path):
            names = f"{pretrain_model_name!r} of {str(pretrain_model_name_or_path)!r}"
            raise ValueError(f"the model {names} has a NUL character in its name or path")
        self.pretrain_model_name_or_path = str(pretrain_model_name_or_path)
        self.pretrain_model_name = pretrain_model_name
        # The name in a form that can be part of a file name.
        self.safe_model_name = pretrain_model_name.replace("/", "_")
        self.trust_remote_code = trust_remote_code
        self._config: ModelConfig | None = None
        self._tokenizer: Any = None
        # (NAME.asgraph, NAME.asparam) once the model was written to files.
        self._model_files: tuple[Path, Path] | None = None

    @property
    def directory(self) -> Path:
        """The local directory of the model."""
        raise NotImplementedError

    # Configuration.

    def read_model_config(self) -> LLM:
        """Reads ``config.json``. Errors name the file and the field."""
        self._config = ModelConfig.read(self.directory)
        return self

    def _model_config(self) -> ModelConfig:
        if self._config is None:
            self.read_model_config()
        assert self._config is not None
        return self._config

    def get_model_config(self) -> dict[str, Any]:
        """A copy of the fields of ``config.json``."""
        return copy.deepcopy(dict(self._model_config()))

    def get_model_context_length(self) -> int:
        """The longest prompt and output together, in tokens, that the model was made for."""
        return int(self.decoder_spec().max_position)

    # What the model is made of.

    def decoder_spec(self) -> Any:
        """The DecoderSpec message of the model."""
        raise NotImplementedError

    def checkpoint_tensors(self) -> Mapping[str, TensorEntry] | None:
        """The weights that the model is made from, by name; None if they are not available."""
        return None

    # Tokenizer.

    def init_tokenizer(self, padding_side: str = "left") -> LLM:
        """Loads the tokenizer; transformers is imported only here."""
        self._tokenizer = self._load_tokenizer(padding_side)
        return self

    def _load_tokenizer(self, padding_side: str) -> Any:
        return load_tokenizer(self.directory, padding_side, self.trust_remote_code)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, loaded at first use."""
        if self._tokenizer is None:
            self.init_tokenizer()
        return self._tokenizer

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    # Builders with the model's own values.

    def get_generation_config(self) -> dict[str, Any]:
        """``generation_config.json``, with fields that older checkpoints have in ``config.json``.

        A checkpoint without ``do_sample`` is greedy, as in transformers.
        """
        path = self.directory / "generation_config.json"
        fields = read_json_object(path, "a generation configuration") if path.exists() else {}
        config = self._model_config()
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if fields.get(name) is None and config.get(name) is not None:
                fields[name] = config[name]
        if fields.get("do_sample") is None:
            fields["do_sample"] = False
        return fields

    def create_reference_generation_config_builder(
        self, runtime_cfg: Any = None
    ) -> ASGenerationConfigBuilder:
        """A builder with the model's defaults. Its max_length is the model's context length, or the
        engine's limit if that is shorter.
        """
        builder = self._generation_config_builder(self.get_generation_config())
        length = self.get_model_context_length()
        if runtime_cfg is not None:
            length = min(length, runtime_cfg.engine_max_length)
        builder.update({"max_length": length})
        return builder

    def create_reference_runtime_config_builder(
        self,
        engine_model_name: str,
        device_type: Any,
        device_ids: Sequence[int] | None = None,
        max_batch: int = 1,
        max_context_length: int = -1,
    ) -> AsModelRuntimeConfigBuilder:
        """A builder for this model under ``engine_model_name``. A ``max_context_length`` of -1
        means the model's own.
        """
        context = self.get_model_context_length()
        if max_context_length == -1:
            max_context_length = context
        if not 2 <= max_context_length <= context:
            raise ValueError(
                f"max_context_length is {max_context_length}, expected -1 or 2 to {context}"
            )
        self._prepare_install(engine_model_name)
        builder = self._runtime_config_builder()
        builder.model_name(engine_model_name)
        builder.compute_unit(device_type, device_ids)
        builder.max_length(max_context_length)
        builder.max_batch(max_batch)
        if self._model_files is not None:
            graph, param = self._model_files
            builder.model_file_path(str(graph), str(param))
        return builder

    # The builder classes; some loaders have their own.

    def _generation_config_builder(self, fields: dict[str, Any]) -> ASGenerationConfigBuilder:
        from allspark.generation_config import ASGenerationConfigBuilder

        return ASGenerationConfigBuilder(fields)

    def _runtime_config_builder(self) -> AsModelRuntimeConfigBuilder:
        from allspark.runtime_config import AsModelRuntimeConfigBuilder

        return AsModelRuntimeConfigBuilder()

    def _prepare_install(self, engine_model_name: str) -> None:
        """Called before a runtime configuration for ``engine_model_name`` is made."""

    # Releasing.

    def free_model(self) -> LLM:
        """Closes the checkpoint; configuration and tokenizer stay usable."""
        return self

    def free_memory_serialize_file(self) -> LLM:
        """Drops the loader's reference to the memory image, if there is one; an engine that has it
        installed keeps it alive.
        """
        return self
