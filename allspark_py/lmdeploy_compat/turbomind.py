"""TurboMind: an engine with one model, as LMDeploy's page on long contexts uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from allspark.lmdeploy_compat.not_served import no_method
from allspark.lmdeploy_compat.pipe import Pipeline
from allspark.lmdeploy_compat.tokenizer import Tokenizer


class TurboMind:
    """A model that is open. `from_pretrained` makes one."""

    def __init__(self, pipe: Pipeline):
        self._pipe = pipe

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        model_name: Any = None,
        chat_template_name: str | None = None,
        engine_config: Any = None,
        **kwargs: Any,
    ) -> TurboMind:
        """Opens a model. The config may also come second. Further keywords are those of a
        TurbomindEngineConfig, where there is no engine_config."""
        if model_name is not None and not isinstance(model_name, str):
            if engine_config is not None:
                raise TypeError("from_pretrained has two values for 'engine_config'")
            model_name, engine_config = None, model_name
        if kwargs:
            from allspark.pipeline.configs import TurbomindEngineConfig

            if engine_config is not None:
                raise TypeError(f"{sorted(kwargs)[0]!r} is given beside engine_config")
            engine_config = TurbomindEngineConfig(**kwargs)
        pipe = Pipeline(
            pretrained_model_name_or_path,
            model_name=model_name,
            backend_config=engine_config,
            chat_template_config=chat_template_name,
        )
        return cls(pipe)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._pipe.tokenizer

    @property
    def session_len(self) -> int:
        """Most tokens of a request."""
        return self._pipe.session_len

    def create_instance(self, cuda_stream_id: int = 0) -> TurboMindInstance:
        """Something that scores; all instances share the engine. The argument has no effect."""
        return TurboMindInstance(self._pipe)

    def close(self) -> None:
        """Frees the model; a second call has no effect."""
        self._pipe.close()


class TurboMindInstance:
    """Computes with the model of a TurboMind."""

    def __init__(self, pipe: Pipeline):
        self._pipe = pipe

    def get_ppl(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray:
        """The mean cross entropy of each sequence, float32 [sequences]; np.exp of it is the
        perplexity."""
        return np.asarray(self._pipe.get_ppl(input_ids), dtype=np.float32)

    def stream_infer(self, *args: Any, **kwargs: Any) -> Any:
        raise no_method("TurboMindInstance.stream_infer")

    def async_stream_infer(self, *args: Any, **kwargs: Any) -> Any:
        raise no_method("TurboMindInstance.async_stream_infer")

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        raise no_method("TurboMindInstance.decode")
