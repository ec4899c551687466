"""What the kinds of `allspark bench` share: flags of datasets and results, and the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from allspark.bench.workload import Lengths

from .argument_types import not_negative, positive
from .output_files import check_output_file, settings_of

_DEFAULT_INPUT = Lengths(512, 512)
_DEFAULT_OUTPUT = Lengths(128, 128)
# Requests before the clock starts: short, since they only open connections and load code.
_WARM_UP = (Lengths(16, 16), Lengths(8, 8))


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_dataset_flags(parser: argparse.ArgumentParser, concurrency: list[int] | None) -> None:
    """Adds them; `requests_of` and `warm_up_of` read them."""
    add = parser.add_argument
    add("--dataset", default="random", metavar="FILE",
        help="conversations as ShareGPT's, or JSON lines with `prompt` or `messages` "
        "(default: random prompts)")  # fmt: skip
    add("-n", "--num-prompts", type=positive, default=100, metavar="N",
        help="requests (default: 100)")  # fmt: skip
    shown = "1" if concurrency is None else " ".join(map(str, concurrency))
    add("-c", "--concurrency", type=positive, nargs="+", default=concurrency, metavar="N",
        help=f"requests at a time (default: {shown})")  # fmt: skip
    add("--input-len", type=_lengths, default=_DEFAULT_INPUT, metavar="N|LOW:HIGH",
        help=f"tokens of random prompts (default: {_DEFAULT_INPUT})")  # fmt: skip
    add("--output-len", type=_lengths, metavar="N|LOW:HIGH",
        help="most tokens of outputs (default: what the file says, else "
        f"{_DEFAULT_OUTPUT})")  # fmt: skip
    add("--warm-up", type=not_negative, default=1, metavar="N",
        help="requests before, which are not counted (default: 1)")  # fmt: skip


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them; `check_results` and `measure_and_report` read them."""
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    add("--json", metavar="FILE", help="settings, figures and the times of every request")
    add("--csv", metavar="FILE", help="figures, a line for each measurement")
    add("--plot", metavar="FILE", help="a picture of them; needs matplotlib")


def check_results(options: argparse.Namespace) -> None:
    """Raises before anything is measured, where results could not be written after it."""
    for flag in ("json", "csv", "plot"):
        check_output_file(f"--{flag}", getattr(options, flag))
    if options.plot is not None:
        from allspark.bench.plot import check_plot

        check_plot(Path(options.plot))


def requests_of(
    options: argparse.Namespace, num_measurements: int, tokenizer: Any = None
) -> list[list[Any]]:
    """The requests of each measurement: others in each, so that no prefix cache knows them."""
    from allspark.bench.workload import random_requests

    output = options.output_len or _DEFAULT_OUTPUT
    if options.dataset != "random":
        return _parts_of_dataset(options, num_measurements, output, tokenizer)
    vocabulary = _vocabulary(tokenizer)
    return [
        random_requests(
            options.num_prompts, options.input_len, output, options.seed,
            vocabulary, f"requests {index}",
        )
        for index in range(num_measurements)
    ]  # fmt: skip


def _parts_of_dataset(
    options: argparse.Namespace, num_measurements: int, output: Lengths, tokenizer: Any
) -> list[list[Any]]:
    """Parts of a file that are equally long; none of its requests is in two of them."""
    from allspark.bench.dataset import read_requests

    path, asked = options.dataset, options.num_prompts
    requests = read_requests(
        path,
        num_measurements * asked,
        options.seed,
        output,
        options.output_len is not None,
        None if tokenizer is None else lambda text: len(tokenizer.encode(text)),
    )
    size = min(asked, len(requests) // num_measurements)
    if size == 0:
        raise ValueError(
            f"{path} gives {len(requests)} request(s); {num_measurements} measurements need at "
            "least as many"
        )
    if size < asked:
        each = f" for each of {num_measurements} measurements" if num_measurements > 1 else ""
        print(f"{path} gives {size} of {asked} requests{each}", file=sys.stderr)
    return [requests[index * size : (index + 1) * size] for index in range(num_measurements)]


def warm_up_of(options: argparse.Namespace, tokenizer: Any = None) -> list[Any]:
    """The requests before a measurement."""
    from allspark.bench.workload import random_requests

    return random_requests(
        options.warm_up, *_WARM_UP, options.seed, _vocabulary(tokenizer), "warm-up"
    )


def _vocabulary(tokenizer: Any) -> list[int] | None:
    from allspark.bench.workload import vocabulary_of

    return None if tokenizer is None else vocabulary_of(tokenizer)


def measure_and_report(
    target: Any,
    cases: Sequence[Any],
    options: argparse.Namespace,
    more: Callable[[], dict[str, float]] = dict,
) -> int:
    """Measures, prints tables and writes files. Returns the exit status: 1 where no request of a
    measurement completed. What was measured before an error or Ctrl-C is reported, too."""
    from allspark.bench.cases import measure, run
    from tqdm import tqdm

    measurements: list[Any] = []
    total = sum(len(case.requests) for case in cases)
    try:
        with tqdm(total=total, unit="request", disable=not sys.stderr.isatty()) as progress:
            run(measure(target, cases, measurements.append, progress.update, more))
    finally:
        if measurements:
            _report(measurements, options)
    return 0 if all(each.values["completed"] for each in measurements) else 1


def _report(measurements: Sequence[Any], options: argparse.Namespace) -> None:
    from allspark.bench.report import tables, write_csv, write_json

    print(tables(measurements))
    name = f"bench {options.bench}"
    if options.json is not None:
        write_json(Path(options.json), name, _settings(options), measurements)
    if options.csv is not None:
        write_csv(Path(options.csv), name, measurements)
    if options.plot is not None:
        from allspark.bench.plot import draw

        draw(Path(options.plot), name, measurements)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the measurement, as JSON has them."""
    found = settings_of(options)
    return {k: str(v) if isinstance(v, Lengths) else v for k, v in found.items()}
