"""The tables of the benchmarks that measure only this engine, made from their records."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from record import Measurement, Record, keys, select
from report import table

FREE = "free"  # In guided.py: decoding without a format.
# In quantizing.py; the types that the peer loads checkpoints in.
OWN, HALF = "allspark awq+gptq", "half of the layers"
PEERS = {f"llm-compressor GPTQ, {dtype}": dtype for dtype in ("float32", "bfloat16")}
IN_PROCESS, OVER_HTTP = "in process", "over HTTP"  # In server_speed.py.
Values = Mapping[str, float]


def _median(
    record: Record, value: Callable[[Values], float | None], text: str, **of: object
) -> str:
    """The median of `value` over the rounds, formatted by `text`; or why there is none."""
    found = list(select(record, **of))
    each = [value(one["values"]) for one in found if "values" in one]
    known = [one for one in each if one is not None]
    return text.format(statistics.median(known)) if known else _no_value(found)


def _no_value(measurements: Iterable[Measurement]) -> str:
    return "disturbed" if any("disturbed" in each for each in measurements) else "–"


def beside(record: Record, of: Mapping[str, Any], base: Mapping[str, Any]) -> list[list[Values]]:
    """The values of the rounds that have both, in pairs."""
    by_round: list[dict[int, Values]] = [
        {one["round"]: one["values"] for one in select(record, **which) if "values" in one}
        for which in (of, base)
    ]
    own, other = by_round
    return [[own[number], other[number]] for number in own if number in other]


def prefix_cache(record: Record) -> list[str]:
    settings = record["settings"]
    rows = []
    for share in keys(record, "found"):
        rows.append([
            f"{share:.1%}",
            _median(record, lambda v: v["with_ms"], "{:,.1f}", found=share),
            _median(record, lambda v: v["without_ms"], "{:,.1f}", found=share),
            _median(record, lambda v: v["with_ms"] / v["without_ms"], "{:.3f}", found=share),
        ])  # fmt: skip
    title = f"{settings['shape']}, {settings['prompt']} tokens: found"
    return table([title, "TTFT with, ms", "without", "ratio"], rows)


def lora(record: Record) -> list[str]:
    settings = record["settings"]
    sets = keys(record, "adapters")
    tokens = settings["requests"] * settings["output"]

    def whole(values: Values) -> float:
        return values["prompts_s"] + values["output_s"]

    rows = []
    for name in sets:
        # Ratios within each round, so that other load on the machine cancels out.
        pairs = beside(record, {"adapters": name}, {"adapters": sets[0]})
        shares = [whole(base) / whole(own) for own, base in pairs]
        rows.append([
            name,
            _median(record, lambda v: v["prompts_s"], "{:.3f}", adapters=name),
            _median(record, lambda v: v["output_s"], "{:.3f}", adapters=name),
            _median(record, lambda v: tokens / whole(v), "{:,.0f}", adapters=name),
            f"{statistics.median(shares):.3f}" if shares else "–",
        ])  # fmt: skip
    title = (
        f"{settings['shape']} {settings['precision']}, {settings['requests']} requests of "
        f"{settings['prompt']} + {settings['output']} tokens, {settings['adapters']} adapters of "
        f"rank {settings['rank']}"
    )
    header = [title, "prompts, s", "output, s", "output tokens/s", "of the base model's"]
    return table(header, rows)


def moe(record: Record) -> list[str]:
    settings = record["settings"]
    rows = []

    def share(values: Values) -> float | None:
        read = values.get("read_gb_s")
        return None if read is None else values["step_bytes"] / 1e7 / values["step_s"] / read

    for streams in keys(record, "streams"):

        def rate(values: Values, streams: int = streams) -> float:
            return streams / values["step_s"]

        rows.append([
            str(streams),
            _median(record, lambda v: 1000 * v["step_s"], "{:.2f}", streams=streams),
            _median(record, rate, "{:.1f}", streams=streams),
            _median(record, lambda v: v["step_bytes"] / 1e9, "{:.3f}", streams=streams),
            _median(record, share, "{:.0f} %", streams=streams),
        ])  # fmt: skip
    title = f"{settings['shape']} {settings['precision']}: streams"
    header = [title, "ms a step", "tokens/s", "GB read a step", "of the read bandwidth"]
    return table(header, rows)


def guided(record: Record) -> list[str]:
    settings = record["settings"]
    rows = []
    for kind in keys(record, "kind"):
        pairs = beside(record, {"kind": kind}, {"kind": FREE})
        shares = [own["tok_s"] / free["tok_s"] for own, free in pairs]
        share = f"{statistics.median(shares):.3f}" if shares else "–"
        rows.append([kind, _median(record, lambda v: v["tok_s"], "{:,.1f}", kind=kind), share])
    title = f"{settings['shape']}, batch {settings['batch']}"
    return table([title, "tokens/s", "of free"], rows)


def hostile_ratio(record: Record) -> float | None:
    """The p99 gap of the attacked stream in quiet ones; the median of the rounds."""
    pairs = beside(record, {"kind": "attacked"}, {"kind": "quiet"})
    ratios = [own["p99"] / quiet["p99"] for own, quiet in pairs]
    return statistics.median(ratios) if ratios else None


def hostile(record: Record) -> list[str]:
    rows = [
        [
            kind,
            *(
                _median(record, lambda v, of=name: 1e3 * v[of], "{:,.1f}", kind=kind)
                for name in ("p50", "p99", "most")
            ),
            _median(record, lambda v: v["attacks"], "{:,.0f}", kind=kind),
        ]
        for kind in keys(record, "kind")
    ]
    title = f"{record['settings']['shape']}, gaps of a stream in ms"
    return table([title, "p50", "p99", "longest", "hostile requests"], rows)


def prefill_policy(record: Record) -> list[str]:
    columns = ("output_tok_s", "ttft_ms", "ttft_p99_ms", "gap_ms", "gap_p99_ms")
    rows = []
    for workload, policy in itertools.product(keys(record, "workload"), keys(record, "policy")):
        cells = [
            _median(record, lambda v, of=name: v[of], "{:,.1f}", workload=workload, policy=policy)
            for name in columns
        ]
        rows.append([workload, policy, *cells])
    settings = record["settings"]
    title = f"{settings['shape']} {settings['precision']}"
    header = [title, "policy", "tokens/s", "TTFT p50, ms", "p99", "gap p50, ms", "p99"]
    return table(header, rows)


def speculative(record: Record) -> list[str]:
    settings = record["settings"]
    rows = []
    # The batch sizes of a set are consecutive rows.
    for name, batch in itertools.product(keys(record, "set"), keys(record, "batch")):
        of = {"set": name, "batch": batch}
        rows.append([
            name,
            str(batch),
            _median(record, lambda v: v["plain_tok_s"], "{:,.1f}", **of),
            _median(record, lambda v: v["fast_tok_s"], "{:,.1f}", **of),
            _median(record, lambda v: v["fast_tok_s"] / v["plain_tok_s"], "{:.2f}", **of),
            _median(record, lambda v: v["accepted"] / max(v["drafted"], 1), "{:.0%}", **of),
        ])  # fmt: skip
    how = f"prompt_lookup_num_tokens {settings['lookup']}"
    if settings["draft_layers"] is not None:
        how = f"a draft model of {settings['draft_layers']} layers in {settings['draft_precision']}"
    title = f"{settings['shape']} {settings['precision']}, {settings['output']} tokens each, {how}"
    return table([title, "batch", "tokens/s", "speculative", "factor", "drafts accepted"], rows)


def conversion(record: Record) -> list[str]:
    sizes = ("checkpoint", "model", "anonymous", "resident")

    def row(name: str) -> list[str]:
        cells = [
            _median(record, lambda v, size=size: v[f"{size}_mb"], "{:,.0f}", format=name)  # type: ignore[misc]
            for size in sizes
        ]
        # Elsewhere the kernel's own writing may have disturbed it.
        files = {each["of"].get("files") for each in select(record, format=name)}
        title = f"{name}, on disk" if "on disk" in files else name
        return [title, *cells, _median(record, lambda v: v["convert_s"], "{:.1f}", format=name)]

    title = f"{record['settings']['shape']}, in MB: format"
    return table([title, *sizes, "s"], map(row, keys(record, "format")))


def step_loop(record: Record) -> list[str]:
    threads = keys(record, "threads")

    def row(streams: int) -> list[str]:
        cells = [
            _median(record, lambda v: v["step_us"], "{:,.1f}", streams=streams, threads=each)
            for each in threads
        ]
        return [str(streams), *cells]

    header = ["streams", *(f"us a step, {each} thread(s)" for each in threads)]
    return table(header, map(row, keys(record, "streams")))


def batch_memory(values: Values) -> float:
    """What a turn takes beside the engine, in MB. Older records have only `grown_mb`, what it took
    beside all that the process had when the turn began."""
    return values["above_engine_mb" if "above_engine_mb" in values else "grown_mb"]


# As the documents call the kinds of records.
LINES = {"own lines": "prompt lines", "requests": "request lines"}


def batch(record: Record) -> list[str]:
    def row(kind: str) -> list[str]:
        pairs = beside(record, {"kind": kind}, {"kind": "sdk"})
        ratios = [own["tok_s"] / sdk["tok_s"] for own, sdk in pairs]
        return [
            LINES.get(kind, kind),
            _median(record, lambda v: v["tok_s"], "{:,.1f}", kind=kind),
            f"{statistics.median(ratios):.3f}" if ratios else "–",
            _median(record, lambda v: v["cpu_ms"], "{:,.3f}", kind=kind),
            _median(record, batch_memory, "{:,.1f}", kind=kind),
        ]

    is_old = any("grown_mb" in each.get("values", {}) for each in record["measurements"])
    memory = "peak memory, MB more" if is_old else "peak memory, MB above the engine's"
    header = ["lines", "tokens/s", "of the SDK's", "CPU ms a token", memory]
    return table(header, map(row, keys(record, "kind")))


def http_streams(record: Record) -> list[str]:
    settings = record["settings"]
    servers = keys(record, "server")
    rows = []
    for server in servers:
        rows.append([
            server,
            _median(record, lambda v: v["frames"], "{:,.0f}", server=server),
            _median(record, lambda v: v["seconds"], "{:.2f}", server=server),
            _median(record, lambda v: v["engine_s"], "{:.2f}", server=server),
            _median(record, lambda v: v["other_s"], "{:.2f}", server=server),
            _median(record, lambda v: v["us_per_frame"], "{:.1f}", server=server),
        ])  # fmt: skip
    title = f"{settings['streams']:,} streams of {settings['output']} tokens"
    heads = [title, "frames", "s", "CPU of the engine, s", "of the rest, s", "µs a frame"]
    return table(heads, rows)


def long_prompt(record: Record) -> list[str]:
    settings = record["settings"]
    rows = [
        [
            kind,
            *(
                _median(record, lambda v, of=name: 1e3 * v[of], "{:,.1f}", kind=kind)
                for name in ("step", "p99", "most")
            ),
            _median(record, lambda v: v.get("newcomer_s"), "{:,.2f}", kind=kind),
            _median(record, lambda v: v.get("prompt_s"), "{:,.1f}", kind=kind),
        ]
        for kind in keys(record, "kind")
    ]
    streams, prompt = settings["streams"], settings["prompt"]
    title = f"{settings['shape']}, {streams} streams, a prompt of {prompt:,}"
    heads = ["gap p50, ms", "p99", "longest", "longest TTFT of newcomers, s", "of the prompt, s"]
    return table([title, *heads], rows)


def server_start(record: Record) -> list[str]:
    rows = [
        [
            name,
            _median(record, lambda v: v["up_s"], "{:.2f}", process=name),
            _median(record, lambda v: v["start_s"], "{:.2f}", process=name),
            _median(record, lambda v: v["rss_mb"], "{:,.0f}", process=name),
        ]
        for name in keys(record, "process")
    ]
    head = f"{record['settings']['model']}: process"
    return table([head, "s until it is up", "until it has answered", "resident memory, MB"], rows)


def quantizing(record: Record) -> list[str]:
    rows = [
        [
            name,
            _median(record, lambda v: v["s"], "{:,.0f}", program=name),
            _median(record, lambda v: v["peak_mb"], "{:,.0f}", program=name),
        ]
        for name in keys(record, "program")
    ]
    settings = record["settings"]
    title = f"{settings['shape']}, {settings['samples']} x {settings['length']} tokens"
    return table([title, "s", "peak memory, MB"], rows)


def server_speed(record: Record) -> list[str]:
    def row(precision: str, way: str) -> list[str]:
        of = {"precision": precision, "way": way}
        pairs = beside(record, of, {**of, "way": IN_PROCESS})
        ratios = [own["output_tok_s"] / base["output_tok_s"] for own, base in pairs]
        columns = ("output_tok_s", "ttft_ms", "gap_ms", "gap_p99_ms")
        cells = [_median(record, lambda v, n=name: v[n], "{:,.1f}", **of) for name in columns]
        return [precision, way, *cells, f"{statistics.median(ratios):.3f}" if ratios else "–"]

    ways = itertools.product(keys(record, "precision"), (IN_PROCESS, OVER_HTTP))
    header = [f"{record['settings']['shape']}, 32 streams", "", "tokens/s", "TTFT p50, ms",
              "gap p50, ms", "p99", "tokens/s, of in process"]  # fmt: skip
    return table(header, [row(*each) for each in ways])


def choices(record: Record) -> list[str]:
    questions = record["settings"]["questions"]

    def shown(name: str, text: str, **of: object) -> str:
        return _median(record, lambda v: v.get(name), text, **of)

    rows = [
        [
            name,
            _median(record, lambda v: v["s"], "{:.1f}", model=name),
            _median(record, lambda v: questions / v["s"], "{:.2f}", model=name),
            shown("difference", "{:.1e}", model=name),
            shown("same", "{:.1%}", model=name),
        ]
        for name in keys(record, "model")
    ]
    header = [f"{questions} questions", "s", "questions/s", "largest difference", "same answers"]
    return table(header, rows)


TABLES: Mapping[str, Callable[[Record], list[str]]] = {
    "prefix_cache": prefix_cache,
    "lora": lora,
    "moe": moe,
    "prefill_policy": prefill_policy,
    "guided": guided,
    "speculative": speculative,
    "conversion": conversion,
    "step_loop": step_loop,
    "http_streams": http_streams,
    "quantizing": quantizing,
    "server_speed": server_speed,
    "server_start": server_start,
    "long_prompt": long_prompt,
    "batch": batch,
    "choices": choices,
}
