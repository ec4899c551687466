"""Serialises a checkpoint to a directory that is a whole model by itself."""

from __future__ import annotations

import argparse
from typing import Any

from .accuracy_report import add_report_flags, check_report, report_texts, write_report
from .quant_flags import WEIGHT_FORMATS, add_pattern_flags, patterns_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="directory of a checkpoint, a GGUF file, a name on a hub, or smollm2")
    add("--output", required=True, metavar="DIR", help="where the model goes")
    add("--name", help="name of the files (default: the last part of MODEL)")
    add("--data-type", default="bfloat16", help="bfloat16 (default), float16 or float32")
    add("--trust-remote-code", action="store_true",
        help="copy a tokenizer's own code, and run it for --report")  # fmt: skip
    add(
        "--weight-format",
        choices=WEIGHT_FORMATS,
        help="quantise the layers' weights (default: leave weights as they are)",
    )
    add("--group-size", type=int, help="input features per scale: 32, 64, 128 (default: all)")
    add_pattern_flags(parser)
    add("--search", action="store_true", help="search the scales of groups of 4 bits")
    add("--activate-quant", action="store_true", help="quantise activations to int8, too")
    add("--activation-group-size", type=int, metavar="N",
        help="input features per scale of these: 32, 64, 128; 0: one scale per token (default: 64, "
        "or 32 where that does not divide)")  # fmt: skip
    add("--lm-head", choices=WEIGHT_FORMATS, help="quantise the head")
    add("--embedding", choices=WEIGHT_FORMATS, help="quantise the embedding")
    add_report_flags(parser)


def run(options: argparse.Namespace) -> int:
    from allspark.eval.accuracy import remove_accuracy
    from allspark.quantize.source import check_output, check_serialised_target, open_checkpoint

    config = _quant_config(options)
    texts = report_texts(options)  # before the conversion, which takes longer
    loader = open_checkpoint(
        options.model, options.name, options.data_type, options.trust_remote_code
    )
    output = check_output(options.output, loader)
    check_serialised_target(output, loader)
    check_report(options, texts, loader)
    for path in loader.write_plan(loader.plan(config), output):
        print(f"{path}: {path.stat().st_size} bytes")
    remove_accuracy(output)
    if texts is not None:
        loader.free_model()
        write_report(options, texts, output)
    return 0


def _quant_config(options: argparse.Namespace) -> dict[str, Any] | None:
    given = {
        "group_size": options.group_size,
        "compute_method": "activate_quant" if options.activate_quant else None,
        "activation_group_size": options.activation_group_size,
        "lm_head": options.lm_head,
        "embedding": options.embedding,
        "search": options.search or None,
        **patterns_of(options),
    }
    config = {key: value for key, value in given.items() if value not in (None, [])}
    if options.weight_format is None:
        if config:
            options.fail("how to quantise is said, but not to what; add --weight-format")
        return None
    return {"weight_format": options.weight_format, **config}
