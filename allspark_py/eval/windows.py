"""Windows: the pieces of a text over which a perplexity is measured, cut as llama.cpp cuts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from allspark.chat_template.encoding import first_tokens
from allspark.eval.files import Text, TextFacts
from allspark.pipeline.fields import whole
from allspark.pipeline.served_model import ServedModel
from numpy.typing import NDArray

Ids = NDArray[np.int64]
MIN_CONTEXT = 8


@dataclass(frozen=True)
class Window:
    """Tokens that are computed together, of which the later half is scored."""

    text: str  # the name of the text that it is of
    index: int  # among that text's
    ids: Ids

    @property
    def first(self) -> int:
        """The first position whose logits count: they predict the token after it."""
        return len(self.ids) // 2

    @property
    def targets(self) -> Ids:
        """The tokens that are predicted, from that position on."""
        return self.ids[self.first + 1 :]

    def __str__(self) -> str:
        return f"window {self.index} of {self.text}"


@dataclass(frozen=True)
class Windows:
    """All windows, and the settings that they are of."""

    windows: list[Window]
    texts: list[TextFacts]
    context: int
    max_tokens: int | None

    @property
    def num_scored(self) -> int:
        return sum(len(window.targets) for window in self.windows)


def check_settings(context: int, max_tokens: int | None) -> None:
    """Raises TypeError or ValueError for what no model can be measured with."""
    whole(MIN_CONTEXT)("context", context)
    whole(1, none=True)("tokens", max_tokens)
    if max_tokens is not None and max_tokens < context:
        raise ValueError(
            f"tokens is {max_tokens}; it must be None or at least context, which is {context}"
        )


def cut(model: ServedModel, texts: Sequence[Text], context: int, max_tokens: int | None) -> Windows:
    """The windows of texts for a model that is open.

    Raises:
        ValueError: the context is longer than the model's. Else as cut_texts.
    """
    check_settings(context, max_tokens)
    if context > model.session_len:
        raise ValueError(
            f"context is {context}; it must be in [{MIN_CONTEXT}, {model.session_len}], the "
            "model's length"
        )
    return cut_texts(model.tokenizer, texts, context, max_tokens)


def cut_texts(
    tokenizer: Any, texts: Sequence[Text], context: int, max_tokens: int | None
) -> Windows:
    """Cuts each text into windows of `context` tokens, and drops the rest of it.

    What the tokenizer puts before a text (BOS) also begins every window, in place of as many of
    its own tokens. With `max_tokens` no more windows are made than have so many tokens.

    Raises:
        ValueError: a text is shorter than a window.
    """
    check_settings(context, max_tokens)
    room = None if max_tokens is None else max_tokens // context
    windows: list[Window] = []
    used = []
    for text in texts:
        if room is not None and len(windows) >= room:
            break
        windows += windows_of(text, tokenizer, context)
        used.append(text.facts)
    return Windows(windows[:room], used, context, max_tokens)


def ids_of(tokenizer: Any, text: str) -> Ids:
    """The ids of a whole text. Nothing that a tokenizer puts after texts is part of them."""
    plain = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return np.array([*first_tokens(tokenizer), *plain], np.int64)


def windows_of(text: Text, tokenizer: Any, context: int, field: str = "context") -> list[Window]:
    """All windows of a text; the rest of it is dropped.

    Raises:
        ValueError: the text is shorter than a window (`field` is what the message calls its
            length).
    """
    ids = ids_of(tokenizer, text.content)
    begin = first_tokens(tokenizer)
    if len(ids) < context:
        raise ValueError(
            f"{text.facts.name} has {len(ids)} tokens; it must have at least {field}, {context}"
        )
    rows = ids[: len(ids) // context * context].reshape(-1, context).copy()
    rows[:, : len(begin)] = begin
    return [Window(text.facts.name, index, row) for index, row in enumerate(rows)]


def check_same_vocabulary(
    model: ServedModel, reference: ServedModel, texts: Iterable[Text]
) -> None:
    """Raises ValueError unless both models have as many logits, and the same ids for the texts."""
    infos = [each.engine.get_as_model_info(each.name) for each in (model, reference)]
    own, other = (info.vocab_size for info in infos)
    if own != other:
        raise ValueError(
            f"the reference's vocabulary has {other} tokens; it must have {own}, as the model's"
        )
    for text in texts:
        ours = ids_of(model.tokenizer, text.content)
        theirs = ids_of(reference.tokenizer, text.content)
        if np.array_equal(ours, theirs):
            continue
        length = min(len(ours), len(theirs))
        differ = np.flatnonzero(ours[:length] != theirs[:length])
        place = int(differ[0]) if differ.size else length
        found = [str(ids[place]) if place < len(ids) else "none" for ids in (theirs, ours)]
        raise ValueError(
            f"the reference's vocabulary is another one: token {place} of {text.facts.name} is "
            f"{found[0]} there; it must be {found[1]}, as in the model's"
        )
