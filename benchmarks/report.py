"""Turns the samples of run.py into medians, fractions of the machine's limits and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints import SHAPES, Shape
from workloads import Workload, make_workload

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Metric:
    """A row of the table; `key` is what run.py stores it under: workload, dot, measured value."""

    key: str
    title: str
    digits: int = 1
    percent: bool = False


METRICS = (
    Metric("convert.convert_s", "conversion, s", 2),
    Metric("convert.convert_rss_mb", "conversion, peak RSS, MB", 0),
    Metric("start.start_s", "start, page cache warm, s", 3),
    Metric("start.warm_up_s", "warm-up on top, s", 2),
    Metric("single.ttft_ms", "single: TTFT of 128, ms", 0),
    Metric("single.decode_tok_s", "single: decode, tokens/s"),
    Metric("single.read_fraction", "– of the read bandwidth", 0, True),
    Metric("single.core_share", "– share of the cores that it got", 0, True),
    Metric("single.rss_mb", "single: peak RSS, MB", 0),
    Metric("p1024.prefill_tok_s", "p1024: prefill, tokens/s"),
    Metric("p1024.compute_fraction", "– of the arithmetic rate", 0, True),
    Metric("p1024.core_share", "– share of the cores that it got", 0, True),
    Metric("b32.output_tok_s", "b32: output tokens/s"),
    Metric("b32.compute_fraction", "– of the arithmetic rate", 0, True),
    Metric("b32.core_share", "– share of the cores that it got", 0, True),
    Metric("b32.rss_mb", "b32: peak RSS, MB", 0),
    Metric("mixed.output_tok_s", "mixed: output tokens/s"),
    Metric("mixed.compute_fraction", "– of the arithmetic rate", 0, True),
    Metric("mixed.core_share", "– share of the cores that it got", 0, True),
    Metric("mixed.ttft_ms", "mixed: median TTFT, ms", 0),
    Metric("gap.gap_max_ms", "gap: longest, ms", 0),
    Metric("gap.gap_median_ms", "gap: median beside the prompt, ms", 0),
    Metric("gap.gap_alone_ms", "gap: median alone, ms", 0),
    Metric("gap.gap_prompt_s", "gap: TTFT of the long prompt, s", 1),
    Metric("streams.streams_tok_s", "64 streams: tokens/s, read at the end", 0),
    Metric("streams.streams_step_us", "64 streams: time per step, µs", 0),
    Metric("streams.streams_read_tok_s", "64 streams: tokens/s, a thread reads each", 0),
)

LIMITS = (
    ("read_gb_s", "read bandwidth, GB/s"),
    ("fma_gflop_s", "float32 multiply-adds, GFLOP/s"),
    ("bf16_gflop_s", "bfloat16 dot products, GFLOP/s"),
    ("int8_gop_s", "int8 dot products, GOP/s"),
)


def work_flops(shape: Shape, work: Workload) -> float:
    """Operations of all requests of a workload, prompts and outputs."""
    total = 0.0
    for request in work.requests:
        # The last output token is drawn and not computed on.
        computed = len(request.ids) + request.num_output - 1
        extra_heads = 2.0 * shape.head_weights * (request.num_output - 1)
        total += shape.prefill_flops(computed) + extra_heads
    return total


def derive(
    shape: Shape,
    task: str,
    divisor: int,
    measured: Mapping[str, float],
    limits: Mapping[str, float | None],
) -> dict[str, float]:
    """What the table shows of one measurement: its values and its fractions of the limits that
    were measured just before and after it."""
    values = dict(measured)
    if "ttft_s" in values:
        values["ttft_ms"] = 1e3 * values.pop("ttft_s")
    read = limits.get("read_gb_s")
    if "decode_tok_s" in values and read:
        bytes_per_s = values["decode_tok_s"] * shape.bytes_per_decoded_token()
        values["read_fraction"] = bytes_per_s / (read * 1e9)
    rate = limits.get("arithmetic_gflop_s")
    if "output_tok_s" in values and rate:
        work = make_workload(task, shape.vocab_size, divisor)
        seconds = work.num_output / values["output_tok_s"]
        values["compute_fraction"] = work_flops(shape, work) / seconds / (rate * 1e9)
    return values


def summarise(samples: Mapping[str, Samples]) -> dict[str, dict[str, Any]]:
    """Per shape and metric: every value, their median, least and greatest."""
    return {
        shape: {
            key: {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "values": values,
            }
            for key, values in metrics.items()
        }
        for shape, metrics in samples.items()
    }


def _number(value: float, metric: Metric) -> str:
    scale = 100 if metric.percent else 1
    return f"{value * scale:,.{metric.digits}f}"


def _cell(entry: Mapping[str, Any] | None, metric: Metric) -> str:
    if entry is None:
        return "–"
    unit = " %" if metric.percent else ""
    text = f"{_number(entry['median'], metric)}{unit}"
    if len(entry["values"]) > 1:
        text += f" ({_number(entry['min'], metric)}..{_number(entry['max'], metric)})"
    return text


def _range(values: list[float]) -> str:
    if not values:
        return "no such instruction or not measured"
    return f"{statistics.median(values):,.1f} ({min(values):,.1f}..{max(values):,.1f})"


def _noise(result: Mapping[str, Any]) -> str:
    slots = result["limits"]
    loads = [slot["load_average"] for slot in slots]
    text = f"Load average of the machine (1 minute) while this ran: {min(loads)} to {max(loads)}."
    reads = [slot["read_gb_s"] for slot in slots if slot["read_gb_s"]]
    if reads and max(reads) > 1.3 * min(reads):
        text += (
            f" The read bandwidth alone moved by a factor of {max(reads) / min(reads):.1f} between"
            " slots: **the machine was not quiet, and only the fractions and the order of magnitude"
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
        f"kernel table `{machine['isa']}`, {settings['threads']} thread(s), "
        f"{settings['data_type']} weights, chunk {settings['chunk'] or '512 (default)'}; "
        f"allspark {machine['version']}; {result['date']}; {settings['rounds']} round(s).",
        "",
    ]
    if settings["divisor"] > 1:
        lines += [f"Quick look: prompts and outputs are {settings['divisor']} times shorter.", ""]
    if settings["note"]:
        lines += [f"Note: {settings['note']}", ""]
    lines += [_noise(result), ""]
    lines += [f"| limit of the machine, {settings['threads']} thread(s) | median (min..max) |"]
    lines += ["|---|---|"]
    for key, title in LIMITS:
        values = [slot[key] for slot in result["limits"] if slot.get(key)]
        lines.append(f"| {title} | {_range(values)} |")
    shapes = result["shapes"]
    titles = [f"{name} ({SHAPES[name].title})" for name in shapes]
    lines += ["", f"| median (min..max) | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for metric in METRICS:
        entries = [shapes[name].get(metric.key) for name in shapes]
        if any(entries):
            cells = " | ".join(_cell(entry, metric) for entry in entries)
            lines.append(f"| {metric.title} | {cells} |")
    if result["failures"]:
        lines += ["", "Failed: " + "; ".join(result["failures"])]
    return "\n".join(lines) + "\n"
