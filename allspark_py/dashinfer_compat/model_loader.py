"""Model loaders with the keywords and values of DashInfer's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import allspark.model_loader
import yaml
from allspark._allspark import AsModelConfig
from allspark.dashinfer_compat.generation_config import ASGenerationConfigBuilder
from allspark.dashinfer_compat.runtime_config import AsModelRuntimeConfigBuilder
from allspark.dashinfer_compat.vocabulary import Vocabulary
from allspark.model_loader import LoadFormat
from allspark.not_served import not_served

if TYPE_CHECKING:
    from allspark.model_loader import LLM as _Base
else:
    _Base = object


class _Loader(_Base):
    """What the loaders here share; precedes allspark's classes in the method resolution order."""

    def init_tokenizer(self, padding_side: str = "left") -> Any:
        """Loads the tokenizer, once."""
        return self if self._tokenizer is not None else super().init_tokenizer(padding_side)

    def create_reference_generation_config_builder(self, runtimeConfig: Any = None) -> Any:
        """As allspark's, with the vocabulary that start_request needs for a response_format."""
        builder = super().create_reference_generation_config_builder(runtimeConfig)
        return builder.update({"vocab": Vocabulary(self)})

    def _runtime_config_builder(self) -> AsModelRuntimeConfigBuilder:
        return AsModelRuntimeConfigBuilder()

    def _generation_config_builder(self, fields: dict[str, Any]) -> ASGenerationConfigBuilder:
        return ASGenerationConfigBuilder(fields)

    def get_as_quant_config_and_weight_process(self, *args: Any, **kwargs: Any) -> None:
        raise not_served(
            "get_as_quant_config_and_weight_process",
            "weights are quantised while they are serialised, as customized_quant_config says",
        )

    def export_model_diconfig(self, output_path: str) -> Any:
        """Writes the model's sizes, a runtime config and its generation config as YAML."""
        path = Path(output_path).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self._describe(), sort_keys=False, allow_unicode=True)
        path.write_text(text, encoding="utf-8")
        return self

    def _describe(self) -> dict[str, Any]:
        config = AsModelConfig(model_name="model", engine_max_batch=64)
        config.engine_max_length = min(config.engine_max_length, self.get_model_context_length())
        generation = self.create_reference_generation_config_builder(config).build()
        model = self.get_model_config()
        unit, ids = AsModelRuntimeConfigBuilder.parse_device_type(config.compute_unit)
        return {
            "model": {name: model[name] for name in _MODEL_FIELDS if name in model},
            "runtime_config": {
                "model_name": config.model_name,
                "compute_unit": {
                    "device_type": unit,
                    "device_ids": ids,
                    "compute_thread_in_device": config.num_threads,
                },
                "engine_max_length": config.engine_max_length,
                "engine_max_batch": config.engine_max_batch,
                "kv_cache_mode": config.cache_mode.name,
                "kv_cache_span_size": config.cache_span_size,
                "enable_prefix_cache": config.enable_prefix_cache,
                "prefix_cache_ttl": config.prefix_cache_ttl,
            },
            "generation_config": {
                name: value for name, value in generation.items() if name != "vocab"
            },
            "tokenizer": {"source": "local", "local_path": str(self.directory)},
        }


# The fields of config.json that a description has.
_MODEL_FIELDS = (
    "architectures", "hidden_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta", "sliding_window",
    "use_sliding_window", "vocab_size",
)  # fmt: skip


class HuggingFaceModel(_Loader, allspark.model_loader.HuggingFaceModel):
    """allspark's; the load_format may be None."""

    def load_model(
        self,
        override_data_type: str | None = None,
        direct_load: bool = False,
        load_format: LoadFormat | str | None = None,
        **kwargs: Any,
    ) -> HuggingFaceModel:
        """As allspark's; a load_format of None means the format of the files."""
        super().load_model(
            override_data_type, direct_load, load_format or LoadFormat.AUTO, **kwargs
        )
        return self


class ModelScopeModel(HuggingFaceModel, allspark.model_loader.ModelScopeModel):
    """HuggingFaceModel for a name on ModelScope."""


class DashInferModel(_Loader, allspark.model_loader.DashInferModel):
    """A serialised model, given by its directory; a dimodel_config.yaml is not read."""

    def __init__(
        self,
        pretrain_model_name_or_path: str,
        pretrain_model_name: str = "model",
        config_file_path: str | None = None,
        config_content: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        for name, value in (
            ("config_file_path", config_file_path), ("config_content", config_content),
        ):  # fmt: skip
            if value is not None:
                raise not_served(name, "the model's files and those beside them have all of it")
        super().__init__(pretrain_model_name_or_path, pretrain_model_name, trust_remote_code)
