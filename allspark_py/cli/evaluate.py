"""Measures how well a model predicts: perplexity, distance from a reference, multiple choice."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import engine_flags, evaluate_layers
from .argument_types import not_negative, positive
from .output_files import check_output_file, settings_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="eval", required=True, metavar="KIND")
    for name, (add, function) in _KINDS.items():
        summary = (function.__doc__ or "").splitlines()[0]
        kind = kinds.add_parser(name, help=summary, description=summary)
        add(kind)
        group = kind.add_argument_group("results")
        group.add_argument("--json", metavar="FILE", help="settings, digests and all figures")
        group.add_argument("--markdown", metavar="FILE", help="a report of them")
        kind.add_argument("--adapter-name", metavar="NAME", help="one of --adapters to evaluate")
        engine_flags.add_engine_flags(kind)
        kind.set_defaults(fail=kind.error)
    evaluate_layers.add_kind(kinds)


def run(options: argparse.Namespace) -> int:
    check_output_file("--json", options.json)
    check_output_file("--markdown", options.markdown)
    if options.eval == evaluate_layers.NAME:
        return evaluate_layers.run(options)
    for name in ("chat_template", "meta_instruction", "cap"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            options.fail(f"{flag} is given; it must be left out: texts are evaluated as they are")
    config = engine_flags.to_engine_config(options)
    config.max_waiting_requests = 0  # what is in flight is bounded here
    engine_flags.choose_adapter(options, config)
    result = _KINDS[options.eval][1](options, config)
    from allspark.eval.report import text_of, write

    print(text_of(result))
    write(result, settings_of(options), options.json, options.markdown)
    return 0


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="what `allspark serve` takes")
    add("--text", required=True, nargs="+", metavar="FILE",
        help="texts in UTF-8; .bz2 is decompressed")  # fmt: skip
    add("--context", type=positive, default=512, metavar="N",
        help="tokens of a window, of which the later half is scored (default: 512)")  # fmt: skip
    add("--tokens", type=positive, metavar="N",
        help="read so many tokens of the texts at most (default: all)")  # fmt: skip
    add("--reference", metavar="MODEL", help="a model of the same vocabulary to compare with")
    add("--reference-type", choices=("float32", "bfloat16", "float16"),
        help="its compute type (default: float32, or as it is serialised)")  # fmt: skip


def _perplexity(options: argparse.Namespace, config: Any) -> Any:
    """Perplexity of texts, and with --reference the distance from another model."""
    from allspark.engine import Engine
    from allspark.eval import compare, perplexity
    from allspark.eval.files import to_texts
    from allspark.eval.opening import open_for_windows, open_reference
    from allspark.eval.windows import check_settings

    if options.reference is None and options.reference_type is not None:
        options.fail("--reference-type is given; --reference must be, too")
    check_settings(options.context, options.tokens)
    texts = to_texts(options.text)  # before models are opened, which takes longer
    engine = Engine()
    with contextlib.ExitStack() as opened:
        model = open_for_windows(options.model, config, options.context, "model", engine)
        opened.callback(model.close)
        arguments = (texts, options.context, options.tokens, options.adapter_name)
        if options.reference is None:
            with _progress("windows") as progress:
                return perplexity(model, *arguments, progress)
        reference = open_reference(
            options.reference, config, options.context, engine, options.reference_type
        )
        opened.callback(reference.close)
        with _progress("windows") as progress:
            return compare(model, reference, *arguments, progress)


def _add_choices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="what `allspark serve` takes")
    add("file", help="tasks in llama.cpp's HellaSwag format, or JSON lines with context, choices "
        "and label; .bz2 is decompressed")  # fmt: skip
    add("--limit", type=positive, metavar="N", help="use N of the tasks (default: all)")
    add("--seed", type=not_negative, default=0, help="of the choice of N (default: 0)")


def _choices(options: argparse.Namespace, config: Any) -> Any:
    """Accuracy in multiple choice."""
    from allspark.eval import choices, read_tasks
    from allspark.pipeline.served_model import ServedModel

    file = read_tasks(options.file)
    if options.block_size is None and options.cache_block_seq_len is None:
        config.block_size = 16  # longer common prefixes
    model = ServedModel.open(options.model, config)
    try:
        with _progress("choices") as progress:
            found = choices(
                model, file.tasks, options.limit, options.seed, options.adapter_name, progress
            )
    finally:
        model.close()
    return dataclasses.replace(found, tasks=file.facts)


@contextlib.contextmanager
def _progress(unit: str) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", disable=not sys.stderr.isatty()) as bar:
        yield bar.update


_KINDS: dict[str, Any] = {
    "ppl": (_add_perplexity, _perplexity),
    "choices": (_add_choices, _choices),
}
