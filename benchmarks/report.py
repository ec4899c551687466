"""Turns a record of compare.py into medians and a page of tables.

A figure of a workload is a metric, named "workload.figure".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bars import BARS, BEST, LIMIT, NOTHING, PEER, Bar
from checkpoints import SHAPES
from machine import LIMITS
from peers.llama_cpp import LlamaCpp
from record import Measurement, Record
from record import rounds as begun_rounds
from workloads import WORKLOADS


@dataclass(frozen=True)
class Figure:
    title: str
    digits: int = 1
    less_is_better: bool = True
    scale: float = 1


FIGURES = {
    "decode_tok_s": Figure("decode, tokens/s", less_is_better=False),
    "prefill_tok_s": Figure("prefill, tokens/s", 0, less_is_better=False),
    "output_tok_s": Figure("output, tokens/s", less_is_better=False),
    "ttft_ms": Figure("TTFT p50, ms", 0),
    "ttft_p99_ms": Figure("TTFT p99, ms", 0),
    "gap_ms": Figure("gap p50, ms"),
    "gap_p99_ms": Figure("gap p99, ms"),
    "load_s": Figure("load, s", 2),
    "rss_mb": Figure("peak RSS, MB", 0),
    "ttft_later_ms": Figure("TTFT after the engine's own, ms"),
    "rss_of_source": Figure("peak RSS, of the file", 2),
    # Says how far to trust a row; not a figure to compare.
    "core_share": Figure("cores got, %", 0, scale=100),
    "others_share": Figure("others, %", 0, scale=100),
}
_ALONE = ("decode_tok_s", "ttft_ms", "gap_p99_ms")
_TOGETHER = ("output_tok_s", "ttft_ms", "ttft_p99_ms", "gap_ms", "gap_p99_ms")
# The figures shown for a workload; the others are only in the JSON. Default: _TOGETHER.
_SHOWN = {
    "single": _ALONE,
    "p1024": ("prefill_tok_s",),
    "long": ("prefill_tok_s", *_ALONE),
}
# The figures of them in the summary. Default: _SUMMARY_TOGETHER.
_SUMMARY = {
    "single": ("decode_tok_s", "ttft_ms"),
    "p1024": ("prefill_tok_s",),
    "long": ("prefill_tok_s", "decode_tok_s"),
}
_SUMMARY_TOGETHER = ("output_tok_s", "ttft_ms", "gap_p99_ms")

# Measured only for this engine.
ENGINE_METRICS = {
    "convert.convert_s": Figure("conversion, s", 2),
    "convert.copy_s": Figure("the checkpoint copied, s", 2),
    "convert.convert_rss_mb": Figure("conversion, peak RSS, MB", 0),
    "start.start_s": Figure("start, page cache warm, s", 3),
    "start.warm_up_s": Figure("warm-up on top, s", 2),
    "gap.gap_max_ms": Figure("gap: longest, ms", 0),
    "gap.gap_median_ms": Figure("gap: median beside the prompt, ms", 0),
    "gap.gap_alone_ms": Figure("gap: median alone, ms", 0),
    "gap.gap_prompt_s": Figure("gap: TTFT of the long prompt, s", 1),
    "streams.streams_tok_s": Figure("64 streams: tokens/s, read at the end", 0),
    "streams.streams_step_us": Figure("64 streams: time per step, µs", 0),
    "streams.streams_read_tok_s": Figure("64 streams: tokens/s, read as they come", 0),
}


def shown_figures(workload: str) -> tuple[str, ...]:
    return _SHOWN.get(workload, _TOGETHER)


def summary_figures(workload: str) -> tuple[str, ...]:
    return _SUMMARY.get(workload, _SUMMARY_TOGETHER)


def figure_of(metric: str) -> Figure:
    return FIGURES[metric.partition(".")[2]]


def is_over_http(label: str) -> bool:
    """Whether this engine is measured over HTTP."""
    engine = label.partition(" ")[0]
    return engine.endswith("-serve") or engine == LlamaCpp.name


def better_by(metric: str, ours: float, peer: float) -> float:
    """A ratio that is above one if our value is better."""
    return peer / ours if figure_of(metric).less_is_better else ours / peer


class Result:
    """A record, and the statistics of its values."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._measurements: dict[tuple[str, str, str], list[Measurement]] = {}
        for each in record["measurements"]:
            of = each["of"]
            key = (of["shape"], of["engine"], of["workload"])
            self._measurements.setdefault(key, []).append(each)

    @property
    def shapes(self) -> list[str]:
        return list(self.record["contestants"])

    @property
    def workloads(self) -> list[str]:
        return list(self.record["settings"]["workloads"])

    def ours(self, shape: str) -> list[str]:
        labels = self.record["contestants"][shape]
        return [label for label in labels if label in self.record["ours"]]

    def peers(self, shape: str) -> list[str]:
        labels = self.record["contestants"][shape]
        return [label for label in labels if label not in self.record["ours"]]

    def measurements(self, shape: str, label: str, workload: str) -> list[Measurement]:
        """One for each round that reached this measurement."""
        return self._measurements.get((shape, label, workload), [])

    def most_rounds(self, shape: str, workload: str) -> int:
        """Of the engine that this row was measured on most often."""
        labels = self.record["contestants"][shape]
        return max((len(self.measurements(shape, each, workload)) for each in labels), default=0)

    def values(self, shape: str, label: str, metric: str) -> list[float]:
        workload, _, name = metric.partition(".")
        found = [each.get("values", {}) for each in self.measurements(shape, label, workload)]
        return [values[name] for values in found if name in values]

    def pairs(self, shape: str, labels: tuple[str, str], metric: str) -> list[tuple[float, float]]:
        """The values of two engines, of the rounds that have both."""
        workload, _, name = metric.partition(".")
        own, other = (
            {
                each["round"]: each["values"][name]
                for each in self.measurements(shape, label, workload)
                if name in each.get("values", {})
            }
            for label in labels
        )
        return [(own[number], other[number]) for number in own if number in other]

    def median(self, shape: str, label: str, metric: str) -> float | None:
        values = self.values(shape, label, metric)
        return statistics.median(values) if values else None

    def best(self, shape: str, labels: Iterable[str], metric: str) -> tuple[str, float] | None:
        """The engine with the best median, and that median."""
        medians = [
            (label, value)
            for label in labels
            if (value := self.median(shape, label, metric)) is not None
        ]
        pick = min if figure_of(metric).less_is_better else max
        return pick(medians, key=lambda pair: pair[1], default=None)

    def best_peer(self, shape: str, metric: str) -> tuple[str, float] | None:
        return self.best(shape, self.peers(shape), metric)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _value(values: list[float], figure: Figure) -> str:
    if not values:
        return "–"
    median, least, greatest = (
        f"{value * figure.scale:,.{figure.digits}f}"
        for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} [{least}..{greatest}]" if len(values) > 1 else median


