"""Answers up to stop strings, as lm-eval's tasks ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allspark.error_text import shown
from allspark.errors import AllSparkError
from allspark.pipeline.configs import GenerationConfig
from allspark.pipeline.generation import to_fields
from allspark.pipeline.runs import Job, run
from allspark.pipeline.served_model import ServedModel

# Names for the most tokens of an answer, in the order in which they count.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Generation:
    """A prompt and how it is answered."""

    ids: list[int]
    until: list[str]
    config: GenerationConfig = field(default_factory=GenerationConfig)

    @classmethod
    def of(cls, ids: list[int], given: Mapping[str, Any], default_length: int) -> Generation:
        """From the generation arguments of a task. Without `do_sample` a temperature above 0
        samples.

        Raises:
            ValueError, TypeError: one is not known, or has a wrong value.
        """
        left = dict(given)
        until = left.pop("until", None) or []
        lengths = [left.pop(name, None) for name in _LENGTHS]
        length = next((value for value in lengths if value is not None), default_length)
        seed = left.pop("seed", None)
        sampling = {name: left.pop(name) for name in _SAMPLING if left.get(name) is not None}
        do_sample = left.pop("do_sample", None)
        left = {name: value for name, value in left.items() if value is not None}
        if left:
            raise ValueError(
                f"generation arguments have {shown(left)}; known are until, do_sample, seed, "
                f"{', '.join((*_LENGTHS, *_SAMPLING))}"
            )
        if do_sample is None:
            do_sample = sampling.get("temperature", 0.0) > 0
        if not do_sample:
            sampling.pop("temperature", None)
        config = GenerationConfig(
            do_sample=bool(do_sample), max_new_tokens=int(length), random_seed=seed, **sampling
        )
        return cls(ids, [until] if isinstance(until, str) else list(until), config)


def generate(
    model: ServedModel,
    generations: Sequence[Generation],
    adapter: str | None = None,
    think_end: str | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> list[str]:
    """The answers, in order; many run at a time.

    Args:
        think_end: what ends reasoning. An answer is what comes after it, and stop strings count
            only there.
        progress: called with 1 for each answer.

    Raises:
        ValueError, AllSparkError: the engine refused a request, or it failed.
    """
    answers = [""] * len(generations)

    def job(index: int) -> Job:
        return Job(index, lambda: _request(model, generations[index], adapter, think_end))

    for response in run(model, [job(index) for index in range(len(generations))], stream=False):
        if response.error_code is not None:
            kind = ValueError if response.error_code == "invalid_request" else AllSparkError
            raise kind(f"request {response.index}: {response.error_message}")
        answers[response.index] = _answer(response.text, generations[response.index], think_end)
        progress(1)
    return answers


def _request(
    model: ServedModel, generation: Generation, adapter: str | None, think_end: str | None
) -> tuple[list[int], dict[str, Any]]:
    """Of a prompt that is too long the beginning is cut off."""
    most = generation.config.max_new_tokens or 1
    room = model.session_len - most
    if room < 1:
        raise ValueError(
            f"max_gen_toks is {most}; it must be in [1, {model.session_len - 1}], so that a prompt "
            "has room"
        )
    fields = to_fields(generation.config, model, adapter)
    if think_end is None:
        fields["stop_words"] = [*fields["stop_words"], *filter(None, generation.until)]
    return generation.ids[-room:], fields


def _answer(text: str, generation: Generation, think_end: str | None) -> str:
    if think_end is None:
        return text
    text = text.split(think_end)[-1].lstrip()
    for stop in filter(None, generation.until):
        text = text.split(stop)[0]
    return text
