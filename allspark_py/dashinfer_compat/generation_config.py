"""Generation configs and prompts with the keywords and values of DashInfer's."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import allspark.generation_config
import allspark.prompt_utils
from allspark._allspark import GenerateConfig
from allspark.dashinfer_compat.keywords import keywords
from allspark.dashinfer_compat.runtime_config import to_bool
from allspark.not_served import not_served

_BOOLS = frozenset(name for name, kind, *_ in GenerateConfig.fields() if kind == "a bool")


class VocabType(enum.IntEnum):
    """How a vocabulary writes its tokens. It is not used: this is found from each vocabulary."""

    VOCAB_TYPE_WPM = 0
    VOCAB_TYPE_SPM = 1
    VOCAB_TYPE_UGM = 2
    VOCAB_TYPE_BPE = 3


@keywords(
    {
        "process_eos_tokens": {
            "hf_eos": "eos", "hf_gen_config_token_id": "eos", "out_dict": "out",
        },
        "update": {"update_fields": "fields"},
    }
)
class ASGenerationConfigBuilder(allspark.generation_config.ASGenerationConfigBuilder):
    """The builder with DashInfer's keywords. It does not take max_new_tokens from a Hugging Face
    config: these scripts set the length with max_length only."""

    def __init__(
        self, hf_gen_config: Any = None, seed: int | None = None, eos_token_id: int | None = None
    ):
        super().__init__(hf_gen_config, seed, eos_token_id)
        self._fields.pop("max_new_tokens", None)

    def with_mm_info(self, info: Any) -> ASGenerationConfigBuilder:
        """Images are not served; None is accepted."""
        self.update({"mm_info": info})
        return self


class GenerationConfigAdapter:
    """Turns what a caller passes as a generation config into the engine's own type."""

    @staticmethod
    def to_native(config: Any) -> GenerateConfig:
        """The engine's part of a config; see RequestConfig.parse."""
        return allspark.generation_config.RequestConfig.parse(config).native


class PromptTemplate(allspark.prompt_utils.PromptTemplate):
    @staticmethod
    def apply_chatml_template(inputs: str) -> str:  # type: ignore[override]
        """The ChatML form of one question, ending where the assistant's answer begins."""
        return allspark.prompt_utils.PromptTemplate.apply_chatml_template(inputs)


def to_fields(config: Any) -> Any:
    """Turns a builder or dict into a dict of allspark's fields and `vocab`; others unchanged."""
    if isinstance(config, allspark.generation_config.ASGenerationConfigBuilder):
        config = config.build()
    if not isinstance(config, Mapping):
        return config
    fields = {name: to_bool(value) if name in _BOOLS else value for name, value in config.items()}
    if fields.pop("mm_info", None) is not None:
        raise not_served("mm_info", "requests are of text alone")
    # A name for the log, and a type that is found from the vocabulary itself.
    for name in ("uuid", "vocab_type"):
        fields.pop(name, None)
    return fields
