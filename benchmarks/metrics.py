"""Computes figures from the times of tokens, and what fraction of the machine's limits they reach.

All engines share this code: a worker only notes times (peers/worker.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from allspark.bench.metrics import gaps, percentile
from checkpoints import Shape
from machine import Slot
from peers.base import Precision
from workloads import Workload


def work_flops(shape: Shape, work: Workload) -> float:
    """Operations that the requests need. A prefix that an earlier request had counts once."""
    total = 0.0
    requests = work.requests
    for index, request in enumerate(requests):
        earlier = (os.path.commonprefix([request.ids, other.ids]) for other in requests[:index])
        known = max(map(len, earlier), default=0)
        # The last output token is sampled but not fed back to the model.
        computed = len(request.ids) + request.num_output - 1
        total += shape.prefill_flops(computed) - shape.prefill_flops(known) + shape.prefill_flops(0)
        total += 2.0 * shape.head_weights * (request.num_output - 1)
    return total


def from_times(work: Workload, measured: Mapping[str, Any]) -> dict[str, float]:
    """What was measured of a workload: its speed, memory, and use of the cores."""
    values = {key: measured[key] for key in ("load_s", "rss_mb", "core_share", "others_share")}
    if "ttft_later_s" in measured:
        values["ttft_later_ms"] = 1e3 * measured["ttft_later_s"]
    return {**from_timelines(work, measured["requests"]), **values}


def from_timelines(work: Workload, timelines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Throughput and percentiles of a workload, as docs/bench.md defines them."""
    first = [entry["times"][0] - entry["begin"] for entry in timelines]
    end = max(entry["times"][-1] for entry in timelines)
    values = {
        "output_tok_s": work.num_output / end,
        "ttft_ms": 1e3 * percentile(first, 50),
        "ttft_p99_ms": 1e3 * percentile(first, 99),
    }
    between = [gap for each in timelines for gap in gaps(each["times"], sum(each["counts"]))]
    if between:
        values["gap_ms"] = 1e3 * percentile(between, 50)
        values["gap_p99_ms"] = 1e3 * percentile(between, 99)
    if len(timelines) == 1:
        times, counts = timelines[0]["times"], timelines[0]["counts"]
        values["prefill_tok_s"] = work.num_prompt / first[0]
        if len(times) > 1:
            values["decode_tok_s"] = sum(counts[1:]) / (times[-1] - times[0])
    return values


def fractions(
    shape: Shape,
    precision: Precision,
    work: Workload,
    values: Mapping[str, float],
    limits: Slot,
) -> dict[str, float]:
    """For each figure NAME a NAME_limit: the shortest time that the limits allow / the time taken.

    Decoding alone reads all weights for every token. Other work is limited by computing, or by
    reading the weights once per step of its longest request, whichever takes longer. Reading the KV
    cache comes on top.
    """
    read, rate = limits.get("read_gb_s"), limits.get(precision.rate)
    if not read or not rate:
        return {}
    token_bytes = shape.bytes_per_decoded_token(precision.body_bits, precision.head_bits)
    read_s = token_bytes / (read * 1e9)
    steps = sum(max(request.num_output for request in wave) for wave in work.waves)
    least_s = max(work_flops(shape, work) / (rate * 1e9), steps * read_s)
    result = {"output_tok_s_limit": least_s * values["output_tok_s"] / work.num_output}
    if "decode_tok_s" in values:
        result["decode_tok_s_limit"] = values["decode_tok_s"] * read_s
    if "prefill_tok_s" in values:
        prefill_s = shape.prefill_flops(work.num_prompt) / (rate * 1e9)
        fraction = prefill_s * values["prefill_tok_s"] / work.num_prompt
        result["prefill_tok_s_limit"] = result["ttft_ms_limit"] = fraction
    return result
