"""Compiles response formats to grammars for the tokens of a tokenizer, within bounds of time and
memory: a format is somebody else's, and nothing of it is trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple, TypeVar

import llguidance
import numpy as np
from allspark import exit_gate
from allspark._allspark import GenerateConfig
from allspark.json_schema import check_depth
from allspark.response_format import Grammar, to_grammar

_T = TypeVar("_T")

# Most characters of a response_format, and of the grammar made from it. The grammar compiler
# follows chains of rules and of $refs by recursion, and a stack overflow would end the process. The
# longest chain that fits in this many characters (rules with one name each, as short as possible)
# takes less than half of this stack. Untouched pages cost no memory.
MAX_GRAMMAR_CHARS = 1_000_000
STACK_BYTES = 512 << 20
_MAX_THREAD_WAIT_SECONDS = 1.0
_stack_size_lock: threading.Lock
# Limits of llguidance's lexer: fuel for its first state (more for long grammars) and for one mask,
# and the number of states. The library's own limits let 25 characters of a regular expression take
# two seconds and 190 MB.
_FIRST_FUEL = 200_000
_FIRST_FUEL_PER_CHAR = 2
_STEP_FUEL = 100_000
_MAX_LEXER_STATES = 50_000
# What a compilation may take of a processor, and how long a start waits for it where others take
# them.
_MAX_COMPILE_SECONDS = 10.0
_MAX_WAIT_SECONDS = 60.0
# The compiled grammars that are kept. One is charged with what it may grow to as masks are computed
# (a lexer state takes less than 0.5 KB), and for its compilation with more than any took.
_MAX_CACHE_BYTES = 1 << 30
_BYTES_PER_CHAR = 32
_GROWTH_BYTES = _MAX_LEXER_STATES * 512
_BYTES_PER_SECOND = 100 << 20
# Other numbers are no tokens; the engine refuses them.
_TOKENS = range(2**31)
# A thread that computes beside the engine's gets out of their way by so much.
_NICENESS = 10
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


def yield_to_engine() -> None:
    """Lowers the priority of this thread, and of those that it starts."""
    with contextlib.suppress(OSError, AttributeError):  # not on Linux, or not allowed
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _on_large_stack(function: Callable[[], _T], max_seconds: float) -> _T:
    """Calls the function on a thread with a stack of STACK_BYTES; returns or raises as it does.

    After `max_seconds` of a processor, or six times as long where others take them, it raises
    ValueError, and the thread is left to itself.
    """
    max_wait = max_seconds * _MAX_WAIT_SECONDS / _MAX_COMPILE_SECONDS
    future: Future[_T] = Future()
    clocks: list[int] = []  # of the thread's processor time

    def run() -> None:
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        yield_to_engine()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    _start(run)
    deadline = time.monotonic() + max_wait
    while True:
        with contextlib.suppress(FutureTimeoutError):
            return future.result(min(0.1, max_wait, max(max_seconds, 0.001)))
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if clocks and time.clock_gettime(clocks[0]) > max_seconds:
                raise _too_slow(max_seconds)
        if time.monotonic() > deadline:
            raise ValueError(f"response_format was not compiled within {max_wait:g} s")


def _start(run: Callable[[], None]) -> None:
    """Starts a thread with a large stack. Where the system has no room for it, the stacks of
    earlier ones may still be there, whose threads have a low priority and are late to end."""
    deadline = time.monotonic() + _MAX_THREAD_WAIT_SECONDS
    while True:
        with _stack_size_lock:  # the stack size is a setting of the process
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=run, name="allspark-compile").start()
                return
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    raise ValueError(
                        "response_format cannot be compiled: the system gives no thread with a "
                        f"stack of {STACK_BYTES >> 20} MiB: {error}"
                    ) from error
            finally:
                threading.stack_size(before)
        time.sleep(0.05)


class FormatTooLargeError(ValueError):
    """A format, or the grammar that it becomes, has more characters than the bound."""


def _too_slow(max_seconds: float) -> ValueError:
    return ValueError(f"response_format takes more than {max_seconds:g} s to compile")


def _key(response_format: Any) -> str:
    try:
        return json.dumps(response_format, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TypeError(f"response_format is not made of JSON values: {error}") from error
    except RecursionError:
        raise ValueError("response_format is nested too deeply") from None


def _bounded_key(response_format: Any) -> str:
    """The key of a format; raises as Compiler.matcher where it is too large."""
    check_depth(response_format, "response_format")
    key = _key(response_format)
    if len(key) > MAX_GRAMMAR_CHARS:
        raise FormatTooLargeError(
            f"response_format has {len(key)} characters; the bound is {MAX_GRAMMAR_CHARS}"
        )
    return key


class _Compiled(NamedTuple):
    matcher: llguidance.LLMatcher | None  # None: plain text
    num_bytes: int


class Compiler:
    """Compiles response formats for one tokenizer, and caches the last ones. Threads that may
    outlive the interpreter call it inside exit_gate.passing()."""

    # At once, of all tokenizers: those that were given up are among them.
    _compiling: threading.BoundedSemaphore

    # Reading a large vocabulary takes a second, so it is done once per tokenizer.
    _of_tokenizer: weakref.WeakKeyDictionary[Any, Compiler] = weakref.WeakKeyDictionary()
    _of_tokenizer_lock: threading.Lock
    # Compile limits in seconds that `limit` has set, by tokenizer.
    _max_seconds: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    @classmethod
    def _make_locks(cls) -> None:
        """For this process: in a fork the threads that hold locks are missing."""
        global _stack_size_lock
        _stack_size_lock = threading.Lock()
        cls._compiling = threading.BoundedSemaphore(max(2, len(os.sched_getaffinity(0))))
        cls._of_tokenizer_lock = threading.Lock()
        for compiler in list(cls._of_tokenizer.values()):
            compiler._lock = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Any) -> Compiler:
        """The compiler of a transformers tokenizer. Raises ValueError where it cannot be used."""
        with cls._of_tokenizer_lock:
            compiler = cls._of_tokenizer.get(tokenizer)
            if compiler is None:
                compiler = cls._of_tokenizer[tokenizer] = cls(tokenizer)
            return compiler

    @classmethod
    def limit(cls, tokenizer: Any, max_seconds: float) -> None:
        """Bounds what compiling one format for a tokenizer may take of a processor, from now on.
        Six times as long it may take where others take the processors."""
        with cls._of_tokenizer_lock:
            cls._max_seconds[tokenizer] = max_seconds

    def __init__(self, tokenizer: Any):
        self._tokenizer = weakref.ref(tokenizer)
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
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._num_bytes = 0  # of all of them
        self.mask_words = (self._vocabulary.vocab_size + 31) // 32
        self.eos_token: int = self._vocabulary.eos_token

    def matcher(self, response_format: Any) -> llguidance.LLMatcher | None:
        """A new matcher at the beginning of the output; None for plain text.

        Raises:
            ValueError: a form, a grammar or a keyword of a schema that cannot be served.
            TypeError: a value of the wrong type.
        """
        matcher = self.prepare(response_format)
        return matcher and matcher.deep_copy()

    def prepare(self, response_format: Any) -> llguidance.LLMatcher | None:
        """Compiles what is not kept yet. Returns what all requests with this format copy; raises as
        `matcher`.
        """
        key = _bounded_key(response_format)
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
        if known is None:
            known = self._compile(response_format)
            self._keep(key, known)
        return known.matcher

    def check(self, response_format: Any) -> None:
        """Compiles a format that no request will use, and keeps nothing. Raises as `matcher`."""
        _bounded_key(response_format)
        self._compile(response_format)

    def check_size(self, response_format: Any) -> None:
        """Compiles nothing. Raises as `matcher` for a format or a grammar that is too large, and
        for a form or keyword that has no grammar."""
        _bounded_key(response_format)
        self._grammar(response_format)

    def forget(self, response_format: Any) -> None:
        """After a matcher failed: a lexer that failed fails for all that share it, so the next
        request is to have another."""
        with self._lock:
            self._drop(_key(response_format))

    def _keep(self, key: str, compiled: _Compiled) -> None:
        with self._lock:
            self._drop(key)
            self._compiled[key] = compiled
            self._num_bytes += compiled.num_bytes
            while self._num_bytes > _MAX_CACHE_BYTES:
                self._drop(next(iter(self._compiled)))

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._compiled.clear()
            self._num_bytes = 0

    def _drop(self, key: str) -> None:
        dropped = self._compiled.pop(key, None)
        self._num_bytes -= dropped.num_bytes if dropped else 0

    def _grammar(self, response_format: Any) -> Grammar | None:
        grammar = to_grammar(response_format, self._special_tokens)
        if grammar is not None and len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise FormatTooLargeError(
                f"response_format is a grammar of {len(grammar.text)} characters; the bound is "
                f"{MAX_GRAMMAR_CHARS}"
            )
        return grammar

    def _compile(self, response_format: Any) -> _Compiled:
        grammar = self._grammar(response_format)
        if grammar is None:
            return _Compiled(None, 0)
        tokenizer = self._tokenizer()
        limit = _MAX_COMPILE_SECONDS
        if tokenizer is not None:
            limit = self._max_seconds.get(tokenizer, limit)
        matcher, seconds = _on_large_stack(lambda: self._build(grammar), limit)
        if seconds > limit:  # it ended between two looks at the clock
            raise _too_slow(limit)
        if matcher.is_error():
            problems = [matcher.get_error()]
        else:
            problems = matcher.get_grammar_warnings()
        if problems:
            explained = "; ".join(map(grammar.explain, problems))
            raise ValueError(f"response_format cannot be enforced: {explained}")
        num_bytes = (
            _GROWTH_BYTES + _BYTES_PER_CHAR * len(grammar.text) + int(_BYTES_PER_SECOND * seconds)
        )
        return _Compiled(matcher, num_bytes)

    def _build(self, grammar: Grammar) -> tuple[llguidance.LLMatcher, float]:
        """The matcher, and the seconds of the processor's time that it took."""
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=max(_FIRST_FUEL, _FIRST_FUEL_PER_CHAR * len(grammar.text)),
            step_lexer_fuel=_STEP_FUEL,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )
        with self._compiling, exit_gate.passing(for_another=True):
            begin = time.thread_time()
            matcher = llguidance.LLMatcher(
                self._vocabulary, grammar.text, log_level=0, limits=limits
            )
            if not matcher.is_error():
                # The lexer is built for the first mask. What it cannot build is refused here, where
                # nobody else waits.
                row = np.empty(self.mask_words, np.uint32)
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            return matcher, time.thread_time() - begin

    def end_tokens(self, config: GenerateConfig) -> list[int]:
        """Tokens that end the request, where its text is complete: EOS, stop tokens, and stop words
        that are one special token."""
        words = (word[0] for word in config.stop_words_ids if len(word) == 1)
        ends = {*config.stop_token_ids, *filter(self._is_special, words)}
        if config.early_stopping and not config.ignore_eos and config.eos_token_id >= 0:
            ends.add(config.eos_token_id)
        return sorted(token for token in ends if token in _TOKENS)

    def _is_special(self, token: int) -> bool:
        return 0 <= token < self._vocabulary.vocab_size and self._vocabulary.is_special_token(token)


Compiler._make_locks()
os.register_at_fork(after_in_child=Compiler._make_locks)
