"""Serialises a checkpoint to a directory that is a whole model by itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .bench_flags import positive
from .output_files import settings_of

_WEIGHT_FORMATS = ("int8", "uint8", "int4", "uint4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="directory of a checkpoint, a GGUF file, a name on a hub, or smollm2")
    add("--output", required=True, metavar="DIR", help="where the model goes")
    add("--name", help="name of the files (default: the last part of MODEL)")
    add("--data-type", default="bfloat16", help="bfloat16 (default) or float32")
    add(
        "--weight-format",
        choices=_WEIGHT_FORMATS,
        help="quantise the layers' weights (default: leave weights as they are)",
    )
    add("--group-size", type=int, help="input features per scale: 32, 64, 128 (default: all)")
    add("--activate-quant", action="store_true", help="quantise activations to int8, too")
    add("--activation-group-size", type=int, metavar="N",
        help="input features per scale of these: 32, 64, 128; 0: one scale per token (default: 64, "
        "or 32 where that does not divide)")  # fmt: skip
    add("--lm-head", choices=_WEIGHT_FORMATS, help="quantise the head")
    add("--embedding", choices=_WEIGHT_FORMATS, help="quantise the embedding")
    add("--report", nargs="+", metavar="FILE",
        help="texts on which the model is compared with its checkpoint in float32; accuracy.md "
        "and accuracy.json go beside it")  # fmt: skip
    add("--report-context", type=positive, metavar="N",
        help="tokens of a window of these texts (default: 512)")  # fmt: skip
    add("--report-tokens", type=positive, metavar="N",
        help="read so many tokens of them at most (default: all)")  # fmt: skip
    parser.set_defaults(fail=parser.error)


def run(options: argparse.Namespace) -> int:
    from allspark.model_loader import HuggingFaceModel
    from allspark.pipeline.model_source import model_name_of, open_loader

    config = _quant_config(options)
    texts = _texts(options)  # before the conversion, which takes longer
    path = Path(options.model).expanduser()
    name = options.name or model_name_of(str(path.resolve()) if path.exists() else options.model)
    loader = open_loader(options.model, name, options.data_type)
    if not isinstance(loader, HuggingFaceModel):
        raise ValueError(f"{options.model} is serialised already; give its checkpoint")
    loader.serialize_to_path(
        None,
        options.output,
        enable_quant=config is not None,
        customized_quant_config=config,
    )
    for ending in ("asgraph", "asparam"):
        path = Path(options.output) / f"{loader.safe_model_name}.{ending}"
        print(f"{path}: {path.stat().st_size} bytes")
    if texts is not None:
        loader.free_model()
        _report(options, texts)
    return 0


def _texts(options: argparse.Namespace) -> Any:
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


def _report(options: argparse.Namespace, texts: Any) -> None:
    from allspark.eval import write_accuracy
    from allspark.eval.report import text_of

    result = write_accuracy(
        options.output,
        options.model,
        texts,
        settings_of(options),
        options.report_context,
        options.report_tokens,
    )
    print(f"\n{text_of(result)}")


def _quant_config(options: argparse.Namespace) -> dict[str, Any] | None:
    given = {
        "group_size": options.group_size,
        "compute_method": "activate_quant" if options.activate_quant else None,
        "activation_group_size": options.activation_group_size,
        "lm_head": options.lm_head,
        "embedding": options.embedding,
    }
    config = {key: value for key, value in given.items() if value is not None}
    if options.weight_format is None:
        if config:
            options.fail("how to quantise is said, but not to what; add --weight-format")
        return None
    return {"weight_format": options.weight_format, **config}
