"""The figures of a measurement. docs/bench.md defines them; benchmarks/ computes its own with the
same functions.

Every function here is pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from allspark.bench.outcome import Outcome

PERCENTILES = (50, 75, 95, 99)
# What a summary has of each latency.
COLUMNS = ("mean", "min", *(f"p{percent}" for percent in PERCENTILES), "max")
# Latencies, with their names in tables.
LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "gap_ms": "gap", "e2e_ms": "E2E"}

Values = dict[str, float | int | None]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which this part of the values lies: between the two nearest ranks it is
    interpolated linearly, so that 0 is the least value and 100 the greatest (type 7 of Hyndman and
    Fan, NumPy's default)."""
    return float(np.percentile(values, percent))


def gaps(times: Sequence[float], num_tokens: int) -> list[float]:
    """The time between each two tokens of an output that follow each other, in the unit of `times`.

    Args:
        times: when chunks of tokens came.
        num_tokens: how many tokens they held together. Tokens of one chunk came together, so the
            gaps between them are zero.
    """
    return [*np.diff(times).tolist(), *[0.0] * max(0, num_tokens - len(times))]


def time_per_token(times: Sequence[float], num_tokens: int) -> float | None:
    """The mean time of the tokens after the first; None where there are none, or all came at
    once."""
    if num_tokens < 2 or len(times) < 2:
        return None
    return (times[-1] - times[0]) / (num_tokens - 1)


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Every value of each of LATENCIES, in ms, of the requests that completed."""
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for each in outcomes:
        if each.error is not None:
            continue
        values["e2e_ms"].append(1e3 * (each.end - each.due))
        if not each.times:
            continue
        values["ttft_ms"].append(1e3 * (each.times[0] - each.due))
        mean = time_per_token(each.times, each.num_output)
        if mean is not None:
            values["tpot_ms"].append(1e3 * mean)
        values["gap_ms"] += [1e3 * gap for gap in gaps(each.times, each.num_output)]
    return values


def summary(name: str, values: Sequence[float]) -> Values:
    """Mean, extremes and percentiles under NAME_mean, NAME_min, NAME_p50, ...; None without
    values."""
    if not values:
        return {f"{name}_{column}": None for column in COLUMNS}
    found = [math.fsum(values) / len(values), min(values)]
    found += [percentile(values, percent) for percent in PERCENTILES]
    return {
        f"{name}_{column}": value
        for column, value in zip(COLUMNS, [*found, max(values)], strict=True)
    }


def duration(outcomes: Sequence[Outcome]) -> float:
    """Seconds from when the first request was due until the last answer ended or failed."""
    return max(each.end for each in outcomes) - min(each.due for each in outcomes)


def figures(outcomes: Sequence[Outcome], client_cpu_s: float = 0.0) -> Values:
    """All figures of a run of at least one request.

    Args:
        client_cpu_s: CPU time of the thread that sent the requests and read the answers.
    """
    completed = [each for each in outcomes if each.error is None]
    seconds = duration(outcomes)

    def rate(count: float) -> float | None:
        return count / seconds if seconds > 0 else None

    num_input = sum(each.prompt_tokens or 0 for each in completed)
    num_output = sum(each.num_output for each in completed)
    per_second = rate(len(completed))
    values: Values = {
        "requests": len(outcomes),
        "completed": len(completed),
        "failed": len(outcomes) - len(completed),
        "duration_s": seconds,
        "rps": per_second,
        "rpm": None if per_second is None else 60 * per_second,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "input_tok_s": rate(num_input),
        "output_tok_s": rate(num_output),
        "total_tok_s": rate(num_input + num_output),
    }
    for name, each_value in latencies(outcomes).items():
        values.update(summary(name, each_value))
    counted = [each for each in completed if each.output_tokens is not None and each.times]
    chunks = sum(len(each.times) for each in counted)
    values.update(
        chunks=sum(len(each.times) for each in completed),
        tokens_per_chunk=sum(each.num_output for each in counted) / chunks if chunks else None,
        without_usage=sum(each.output_tokens is None for each in completed),
        more_chunks_than_tokens=sum(len(each.times) > each.num_output for each in counted),
        not_counted=sum(not each.is_counted for each in completed),
        without_output=sum(each.is_empty for each in completed),
        shorter_than_asked=sum(
            each.output_tokens is not None and each.output_tokens < each.asked for each in completed
        ),
        late_ms_max=1e3 * max(each.sent - each.due for each in outcomes),
        client_cpu_s=client_cpu_s,
        client_cpu_share=rate(client_cpu_s),
    )
    return values


def errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many requests failed for which reason, the most frequent first."""
    return dict(Counter(each.error for each in outcomes if each.error is not None).most_common())
