"""pipeline() and Pipeline with the positions and habits of LMDeploy's releases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from allspark.error_text import wrong_type
from allspark.lmdeploy_compat.configs import VisionConfig, to_generation_config
from allspark.lmdeploy_compat.not_served import no_method
from allspark.lmdeploy_compat.tokenizer import Tokenizer
from allspark.pipeline import pipe as plain
from allspark.pipeline.arguments import bind
from allspark.pipeline.response import Response
from allspark.pipeline.session import Session


def pipeline(model_path: str, *args: Any, **kwargs: Any) -> Pipeline:
    """Opens a model and returns its pipeline; the arguments are those of
    allspark.pipeline.pipeline."""
    return Pipeline(model_path, *args, **kwargs)


def _served(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those about vision."""
    vision = given.pop("vision_config", None)
    if vision is not None and not isinstance(vision, VisionConfig):
        raise wrong_type("vision_config", vision, "a VisionConfig")
    given.pop("allowed_media_domains", None)
    return given


class Pipeline(plain.Pipeline):
    """allspark.pipeline.Pipeline, with LMDeploy's Tokenizer."""

    backend = "turbomind"

    def __init__(self, model_path: str, *args: Any, **kwargs: Any):
        super().__init__(model_path, **_served(bind(args, kwargs)))
        self._tokenizer = Tokenizer.of(self.model.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; it also has everything that the transformers tokenizer has."""
        return self._tokenizer

    def infer(self, prompts: Any, gen_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().infer(prompts, to_generation_config(gen_config), *args, **kwargs)

    __call__ = infer

    def stream_infer(
        self, prompts: Any, sessions: Any = None, gen_config: Any = None, *args: Any, **kwargs: Any
    ) -> Iterator[Response]:
        if sessions is not None and _has_configs(sessions):
            # Before 0.12 gen_config came second.
            before = sessions, gen_config
            sessions = None
            if isinstance(before[1], bool):
                args = (before[1], *args)
                gen_config = before[0]
            elif before[1] is None:
                gen_config = before[0]
            else:
                raise TypeError("stream_infer has two values for 'gen_config'")
        gen_config = to_generation_config(gen_config)
        return super().stream_infer(prompts, sessions, gen_config, *args, **kwargs)

    def session(self, gen_config: Any = None) -> Session:
        return super().session(to_generation_config(gen_config))

    def chat(
        self, prompt: Any, session: Any = None, gen_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return super().chat(prompt, session, to_generation_config(gen_config), *args, **kwargs)

    def generate(
        self,
        messages: Any,
        session_id: int = 0,
        gen_config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[Response]:
        config = to_generation_config(gen_config)
        return super().generate(messages, session_id, config, *args, **kwargs)

    def get_reward_score(self, input_ids: Any) -> list[float]:
        raise no_method("Pipeline.get_reward_score")


def _has_configs(value: Any) -> bool:
    from allspark.pipeline.configs import GenerationConfig

    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, GenerationConfig)
