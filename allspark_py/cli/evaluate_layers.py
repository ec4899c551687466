"""What quantising each weight alone does to a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_flags import positive
from .layer_progress import layer_progress
from .output_files import settings_of
from .quant_flags import add_checkpoint_flags, add_format_flags, formats_of

if TYPE_CHECKING:
    from allspark.quantize import Effect

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
    group.add_argument("--markdown", metavar="FILE", help="the table")
    parser.set_defaults(fail=parser.error)


def run(options: argparse.Namespace) -> int:
    from allspark.quantize import QuantizeConfig, layer_effects

    config = QuantizeConfig(method="rtn", **formats_of(options))
    with layer_progress() as progress:
        effects = layer_effects(
            options.model,
            options.text,
            config,
            context=options.context,
            tokens=options.tokens,
            threads=options.threads,
            trust_remote_code=options.trust_remote_code,
            progress=progress,
        )
    rows = [_cells(effect) for effect in effects]
    print(_text(rows))
    settings = settings_of(options)
    if options.json is not None:
        found = [dataclasses.asdict(effect) for effect in effects]
        record = {"evaluation": NAME, "settings": settings, "weights": found}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.markdown is not None:
        Path(options.markdown).write_text(_markdown(rows), encoding="utf-8")
    return 0


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


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    table = [_HEADS, ["---"] * len(_HEADS), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n"
