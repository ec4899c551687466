"""What a conversion cost, in files beside the model that it made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allspark.engine import Engine
from allspark.eval.divergence import Comparison, compare
from allspark.eval.files import Texts, to_texts
from allspark.eval.opening import check_length, open_for_windows, open_reference
from allspark.eval.report import markdown_of, record_of, write_files
from allspark.eval.text_perplexity import DEFAULT_CONTEXT
from allspark.eval.windows import check_settings, cut_texts
from allspark.model_loader import LLM
from allspark.pipeline.engine_config import EngineConfig

# The names of the files, in the directory of the model.
JSON_NAME, MARKDOWN_NAME = "accuracy.json", "accuracy.md"


def remove_accuracy(model: str | Path) -> None:
    """Removes the files from the directory of a new model: they are about an older one."""
    for name in (JSON_NAME, MARKDOWN_NAME):
        (Path(model).expanduser() / name).unlink(missing_ok=True)


def check_accuracy(loader: LLM, texts: Texts, context: int, tokens: int | None) -> None:
    """Raises the ValueErrors of write_accuracy about texts and lengths, before its model is made;
    `loader` is that of the checkpoint."""
    check_length(loader, context)
    cut_texts(loader.get_tokenizer(), to_texts(texts), context, tokens)


def write_accuracy(
    model: str | Path,
    source: str,
    texts: Texts,
    settings: Mapping[str, Any],
    context: int = DEFAULT_CONTEXT,
    tokens: int | None = None,
    progress: Callable[[int], object] = lambda count: None,
    trust_remote_code: bool = False,
    fallbacks: Mapping[str, str] | None = None,
    upgrades: Sequence[str] = (),
) -> Comparison:
    """Compares a serialised model with the checkpoint that it was made of, which computes in
    float32, and writes accuracy.json and accuracy.md into the model's directory.

    Args:
        model: the directory.
        source: the checkpoint, as `allspark serve` takes it.
        settings: those of the conversion, for the report.
        texts, context, tokens, progress: those of `perplexity`.
        trust_remote_code: run code that comes with the tokenizer.
        fallbacks, upgrades: those of the `QuantizedModel`, which the files name.

    Raises:
        ValueError, OSError, OutOfMemoryError, AllSparkError: as `compare`, and where a model
            cannot be opened. Neither file is written then.
    """
    check_settings(context, tokens)
    found, folder = to_texts(texts), Path(model).expanduser()
    engine, config = Engine(), EngineConfig(trust_remote_code=trust_remote_code)
    with contextlib.ExitStack() as opened:
        own = open_for_windows(str(folder), config, context, "model", engine)
        opened.callback(own.close)
        reference = open_reference(source, config, context, engine)
        opened.callback(reference.close)
        result = compare(own, reference, found, context, tokens, None, progress)
    fallbacks, upgrades = dict(fallbacks or {}), list(upgrades)
    record = record_of(result, settings) | {"fallbacks": fallbacks, "upgrades": upgrades}
    page = markdown_of(result, settings) + _of_weights(fallbacks, upgrades)
    write_files(record, page, str(folder / JSON_NAME), str(folder / MARKDOWN_NAME))
    return result


def _of_weights(fallbacks: Mapping[str, str], upgrades: Sequence[str]) -> str:
    """The end of the page: the weights that are not as the others are."""
    lines = []
    if fallbacks:
        lines += ["", "## Weights with searched scales", "", "| weight | reason |", "|---|---|"]
        lines += [f"| {weight} | {reason} |" for weight, reason in fallbacks.items()]
    if upgrades:
        lines += ["", "## Weights that became int8", "", *(f"- {weight}" for weight in upgrades)]
    return "".join(f"{line}\n" for line in lines)
