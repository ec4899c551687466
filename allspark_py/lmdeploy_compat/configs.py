"""Types of LMDeploy's documents that the pipeline itself does not need."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allspark.error_text import shown
from allspark.pipeline import fields as f
from allspark.pipeline.configs import GenerationConfig

# The release whose documents these names follow; they are those of 0.2 and 0.4 as well.
__version__ = "0.13.0"
version_info = (0, 13, 0)


class QuantPolicy(enum.IntEnum):
    """Bits of cached keys and values. FP8, FP8_E5M2 and TURBO_QUANT are refused by the configs."""

    NONE = 0
    INT4 = 4
    INT8 = 8
    FP8 = 16
    FP8_E5M2 = 17
    TURBO_QUANT = 42


class EngineRole(str, enum.Enum):
    """What an engine computes. The configs refuse all but Hybrid, their default."""

    Hybrid = "Hybrid"
    Prefill = "Prefill"
    Decode = "Decode"


class MigrationBackend(str, enum.Enum):
    """What moves caches between engines; nothing does here."""

    DLSlime = "DLSlime"
    Mooncake = "Mooncake"


class ResponseType(enum.Enum):
    """How an engine's output ended. A Response says it by finish_reason and error_code."""

    SUCCESS = enum.auto()
    FINISH = enum.auto()
    ENGINE_STOP_ERROR = enum.auto()
    SESSION_REPEAT = enum.auto()
    SESSION_NOT_EXIST = enum.auto()
    HANDLER_NOT_EXIST = enum.auto()
    INPUT_LENGTH_ERROR = enum.auto()
    INTERNAL_ENGINE_ERROR = enum.auto()
    CANCEL = enum.auto()
    PREFIX_CACHE_CONFLICT = enum.auto()
    NO_QUEUE = enum.auto()
    NOT_SUPPORTED = enum.auto()
    OUT_OF_MEMORY = enum.auto()


@dataclass
class VisionConfig:
    """Settings of vision models, which are not served; taken beside a language model."""

    max_batch_size: int = 1
    thread_safe: bool = False

    def __post_init__(self) -> None:
        f.whole(1)("VisionConfig.max_batch_size", self.max_batch_size)
        f.flag("VisionConfig.thread_safe", self.thread_safe)


@dataclass
class EngineGenerationConfig(GenerationConfig):
    """A GenerationConfig whose stop_words and bad_words are token ids."""

    stop_words: Any = None  # list[int] | None
    bad_words: Any = None  # list[int] | None

    def __post_init__(self) -> None:
        f.token_ids("EngineGenerationConfig.stop_words", self.stop_words)
        f.token_ids("EngineGenerationConfig.bad_words", self.bad_words)
        self.to_generation_config()

    def to_generation_config(self) -> GenerationConfig:
        """The same with its ids where a GenerationConfig has them. Raises as that class does."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        stops, bad = values.pop("stop_words"), values.pop("bad_words")
        values["stop_token_ids"] = _joined(values["stop_token_ids"], stops)
        values["bad_token_ids"] = _joined(values["bad_token_ids"], bad)
        return GenerationConfig(**values)

    @classmethod
    def From(cls, gen_config: GenerationConfig, tokenizer: Any) -> EngineGenerationConfig:
        """The ids of the words of a GenerationConfig, as Tokenizer.indexes_containing_token finds
        them: a word of several tokens has none. A pipeline takes the words themselves."""
        if not isinstance(gen_config, GenerationConfig):
            raise TypeError(f"gen_config is {shown(gen_config)}; it must be a GenerationConfig")
        values = {each.name: getattr(gen_config, each.name) for each in dataclasses.fields(cls)}
        if not isinstance(gen_config, EngineGenerationConfig):
            for name in ("stop_words", "bad_words"):
                values[name] = _ids_of(values[name], tokenizer)
        return cls(**values)


def to_generation_config(config: Any) -> Any:
    """For pipelines: an EngineGenerationConfig, alone or in a list, as a GenerationConfig."""
    if isinstance(config, EngineGenerationConfig):
        return config.to_generation_config()
    if isinstance(config, (list, tuple)):
        return [to_generation_config(each) for each in config]
    return config


def _joined(first: Sequence[int] | None, second: Sequence[int] | None) -> list[int] | None:
    ids = list(dict.fromkeys([*(first or ()), *(second or ())]))
    return ids or None


def _ids_of(words: str | Sequence[str] | None, tokenizer: Any) -> list[int] | None:
    if not words:
        return None
    many = [words] if isinstance(words, str) else words
    found = [token for word in many for token in tokenizer.indexes_containing_token(word)]
    return list(dict.fromkeys(found)) or None