def _no_value(measurements: list[Measurement]) -> str:
    """Why a cell has no value."""
    if any("disturbed" in each for each in measurements):
        return "disturbed"
    for each in measurements:
        if "stopped" in each:
            return over_our_time(each["stopped"])
    return "failed" if any("failed" in each for each in measurements) else "–"


def over_our_time(stopped: Mapping[str, float]) -> str:
    """Why a peer's measurement was ended."""
    # Rounded down, since it would have taken longer.
    tenths = math.floor(round(10 * stopped["after_s"] / stopped["ours_s"], 6))
    return f"over {tenths / 10:g} × our time"


def _fewer_rounds(result: Result, shape: str, label: str, workload: str) -> list[str]:
    """The number of rounds with a value, if the engine was left out of rounds of this row."""
    measurements = result.measurements(shape, label, workload)
    if len(measurements) >= result.most_rounds(shape, workload):
        return []
    count = sum("values" in each for each in measurements)
    return [f"{count} round" if count == 1 else f"{count} rounds"]


def best_peer_cell(result: Result, shape: str, metric: str) -> str:
    """The value and name of the best peer, and its rounds if others have more."""
    best = result.best_peer(shape, metric)
    if best is None:
        return "–"
    label, value = best
    about = [label, *_fewer_rounds(result, shape, label, metric.partition(".")[0])]
    return f"{value:,.{figure_of(metric).digits}f} ({', '.join(about)})"


def beside(result: Result, shape: str) -> str:
    """A sentence: which peers took part, and which of them have no value of a workload."""
    workloads = [each for each in result.workloads if each in WORKLOADS]
    told = []
    for label in result.peers(shape):
        found = {each: result.measurements(shape, label, each) for each in workloads}
        missing = [
            f"{workload} {_no_value(measurements)}"
            for workload, measurements in found.items()
            if measurements and not any("values" in each for each in measurements)
        ]
        told.append(f"{label} ({', '.join(missing)})" if missing else label)
    return f"Beside: {', '.join(told)}." if told else "Beside: none."


