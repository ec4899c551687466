"""Log-probabilities of continuations, given the tokens before them, which many have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from allspark._allspark import GeneratedElements
from allspark.eval.in_flight import Started, for_adapter, results
from allspark.eval.statistics import Floats
from allspark.pipeline.served_model import ServedModel


@dataclass(frozen=True)
class Likelihood:
    """What a model gives a continuation."""

    logprobs: Floats  # of each of its tokens; natural logarithms
    is_greedy: bool  # whether each of them is the likeliest

    @property
    def total(self) -> float:
        return float(self.logprobs.sum())


@dataclass
class _Job:
    """A continuation at its place among all."""

    index: int
    context: Sequence[int]
    continuation: Sequence[int]

    def __str__(self) -> str:
        return f"continuation {self.index}"


def likelihoods(
    model: ServedModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    adapter: str | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> list[Likelihood]:
    """Scores continuations, many at a time.

    Those with a common prefix run together, and the prefix is computed once. The figures are the
    same bit for bit whatever runs beside them.

    Args:
        pairs: token ids: a context of at least one, and what follows it.
        progress: called with the number of pairs that were scored since the last call.

    Raises:
        ValueError: a pair has no context, is longer than the model, or its logits are no numbers.
    """
    found: list[Likelihood | None] = [None] * len(pairs)
    jobs = _planned(model, pairs)

    def start(job: _Job) -> Started:
        fields = for_adapter(
            adapter,
            prompt_only=True,
            prompt_logprobs=True,
            prompt_logprobs_start=len(job.context),
            top_logprobs=1,
        )
        ids = np.array([*job.context, *job.continuation], np.int64)
        return model.engine.start_request_ids(model.name, None, ids, fields)

    for job, elements in results(model, jobs, start):
        found[job.index] = _likelihood(job, elements)
        progress(1)
    nothing = Likelihood(np.zeros(0), True)
    progress(len(pairs) - len(jobs))
    return [nothing if each is None else each for each in found]


def _planned(
    model: ServedModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[_Job]:
    """The jobs in an order in which common prefixes follow each other. Pairs without a continuation
    need none."""
    jobs = []
    for index, (context, continuation) in enumerate(pairs):
        if not len(context):
            raise ValueError(
                f"continuation {index} has no context; it must have at least one token"
            )
        length = len(context) + len(continuation)
        if length > model.session_len:
            raise ValueError(
                f"continuation {index} has {length} tokens with its context; the model's length "
                f"is {model.session_len}"
            )
        if len(continuation):
            jobs.append(_Job(index, tuple(context), tuple(continuation)))
    jobs.sort(key=lambda job: (*job.context, *job.continuation))
    return jobs


def _likelihood(job: _Job, elements: GeneratedElements) -> Likelihood:
    own, tops = elements.prompt_token_logprobs_list, elements.prompt_log_probs_list
    logprobs = np.array(own, np.float64)
    if not np.isfinite(logprobs).all():
        place = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise ValueError(
            f"{job}: the log-probability of its token {place} is {logprobs[place]}; the model's "
            "logits must be finite"
        )
    is_greedy = all(value >= top[0][1] for value, top in zip(own, tops, strict=True))
    return Likelihood(logprobs, is_greedy)
