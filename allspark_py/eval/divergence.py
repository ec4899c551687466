"""compare(): how far a model's predictions are from those of a reference."""

from __future__ import annotations

from collections.abc import Callable
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
# Rows of logits that are in float64 at a time.
_ROWS = 32


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
    those of `perplexity`; `adapter` is the model's.

    Raises:
        ValueError: as `perplexity`, or the reference has another vocabulary.
        OutOfMemoryError, AllSparkError: the logits of a window have no room.
    """
    check_settings(context, tokens)
    found = to_texts(texts)
    windows = cut(model, found, context, tokens)
    if context > reference.session_len:
        raise ValueError(
            f"context is {context}; it must be at most {reference.session_len}, the reference's "
            "length"
        )
    check_same_vocabulary(model, reference, found[: len(windows.texts)])
    parts = []
    for window in windows.windows:
        own = _logits(model, window, adapter)
        check_finite(own, window)
        base = _logits(reference, window, None)
        check_finite(base, window, "the reference")
        parts.append(token_figures(own, base, window.targets))
        progress(1)
    return _comparison(facts_of(model, adapter), facts_of(reference), windows, _joined(parts))


def _logits(model: ServedModel, window: Window, adapter: str | None) -> np.ndarray:
    """The rows from which the window's targets are predicted."""
    fields = for_adapter(adapter, prompt_only=True, output_logits="all")
    ((_, elements),) = results(
        model,
        [window],
        lambda each: model.engine.start_request_ids(model.name, None, each.ids, fields),
    )
    logits: np.ndarray = elements.tensors_from_model_inference[0]["logits"]
    return logits[window.first : -1]


def token_figures(logits: np.ndarray, reference: np.ndarray, targets: Ids) -> TokenFigures:
    """Of logits [tokens, vocabulary] of both models, and the tokens that followed."""
    parts = []
    for begin in range(0, len(targets), _ROWS):
        rows = slice(begin, begin + _ROWS)
        parts.append(_figures_of_rows(logits[rows], reference[rows], targets[rows]))
    return _joined(parts)


def _figures_of_rows(logits: np.ndarray, reference: np.ndarray, targets: Ids) -> TokenFigures:
    own, base = _log_softmax(logits), _log_softmax(reference)
    rows = np.arange(len(targets))
    own_targets, base_targets = own[rows, targets], base[rows, targets]
    probabilities = np.exp(base)
    top, base_top = _top(logits), _top(reference)
    common = (top[:, :, None] == base_top[:, None, :]).any(axis=2)
    return TokenFigures(
        losses=-own_targets,
        reference_losses=-base_targets,
        kl_divergences=np.einsum("rv,rv->r", probabilities, base - own),
        changes=np.exp(own_targets) - np.exp(base_targets),
        is_same_top=logits.argmax(axis=1) == reference.argmax(axis=1),
        overlaps=common.mean(axis=1),
    )


def _log_softmax(logits: np.ndarray) -> Floats:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _top(logits: np.ndarray) -> NDArray[np.int64]:
    """The likeliest tokens of each row; of equal ones those with the lowest ids."""
    count = min(NUM_TOP, logits.shape[1])
    top = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    least = np.take_along_axis(logits, top, axis=1).min(axis=1, keepdims=True)
    for row in np.flatnonzero((logits >= least).sum(axis=1) > count):  # ties at the end
        top[row] = np.argsort(-logits[row], kind="stable")[:count]
    return top


def _joined(parts: list[TokenFigures]) -> TokenFigures:
    return TokenFigures(
        *(np.concatenate(values) for values in zip(*(_fields(part) for part in parts), strict=True))
    )


def _fields(part: TokenFigures) -> tuple[np.ndarray, ...]:
    return tuple(vars(part).values())


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