def _of_the_limit(result: Result, shape: str, label: str, metric: str) -> list[str]:
    """The percentage, and how often the measured limit was too low to give one."""
    fractions = result.values(shape, label, f"{metric}_limit")
    possible = [fraction for fraction in fractions if fraction <= 1]
    remarks = [f"{100 * statistics.median(possible):.0f} %"] if possible else []
    too_low = len(fractions) - len(possible)
    if too_low:
        remarks.append(f"limit too low in {too_low} of {len(fractions)}")
    return remarks


def cell(result: Result, shape: str, label: str, metric: str, with_range: bool = True) -> str:
    """Median and range, the fraction of the limit and, for ours, the ratio to the best peer."""
    figure = figure_of(metric)
    measurements = result.measurements(shape, label, metric.partition(".")[0])
    values = result.values(shape, label, metric)
    if not values:
        return _no_value(measurements)
    median = statistics.median(values)
    text = _value(values if with_range else [median], figure)
    remarks = _of_the_limit(result, shape, label, metric)
    best = result.best_peer(shape, metric)
    if label in result.record["ours"] and median and best:
        remarks.append(f"×{better_by(metric, median, best[1]):.2f}")
    fewer = _fewer_rounds(result, shape, label, metric.partition(".")[0])
    remarks += fewer
    lost = sum("values" not in each for each in measurements)
    if lost and not fewer:
        remarks.append(f"{lost} of {len(measurements)} without a value")
    return f"{text} ({', '.join(remarks)})" if remarks else text


def summary(
    result: Result, shape: str, labels: Iterable[str] | None = None, with_range: bool = True
) -> list[str]:
    """A row for each figure: some of our precisions, and the best value of all peers."""
    engines = [label for label in result.ours(shape) if labels is None or label in labels]
    rows = []
    for workload in result.workloads:
        for name in summary_figures(workload):
            metric = f"{workload}.{name}"
            everybody = result.record["contestants"][shape]
            if not any(result.values(shape, label, metric) for label in everybody):
                continue
            cells = [cell(result, shape, label, metric, with_range) for label in engines]
            peer = best_peer_cell(result, shape, metric)
            rows.append([f"{workload}: {FIGURES[name].title}", *cells, peer])
    return table(["", *engines, "best peer"], rows) if rows else []


def _workload(result: Result, shape: str, workload: str) -> list[str]:
    names = [*shown_figures(workload), "rss_mb", "load_s"]
    shares = ("core_share", "others_share")
    rows = []
    for label in result.record["contestants"][shape]:
        if not result.measurements(shape, label, workload):
            continue
        cells = [cell(result, shape, label, f"{workload}.{name}") for name in names]
        trust = [
            _value(result.values(shape, label, f"{workload}.{name}"), FIGURES[name])
            for name in shares
        ]
        rows.append([label, *cells, *trust])
    header = [workload, *(FIGURES[name].title for name in [*names, *shares])]
    return table(header, rows) if rows else []


def _engine_only(result: Result, shape: str) -> list[str]:
    ours = result.ours(shape)
    rows = [
        [figure.title, *(_value(result.values(shape, label, metric), figure) for label in ours)]
        for metric, figure in ENGINE_METRICS.items()
        if any(result.values(shape, label, metric) for label in ours)
    ]
    return table(["this engine alone", *ours], rows) if rows else []


# Bars.


def bar_value(result: Result, shape: str, bar: Bar) -> float | None:
    """Unrounded; None if it was not measured."""
    if bar.against == LIMIT:
        fractions = result.values(shape, bar.engine, f"{bar.metric}_limit")
        possible = [fraction for fraction in fractions if fraction <= 1]
        return statistics.median(possible) if possible else None
    if bar.against == NOTHING:
        value = result.median(shape, bar.engine, bar.metric)
        return None if value is None else value * figure_of(bar.metric).scale
    engines = _compared(result, shape, bar)
    if engines is None:
        return None
    pairs = result.pairs(shape, engines, bar.metric)
    ratios = [better_by(bar.metric, *pair) for pair in pairs]
    return statistics.median(ratios) if ratios else None


