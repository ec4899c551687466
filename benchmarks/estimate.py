"""Estimates how long measurements take, from earlier measurements or from the amount of work."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from checkpoints import SHAPES
from metrics import work_flops
from workloads import WORKLOADS, MissingData, Workload, make_workload

# (shape, workload, engine)
Key = tuple[str, str, str]
_START_S = 8.0  # A process starts, loads and warms up.
# The rate of a slow machine; measurements of an engine are compared with it.
_FLOPS_PER_S = 1e11
_READ_BYTES_PER_S = 2e10


def key_of(of: dict[str, str]) -> Key:
    return of["shape"], of["workload"], of["engine"]


def weight(shape: str, task: str, divisor: int) -> float:
    """Seconds on the slow machine."""
    size = SHAPES[shape]
    if task not in WORKLOADS and task not in ("gap", "streams"):
        return _START_S + 1e-9 * size.bytes_per_decoded_token()
    try:
        work = make_workload(task, size.vocab_size, divisor)
    except MissingData:
        return 0.0
    flops = work_flops(size, work) + work_flops(size, Workload("", [work.warm_up()]))
    steps = sum(max(request.num_output for request in wave) for wave in work.waves)
    reads = steps * size.bytes_per_decoded_token() / _READ_BYTES_PER_S
    return _START_S + flops / _FLOPS_PER_S + reads


class Estimate:
    """Learns from all measurements so far, including failed ones."""

    def __init__(self, divisor: int, measurements: Iterable[dict[str, Any]]) -> None:
        self._divisor = divisor
        self._took: dict[Key, list[float]] = {}
        self._weights: dict[tuple[str, str], float] = {}
        for measurement in measurements:
            self.add(key_of(measurement["of"]), measurement["took_s"])

    def add(self, key: Key, took_s: float) -> None:
        self._took.setdefault(key, []).append(took_s)

    def _weight(self, key: Key) -> float:
        pair = key[:2]
        if pair not in self._weights:
            self._weights[pair] = weight(*pair, self._divisor)
        return self._weights[pair]

    def seconds(self, key: Key) -> float:
        """Seconds of one measurement: what it took before; otherwise its weight, scaled by what the
        same engine took for its weights; without any, by what all engines took."""
        if key in self._took:
            return statistics.fmean(self._took[key])
        same = {other: took for other, took in self._took.items() if other[2] == key[2]}
        known = same or self._took
        total = sum(self._weight(other) for other in known)
        took = sum(statistics.fmean(values) for values in known.values())
        return self._weight(key) * (took / total if total else 1.0)


def in_words(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
