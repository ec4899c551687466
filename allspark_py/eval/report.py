"""What an evaluation found, as a table for the terminal, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from allspark._allspark import __version__
from allspark.eval.divergence import Comparison
from allspark.eval.facts import ModelFacts
from allspark.eval.files import TextFacts
from allspark.eval.multiple_choice import Choices
from allspark.eval.statistics import Estimate, Spread
from allspark.eval.text_perplexity import Perplexity
from allspark.whole_file import write_whole

Result: TypeAlias = "Perplexity | Comparison | Choices"
_VERSION = ("version", f"allspark {__version__}")
_SHOWN_KL = ("50", "90", "99", "99.9")
_SHOWN_CHANGE = ("1", "5", "25", "50", "75", "95", "99")


@dataclass(frozen=True)
class Row:
    """A figure: its name, and what is shown of it."""

    name: str
    value: str
    error: str = ""


@dataclass(frozen=True)
class Section:
    """Figures that belong together."""

    title: str
    rows: list[Row]


def text_of(result: Result) -> str:
    """For the terminal: what was measured, then the figures in columns."""
    facts = [*_facts(result), _VERSION]
    width = max(len(name) for name, _ in facts)
    lines = [f"{name.ljust(width)}  {value}" for name, value in facts]
    sections = _sections(result)
    names = max(len(row.name) for section in sections for row in section.rows)
    values = max(len(row.value) for section in sections for row in section.rows)
    for section in sections:
        lines += ["", section.title]
        for row in section.rows:
            error = f" ± {row.error}" if row.error else ""
            lines.append(f"  {row.name.ljust(names)}  {row.value.rjust(values)}{error}")
    return "\n".join(lines)


def markdown_of(result: Result, settings: Mapping[str, Any]) -> str:
    """A page: the figures, what was measured, and the settings that were given."""
    lines = []
    for section in _sections(result):
        lines += [f"## {section.title}", "", "| figure | value | ± |", "|---|---|---|"]
        lines += [f"| {row.name} | {row.value} | {row.error} |" for row in section.rows]
        lines.append("")
    return as_page(_title(result), lines, _facts(result), settings)


def as_page(
    title: str,
    figures: Sequence[str],
    facts: Sequence[tuple[str, str]],
    settings: Mapping[str, Any],
) -> str:
    """A page in Markdown of these lines, what was measured, and the settings that were given."""
    lines = [f"# {title}", "", *figures, "## What was measured", "", "| | |", "|---|---|"]
    facts = [*facts, _VERSION]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts]
    if settings:
        lines += ["", "## Settings", "", "| setting | value |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(value)} |" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def record_of(result: Result, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All figures, as JSON has them."""
    return as_record(type(result).__name__.lower(), dataclasses.asdict(result), settings)


