"""What a measurement gave, as tables, JSON and CSV."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspark._allspark import __version__
from allspark.bench.load import Run
from allspark.bench.metrics import COLUMNS, LATENCIES, Values, errors, figures
from allspark.bench.outcome import Outcome

# From here on the client may be what limits.
BUSY = 0.8
_GAPS = "; the gaps within a chunk are zero"
# Lateness from which the report has a note, in ms.
_LATE_MS = 1.0
_RATES = {
    "completed": "completed",
    "failed": "failed",
    "duration_s": "seconds",
    "rps": "RPS",
    "rpm": "RPM",
    "input_tok_s": "input tokens/s",
    "output_tok_s": "output tokens/s",
    "total_tok_s": "all tokens/s",
}


@dataclass(frozen=True)
class Measurement:
    """One run, and what it was of: {"concurrency": 16, ...}."""

    of: Mapping[str, float | None]
    outcomes: Sequence[Outcome]
    values: Values

    @classmethod
    def of_run(cls, of: Mapping[str, float | None], run: Run, **more: float) -> Measurement:
        """With all figures, and `more` beside them."""
        return cls(of, run.outcomes, {**figures(run.outcomes, run.client_cpu_s), **more})

    @property
    def title(self) -> str:
        """What it was of, in words."""
        given = {name: value for name, value in self.of.items() if value is not None}
        return ", ".join(f"{name} {value:g}" for name, value in given.items())


def tables(measurements: Sequence[Measurement]) -> str:
    """Rates, latencies in ms, and what a reader should know of them."""
    rates = [["", *_RATES.values()]]
    rows = [["ms", "", *COLUMNS]]
    for each in measurements:
        rates.append([each.title, *(_shown(each.values[name]) for name in _RATES)])
        title = each.title
        for name, shown in LATENCIES.items():
            cells = [_shown(each.values[f"{name}_{column}"]) for column in COLUMNS]
            rows.append([title, shown, *cells])
            title = ""
    lines = [*_table(rates, 1), "", *_table(rows, 2), ""]
    for each in measurements:
        prefix = f"{each.title}: " if len(measurements) > 1 else ""
        lines += [prefix + note for note in notes(each)]
    return "\n".join(lines)


def notes(measurement: Measurement) -> list[str]:
    """Sentences about a measurement: failures with their reasons, and what to think of its
    counts."""
    values = measurement.values
    found = [
        f"{count} failed: {_line(reason)}" for reason, count in errors(measurement.outcomes).items()
    ]

    def count(name: str, sentence: str, but: str | None = None) -> None:
        number = (values[name] or 0) - (0 if but is None else values[but] or 0)
        if number:
            found.append(f"{number} of {values['completed']} answers {sentence}")

    count("without_output", "have no output")
    count("without_usage", "have no usage: their tokens are counted as chunks", "not_counted")
    count("not_counted", "have neither usage nor chunks: their tokens are not counted")
    count("more_chunks_than_tokens", "came in more chunks than the usage has tokens")
    count("shorter_than_asked", "are shorter than they were allowed to be")
    per_chunk = values["tokens_per_chunk"]
    if per_chunk is not None:
        found.append(
            f"{per_chunk:.2f} tokens in a chunk: {values['output_tokens']} tokens by the counts, "
            f"{values['chunks']} chunks with output{_GAPS if per_chunk > 1 else ''}"
        )
    if (values["late_ms_max"] or 0) >= _LATE_MS:
        found.append(f"requests were sent at most {_shown(values['late_ms_max'])} ms late")
    if (memory := values.get("peak_rss_mb")) is not None:
        found.append(f"this process has taken at most {memory:.0f} MB so far")
    share = values["client_cpu_share"]
    if share is not None:
        found.append(f"the client took {100 * share:.0f} % of a core")
        if share >= BUSY:
            found.append("WARNING: the client was as busy as it can be; it limits these figures")
    return found


def _line(text: str) -> str:
    """A server's text as one line that does not steer the terminal."""
    line = " ".join(text.split())
    return "".join(each if each.isprintable() else "\ufffd" for each in line)


def _shown(value: float | int | None) -> str:
    """Three digits at least, and none that say nothing."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    decimals = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:.{decimals}f}"


def _table(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Lines of columns that are wide enough, the first ones aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < num_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def write_json(
    path: Path, benchmark: str, settings: Mapping[str, Any], measurements: Sequence[Measurement]
) -> None:
    """Settings, figures, failures by their reason, and the times of every request."""
    record = {
        "benchmark": benchmark,
        "version": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "measurements": [
            {
                "of": dict(each.of),
                "values": each.values,
                "errors": errors(each.outcomes),
                "requests": [_request(outcome) for outcome in each.outcomes],
            }
            for each in measurements
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _request(outcome: Outcome) -> dict[str, Any]:
    return {
        "due_s": outcome.due,
        "sent_s": outcome.sent,
        "first_s": outcome.times[0] if outcome.times else None,
        "last_s": outcome.times[-1] if outcome.times else None,
        "end_s": outcome.end,
        "chunks": len(outcome.times),
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "asked_tokens": outcome.asked,
        "error": outcome.error,
    }


def write_csv(path: Path, benchmark: str, measurements: Sequence[Measurement]) -> None:
    """A line for each measurement: what it was of, and its figures."""
    rows = [{"benchmark": benchmark, **each.of, **each.values} for each in measurements]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
