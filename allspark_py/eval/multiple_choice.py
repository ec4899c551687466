"""choices(): how often a model finds the right continuation the likeliest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from allspark.eval.continuations import Likelihood, likelihoods
from allspark.eval.facts import ModelFacts, facts_of
from allspark.eval.files import TextFacts
from allspark.eval.statistics import Estimate, mean
from allspark.eval.tasks import Task, read_tasks
from allspark.eval.windows import ids_of
from allspark.pipeline.fields import whole
from allspark.pipeline.served_model import ServedModel


@dataclass(frozen=True)
class TaskResult:
    """What the model made of one task."""

    index: int  # among all tasks
    label: int
    logprobs: list[float]  # of each choice, given the context
    per_token: list[float]  # the mean over the tokens in which the choices differ
    per_character: list[float]  # logprobs by the length of the choice
    chosen: int
    chosen_per_token: int
    chosen_per_character: int


@dataclass(frozen=True)
class Choices:
    """How often the model was right. Of equal choices the first one counts as chosen."""

    model: ModelFacts
    tasks: TextFacts | None  # None: they were given without a file
    num_tasks: int
    num_available: int
    seed: int | None  # of the choice of tasks; None: all were used
    accuracy: Estimate  # by logprobs: lm-eval's acc
    accuracy_per_token: Estimate  # llama.cpp's acc_norm of HellaSwag
    accuracy_per_character: Estimate  # lm-eval's acc_norm
    results: list[TaskResult]


@dataclass(frozen=True)
class _Encoded:
    """The choices of a task as token ids, each after the context."""

    wholes: list[list[int]]
    begin: int  # the tokens before are scored for none of them
    own_begins: list[int]  # where each choice begins, by lm-eval's definition
    common: int  # tokens that all of them begin with

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        return [(ids[: self.begin], ids[self.begin :]) for ids in self.wholes]


def choices(
    model: ServedModel,
    tasks: str | Path | Sequence[Task],
    limit: int | None = None,
    seed: int = 0,
    adapter: str | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> Choices:
    """Answers multiple-choice tasks by the probability of each choice after the context.

    Args:
        tasks: a path that read_tasks takes, or tasks.
        limit: only so many of them, chosen at random.
        seed: of that choice.
        adapter: the name of a loaded adapter.
        progress: called with the number of choices that were scored since the last call.

    Raises:
        ValueError: a task is longer than the model, or logits are no numbers. Else as read_tasks.
    """
    whole(1, none=True)("limit", limit)
    whole(0)("seed", seed)
    facts = None
    if isinstance(tasks, (str, Path)):
        file = read_tasks(tasks)
        tasks, facts = file.tasks, file.facts
    chosen = _sample(len(tasks), limit, seed)
    encoded = [_encode(model, tasks[index], index) for index in chosen]
    pairs = [pair for each in encoded for pair in each.pairs()]
    scores = iter(likelihoods(model, pairs, adapter, progress))
    results = [
        _result(index, tasks[index], each, [next(scores) for _ in each.wholes])
        for index, each in zip(chosen, encoded, strict=True)
    ]
    return Choices(
        model=facts_of(model, adapter),
        tasks=facts,
        num_tasks=len(chosen),
        num_available=len(tasks),
        seed=None if len(chosen) == len(tasks) else seed,
        accuracy=mean([each.chosen == each.label for each in results]),
        accuracy_per_token=mean([each.chosen_per_token == each.label for each in results]),
        accuracy_per_character=mean([each.chosen_per_character == each.label for each in results]),
        results=results,
    )


def _sample(count: int, limit: int | None, seed: int) -> list[int]:
    """The indices of the tasks that are used, in order."""
    if not count:
        raise ValueError("tasks is empty; it must have at least one task")
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), limit))


def _encode(model: ServedModel, task: Task, index: int) -> _Encoded:
    """White space at the end of a context belongs to the choices, as tokenizers have words."""
    tokenizer = model.tokenizer
    context = ids_of(tokenizer, task.context.rstrip())
    wholes = [
        ids_of(tokenizer, f"{task.context}{task.delimiter}{choice}").tolist()
        for choice in task.choices
    ]
    for choice, ids in enumerate(wholes):
        if not 1 < len(ids) <= model.session_len:
            raise ValueError(
                f"task {index}: choice {choice} has {len(ids)} tokens with its context; it must "
                f"have 2 to {model.session_len}, the model's length"
            )
    common = _common_prefix(wholes)
    own = [min(len(context), len(ids) - 1) for ids in wholes]
    return _Encoded(wholes, max(1, min(common, *own)), own, common)


def _common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Tokens that all rows begin with. Of each row at least one token is left, and one before."""
    most = min(map(len, rows)) - 1
    for place in range(most):
        if any(row[place] != rows[0][place] for row in rows):
            return max(1, place)
    return most


def _result(index: int, task: Task, encoded: _Encoded, scores: Sequence[Likelihood]) -> TaskResult:
    sums, means = [], []
    for own, score in zip(encoded.own_begins, scores, strict=True):
        sums.append(float(score.logprobs[max(0, own - encoded.begin) :].sum()))
        means.append(float(score.logprobs[encoded.common - encoded.begin :].mean()))
    per_character = [value / len(choice) for value, choice in zip(sums, task.choices, strict=True)]
    return TaskResult(
        index=index,
        label=task.label,
        logprobs=sums,
        per_token=means,
        per_character=per_character,
        chosen=int(np.argmax(sums)),
        chosen_per_token=int(np.argmax(means)),
        chosen_per_character=int(np.argmax(per_character)),
    )
