"""Flags that say which checkpoint is read and what its weights become, for the commands that
quantise."""

from __future__ import annotations

import argparse
from typing import Any

from .argument_types import not_negative

WEIGHT_FORMATS = ("int8", "uint8", "int4", "uint4")


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """What is read, and by what."""
    add = parser.add_argument
    add("model", help="directory of a checkpoint, a GGUF file, a name on a hub, or smollm2")
    add("--threads", type=not_negative, default=0, metavar="N", help="(default: all cores)")
    add("--trust-remote-code", action="store_true",
        help="run a tokenizer's own code, and copy it with the model")  # fmt: skip


def add_format_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--weight-format", default="uint4", choices=WEIGHT_FORMATS,
        help="of the layers' weights (default: uint4)")  # fmt: skip
    add("--group-size", type=not_negative, default=64, metavar="N",
        help="input features per scale: 32, 64, 128; 0: all (default: 64)")  # fmt: skip
    add_pattern_flags(parser)
    add("--compute-method", default="weight_only", choices=("weight_only", "activate_quant"),
        help="activate_quant: activations become int8, too (default: weight_only)")  # fmt: skip
    add("--activation-group-size", type=not_negative, metavar="N",
        help="input features per scale of these: 32, 64, 128; 0: one scale per token (default: 64, "
        "or 32 where that does not divide)")  # fmt: skip
    add("--lm-head", choices=WEIGHT_FORMATS, help="round the head to this format")
    add("--embedding", choices=WEIGHT_FORMATS, help="round the embedding to this format")


def add_pattern_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for single weights."""
    add = parser.add_argument
    add("--group-settings", nargs="+", default=[], metavar="PATTERN=N",
        help="other group sizes, by patterns of weights' names")  # fmt: skip
    add("--format-settings", nargs="+", default=[], metavar="PATTERN=FORMAT",
        help="other weight formats, in the same way")  # fmt: skip
    add("--modules-to-not-convert", nargs="+", default=[], metavar="PATTERN",
        help="weights that stay in the compute type")  # fmt: skip


def formats_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of QuantizeConfig that the flags of add_format_flags give."""
    return {
        "weight_format": options.weight_format,
        "group_size": options.group_size,
        "compute_method": options.compute_method,
        "activation_group_size": options.activation_group_size,
        "lm_head": options.lm_head,
        "embedding": options.embedding,
        **patterns_of(options),
    }


def patterns_of(options: argparse.Namespace) -> dict[str, Any]:
    """Those that the flags of add_pattern_flags give; None for dicts that are not given."""
    sizes = {
        pattern: int(size) if size.isdecimal() else size
        for pattern, size in _settings(options, "group_settings").items()
    }
    return {
        "group_settings": sizes or None,
        "format_settings": _settings(options, "format_settings") or None,
        "modules_to_not_convert": options.modules_to_not_convert,
    }


def _settings(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """The values by their patterns; what they may be is checked with the model."""
    settings = {}
    for setting in getattr(options, name):
        pattern, separator, value = setting.rpartition("=")
        if not separator:
            flag = f"--{name.replace('_', '-')}"
            options.fail(f"{flag} has {setting!r}; it must be PATTERN=VALUE")
        settings[pattern] = value
    return settings
