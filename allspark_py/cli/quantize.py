"""Quantises a checkpoint with calibration: AWQ, GPTQ, scale search, SmoothQuant."""

from __future__ import annotations

import argparse

from .accuracy_report import add_report_flags, check_report, report_texts, write_report
from .argument_types import not_negative, positive, positive_real
from .layer_progress import layer_progress
from .made_model import show_model
from .quant_flags import add_checkpoint_flags, add_format_flags, formats_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from allspark.quantize.config import METHODS
    from allspark.quantize.export_formats import SAVE_FORMATS

    add_checkpoint_flags(parser)
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="where the model goes")
    add("--name", help="name of the files (default: the last part of MODEL)")
    add("--save-format", default="allspark", choices=("allspark", *SAVE_FORMATS),
        help="allspark (default), or a checkpoint that other programs read, too")  # fmt: skip
    add("--data-type", default="bfloat16", help="bfloat16 (default), float16 or float32")
    add("--method", default="awq+gptq", choices=METHODS,
        help="how integers are found (default: awq+gptq); rtn: rounded to the nearest")  # fmt: skip
    add_format_flags(parser)
    add("--smooth", type=float, metavar="ALPHA",
        help="SmoothQuant: move so much of the activations' range into weights, in [0, 1]; with "
        "activate_quant, and without awq")  # fmt: skip
    add("--calib", nargs="+", metavar="FILE", help="calibration texts in UTF-8, also as .bz2")
    add("--calib-samples", type=not_negative, default=128, metavar="N",
        help="sequences of them that are read (default: 128); 0: none")  # fmt: skip
    add("--calib-seqlen", type=positive, default=512, metavar="N",
        help="tokens of a sequence (default: 512)")  # fmt: skip
    add("--target-bits", type=positive_real, metavar="B",
        help="bits per weight that is quantised, scales included: weights whose rounding does most "
        "harm become int8 until the mean is B (5.3, for example)")  # fmt: skip
    add("--seed", type=not_negative, default=0, help="of the choice of sequences (default: 0)")
    add("--requantize", action="store_true",
        help="dequantise a checkpoint that is quantised, instead of refusing it")  # fmt: skip
    add("--resume", action="store_true", help="go on after an interruption")
    add_report_flags(parser)


def run(options: argparse.Namespace) -> int:
    from allspark.quantize import QuantizeConfig
    from allspark.quantize.quantizer import quantize_checkpoint
    from allspark.quantize.source import open_checkpoint

    texts = report_texts(options)
    config = QuantizeConfig(
        method=options.method,
        **formats_of(options),
        smooth=options.smooth,
        data_type=options.data_type,
        calib_samples=options.calib_samples,
        calib_seqlen=options.calib_seqlen,
        target_bits=options.target_bits,
        seed=options.seed,
        requantize=options.requantize,
    )
    if options.calib is None and config.needs_text:
        options.fail(f"--calib is missing; --method {config.method} reads a calibration text")
    if options.calib is not None and not config.is_calibrated:
        reason = f"--method {config.method}" if config.calib_samples else "--calib-samples 0"
        options.fail(f"--calib is given; {reason} reads no text")
    loader = open_checkpoint(
        options.model, options.name, config.data_type, options.trust_remote_code
    )
    check_report(options, texts, loader)
    with layer_progress() as progress:
        made = quantize_checkpoint(
            loader,
            options.output,
            config,
            options.calib,
            save_format=options.save_format,
            resume=options.resume,
            threads=options.threads,
            progress=progress,
        )
    show_model(made, config.calib_samples)
    if texts is not None:
        loader.free_model()
        write_report(options, texts, options.output, made)
    return 0