def _compared(result: Result, shape: str, bar: Bar) -> tuple[str, str] | None:
    """The engines that a bar compares, ours first. Where several may be meant, it is the one with
    the best median."""
    others = result.peers(shape) if bar.against == PEER else [bar.against]
    peer = result.best(shape, others, bar.metric)
    if peer is None:
        return None
    labels = result.ours(shape) if bar.engine == BEST else [bar.engine]
    if is_over_http(peer[0]):  # It is compared with servers, where there are any.
        measured = [label for label in labels if result.values(shape, label, bar.metric)]
        labels = list(filter(is_over_http, measured)) or labels
    ours = result.best(shape, labels, bar.metric)
    return None if ours is None else (ours[0], peer[0])


def _is_asked(result: Result, shape: str, bar: Bar) -> bool:
    """Whether both sides were requested, so that a missing value is a gap."""
    workload = bar.metric.partition(".")[0]
    if bar.against == LIMIT:
        has_limits = any(slot["read_gb_s"] for slot in result.record["limits"])
        return has_limits and bool(result.measurements(shape, bar.engine, workload))
    if bar.against == NOTHING:
        return bool(result.measurements(shape, bar.engine, workload))
    ours = result.ours(shape) if bar.engine == BEST else [bar.engine]
    others = result.peers(shape) if bar.against == PEER else [bar.against]
    return all(
        any(result.measurements(shape, label, workload) for label in labels)
        for labels in (ours, others)
    )


def cut(value: float, is_least: bool = True) -> str:
    """Rounded towards the worse, so that the text never shows a bar as met that is not."""
    return f"{(math.floor if is_least else math.ceil)(value * 1000) / 1000:.3f}"


def verdict(value: float | None, is_met: Callable[[float], bool]) -> str:
    """What a table says of a bar."""
    return "open: no value" if value is None else "met" if is_met(value) else "**open**"


def _reached(bar: Bar, value: float | None) -> str:
    return "–" if value is None else cut(value, bar.most is None)


def _missed(bar: Bar, value: float) -> str:
    reached = f"{bar.metric} of {bar.engine}: {_reached(bar, value)}"
    if bar.most is None:
        return f"{reached} of {bar.against} ({bar.least:g} wanted)"
    return f"{reached} ({bar.wanted} wanted)"


def bars(result: Result, shape: str) -> list[str]:
    """The bars that were requested."""
    rows = []
    for bar in BARS:
        workload, _, name = bar.metric.partition(".")
        value = bar_value(result, shape, bar)
        if value is None and not _is_asked(result, shape, bar):
            continue
        title = f"{workload}: {FIGURES[name].title}"
        reached = _reached(bar, value)
        rows.append([title, bar.engine, bar.wanted, reached, verdict(value, bar.is_met)])
    return table(["bar", "of this engine", "wanted", "reached", ""], rows) if rows else []


def bars_met(result: Result, shape: str) -> str:
    """A sentence: how many bars are met, and which are not."""
    values = [(bar, bar_value(result, shape, bar)) for bar in BARS]
    known = [(bar, value) for bar, value in values if value is not None]
    met = sum(bar.is_met(value) for bar, value in known)
    text = f"Of {len(BARS)} bars {len(known)} were measured, and {met} of these are met."
    missed = [_missed(bar, value) for bar, value in known if not bar.is_met(value)]
    return f"{text} Open: {'; '.join(missed)}." if missed else text


# Participation of the engines.


def _reason(measurement: Measurement) -> str | None:
    """Why it has no value."""
    if "disturbed" in measurement:
        return f"disturbed: others took {100 * measurement['disturbed']:.0f} % of the cores"
    if "stopped" in measurement:
        stopped = measurement["stopped"]
        return f"ended after {stopped['after_s']:.0f} s, {over_our_time(stopped)}"
    return measurement.get("failed")


