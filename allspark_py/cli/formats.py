"""Lists the architectures and formats that can be read, and the chat templates."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(options: argparse.Namespace) -> int:
    from allspark.chat_template import names
    from allspark.model_loader.convert import COMPUTE_TYPES
    from allspark.model_loader.gguf import FAMILIES
    from allspark.model_loader.quantized import FORMATS
    from allspark.model_loader.spec import registered

    del options
    print("architectures:", *registered(), sep="\n  ")
    print("checkpoints:", "safetensors", ".bin", "Meta's .pth", "GGUF", sep="\n  ")
    print("quantised checkpoints (quant_method):", *FORMATS, sep="\n  ")
    print("GGUF (general.architecture):", *FAMILIES, sep="\n  ")
    print("compute types:", *COMPUTE_TYPES, sep="\n  ")
    print("chat templates:", *names(), sep="\n  ")
    return 0
