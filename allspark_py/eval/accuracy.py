"""What a conversion cost, in files beside the model that it made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allspark.engine import Engine
from allspark.eval.divergence import Comparison, compare
from allspark.eval.files import Texts, to_texts
from allspark.eval.opening import check_length, open_for_windows, open_reference
from allspark.eval.report import write
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
) -> Comparison:
    """Compares a serialised model with the checkpoint that it was made of, which computes in
    float32, and writes accuracy.json and accuracy.md into the model's directory.

    Args:
        model: the directory.
        source: the checkpoint, as `allspark serve` takes it.
        settings: those of the conversion, for the report.
        texts, context, tokens, progress: those of `perplexity`.
        trust_remote_code: run code that comes with the tokenizer.

    Raises:
        ValueError, OSError, OutOfMemoryError, AllSparkError: as `compare`, and where a model
            cannot be opened. Neither file is written then.
    """
    check_settings(context, tokens)
    found = to_texts(texts)
    engine, config = Engine(), EngineConfig(trust_remote_code=trust_remote_code)
    with contextlib.ExitStack() as opened:
        own = open_for_windows(str(model), config, context, "model", engine)
        opened.callback(own.close)
        reference = open_reference(source, config, context, engine)
        opened.callback(reference.close)
        result = compare(own, reference, found, context, tokens, None, progress)
    folder = Path(model)
    write(result, settings, str(folder / JSON_NAME), str(folder / MARKDOWN_NAME))
    return result
