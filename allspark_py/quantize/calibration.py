"""Calibration text: the sequences of tokens that weights are quantised for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from allspark.eval.files import Text
from allspark.eval.windows import windows_of
from allspark.model_loader import LLM
from numpy.typing import NDArray


def read_ids(
    loader: LLM,
    texts: Sequence[Text],
    samples: int,
    length: int,
    seed: int = 0,
    field: str = "calib_seqlen",
) -> NDArray[np.int32]:
    """Sequences [samples, length] for a model, chosen from all windows of the texts; fewer, if
    there are not so many.

    Raises:
        ValueError: they are longer than the model takes, or than a text (`field` is what the
            message calls the length), or have tokens that the model does not know.
    """
    longest = loader.get_model_context_length()
    if length > longest:
        raise ValueError(f"{field} is {length}; it must be at most {longest}, the model's length")
    tokenizer = loader.get_tokenizer()
    windows = [window for text in texts for window in windows_of(text, tokenizer, length, field)]
    chosen = np.random.default_rng(seed).permutation(len(windows))[:samples]
    ids = np.array([windows[index].ids for index in np.sort(chosen)], np.int32)
    vocab_size = loader.decoder_spec().vocab_size
    if ids.max() >= vocab_size:
        raise ValueError(
            f"texts have token {ids.max()}; it must be below {vocab_size}, the model's vocabulary"
        )
    return ids
