"""Turns the samples of compare.py into medians and a page of tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints import SHAPES
from machine import LIMITS

# By metric, named "workload.figure".
Samples = dict[str, list[float]]
Entries = Mapping[str, Mapping[str, Any]]


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
    # How far to trust a row rather than what to compare.
    "core_share": Figure("cores got, %", 0, scale=100),
    "others_share": Figure("others, %", 0, scale=100),
}
_ALONE = ("decode_tok_s", "ttft_ms", "gap_p99_ms")
_TOGETHER = ("output_tok_s", "ttft_ms", "ttft_p99_ms", "gap_ms", "gap_p99_ms")
# What a workload is measured by; other figures of it are in the JSON only. The rest: _TOGETHER.
_SHOWN = {
    "single": _ALONE,
    "p1024": ("prefill_tok_s",),
    "long": ("prefill_tok_s", *_ALONE),
}

# Measured of this engine alone.
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


def summarise(samples: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Per metric: every value, their median, least and greatest."""
    return {
        key: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "values": values,
        }
        for key, values in samples.items()
    }


def median(entries: Entries, metric: str) -> float | None:
    return entries[metric]["median"] if metric in entries else None


def best_peer(result: Mapping[str, Any], shape: str, metric: str) -> tuple[str, float] | None:
    """The peer with the best median, and that."""
    figure = FIGURES[metric.partition(".")[2]]
    medians = [
        (label, value)
        for label, entries in result["shapes"][shape].items()
        if label not in result["ours"] and (value := median(entries, metric)) is not None
    ]
    pick = min if figure.less_is_better else max
    return pick(medians, key=lambda pair: pair[1], default=None)


def better_by(metric: str, ours: float, peer: float) -> float:
    """Above one where ours is better."""
    less_is_better = FIGURES[metric.partition(".")[2]].less_is_better
    return peer / ours if less_is_better else ours / peer


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _value(entry: Mapping[str, Any] | None, figure: Figure) -> str:
    if entry is None:
        return "–"
    median, least, greatest = (
        f"{entry[key] * figure.scale:,.{figure.digits}f}" for key in ("median", "min", "max")
    )
    return f"{median} [{least}..{greatest}]" if len(entry["values"]) > 1 else median


def _cell(result: Mapping[str, Any], shape: str, label: str, metric: str) -> str:
    """Median and range, the fraction of the limit and, for ours, the ratio to the best peer."""
    entries = result["shapes"][shape][label]
    text = _value(entries.get(metric), FIGURES[metric.partition(".")[2]])
    value, fraction = median(entries, metric), median(entries, f"{metric}_limit")
    remarks = [] if fraction is None else [f"{100 * fraction:.0f} %"]
    best = best_peer(result, shape, metric)
    if label in result["ours"] and value and best:
        remarks.append(f"×{better_by(metric, value, best[1]):.2f}")
    return f"{text} ({', '.join(remarks)})" if remarks else text


def _summary(result: Mapping[str, Any], shape: str) -> list[str]:
    engines = result["shapes"][shape]
    ours = [label for label in engines if label in result["ours"]]
    rows = []
    for workload in result["settings"]["workloads"]:
        for name in shown_figures(workload)[: 2 if workload in ("single", "long") else 1]:
            metric = f"{workload}.{name}"
            if not any(metric in entries for entries in engines.values()):
                continue
            best = best_peer(result, shape, metric)
            peer = "–" if best is None else f"{best[1]:,.{FIGURES[name].digits}f} ({best[0]})"
            cells = [_cell(result, shape, label, metric) for label in ours]
            rows.append([f"{workload}: {FIGURES[name].title}", *cells, peer])
    return _table(["", *ours, "best peer"], rows) if rows else []


def _workload(result: Mapping[str, Any], shape: str, workload: str) -> list[str]:
    engines = result["shapes"][shape]
    names = [*shown_figures(workload), "rss_mb", "load_s"]
    shares = ("core_share", "others_share")
    rows = [
        [
            label,
            *(_cell(result, shape, label, f"{workload}.{name}") for name in names),
            *(_value(entries.get(f"{workload}.{name}"), FIGURES[name]) for name in shares),
        ]
        for label, entries in engines.items()
        if f"{workload}.output_tok_s" in entries
    ]
    header = [workload, *(FIGURES[name].title for name in [*names, *shares])]
    return _table(header, rows) if rows else []


def _engine_only(result: Mapping[str, Any], shape: str) -> list[str]:
    engines = result["shapes"][shape]
    ours = [label for label in engines if label in result["ours"]]
    rows = [
        [figure.title, *(_value(engines[label].get(metric), figure) for label in ours)]
        for metric, figure in ENGINE_METRICS.items()
        if any(metric in engines[label] for label in ours)
    ]
    return _table(["this engine alone", *ours], rows) if rows else []


def _limits(result: Mapping[str, Any]) -> list[str]:
    rows = []
    for key, title in LIMITS.items():
        values = [slot[key] for slot in result["limits"] if slot.get(key)]
        text = "no such instruction or not measured"
        if values:
            text = f"{statistics.median(values):,.1f} ({min(values):,.1f}..{max(values):,.1f})"
        rows.append([title, text])
    threads = result["settings"]["threads"]
    return _table([f"limit of the machine, {threads} thread(s)", "median (min..max)"], rows)


def _noise(result: Mapping[str, Any]) -> str:
    slots = result["limits"]
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


def markdown(result: Mapping[str, Any]) -> str:
    """The report of one run."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"# {result['name']}",
        "",
        f"{machine['cpu']}, {machine['cores']} core(s) usable, {machine['memory_gib']:.0f} GiB; "
        f"{settings['threads']} thread(s) for every engine; allspark {machine['version']}, kernel "
        f"table `{machine['isa']}`; {result['date']}; {settings['rounds']} round(s), interleaved.",
        "",
    ]
    if settings["divisor"] > 1:
        lines += [f"A try: prompts and outputs are {settings['divisor']} times shorter.", ""]
    if settings["note"]:
        lines += [f"Note: {settings['note']}", ""]
    lines += [_noise(result), "", *_limits(result)]
    lines += [
        "Cells: median [least..greatest] (fraction of the machine's limit for these weights, × best"
        " peer; above 1 this engine is better).",
        "",
    ]
    for shape in result["shapes"]:
        lines += [f"## {shape} ({SHAPES[shape].title})", "", *_summary(result, shape)]
        for workload in settings["workloads"]:
            lines += _workload(result, shape, workload)
        lines += _engine_only(result, shape)
    for title, reasons in (("Left out", result["skipped"]), ("Failed", result["failures"])):
        if reasons:
            lines += [f"{title}:", "", *(f"- {reason}" for reason in reasons), ""]
    return "\n".join(lines)
