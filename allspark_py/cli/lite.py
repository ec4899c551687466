"""LMDeploy's tools that quantise: auto_awq, auto_gptq, smooth_quant, blocked_fp8, calibrate."""

from __future__ import annotations

import argparse
from typing import Any

from .accuracy_report import add_report_flags, check_report, report_texts, write_report
from .argument_types import boolean, not_negative, positive
from .layer_progress import layer_progress
from .made_model import show_model
from .quant_flags import add_pattern_flags, patterns_of

# Options that are no arguments of a tool.
_NO_ARGUMENTS = (
    "command", "fail", "report", "report_context", "report_tokens", "tool", "version",
)  # fmt: skip
_KV_QPARAMS = (
    "kv_qparams: there is nothing to do: the scales of a quantised KV cache are computed as tokens "
    "come; serve the model with --quant-policy 8 or 4"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name, (summary, add) in _TOOLS.items():
        if add is None:  # whatever follows, flags included, is an argument
            kind = kinds.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
            kind.add_argument("ignored", nargs="*")
            continue
        kind = kinds.add_parser(name, help=summary, description=summary)
        kind.set_defaults(fail=kind.error)
        kind.add_argument("model", help="what `allspark quantize` takes")
        _add_common(kind)
        add(kind)


def run(options: argparse.Namespace) -> int:
    if options.tool == "kv_qparams":
        raise ValueError(_KV_QPARAMS)
    from allspark.quantize import QuantizedModel, lite

    given = {name: value for name, value in vars(options).items() if name not in _NO_ARGUMENTS}
    if "group_settings" in given:
        given |= patterns_of(options)
    texts = report_texts(options) if "report" in options else None
    source = _checked_source(options, texts)
    with layer_progress() as progress:
        made = getattr(lite, options.tool)(**given, progress=progress)
    if isinstance(made, QuantizedModel):
        show_model(made, options.calib_samples)
    else:
        for path in made if isinstance(made, list) else [made]:
            print(f"{path}: {path.stat().st_size} bytes")
    if texts is not None:
        quantized = made if isinstance(made, QuantizedModel) else None
        write_report(options, texts, options.work_dir, quantized, source)
    return 0


def _checked_source(options: argparse.Namespace, texts: Any) -> str | None:
    """Raises where the texts of a report do not fit the checkpoint. Returns where that lies, if its
    name alone does not say it."""
    if texts is None:
        return None
    from allspark.quantize.source import open_checkpoint

    loader = open_checkpoint(
        options.model,
        None,
        "bfloat16",
        options.trust_remote_code,
        options.revision,
        options.download_dir,
    )
    check_report(options, texts, loader)
    return str(loader.directory) if options.revision or options.download_dir else None


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--work-dir", default="./work_dir", metavar="DIR", help="where results go (./work_dir)")
    add("--dtype", default="auto", choices=("auto", "float16", "bfloat16", "float32"),
        help="what the model computes in; auto: bfloat16")  # fmt: skip
    add("--revision", help="of a model on a hub")
    add("--download-dir", metavar="DIR", help="where such a model goes")
    add("--trust-remote-code", action="store_true",
        help="run a tokenizer's own code, and copy it with the model")  # fmt: skip


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--calib-dataset", default="wikitext2", metavar="NAME",
        help="a text: its path, or its name in --calib-dir (default: wikitext2)")  # fmt: skip
    add("--calib-dir", metavar="DIR", help="where texts are (default: the current directory)")
    add("--calib-samples", type=not_negative, default=128, metavar="N",
        help="sequences that are read (default: 128); 0: quantise without data")  # fmt: skip
    add("--calib-seqlen", type=positive, metavar="N",
        help="tokens of a sequence (default: 2048, or the model's length)")  # fmt: skip
    add("--batch-size", type=positive, default=1, metavar="N", help="has no effect")


def _add_device_and_calibration(parser: argparse.ArgumentParser) -> None:
    _add_calibration(parser)
    parser.add_argument("--device", default="cpu", help="has no effect: tools run on the CPU")
    parser.add_argument("--search-scale", nargs="?", type=boolean, const=True, default=False,
        metavar="BOOL",
        help="has no effect: AWQ always searches scales, the others never")  # fmt: skip


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    add_pattern_flags(parser)
    parser.add_argument("--requantize", action="store_true",
        help="dequantise a checkpoint that is quantised, instead of refusing it")  # fmt: skip
    add_report_flags(parser)


def _add_gptq(parser: argparse.ArgumentParser) -> None:
    _add_calibration(parser)
    _add_bits(parser)
    _add_quantization(parser)


def _add_bits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--w-bits", type=int, choices=(4, 8), default=4, help="bits of a weight (default: 4)")
    add("--w-group-size", type=positive, default=128, metavar="N",
        help="input features per scale: 32, 64, 128 (default: 128)")  # fmt: skip


def _add_awq(parser: argparse.ArgumentParser) -> None:
    _add_device_and_calibration(parser)
    _add_bits(parser)
    parser.add_argument("--w-sym", action="store_true", help="without zero points")
    _add_quantization(parser)


def _add_smooth(parser: argparse.ArgumentParser) -> None:
    _add_device_and_calibration(parser)
    parser.add_argument("--quant-dtype", default="int8", help="int8 (default)")
    _add_quantization(parser)


def _add_fp8(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quant-dtype", default="fp8", help="fp8 (default) or float8_e4m3fn, the same")
    add("--block-size", type=positive, default=128, metavar="N",
        help="rows, and columns, that share a scale (default: 128)")  # fmt: skip
    add_report_flags(parser)


_TOOLS: dict[str, tuple[str, Any]] = {
    "auto_awq": ("Quantises weights to 4 bits by AWQ.", _add_awq),
    "auto_gptq": ("Quantises weights to 4 bits by GPTQ.", _add_gptq),
    "smooth_quant": ("Quantises weights and activations to int8, smoothed.", _add_smooth),
    "blocked_fp8": ("Writes a checkpoint of float8 weights, scaled in blocks.", _add_fp8),
    "calibrate": ("Writes the ranges of all weights' inputs.", _add_device_and_calibration),
    "kv_qparams": ("Says why nothing has to be done for a quantised KV cache.", None),
}