def _failures(result: Result, shape: str) -> Iterator[str]:
    """Each reason once, with the engine, workloads and rounds that it applies to."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for label in result.record["contestants"][shape]:
        for workload in result.workloads:
            for each in result.measurements(shape, label, workload):
                if (said := _reason(each)) is not None:
                    where = reasons.setdefault((label, said), [])
                    where.append(f"{workload} (round {each['round']})")
                for remark in each.get("remarks", ()):
                    reasons.setdefault((label, remark), []).append(workload)
    for (label, said), where in reasons.items():
        yield f"{label}, {', '.join(dict.fromkeys(where))}: {said}"


def participation(result: Result, shape: str) -> list[str]:
    """How many rounds each engine has of each workload, and why not more."""
    shown = [
        workload
        for workload in result.workloads
        if any(
            result.measurements(shape, label, workload)
            for label in result.record["contestants"][shape]
        )
    ]
    rows = []
    for label in result.record["contestants"][shape]:
        cells = []
        for workload in shown:
            found = result.measurements(shape, label, workload)
            rounds = sum("values" in each for each in found)
            cells.append(str(rounds) if rounds else _no_value(found))
        rows.append([label, *cells])
    lines = table(["rounds with a value", *shown], rows)
    reasons = [f"- {reason}" for reason in _failures(result, shape)]
    return [*lines, *reasons, ""] if reasons else lines


def _limits(result: Result) -> list[str]:
    slots = result.record["limits"]
    disturbed = sum("others_share" in slot and not slot["read_gb_s"] for slot in slots)
    rows = []
    for key, title in LIMITS.items():
        values = [slot[key] for slot in slots if slot.get(key)]
        text = "no such instruction or not measured"
        if values:
            text = f"{statistics.median(values):,.1f} ({min(values):,.1f}..{max(values):,.1f})"
        elif disturbed:
            text = "–"
        if disturbed:
            text += f", disturbed in {disturbed} of {len(slots)}"
        rows.append([title, text])
    threads = result.record["settings"]["threads"]
    return table([f"limit of the machine, {threads} thread(s)", "median (min..max)"], rows)


def _noise(result: Result) -> str:
    slots = result.record["limits"]
    if not slots:
        return "The machine's limits have not been measured."
    loads = [slot["load_average"] for slot in slots]
    text = f"Load average of the machine (1 minute) while this ran: {min(loads)} to {max(loads)}."
    reads = [slot["read_gb_s"] for slot in slots if slot["read_gb_s"]]
    if reads and max(reads) > 1.3 * min(reads):
        text += (
            f" The read bandwidth alone moved by a factor of {max(reads) / min(reads):.1f} between"
            " slots: **the machine was not quiet, and only ratios and the order of magnitude"
            " count.**"
        )
    return text


def _who_has_fewer(settings: Mapping[str, Any]) -> str:
    times = settings.get("far_behind")
    if times is None or settings["rounds"] == 1:
        return ""
    return (
        f" A peer more than {times:g} times behind the best peer is measured in that row no more;"
        " its cells say how many rounds they have."
    )


def origin(record: Record) -> str:
    """Machine, commit and date of a record, to print above its figures."""
    machine, settings = record["machine"], record["settings"]
    commit = f"commit {record['commit']}" if record["commit"] else "no commit"
    if record["modified"]:
        commit += " **with changes**"
    rounds = str(settings["rounds"])
    if not record["complete"]:
        rounds = f"{begun_rounds(record)} of {rounds}"
    threads = settings.get("threads")
    threads = f"; {threads} thread(s)" if isinstance(threads, int) and threads else ""
    return (
        f"{machine['kind']}: {machine['cpu']}, {machine['cores']} core(s) usable, "
        f"{machine['memory_gib']:.0f} GiB, kernel table `{machine['isa']}`{threads}; allspark "
        f"{machine['version'].partition('/')[0]}, {commit}; {record['date']}; "
        f"{rounds} round(s), interleaved."
    )


def markdown(record: Record) -> str:
    """The report of one run."""
    result, settings = Result(record), record["settings"]
    lines = [f"# {record['name']}", "", origin(record), "", f"`{record['command']}`", ""]
    if settings["divisor"] > 1:
        lines += [f"A try: prompts and outputs are {settings['divisor']} times shorter.", ""]
    if settings["note"]:
        lines += [f"Note: {settings['note']}", ""]
    lines += [_noise(result), "", *_limits(result)]
    lines += [
        "Cells: median [least..greatest] (fraction of the machine's limit for these weights, × best"
        " peer; above 1 this engine is better). The best peer of a row is the best precision of any"
        f" peer in that row.{_who_has_fewer(settings)}",
        "",
    ]
    for shape in result.shapes:
        lines += [f"## {shape} ({SHAPES[shape].title})", "", *summary(result, shape)]
        lines += [*bars(result, shape), *participation(result, shape)]
        for workload in filter(WORKLOADS.__contains__, result.workloads):
            lines += _workload(result, shape, workload)
        lines += _engine_only(result, shape)
    if record["skipped"]:
        lines += ["Left out:", "", *(f"- {reason}" for reason in record["skipped"]), ""]
    return "\n".join(lines)