def as_record(kind: str, figures: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a JSON file. What is not a number is null."""
    found = {"evaluation": kind, "version": __version__, "settings": dict(settings)}
    record: dict[str, Any] = _without_nan({**found, **figures})
    return record


def write(
    result: Result, settings: Mapping[str, Any], json_file: str | None, markdown_file: str | None
) -> None:
    """Writes the files that were asked for."""
    record, page = record_of(result, settings), markdown_of(result, settings)
    write_files(record, page, json_file, markdown_file)


def write_files(
    record: Mapping[str, Any], page: str, json_file: str | None, markdown_file: str | None
) -> None:
    """Writes the files that were asked for."""
    if json_file is not None:
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        write_whole(Path(json_file), text.encode())
    if markdown_file is not None:
        write_whole(Path(markdown_file), page.encode())


def _title(result: Result) -> str:
    if isinstance(result, Comparison):
        return "A model against its reference"
    return "Perplexity" if isinstance(result, Perplexity) else "Multiple choice"


def _facts(result: Result) -> list[tuple[str, str]]:
    """What was measured, and of which files."""
    facts = _model_facts("model", result.model)
    if isinstance(result, Comparison):
        facts += _model_facts("reference", result.reference)
    if isinstance(result, Choices):
        if result.tasks is not None:
            facts.append(("tasks", shown_file(result.tasks)))
        of_all = f" of {result.num_available}, chosen with seed {result.seed}"
        facts.append(("answered", f"{result.num_tasks}{of_all if result.seed is not None else ''}"))
    else:
        facts += [("text", shown_file(text)) for text in result.texts]
        facts.append(
            ("windows", f"{result.num_windows} of {result.context} tokens, {result.num_scored} "
             "tokens scored")
        )  # fmt: skip
    return facts


def _model_facts(name: str, model: ModelFacts) -> list[tuple[str, str]]:
    adapter = f", adapter {model.adapter}" if model.adapter else ""
    formats = "; ".join(model.weights) or "none"
    return [
        (name, f"{model.source} ({model.architecture}{adapter})"),
        ("  sha256", model.sha256),
        ("  computes in", f"{model.compute_type}, KV cache {model.kv_cache}"),
        ("  quantised", formats),
        ("  size", f"{model.num_weights} weights, {model.weight_bytes} bytes, "
         f"{model.bits_per_weight:.2f} bits per weight"),
    ]  # fmt: skip


def shown_file(facts: TextFacts) -> str:
    """Of a text or of tasks: name, bytes and digest."""
    return f"{facts.name}, {facts.num_bytes} bytes, sha256 {facts.sha256}"


def _sections(result: Result) -> list[Section]:
    if isinstance(result, Choices):
        rows = [
            _row("accuracy", result.accuracy, _percent),
            _row("by the mean of tokens", result.accuracy_per_token, _percent),
            _row("by characters", result.accuracy_per_character, _percent),
        ]
        return [Section("Right answers", rows)]
    if isinstance(result, Perplexity):
        rows = [
            _row("perplexity", result.perplexity, _four),
            _row("cross entropy", result.cross_entropy, _six),
        ]
        return [Section("Perplexity", rows)]
    return _comparison_sections(result)


def _comparison_sections(result: Comparison) -> list[Section]:
    perplexities = [
        _row("model", result.perplexity, _four),
        _row("reference", result.reference_perplexity, _four),
        _row("ratio", result.ratio, _six),
        _row("ln of the ratio", result.log_ratio, _six),
        _row("difference", result.difference, _four),
        Row("correlation", _percent(result.correlation)),
    ]
    tops = [
        _row("same likeliest token", result.same_top, _percent),
        _row("common to the five likeliest", result.top5_overlap, _percent),
    ]
    change = _spread_rows(result.probability_change, _SHOWN_CHANGE, _percent)
    change.insert(1, _row("root mean square", result.rms_probability_change, _percent))
    return [
        Section("Perplexity", perplexities),
        Section("KL divergence", _spread_rows(result.kl_divergence, _SHOWN_KL, _six)),
        Section("Change of the right token's probability", change),
        Section("Likeliest tokens", tops),
    ]


def _spread_rows(
    spread: Spread, percents: Sequence[str], shown: Callable[[float], str]
) -> list[Row]:
    rows = [_row("mean", spread.mean, shown)]
    if spread.smallest < 0 and shown is _percent:
        rows.append(Row("smallest", shown(spread.smallest)))
    for percent in percents:
        name = "median" if percent == "50" else f"{percent} %"
        rows.append(Row(name, shown(spread.percentiles[percent])))
    return [*rows, Row("largest", shown(spread.largest))]


def _row(name: str, estimate: Estimate, shown: Callable[[float], str]) -> Row:
    error = "" if math.isnan(estimate.error) else shown(estimate.error)
    return Row(name, shown(estimate.value), error)


def _four(value: float) -> str:
    return f"{value:.4f}"


def _six(value: float) -> str:
    return f"{value:.6f}"


def _percent(value: float) -> str:
    if math.isnan(value):
        return "-"
    text = f"{100 * value:.3f}"
    return f"{text.removeprefix('-') if float(text) == 0 else text} %"


def _cell(value: object) -> str:
    """A value that does not end its cell."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
