"""compare(): how far a model's predictions are from those of a reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from allspark.eval.facts import ModelFacts, facts_of
from allspark.eval.files import TextFacts, Texts, to_texts
from allspark.eval.in_flight import for_adapter, results
from allspark.eval.statistics import (
    Estimate,
    Floats,
    Spread,
    exponential,
    mean,
    ratio_of,
    root_mean_square,
    spread,
)
from allspark.eval.text_perplexity import DEFAULT_CONTEXT, check_finite
from allspark.eval.windows import Ids, Window, Windows, check_same_vocabulary, check_settings, cut
from allspark.pipeline.served_model import ServedModel
from numpy.typing import NDArray

NUM_TOP = 5
KL_PERCENTS = ("1", "5", "10", "50", "90", "95", "99", "99.9")
CHANGE_PERCENTS = ("0.1", "1", "5", "10", "25", "50", "75", "90", "95", "99", "99.9")
# Rows of logits that a thread has in float64 at a time: with a large vocabulary few, so that they
# stay in the second-level cache.
_ROWS = 8


@dataclass(frozen=True)
class Comparison:
    """A model against a reference, over the tokens that were scored. In formulas P is the
    reference's distribution of the next token, Q the model's."""

    model: ModelFacts
    reference: ModelFacts
    texts: list[TextFacts]
    context: int
    max_tokens: int | None
    num_windows: int
    num_scored: int
    cross_entropy: Estimate
    perplexity: Estimate
    reference_cross_entropy: Estimate
    reference_perplexity: Estimate
    log_ratio: Estimate  # ln(perplexity / reference_perplexity)
    ratio: Estimate
    difference: Estimate
    correlation: float  # of the two cross entropies, by token
    kl_divergence: Spread  # sum of P ln(P / Q), in nats
    probability_change: Spread  # Q - P of the text's token
    rms_probability_change: Estimate
    same_top: Estimate  # the part of the tokens at which both have the same likeliest token
    top5_overlap: Estimate  # of the five likeliest tokens, the part that is common to both


@dataclass(frozen=True)
class TokenFigures:
    """The figures of each token."""

    losses: Floats
    reference_losses: Floats
    kl_divergences: Floats
    changes: Floats
    is_same_top: NDArray[np.bool_]
    overlaps: Floats


def compare(
    model: ServedModel,
    reference: ServedModel,
    texts: Texts,
    context: int = DEFAULT_CONTEXT,
    tokens: int | None = None,
    adapter: str | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> Comparison:
    """Compares two models window by window, as llama.cpp's `perplexity --kl-divergence` does.

    Of each window the logits of both models are in memory, and of no other. The arguments are
    those of `perplexity`; `adapter` is the model's. Figures are computed by a thread on each core.

    Raises:
        ValueError: as `perplexity`, or the reference has another vocabulary.
        OutOfMemoryError, AllSparkError: the logits of a window have no room.
    """
    (found,) = compare_all([model], reference, texts, context, tokens, adapter, progress)
    return found


def compare_all(
    models: Sequence[ServedModel],
    reference: ServedModel,
    texts: Texts,
    context: int = DEFAULT_CONTEXT,
    tokens: int | None = None,
    adapter: str | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> list[Comparison]:
    """As `compare`, of several models with one reference, which computes each window once. The
    logits of a window of all models are in memory.

    Returns:
        In the order of the models.

    Raises:
        ValueError: as `compare`, or there are no models. OutOfMemoryError, AllSparkError: as there.
    """
    check_settings(context, tokens)
    if not models:
        raise ValueError("models is empty; it must have at least one model")
    found = to_texts(texts)
    for model in models:
        windows = cut(model, found, context, tokens)
    if context > reference.session_len:
        raise ValueError(
            f"context is {context}; it must be at most {reference.session_len}, the reference's "
            "length"
        )
    for model in models:  # so all have the same windows
        check_same_vocabulary(model, reference, found[: len(windows.texts)])
    parts: list[list[TokenFigures]] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for window in windows.windows:
            own = [_logits(model, window, adapter) for model in models]
            base = _logits(reference, window, None, "the reference")
            parts.append(token_figures(own, base, window.targets, pool))
            progress(1)
    return [
        _comparison(facts_of(model, adapter), facts_of(reference), windows, _joined(figures))
        for model, figures in zip(models, zip(*parts, strict=True), strict=True)
    ]


def _logits(
    model: ServedModel, window: Window, adapter: str | None, whose: str = "the model"
) -> np.ndarray:
    """The rows from which the window's targets are predicted. Raises ValueError unless they are
    finite."""
    fields = for_adapter(adapter, prompt_only=True, output_logits="all")
    ((_, elements),) = results(
        model,
        [window],
        lambda each: model.engine.start_request_ids(model.name, None, each.ids, fields),
    )
    logits: np.ndarray = elements.tensors_from_model_inference[0]["logits"]
    rows = logits[window.first : -1]
    check_finite(rows, window, whose)
    return rows


def token_figures(
    logits: Sequence[np.ndarray], reference: np.ndarray, targets: Ids, pool: Executor
) -> list[TokenFigures]:
    """Of logits [tokens, vocabulary] of each model and of the reference, and the tokens that
    followed. The threads do not change them: a row is computed by itself."""

    def figures_of(begin: int) -> list[TokenFigures]:
        rows = slice(begin, begin + _ROWS)
        base = _Reference(reference[rows], targets[rows])
        return [base.figures_of(own[rows]) for own in logits]

    parts = pool.map(figures_of, range(0, len(targets), _ROWS))
    return [_joined(figures) for figures in zip(*parts, strict=True)]


class _Reference:
    """Some rows of the reference's logits, and what all models are compared with."""

    def __init__(self, logits: np.ndarray, targets: Ids):
        self._targets = np.arange(len(targets)), targets
        self._logprobs = _log_softmax(logits)
        self._probabilities = np.exp(self._logprobs)
        self._top = _top(logits)

    def figures_of(self, logits: np.ndarray) -> TokenFigures:
        own, base = _log_softmax(logits), self._logprobs
        own_targets, base_targets = own[self._targets], base[self._targets]
        top = _top(logits)
        common = (top[:, :, None] == self._top[:, None, :]).any(axis=2)
        np.subtract(base, own, out=own)
        return TokenFigures(
            losses=-own_targets,
            reference_losses=-base_targets,
            kl_divergences=np.einsum("rv,rv->r", self._probabilities, own),
            changes=np.exp(own_targets) - np.exp(base_targets),
            is_same_top=top[:, 0] == self._top[:, 0],
            overlaps=common.mean(axis=1),
        )


