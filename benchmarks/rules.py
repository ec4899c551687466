"""The rules that keep a run of compare.py short: who is measured in a row no more, and when a
measurement of a peer is ended.

Every peer runs every row once. The later rounds are for those who are near the best, since most of
the time would be spent on those who are far behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from record import Measurement
from report import Result, figure_of, summary_figures

FAR_BEHIND = 1.5
# How often a peer is tried that fails for another reason than its time.
TRIES = 2
# A peer may take this many times what the fastest of ours took.
TIMES_OURS = 3.0
# Some peers take a minute to start, and more the first time, when they compile. So that they are
# not ended for that, ours counts as at least this long.
LEAST_OURS_S = 60.0


def left_out(result: Result, shape: str, workload: str, far_behind: float | None) -> set[str]:
    """The engines that are measured in this row no more. Without `far_behind`, these are only the
    ones that took too long."""
    peers = result.peers(shape)
    out = set()
    for label in result.record["contestants"][shape]:
        found = result.measurements(shape, label, workload)
        is_out = any(each.get("took_too_long") or "stopped" in each for each in found)
        if far_behind is not None and label in peers:
            is_out |= _has_only_failed(found)
            is_out |= _is_behind(result, shape, label, workload, far_behind)
        if is_out:
            out.add(label)
    return out


def _has_only_failed(found: Sequence[Measurement]) -> bool:
    is_without = not any("values" in each for each in found)
    return is_without and sum("failed" in each for each in found) >= TRIES


def _is_behind(result: Result, shape: str, label: str, workload: str, times: float) -> bool:
    """Whether a peer is so far behind in every figure for which the row has a best peer. Its first
    values count, so that later ones do not bring it back."""
    verdicts = []
    for name in summary_figures(workload):
        metric = f"{workload}.{name}"
        firsts = {
            peer: values[0]
            for peer in result.peers(shape)
            if (values := result.values(shape, peer, metric))
        }
        if label not in firsts:
            continue
        if figure_of(metric).less_is_better:
            verdicts.append(firsts[label] > times * min(firsts.values()))
        else:
            verdicts.append(times * firsts[label] < max(firsts.values()))
    return bool(verdicts) and all(verdicts)


def fastest_of_ours_s(result: Result, shape: str, workload: str) -> float | None:
    """The wall time of the shortest undisturbed measurement of ours in this row, with its start."""
    times = [
        each["wall_s"]
        for label in result.ours(shape)
        for each in result.measurements(shape, label, workload)
        if "values" in each and "wall_s" in each
    ]
    return min(times, default=None)


def longest_s(ours_s: float, times: float) -> float:
    """How long a measurement of a peer may take where the fastest of ours took `ours_s`."""
    return times * max(LEAST_OURS_S, ours_s)
