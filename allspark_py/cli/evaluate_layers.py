"""What quantising each weight alone does to a model."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .argument_types import positive
from .layer_progress import layer_progress
from .output_files import settings_of
from .quant_flags import add_checkpoint_flags, add_format_flags, formats_of

if TYPE_CHECKING:
    from allspark.quantize import Effect
    from allspark.quantize.layer_effects import LayerEffects

NAME = "layers"
_HEADS = ("weight", "format", "error", "cosine", "product's", "cosine", "KL divergence")


def add_kind(kinds: Any) -> None:
    """Adds the parser of `allspark eval layers`."""
    parser = kinds.add_parser(NAME, help=__doc__, description=__doc__)
    add_checkpoint_flags(parser)
    add = parser.add_argument
    add("--text", required=True, nargs="+", metavar="FILE",
        help="texts in UTF-8; .bz2 is decompressed")  # fmt: skip
    add("--context", type=positive, default=512, metavar="N",
        help="tokens of a sequence (default: 512)")  # fmt: skip
    add("--tokens", type=positive, default=1024, metavar="N",
        help="read so many tokens of the texts at most (default: 1024)")  # fmt: skip
    add_format_flags(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--json", metavar="FILE", help="settings and all figures")
    group.add_argument("--markdown", metavar="FILE", help="a page of them")
    parser.set_defaults(fail=parser.error)


def run(options: argparse.Namespace) -> int:
    from allspark.eval.report import as_page, as_record, write_files
    from allspark.quantize import QuantizeConfig
    from allspark.quantize.layer_effects import checkpoint_effects
    from allspark.quantize.source import open_checkpoint

    config = QuantizeConfig(method="rtn", **formats_of(options))
    loader = open_checkpoint(options.model, None, config.data_type, options.trust_remote_code)
    with layer_progress() as progress:
        found = checkpoint_effects(
            loader,
            options.text,
            config,
            context=options.context,
            tokens=options.tokens,
            threads=options.threads,
            progress=progress,
        )
    rows = [_cells(effect) for effect in found.weights]
    print(_text(rows))
    settings = settings_of(options)
    write_files(
        as_record(NAME, dataclasses.asdict(found), settings),
        as_page("What quantising each weight does", _markdown(rows), _facts(found), settings),
        options.json,
        options.markdown,
    )
    return 0


def _facts(found: LayerEffects) -> list[tuple[str, str]]:
    """What was measured, and of which files."""
    from allspark.eval.report import shown_file

    return [
        ("model", f"{found.model.source} ({found.model.architecture})"),
        ("  sha256", found.model.sha256),
        *(("text", shown_file(text)) for text in found.texts),
        ("sequences", f"{found.num_sequences} of {found.context} tokens"),
    ]


def _cells(effect: Effect) -> list[str]:
    own = effect.format
    name = f"{'uint' if own.asymmetric else 'int'}{own.bits}"
    if own.group_size:
        name += f", {own.group_size}"
    return [
        effect.weight,
        name,
        f"{effect.weight_error:.4f}",
        f"{effect.weight_cosine:.5f}",
        f"{effect.product_error:.4f}",
        f"{effect.product_cosine:.5f}",
        f"{effect.kl_divergence:.6f}",
    ]


def _text(rows: Sequence[Sequence[str]]) -> str:
    table = [_HEADS, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADS))]
    lines = []
    for row in table:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        figures = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join([*names, *figures]).rstrip())
    return "\n".join(lines)


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    table = [_HEADS, ["---"] * len(_HEADS), *rows]
    return ["## Weights", "", *(f"| {' | '.join(row)} |" for row in table), ""]
