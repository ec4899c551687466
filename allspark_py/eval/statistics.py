"""Means with their standard errors, as llama.cpp's `perplexity` computes them: in float64, as if
every token's value were drawn independently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error; the error of a single value is not a number."""

    value: float
    error: float


@dataclass(frozen=True)
class Spread:
    """How the values of all tokens lie."""

    mean: Estimate
    smallest: float
    # Percent -> the value below which so many lie, between ranks interpolated.
    percentiles: dict[str, float]
    largest: float


def mean(values: ArrayLike) -> Estimate:
    """The mean, and the sample's standard deviation divided by the root of the count."""
    array = np.asarray(values, np.float64)
    count = array.size
    if count < 2:
        return Estimate(float(array.mean()) if count else math.nan, math.nan)
    return Estimate(float(array.mean()), float(array.std(ddof=1) / math.sqrt(count)))


def spread(values: ArrayLike, percents: Sequence[str]) -> Spread:
    """The mean, the extremes and some percentiles."""
    array = np.asarray(values, np.float64)
    found = np.percentile(array, [float(percent) for percent in percents])
    return Spread(
        mean=mean(array),
        smallest=float(array.min()),
        percentiles=dict(zip(percents, found.tolist(), strict=True)),
        largest=float(array.max()),
    )


def root_mean_square(values: ArrayLike) -> Estimate:
    """With the error that the mean of the squares has, propagated through the root."""
    squares = mean(np.square(np.asarray(values, np.float64)))
    root = math.sqrt(squares.value)
    return Estimate(root, 0.5 / root * squares.error if root > 0 else 0.0)


def exponential(exponent: Estimate) -> Estimate:
    """e to an estimate, with its error propagated. What is too large for a number is infinite."""
    try:
        value = math.exp(exponent.value)
    except OverflowError:
        return Estimate(math.inf, math.inf)
    return Estimate(value, value * exponent.error)


@dataclass(frozen=True)
class Ratio:
    """Two perplexities of the same tokens against each other. Their errors are smaller than those
    of the perplexities, since what is hard to predict for one model is so for the other."""

    log_ratio: Estimate  # of the first to the second
    ratio: Estimate
    difference: Estimate
    correlation: float  # of the two cross entropies, by token


def ratio_of(losses: Floats, reference_losses: Floats) -> Ratio:
    """Of the perplexities that two models have, given the losses of each token."""
    own, base = mean(losses), mean(reference_losses)
    covariance = float(np.cov(losses, reference_losses)[0, 1]) / losses.size
    errors = own.error * base.error
    log_ratio = Estimate(
        own.value - base.value, _root(own.error**2 + base.error**2 - 2 * covariance)
    )
    ours, theirs = exponential(own), exponential(base)
    difference = Estimate(
        ours.value - theirs.value,
        _root(ours.error**2 + theirs.error**2 - 2 * ours.value * theirs.value * covariance),
    )
    return Ratio(
        log_ratio=log_ratio,
        ratio=exponential(log_ratio),
        difference=difference,
        correlation=covariance / errors if errors > 0 else math.nan,
    )


def _root(variance: float) -> float:
    """Of a variance that rounding may have made negative."""
    return math.sqrt(max(0.0, variance))
