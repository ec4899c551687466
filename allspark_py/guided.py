"""Guided decoding: masks that keep the output of a request in its `response_format`.

Grammars are compiled while a request starts, so that a bad one is refused there. They advance on
one thread per engine, while the forward pass runs. The engine's threads see a queue and bits
(allspark/token_mask.h), never Python.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import llguidance
import numpy as np
from allspark._allspark import GenerateConfig, MaskQueue, QueuedMask
from allspark.json_schema import check_depth
from allspark.response_format import to_grammar

_T = TypeVar("_T")

# A compiled grammar takes some hundred KB; a server uses a few grammars again and again.
_MAX_COMPILED = 128
# The grammar compiler follows chains of rules and of $refs by recursion, and a stack overflow
# would end the process. The longest chain that fits in this many characters (rules with one name
# each, as short as possible) takes less than half of this stack. Untouched pages cost no memory.
_MAX_GRAMMAR_CHARS = 1_000_000
_STACK_BYTES = 512 << 20
_stack_size_lock = threading.Lock()
# Text that most vocabularies can spell; with the others, the part that they can spell is used.
_PROBE = 'a {"b": "é ☃"}\n 1 + 2,345,678,90 - Zebra\t<x>'


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
    # llguidance accepts SentencePiece's space only as a replacement together with byte tokens; a
    # vocabulary may have none.
    fields = json.loads(text)
    decoder = fields["decoder"] or {"type": "Sequence", "decoders": []}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    steps = [replace if step["type"] == "Metaspace" else step for step in steps]
    if {"type": "ByteFallback"} not in steps:
        steps.append({"type": "ByteFallback"})
    fields["decoder"] = {"type": "Sequence", "decoders": steps}
    return json.dumps(fields)


def _check_reading(tokenizer: Any, vocabulary: llguidance.LLTokenizer) -> None:
    """Raises ValueError unless both decode the same tokens to the same text."""
    name = type(tokenizer).__name__
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    # A character that is not in the vocabulary may have become the unknown token, which has no
    # text.
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = [token for token in ids if token != unknown and not vocabulary.is_special_token(token)]
    if not ids:
        raise ValueError(
            f"response_format cannot be served: this {name} has a token for none of {_PROBE!r}"
        )
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if vocabulary.decode_bytes(ids).decode(errors="replace").strip() != text.strip():
        raise ValueError(
            "response_format cannot be served: the grammar compiler reads the tokens of this "
            f"{name} otherwise than it does itself"
        )


def _on_large_stack(function: Callable[[], _T]) -> _T:
    """Calls the function on a thread with a stack of _STACK_BYTES; returns or raises as it does."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="allspark-compile", daemon=True)
    with _stack_size_lock:  # the stack size is a setting of the process
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise ValueError(
                "response_format cannot be compiled: the system gives no thread with a stack of "
                f"{_STACK_BYTES >> 20} MiB: {error}"
            ) from error
        finally:
            threading.stack_size(before)
    return future.result()


class Compiler:
    """Compiles response formats for one tokenizer, and caches the last ones."""

    # Reading a large vocabulary takes a second, so it is done once per tokenizer.
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
        description = _tokenizer_json(tokenizer)
        try:
            self._vocabulary = llguidance.LLTokenizer(
                description, eos_token=tokenizer.eos_token_id
            )
        except ValueError as error:
            raise ValueError(
                "response_format cannot be served: the grammar compiler cannot read this "
                f"{type(tokenizer).__name__}: {error}"
            ) from error
        _check_reading(tokenizer, self._vocabulary)
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
            TypeError: a value of the wrong type.
        """
        check_depth(response_format, "response_format")
        try:
            key = json.dumps(response_format)
        except (TypeError, ValueError) as error:
            raise TypeError(f"response_format is not made of JSON values: {error}") from error
        except RecursionError:
            raise ValueError("response_format is nested too deeply") from None
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
        if len(grammar.text) > _MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"response_format is a grammar of {len(grammar.text)} characters; the bound is "
                f"{_MAX_GRAMMAR_CHARS}"
            )
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = _on_large_stack(
            lambda: llguidance.LLMatcher(
                self._vocabulary, grammar.text, log_level=0, limits=limits
            )
        )
        problems = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if problems:
            explained = "; ".join(map(grammar.explain, problems))
            raise ValueError(f"response_format cannot be enforced: {explained}")
        return matcher

    def end_tokens(self, config: GenerateConfig) -> list[int]:
        """Tokens that end the request and have no text: its EOS, and special stop tokens."""
        stops = [*config.stop_token_ids, *(w[0] for w in config.stop_words_ids if len(w) == 1)]
        ends = {token for token in stops if self._is_special(token)}
        if config.early_stopping and not config.ignore_eos and config.eos_token_id >= 0:
            ends.add(config.eos_token_id)
        return sorted(ends)

    def _is_special(self, token: int) -> bool:
        return 0 <= token < self._vocabulary.vocab_size and self._vocabulary.is_special_token(token)


class _Guide:
    """The position of one request in its grammar."""

    def __init__(self, compiler: Compiler, matcher: llguidance.LLMatcher, can_end: bool):
        self.compiler = compiler
        self.matcher = matcher
        self.can_end = can_end  # its config has end tokens


# A mask to compute: its queue, the position of its request, and the token chosen last (-1: none).
_Asked: TypeAlias = tuple[QueuedMask, _Guide, int]


class GuidedDecoding:
    """The masks of one engine's guided requests, and the thread that computes them."""

    def __init__(self) -> None:
        self._queue = MaskQueue()
        self._guides: dict[QueuedMask, _Guide] = {}
        self._process = os.getpid()
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
        """The mask of a new request whose output begins with `generated`; None for plain text.
        Where the engine refuses the request, return the mask with `forget`. Raises as
        Compiler.matcher does."""
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
        """Ends the thread; masks requested afterwards fail. A fork has no such thread."""
        if os.getpid() != self._process:
            return
        self._queue.close()
        if threading.current_thread() is not self._thread:  # the garbage collector may call
            self._thread.join(timeout=5)  # a hanging grammar must not block exit


def _serve(queue: MaskQueue, guides: dict[QueuedMask, _Guide]) -> None:
    # The forward pass needs the cores; half of them compute masks early enough.
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
                except Exception as error:  # whatever it is, it ends only these requests
                    for mask, _, _ in asked:
                        mask.fail(f"{type(error).__name__}: {error}")
    finally:
        queue.close()
        for mask in list(guides):
            mask.fail("the thread that computes masks has ended")


def _answer(executor: llguidance.LLExecutor, compiler: Compiler, asked: list[_Asked]) -> None:
    """Advances the grammars by the tokens that were chosen and fills the masks."""
    # One call for all rows: each call releases the GIL and has to get it back.
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
    # The grammar's own EOS is masked. A request ends by its own EOS tokens, after is_accepting().
    rows[:, compiler.eos_token // 32] &= np.uint32(~(1 << compiler.eos_token % 32) & 0xFFFFFFFF)
    for row, (mask, guide, _) in zip(rows, asked, strict=True):
        matcher = guide.matcher
        if matcher.is_error():
            mask.fail(_failure(matcher))
        elif matcher.is_stopped() and not guide.can_end:
            mask.finish()
        else:
            mask.publish(row, matcher.is_accepting())


def _failure(matcher: llguidance.LLMatcher) -> str:
    error = matcher.get_error()
    if error.startswith("NoExtensionBias"):
        return "no token of the vocabulary can follow in the grammar"
    return f"the grammar failed: {error}"
