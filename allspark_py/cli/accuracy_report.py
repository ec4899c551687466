"""The flag --report of the commands that make models: what the model lost, measured at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .argument_types import positive
from .output_files import settings_of

if TYPE_CHECKING:
    from allspark.quantize import QuantizedModel


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--report", nargs="+", metavar="FILE",
        help="texts on which the model is compared with its checkpoint in float32; accuracy.md "
        "and accuracy.json go beside it")  # fmt: skip
    add("--report-context", type=positive, metavar="N",
        help="tokens of a window of these texts (default: 512)")  # fmt: skip
    add("--report-tokens", type=positive, metavar="N",
        help="read so many tokens of them at most (default: all)")  # fmt: skip


def report_texts(options: argparse.Namespace) -> Any:
    """The texts, read before the work begins; None: no report is wanted."""
    if options.report is None:
        for name in ("report_context", "report_tokens"):
            if getattr(options, name) is not None:
                options.fail(f"--{name.replace('_', '-')} is given; --report must be, too")
        return None
    from allspark.eval.files import to_texts
    from allspark.eval.text_perplexity import DEFAULT_CONTEXT
    from allspark.eval.windows import check_settings

    options.report_context = options.report_context or DEFAULT_CONTEXT
    check_settings(options.report_context, options.report_tokens)
    return to_texts(options.report)


def check_report(options: argparse.Namespace, texts: Any, loader: Any) -> None:
    """Raises before the work begins, where the texts or their windows do not fit the checkpoint."""
    if texts is not None:
        from allspark.eval.accuracy import check_accuracy

        check_accuracy(loader, texts, options.report_context, options.report_tokens)


def write_report(
    options: argparse.Namespace,
    texts: Any,
    output: str | Path,
    made: QuantizedModel | None = None,
    source: str | None = None,
) -> None:
    """Measures the model in `output` against `source`, or the checkpoint that was named; writes the
    files and prints the figures."""
    from allspark.eval import write_accuracy
    from allspark.eval.report import text_of

    result = write_accuracy(
        output,
        source or options.model,
        texts,
        settings_of(options),
        options.report_context,
        options.report_tokens,
        trust_remote_code=options.trust_remote_code,
        fallbacks={} if made is None else made.fallbacks,
        upgrades=[] if made is None else made.upgrades,
    )
    print(f"\n{text_of(result)}")
