"""Guided decoding: masks that keep the output of a request in its `response_format`.

Grammars are compiled on the thread that starts a request, so that a bad one is refused there, and
advance on one thread per engine, while the forward pass runs. The engine's threads see a queue and
bits (allspark/token_mask.h), never Python.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import llguidance
import numpy as np
from allspark._allspark import GenerateConfig, MaskQueue, QueuedMask
from allspark.response_format import to_grammar

# A compiled grammar takes some hundred KB; a server asks for few different ones again and again.
_MAX_COMPILED = 128


def _tokenizer_json(tokenizer: Any) -> str:
    """The description of a fast tokenizer in the form that llguidance reads."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"response_format needs a fast tokenizer, one with a backend_tokenizer; this is a "
            f"{type(tokenizer).__name__}"
        )
    text = backend.to_str()
    if '"Metaspace"' not in text:
        return text
    # llguidance knows SentencePiece's space as a replacement alone.
    fields = json.loads(text)
    decoder = fields["decoder"]
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    steps = [replace if step["type"] == "Metaspace" else step for step in steps]
    fields["decoder"] = {"type": "Sequence", "decoders": steps}
    return json.dumps(fields)


class Compiler:
    """Compiles response formats for one tokenizer, and keeps the last ones."""

    # Reading a large vocabulary takes a second, so it is done once for each tokenizer.
    _of_tokenizer: weakref.WeakKeyDictionary[Any, Compiler] = weakref.WeakKeyDictionary()
    _of_tokenizer_lock = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Any) -> Compiler:
        """The compiler of a transformers tokenizer. Raises ValueError where it cannot be used."""
        with cls._of_tokenizer_lock:
            compiler = cls._of_tokenizer.get(tokenizer)
            if compiler is None:
                compiler = cls._of_tokenizer[tokenizer] = cls(tokenizer)
            return compiler

    def __init__(self, tokenizer: Any):
        self._vocabulary = llguidance.LLTokenizer(
            _tokenizer_json(tokenizer), eos_token=tokenizer.eos_token_id
        )
        probe = 'a {"b": "é ☃"}\n 1'
        ids = tokenizer.encode(probe, add_special_tokens=False)
        if self._vocabulary.decode_bytes(ids).decode(errors="replace").strip() != probe:
            raise ValueError(
                "response_format cannot be served: the grammar compiler reads the tokens of this "
                f"{type(tokenizer).__name__} otherwise than it does itself"
            )
        self._special_tokens = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if self._vocabulary.is_special_token(token_id)
        }
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, llguidance.LLMatcher | None] = OrderedDict()
        self.mask_words = (self._vocabulary.vocab_size + 31) // 32
        self.eos_token: int = self._vocabulary.eos_token

    def matcher(self, response_format: Any) -> llguidance.LLMatcher | None:
        """A new matcher at the beginning of the output; None for plain text.

        Raises:
            ValueError: a form, a grammar or a keyword of a schema that cannot be served.
            TypeError: a value of a wrong type.
        """
        try:
            key = json.dumps(response_format)
        except (TypeError, ValueError) as error:
            raise TypeError(f"response_format is not made of JSON values: {error}") from error
        with self._lock:
            known = key in self._compiled
            if known:
                self._compiled.move_to_end(key)
                matcher = self._compiled[key]
        if not known:
            matcher = self._compile(response_format)
            with self._lock:
                self._compiled[key] = matcher
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return matcher and matcher.deep_copy()

    def _compile(self, response_format: Any) -> llguidance.LLMatcher | None:
        grammar = to_grammar(response_format, self._special_tokens)
        if grammar is None:
            return None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        problems = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if problems:
            raise ValueError(f"response_format cannot be enforced: {'; '.join(problems)}")
        return matcher

    def end_tokens(self, config: GenerateConfig) -> list[int]:
        """Tokens that end the request and stand for no text: its EOS, and special stop tokens."""
        stops = [*config.stop_token_ids, *(w[0] for w in config.stop_words_ids if len(w) == 1)]
        ends = {token for token in stops if self._is_special(token)}
        if config.early_stopping and not config.ignore_eos and config.eos_token_id >= 0:
            ends.add(config.eos_token_id)
        return sorted(ends)

    def _is_special(self, token: int) -> bool:
        return 0 <= token < self._vocabulary.vocab_size and self._vocabulary.is_special_token(token)