def _log_softmax(logits: np.ndarray) -> Floats:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _top(logits: np.ndarray) -> NDArray[np.int64]:
    """The likeliest tokens of each row, the likeliest first; of equal ones those with the lowest
    ids."""
    rows, left = np.arange(len(logits)), logits.copy()
    top = np.empty((len(logits), min(NUM_TOP, logits.shape[1])), np.int64)
    for place in range(top.shape[1]):  # a fifth of the time that a partition of each row takes
        top[:, place] = left.argmax(axis=1)
        left[rows, top[:, place]] = -np.inf
    return top


def _joined(parts: Sequence[TokenFigures]) -> TokenFigures:
    fields = zip(*(vars(part).values() for part in parts), strict=True)
    return TokenFigures(*(np.concatenate(values) for values in fields))


def _comparison(
    model: ModelFacts, reference: ModelFacts, windows: Windows, figures: TokenFigures
) -> Comparison:
    own, base = mean(figures.losses), mean(figures.reference_losses)
    ratio = ratio_of(figures.losses, figures.reference_losses)
    return Comparison(
        model=model,
        reference=reference,
        texts=windows.texts,
        context=windows.context,
        max_tokens=windows.max_tokens,
        num_windows=len(windows.windows),
        num_scored=windows.num_scored,
        cross_entropy=own,
        perplexity=exponential(own),
        reference_cross_entropy=base,
        reference_perplexity=exponential(base),
        log_ratio=ratio.log_ratio,
        ratio=ratio.ratio,
        difference=ratio.difference,
        correlation=ratio.correlation,
        kl_divergence=spread(figures.kl_divergences, KL_PERCENTS),
        probability_change=spread(figures.changes, CHANGE_PERCENTS),
        rms_probability_change=root_mean_square(figures.changes),
        same_top=mean(figures.is_same_top),
        top5_overlap=mean(figures.overlaps),
    )
