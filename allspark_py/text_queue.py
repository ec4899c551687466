"""TextQueue: a ResultQueue that also returns text, and ends at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from allspark._allspark import (
    ByteLevelText,
    GeneratedElements,
    GenerateRequestStatus,
    NativeResultQueue,
    WordMatcher,
)
from allspark.detokenizer import open_decoding
from allspark.result_queue import ResultQueue
from allspark.text_options import TextOptions


class StopStrings:
    """Finds stop strings in streamed text, and holds back text that may still become one."""

    def __init__(self, words: WordMatcher | Sequence[str], include: bool = False):
        self._matcher = words if isinstance(words, WordMatcher) else WordMatcher(words)
        self._state = 0
        self._include = include
        self._held = ""  # what may become a stop string; all since then, once one was found
        self._found: str | None = None  # the text up to the stop string
        self.word: str | None = None  # the stop string

    def put(self, text: str) -> tuple[str, bool]:
        """Adds text; returns the text that is now certain, and whether it ends at a stop string.
        The stop string completed first counts; of those that end at the same place, the longest."""
        begin = len(self._held)
        self._held += text
        if self._found is None:
            self._state, num_read, length = self._matcher.read(self._state, text)
            if length == 0:
                return self._take_certain(), False
            end = begin + num_read
            self.word = self._held[end - length : end]
            self._found = self._held[: end if self._include else end - length]
        return self._found, True

    def pass_by(self, text: str) -> str:
        """Adds text in which no stop string counts, though one that counts may begin there; returns
        the text that is now certain."""
        self._held += text
        while text:
            self._state, num_read, _ = self._matcher.read(self._state, text)
            text = text[num_read:]
        return self._take_certain()

    def _take_certain(self) -> str:
        certain = len(self._held) - self._matcher.matched_length(self._state)
        out, self._held = self._held[:certain], self._held[certain:]
        return out

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def flush(self) -> str:
        """Returns the text held back; call once at the end."""
        out, self._held = self._held, ""
        return out


@dataclass
class TextElements:
    """The members of GeneratedElements, and the text that became certain with these tokens."""

    text: str = ""
    ids_from_generate: list[int] = field(default_factory=list)
    log_probs_list: list[list[tuple[int, float]]] = field(default_factory=list)
    token_logprobs_list: list[float] = field(default_factory=list)
    prompt_log_probs_list: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_token_logprobs_list: list[float] = field(default_factory=list)
    tensors_from_model_inference: list[dict[str, np.ndarray]] = field(default_factory=list)
    prefix_cache_len: int = 0
    prefix_len_gpu: int = 0
    prefix_len_cpu: int = 0

    def add_details(self, native: GeneratedElements, count: int) -> None:
        """Appends what came with the first `count` tokens of native elements, beside these."""
        num_left_out = len(native.ids_from_generate) - count
        self.log_probs_list += native.log_probs_list[:count]
        self.token_logprobs_list += native.token_logprobs_list[:count]
        self.prompt_log_probs_list += native.prompt_log_probs_list
        self.prompt_token_logprobs_list += native.prompt_token_logprobs_list
        self.tensors_from_model_inference += [
            {name: _without_last_rows(tensor, num_left_out) for name, tensor in tensors.items()}
            for tensors in native.tensors_from_model_inference
        ]


def _without_last_rows(tensor: np.ndarray, count: int) -> np.ndarray:
    """Each output token has a row, that from which it was chosen; an embedding has one dimension,
    and none."""
    if count == 0 or tensor.ndim == 1:
        return tensor
    return tensor[: len(tensor) - count].copy()


class TextQueue(ResultQueue):
    """A ResultQueue whose elements also have `text`, and whose request ends at a stop string.

    The joined text of all elements is the output's text, up to the stop string or including it; the
    ids go up to the token that completes the stop string. Tokens in `end_ids` (EOS, stop tokens,
    stop words of one token) have text only where the stop is included. Stop strings are found by
    reading, so a request that nobody reads goes on to its length; what is read is the same either
    way. For one reader at a time.

    Args:
        native, tokenizer: the source of the tokens, and their decoder.
        stop: ends the request.
        min_tokens: stop strings count only if they end with this token of the output or later.
        generated: tokens of the output from an earlier request. The text continues where the text
            of that request ended.
    """

    def __init__(
        self,
        native: NativeResultQueue,
        tokenizer: Any,
        options: TextOptions,
        stop: Callable[[], Any],
        end_ids: Sequence[int] = (),
        min_tokens: int = 0,
        generated: Sequence[int] = (),
    ):
        super().__init__(native)
        self._text = open_decoding(tokenizer, options.skip_special_tokens)
        self._stops = StopStrings(options.matcher, options.include_stop_str_in_output)
        self._stop = stop
        self._has_stops = bool(options.stop_words)
        self._silent_ids = frozenset(() if options.include_stop_str_in_output else end_ids)
        self._min_tokens = min_tokens - len(generated)
        self._num_tokens = -len(generated)  # delivered
        self._stopped = False  # at a stop string
        self._flushed = False
        for token in generated:
            self._decode(token)
        # Text held back at the end of the earlier request was returned there.
        self._num_given = self._stops.num_held

    def GenerateStatus(self) -> GenerateRequestStatus:
        """The request's status; a stop string found ends it."""
        return GenerateRequestStatus.GenerateFinished if self._stopped else super().GenerateStatus()

    def GeneratedLength(self) -> int:
        """Output tokens so far; once a stop string was found, those up to it."""
        return self._num_tokens if self._stopped else super().GeneratedLength()

    @property
    def finished(self) -> bool:
        """True once the status is terminal; tokens may still wait to be fetched."""
        return self._stopped or self._native.is_terminal

    @property
    def finish_reason(self) -> str | None:
        """As ResultQueue.finish_reason; 'stop' where a stop string was found."""
        return "stop" if self._stopped else super().finish_reason

    @property
    def stop_word(self) -> str | None:
        """The stop string at which the text ended; None if it ended otherwise."""
        return self._stops.word

    @property
    def error(self) -> str | None:
        """As ResultQueue.error; None where a stop string was found, since an error after it does
        not concern the request."""
        return None if self._stopped else super().error

    def _take(  # type: ignore[override]  # GeneratedElements, a native class, has no text
        self, fetch: Callable[[], GeneratedElements | None]
    ) -> TextElements | None:
        if self._stopped or self._flushed:
            return None
        native = fetch()
        ids = native.ids_from_generate if native is not None else []
        text, count = self._put(ids, self._is_drained(len(ids)))
        if native is None:
            return TextElements(text) if text else None
        elements = TextElements(text, ids[:count])
        elements.prefix_cache_len = native.prefix_cache_len
        elements.prefix_len_gpu = native.prefix_len_gpu
        elements.prefix_len_cpu = native.prefix_len_cpu
        if not native.has_tokens_only:
            elements.add_details(native, count)
        return elements

    def _is_drained(self, num_new: int) -> bool:
        """Whether the output has ended, and all its tokens are delivered with these."""
        native = self._native
        return native.is_terminal and native.generated_length() == self._num_tokens + num_new

    def _put(self, ids: list[int], is_end: bool) -> tuple[str, int]:
        if self._stopped or self._flushed:
            return "", 0
        if self._has_stops:
            text, count = self._read_to_stop(ids)
            if self._stopped:
                self._stop()
        else:
            count = len(ids)
            self._num_tokens += count
            silent = self._silent_ids
            text = self._text.put(
                ids if silent.isdisjoint(ids) else [i for i in ids if i not in silent]
            )
        if is_end and not self._stopped:
            self._flushed = True
            rest, self._stopped = self._find_stop(self._text.flush())
            rest += "" if self._stopped else self._stops.flush()
            text += self._without_given(rest)
        return text, count

    def _plain_decoder(self) -> tuple[ByteLevelText, list[int]] | None:
        """The decoder and the ids without text, where they are all that the text depends on:
        whoever puts the ids then tells `_end_plain` of them."""
        if self._has_stops or self._num_given or not isinstance(self._text, ByteLevelText):
            return None
        return self._text, list(self._silent_ids)

    def _end_plain(self, num_ids: int) -> None:
        """All ids were put to `_plain_decoder`, and all text was taken from it."""
        self._num_tokens += num_ids
        self._flushed = True

    def _read_to_stop(self, ids: list[int]) -> tuple[str, int]:
        """The text that becomes certain with these tokens, and how many of them the output has."""
        text = ""
        for count, token in enumerate(ids, 1):  # so that the ids end where the text ends
            piece, self._stopped = self._decode(token)
            text += self._without_given(piece)
            if self._stopped:
                return text, count
        return text, len(ids)

    def _decode(self, token: int) -> tuple[str, bool]:
        self._num_tokens += 1
        return self._find_stop("" if token in self._silent_ids else self._text.put((token,)))

    def _without_given(self, text: str) -> str:
        given = min(self._num_given, len(text))
        self._num_given -= given
        return text[given:]

    def _find_stop(self, piece: str) -> tuple[str, bool]:
        if self._num_tokens < self._min_tokens:
            return self._stops.pass_by(piece), False
        return self._stops.put(piece)
