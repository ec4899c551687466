"""perplexity(): how well a model predicts texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from allspark.eval.facts import ModelFacts, facts_of
from allspark.eval.files import TextFacts, Texts, to_texts
from allspark.eval.in_flight import Started, for_adapter, results
from allspark.eval.statistics import Estimate, exponential, mean
from allspark.eval.windows import Window, check_settings, cut
from allspark.pipeline.served_model import ServedModel

DEFAULT_CONTEXT = 512


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts texts."""

    model: ModelFacts
    texts: list[TextFacts]
    context: int  # tokens of a window; the later half of it is scored
    max_tokens: int | None  # the bound that was given
    num_windows: int
    num_scored: int  # tokens
    cross_entropy: Estimate  # nats per token
    perplexity: Estimate  # e to it


def perplexity(
    model: ServedModel,
    texts: Texts,
    context: int = DEFAULT_CONTEXT,
    tokens: int | None = None,
    adapter: str | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> Perplexity:
    """Measures the perplexity of texts, window by window as llama.cpp's `perplexity` does.

    Args:
        texts: paths of files, or `Text`s.
        context: tokens of a window. Each window is computed by itself, and the tokens of its later
            half are scored, so that each has at least half a window before it.
        tokens: at most so many tokens of the texts are read; None: all.
        adapter: the name of a loaded adapter.
        progress: called with the number of windows that were scored since the last call.

    Raises:
        ValueError: a text is shorter than a window, the context is longer than the model's, or
            logits are no numbers. OSError: a file cannot be read.
    """
    check_settings(context, tokens)
    windows = cut(model, to_texts(texts), context, tokens)
    fields = for_adapter(adapter, prompt_only=True, prompt_logprobs=True)

    def start(window: Window) -> Started:
        return model.engine.start_request_ids(model.name, None, window.ids, fields)

    losses = []
    for window, elements in results(model, windows.windows, start):
        logprobs = np.array(elements.prompt_token_logprobs_list[window.first :], np.float64)
        check_finite(logprobs, window)
        losses.append(-logprobs)
        progress(1)
    cross_entropy = mean(np.concatenate(losses))
    return Perplexity(
        model=facts_of(model, adapter),
        texts=windows.texts,
        context=context,
        max_tokens=tokens,
        num_windows=len(windows.windows),
        num_scored=windows.num_scored,
        cross_entropy=cross_entropy,
        perplexity=exponential(cross_entropy),
    )


def check_finite(rows: np.ndarray, window: Window, whose: str = "the model") -> None:
    """Raises ValueError for logits, or what was made of them, that are no numbers. The first row
    is of the window's first position that counts."""
    is_bad = ~np.isfinite(rows.reshape(len(rows), -1)).all(axis=1)
    if is_bad.any():
        place = window.first + int(np.flatnonzero(is_bad)[0])
        raise ValueError(
            f"{window}: {whose}'s logits after its token {place} are not finite; a model with NaN "
            "or Inf in weights or activations cannot be measured"
        )