class _Guide:
    """Where one request is in its grammar."""

    def __init__(self, compiler: Compiler, matcher: llguidance.LLMatcher, can_end: bool):
        self.compiler = compiler
        self.matcher = matcher
        self.can_end = can_end  # by a token of its own


# A mask that is wanted, where its request is, and the token chosen last, -1 at the beginning.
_Asked: TypeAlias = tuple[QueuedMask, _Guide, int]


class GuidedDecoding:
    """The masks of one engine's guided requests, and the thread that computes them."""

    def __init__(self) -> None:
        self._queue = MaskQueue()
        self._guides: dict[QueuedMask, _Guide] = {}
        self._thread = threading.Thread(
            target=_serve, args=(self._queue, self._guides), name="allspark-guided", daemon=True
        )
        self._thread.start()

    def mask(
        self,
        response_format: Any,
        tokenizer: Any,
        config: GenerateConfig,
        generated: Sequence[int] = (),
    ) -> QueuedMask | None:
        """The mask of a new request, whose output begins with `generated`; None for plain text.
        Give it back with `forget` where the engine refuses the request. Raises as Compiler.matcher
        does."""
        compiler = Compiler.of(tokenizer)
        matcher = compiler.matcher(response_format)
        if matcher is None:
            return None
        if generated and matcher.validate_tokens(list(generated)) < len(generated):
            raise ValueError(
                f"num_generated_in_prompt is {len(generated)}, but these tokens do not begin a "
                "text of the response_format"
            )
        matcher.consume_tokens(list(generated))
        end_tokens = compiler.end_tokens(config)
        mask = QueuedMask(self._queue, end_tokens)
        self._guides[mask] = _Guide(compiler, matcher, bool(end_tokens))
        return mask

    def forget(self, mask: QueuedMask) -> None:
        self._guides.pop(mask, None)

    def close(self) -> None:
        """Ends the thread; masks that are asked for afterwards fail."""
        self._queue.close()
        if threading.current_thread() is not self._thread:  # the garbage collector may call
            self._thread.join(timeout=5)  # a grammar that hangs must not hang the interpreter's end


def _serve(queue: MaskQueue, guides: dict[QueuedMask, _Guide]) -> None:
    # The forward pass wants the cores; half of them bring masks early enough.
    executor = llguidance.LLExecutor(max(1, len(os.sched_getaffinity(0)) // 2))
    try:
        while work := queue.take():
            by_compiler: dict[Compiler, list[_Asked]] = {}
            for mask, token in work:
                guide = guides.get(mask)
                if token is None:
                    guides.pop(mask, None)
                elif guide is not None:
                    by_compiler.setdefault(guide.compiler, []).append((mask, guide, token))
            for compiler, asked in by_compiler.items():
                try:
                    _answer(executor, compiler, asked)
                except Exception as error:  # whatever it is, it ends these requests alone
                    for mask, _, _ in asked:
                        mask.fail(f"{type(error).__name__}: {error}")
    finally:
        queue.close()
        for mask in list(guides):
            mask.fail("the thread that computes masks has ended")


def _answer(executor: llguidance.LLExecutor, compiler: Compiler, asked: list[_Asked]) -> None:
    """Advances the grammars by the tokens that were chosen and fills the masks."""
    # One call for all rows: each call gives up the GIL and has to get it back.
    chosen = [(guide.matcher, token) for _, guide, token in asked if token >= 0]
    if chosen:
        executor.consume_token_par(chosen)
    rows = np.empty((len(asked), compiler.mask_words), np.uint32)
    executor.unsafe_compute_mask_ptr(
        [(guide.matcher, row) for row, (_, guide, _) in enumerate(asked)],
        rows.ctypes.data,
        rows.strides[0],
        len(asked),
    )
    # The grammar's own EOS; a request ends by its own ones, which follow is_accepting().
    rows[:, compiler.eos_token // 32] &= np.uint32(~(1 << compiler.eos_token % 32) & 0xFFFFFFFF)
    for row, (mask, guide, _) in zip(rows, asked, strict=True):
        matcher = guide.matcher
        if matcher.is_error():
            mask.fail(f"the grammar failed: {matcher.get_error()}")
        elif matcher.is_stopped() and not guide.can_end:
            mask.finish()
        else:
            mask.publish(row, matcher.is_accepting())
