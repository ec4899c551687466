"""Whether the benchmarks of this engine alone reach their bars (bars.OWN_BARS)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping

from bars import OWN_BARS
from record import Record, keys, median, values
from report import cut, table, verdict
from tables import HALF, IN_PROCESS, OVER_HTTP, OWN, PEERS, TABLES, Values, batch_memory, beside


def _paired(
    record: Record,
    of: Mapping[str, str],
    base: Mapping[str, str],
    value: Callable[[Values, Values], float],
) -> float | None:
    """The median over the rounds of what is made of two measurements of one round."""
    found = [value(own, other) for own, other in beside(record, of, base)]
    return statistics.median(found) if found else None


def _frames(record: Record) -> float | None:
    servers = ({"server": "allspark serve"}, {"server": "bare uvloop protocol"})
    return _paired(record, *servers, lambda own, bare: own["us_per_frame"] / bare["us_per_frame"])


def _steps(record: Record) -> float | None:
    kinds = ({"kind": "beside the prompt"}, {"kind": "quiet"})
    return _paired(record, *kinds, lambda own, quiet: (own["p99"] - quiet["p99"]) / own["step"])


def _batch_speed(kind: str) -> Callable[[Record], float | None]:
    kinds = ({"kind": kind}, {"kind": "sdk"})
    return lambda record: _paired(record, *kinds, lambda own, sdk: own["tok_s"] / sdk["tok_s"])


def _server_speed(precision: str) -> Callable[[Record], float | None]:
    ways = [{"precision": precision, "way": way} for way in (OVER_HTTP, IN_PROCESS)]
    return lambda record: _paired(
        record, *ways, lambda http, own: http["output_tok_s"] / own["output_tok_s"]
    )


def _batch_memory(kind: str) -> Callable[[Record], float | None]:
    kinds = ({"kind": kind}, {"kind": kind})
    return lambda record: _paired(record, *kinds, lambda own, _: batch_memory(own))


def _start(record: Record) -> float | None:
    kinds = ({"process": "server"}, {"process": "server"})
    return _paired(record, *kinds, lambda own, _: own["start_s"])


def _memory(record: Record) -> float | None:
    """Older records have an `engine` in a process with the benchmark's modules."""
    names = keys(record, "process")
    base = {"process": "engine" if "engine" in names else "engine alone"}
    server = {"process": "server"}
    return _paired(record, server, base, lambda own, engine: own["rss_mb"] - engine["rss_mb"])


def _choices_speed(record: Record) -> float | None:
    """Against the best batch size of each round."""
    measured = [one for one in record["measurements"] if "values" in one]
    own: dict[int, float] = {}
    others: dict[int, list[float]] = {}
    for one in measured:
        number, seconds = one["round"], one["values"]["s"]
        if one["of"]["model"] == "allspark":
            own[number] = seconds
        else:
            others.setdefault(number, []).append(seconds)
    found = [min(others[number]) / own[number] for number in own if number in others]
    return statistics.median(found) if found else None


def _choices_worst(
    name: str, worst: Callable[[list[float]], float]
) -> Callable[[Record], float | None]:
    """Over all rounds."""

    def value(record: Record) -> float | None:
        found = values(record, name, model="allspark")
        return worst(found) if found else None

    return value


def _quantizing(name: str, others: Collection[str]) -> Callable[[Record], float | None]:
    """Of the least of the others."""

    def value(record: Record) -> float | None:
        found = [median(record, name, program=each) for each in others]
        least = min((each for each in found if each is not None), default=None)
        own = median(record, name, program=OWN)
        return None if own is None or least is None else own / least

    return value


# By the names in bars.OWN_BARS.
FIGURES: Mapping[str, Callable[[Record], float | None]] = {
    "CPU a frame, of the bare protocol's": _frames,
    "p99 gap, steps more than quiet": _steps,
    "prompt lines: tokens/s, of the SDK's": _batch_speed("own lines"),
    "request lines: tokens/s, of the SDK's": _batch_speed("requests"),
    "prompt lines: peak memory, MB more": _batch_memory("own lines"),
    "request lines: peak memory, MB more": _batch_memory("requests"),
    "questions/s, of transformers'": _choices_speed,
    "largest difference of log-likelihoods": _choices_worst("difference", max),
    "questions with the same answers": _choices_worst("same", min),
    "bf16: tokens/s, of the SDK's": _server_speed("bf16"),
    "A8W8: tokens/s, of the SDK's": _server_speed("A8W8"),
    "s, of llm-compressor's": _quantizing("s", PEERS),
    "peak memory, of llm-compressor's": _quantizing("peak_mb", PEERS),
    "peak memory, of that with half of the layers": _quantizing("peak_mb", [HALF]),
    "s until it answers": _start,
    "memory, MB above the engine's": _memory,
}


def verdicts(record: Record) -> list[str]:
    """A row for each bar of this benchmark; nothing for a benchmark without bars."""
    rows = []
    for bar in OWN_BARS:
        if bar.benchmark != record["benchmark"]:
            continue
        value = FIGURES[bar.figure](record)
        least = "at least" if bar.is_least else "at most"
        reached = "–" if value is None else cut(value, bar.is_least)
        said = verdict(value, bar.is_met)
        rows.append([bar.figure, f"{least} {bar.bound:g}", reached, said])
    return table(["bar", "wanted", "reached", ""], rows) if rows else []


def page(record: Record) -> list[str]:
    """The table of a benchmark, and its bars."""
    return [*TABLES[record["benchmark"]](record), *verdicts(record)]
