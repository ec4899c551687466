"""Writes the documents' figures, between `<!-- figures: NAME -->` and `<!-- end -->`.

All of them come from the records in results/, which has one folder for each kind of machine, all
from one commit. A test compares the documents with these, and finds figures in other places.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoints import SHAPES
from record import DOCUMENTS, Record, read
from report import (
    FIGURES,
    Result,
    bars_met,
    beside,
    best_peer_cell,
    cell,
    figure_of,
    is_over_http,
    origin,
    summary,
    table,
)
from tables import TABLES
from verdicts import page

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# The precisions that documents show; reports show all of them.
_SHOWN = ("allspark bf16", "allspark A8W8", "allspark A8W4")
_HEADLINE = (
    "single.decode_tok_s", "single.ttft_ms", "p1024.prefill_tok_s", "b32.output_tok_s",
    "mixed.output_tok_s", "shared.output_tok_s",
)  # fmt: skip
_EXPECTED = (
    "single.decode_tok_s", "single.ttft_ms", "p1024.prefill_tok_s", "b32.output_tok_s",
    "b32.rss_mb", "b32.load_s",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A record and its path."""

    path: Path
    record: Record


class UnknownBlock(ValueError):
    """A marker whose name is not the name of a block."""


class Results:
    """The records under a folder."""

    def __init__(self, folder: Path) -> None:
        self._sources = [Source(path, read(path)) for path in sorted(folder.glob("*/*.json"))]

    def of(self, benchmark: str) -> Iterator[Source]:
        for source in self._sources:
            if source.record["benchmark"] == benchmark:
                yield source

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)


def _link(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder)


def _missing(command: str) -> list[str]:
    return [f"There is no measurement of this yet (`{command}`).", ""]


def _shapes(result: Result) -> list[str]:
    """The shapes for which a shown precision was measured."""
    return [shape for shape in result.shapes if set(_SHOWN) & set(result.ours(shape))]


def headline(results: Results, folder: Path) -> list[str]:
    """A few rows of the first shape, for each kind of machine."""
    lines: dict[str, list[str]] = {}
    for source in results.of("engines"):
        result, kind = Result(source.record), source.record["machine"]["kind"]
        for shape in _shapes(result):
            rows = _peer_rows(result, shape, _HEADLINE)
            if rows and kind not in lines:
                header = [f"{SHAPES[shape].title} on {kind}", *_ours_shown(result, shape)]
                lines[kind] = [origin(source.record), ""]
                lines[kind] += [*table([*header, "best peer"], rows), beside(result, shape), ""]
    written = [line for each in lines.values() for line in each]
    return written or _missing("python benchmarks/compare.py")


def _ours_shown(result: Result, shape: str) -> list[str]:
    return [label for label in result.ours(shape) if label in _SHOWN]


def _peer_rows(result: Result, shape: str, metrics: tuple[str, ...]) -> list[list[str]]:
    rows = []
    for metric in metrics:
        ours = _ours_shown(result, shape)
        if not any(result.values(shape, label, metric) for label in ours):
            continue
        cells = [cell(result, shape, label, metric, with_range=False) for label in ours]
        rows.append([_row_title(metric), *cells, best_peer_cell(result, shape, metric)])
    return rows


def _row_title(metric: str) -> str:
    workload, _, name = metric.partition(".")
    return f"{workload}: {FIGURES[name].title}"


def engines(results: Results, folder: Path) -> list[str]:
    """The summary of every shape, and its bars."""
    lines: list[str] = []
    headings: set[str] = set()
    for source in results.of("engines"):
        result, kind = Result(source.record), source.record["machine"]["kind"]
        if kind not in headings:
            lines += [f"### {kind}", ""]
            headings.add(kind)
        report = _link(source.path.with_suffix(".md"), folder)
        plot = _link(source.path.with_suffix(".png"), folder)
        values = _link(source.path, folder)
        lines += [origin(source.record)]
        lines += [f"[Report]({report}), [plot]({plot}), [every value]({values}).", ""]
        for shape in _shapes(result):
            lines += [f"{SHAPES[shape].title}:", ""]
            lines += summary(result, shape, _SHOWN, with_range=False)
            lines += [beside(result, shape), bars_met(result, shape), ""]
    return lines or _missing("python benchmarks/compare.py")


def expected(results: Results, folder: Path) -> list[str]:
    """What users can expect from each precision."""
    lines: list[str] = []
    for source in results.of("engines"):
        result = Result(source.record)
        for shape in _shapes(result):
            ours = result.ours(shape)
            rows = [
                [_row_title(metric), *(_plain(result, shape, label, metric) for label in ours)]
                for metric in _EXPECTED
                if any(result.values(shape, label, metric) for label in ours)
            ]
            if not rows:
                continue
            title = f"{SHAPES[shape].title} on {source.record['machine']['kind']}"
            names = [_form(label) for label in ours]
            lines += [origin(source.record), "", *table([title, *names], rows)]
    return lines or _missing("python benchmarks/compare.py")


def _form(label: str) -> str:
    """What a user chooses: a precision, and whether a server is in between."""
    precision = label.partition(" ")[2]
    return f"{precision}, over HTTP" if is_over_http(label) else precision


def _plain(result: Result, shape: str, label: str, metric: str) -> str:
    value, figure = result.median(shape, label, metric), figure_of(metric)
    return "–" if value is None else f"{value * figure.scale:,.{figure.digits}f}"


def _alone(benchmark: str) -> Callable[[Results, Path], list[str]]:
    def lines_of(results: Results, folder: Path) -> list[str]:
        lines: list[str] = []
        for source in results.of(benchmark):
            record = source.record
            lines += [f"{origin(record)} `{record['command']}`; "]
            lines[-1] += f"[every value]({_link(source.path, folder)})."
            lines += ["", *page(record)]
        return lines or _missing(f"python benchmarks/{benchmark}.py")

    return lines_of


BLOCKS: Mapping[str, Callable[[Results, Path], list[str]]] = {
    "headline": headline,
    "engines": engines,
    "expected": expected,
    **{benchmark: _alone(benchmark) for benchmark in TABLES},
}


def render(text: str, results: Results, folder: Path) -> str:
    """The document with its blocks written again; `folder`: that of the document, for links."""

    def block(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name not in BLOCKS:
            raise UnknownBlock(f"figures: {name!r}; it must be one of {', '.join(BLOCKS)}")
        return "\n".join([begin, *BLOCKS[name](results, folder), end])

    return BLOCK.sub(block, text)


def write_documents(folder: Path) -> None:
    """Writes the reports beside the records, and the documents."""
    results = Results(folder)
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        new = render(text, results, path.parent)
        print(f"{name}: {'unchanged' if new == text else 'written'}")
        path.write_text(new)
