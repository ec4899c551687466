"""Writes the documents' figures, between `<!-- figures: NAME -->` and `<!-- end -->`.

All of them come from the records in results/, which has one folder for each kind of machine, all
from one commit. A test compares the documents with these, and finds figures in other places.
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True)
class _Row:
    """A figure of a shape."""

    result: Result
    shape: str
    metric: str

    @property
    def kind(self) -> str:
        return self.result.record["machine"]["kind"]

    def begin(self) -> list[str]:
        """The cells that say what the row is about."""
        cores = self.result.record["machine"]["cores"]
        machine = f"{self.kind}, {cores} cores"
        return [machine, SHAPES[self.shape].title, _row_title(self.metric)]


def _rows(
    results: Results, metrics: tuple[str, ...], labels: tuple[str, ...] = ()
) -> Iterator[_Row]:
    """Those of which one of `labels` has a value; none given: any precision of ours."""
    for source in results.of("engines"):
        result = Result(source.record)
        for shape, metric in itertools.product(_shapes(result), metrics):
            if any(result.values(shape, label, metric) for label in labels or result.ours(shape)):
                yield _Row(result, shape, metric)


def _one_table(header: list[str], rows: list[list[str]], folder: Path) -> list[str]:
    if not rows:
        return _missing("python benchmarks/compare.py")
    page = _link(ROOT / "benchmarks" / "README.md", folder)
    where = f"Dates, commits and the engines that took part: [all rows]({page}#figures)."
    return [*table(["machine", "shape", "figure", *header], rows), where, ""]


def headline(results: Results, folder: Path) -> list[str]:
    """A few rows of the first shape, for each kind of machine."""
    first: dict[str, tuple[Result, str]] = {}
    rows = []
    for row in _rows(results, _HEADLINE, _SHOWN):
        if first.setdefault(row.kind, (row.result, row.shape)) == (row.result, row.shape):
            rows.append(row)
    labels = [label for label in _SHOWN if any(label in row.result.ours(row.shape) for row in rows)]
    cells = [
        [
            *row.begin(),
            *(cell(row.result, row.shape, label, row.metric, with_range=False) for label in labels),
            best_peer_cell(row.result, row.shape, row.metric),
        ]
        for row in rows
    ]
    return _one_table([*labels, "best peer"], cells, folder)


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
    rows = list(_rows(results, _EXPECTED))
    measured = dict.fromkeys(label for row in rows for label in row.result.ours(row.shape))
    labels = sorted(measured, key=is_over_http)
    cells = [[*row.begin(), *(_plain(row, label) for label in labels)] for row in rows]
    return _one_table([_form(label) for label in labels], cells, folder)


def _form(label: str) -> str:
    """What a user chooses: a precision, and whether a server is in between."""
    precision = label.partition(" ")[2]
    return f"{precision}, over HTTP" if is_over_http(label) else precision


def _plain(row: _Row, label: str) -> str:
    value, figure = row.result.median(row.shape, label, row.metric), figure_of(row.metric)
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
