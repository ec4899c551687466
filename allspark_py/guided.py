"""Guided decoding: masks that keep the output of a request in its `response_format`.

Grammars are compiled while a request starts (grammar_compiler.py). They advance on two threads per
engine, while the forward pass runs. The engine's threads see a queue and bits
(allspark/token_mask.h), never Python.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import llguidance
import numpy as np
from allspark import exit_gate
from allspark._allspark import GenerateConfig, MaskQueue, QueuedMask
from allspark.grammar_compiler import Compiler, yield_to_engine
from allspark.response_format import explain

# A batch of masks that takes longer may be the fault of any of its requests. Each of them is then
# answered alone, by another thread, until its own mask takes no longer than the second bound.
_SLOW_BATCH_SECONDS = 0.02
_SLOW_MASK_SECONDS = 0.005


class _Guide:
    """The position of one request in its grammar."""

    def __init__(
        self,
        compiler: Compiler,
        response_format: Any,
        matcher: llguidance.LLMatcher,
        can_end: bool,
    ):
        self.compiler = compiler
        self.response_format = response_format
        self.matcher = matcher
        self.can_end = can_end  # its config has end tokens
        self.slow = False


# A mask to compute: its queue, the position of its request, and the token chosen last (-1: none).
_Asked: TypeAlias = tuple[QueuedMask, _Guide, int]
# What the thread for slow masks is to answer; None ends it.
_Slow: TypeAlias = "queue.SimpleQueue[tuple[Compiler, _Asked] | None]"


class GuidedDecoding:
    """The masks of one engine's guided requests, and the threads that compute them."""

    def __init__(self) -> None:
        self._queue = MaskQueue()
        self._guides: dict[QueuedMask, _Guide] = {}
        self._process = os.getpid()
        slow: _Slow = queue.SimpleQueue()
        self._slow_thread = _start(_serve_slow, slow, name="allspark-guided-slow")
        try:
            self._thread = _start(_serve, self._queue, self._guides, slow, name="allspark-guided")
        except ValueError:
            slow.put(None)
            raise

    def masks(
        self,
        response_format: Any,
        tokenizer: Any,
        config: GenerateConfig,
        generated: Sequence[int],
        count: int,
        compiled: llguidance.LLMatcher | None,
    ) -> list[QueuedMask | None]:
        """The masks of `count` new requests whose outputs begin with `generated`; Nones for plain
        text. Where the engine refuses a request, return its mask with `forget`. `compiled`: what
        Compiler.prepare returned for the format, if it was called. Raises as Compiler.matcher does.
        """
        compiler = Compiler.of(tokenizer)
        matcher = compiled.deep_copy() if compiled else compiler.matcher(response_format)
        if matcher is None:
            return [None] * count
        if generated and matcher.validate_tokens(list(generated)) < len(generated):
            raise ValueError(
                f"num_generated_in_prompt is {len(generated)}, but these tokens do not begin a "
                "text of the response_format"
            )
        matcher.consume_tokens(list(generated))
        end_tokens = compiler.end_tokens(config)
        masks: list[QueuedMask | None] = []
        for own in (matcher, *(matcher.deep_copy() for _ in range(count - 1))):
            mask = QueuedMask(self._queue, end_tokens)
            self._guides[mask] = _Guide(compiler, response_format, own, bool(end_tokens))
            masks.append(mask)
        return masks

    def forget(self, mask: QueuedMask) -> None:
        self._guides.pop(mask, None)

    def close(self) -> None:
        """Ends the threads; masks requested afterwards fail. A fork has no such threads."""
        if os.getpid() != self._process:
            return
        self._queue.close()
        # The garbage collector may call, on any thread.
        current = threading.current_thread()
        if current is self._thread or exit_gate.is_exiting():  # that thread ends the slow one
            return
        self._thread.join(timeout=5)  # a hanging grammar must not block exit
        if current is not self._slow_thread:
            self._slow_thread.join(timeout=5)


def _num_threads() -> int:
    # The forward pass needs the cores; half of them compute masks early enough.
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _start(function: Callable[..., None], *arguments: Any, name: str) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ValueError(f"response_format cannot be served: {error}") from error
    return thread


def _executor(num_threads: int) -> llguidance.LLExecutor:
    with exit_gate.passing():
        return llguidance.LLExecutor(num_threads)


def _serve(masks: MaskQueue, guides: dict[QueuedMask, _Guide], slow: _Slow) -> None:
    try:
        executor = _executor(_num_threads())
        while work := masks.take():
            by_compiler: dict[Compiler, list[_Asked]] = {}
            for mask, token in work:
                guide = guides.get(mask)
                if token is None:
                    guides.pop(mask, None)
                elif guide is not None and guide.slow:
                    slow.put((guide.compiler, (mask, guide, token)))
                elif guide is not None:
                    by_compiler.setdefault(guide.compiler, []).append((mask, guide, token))
            for compiler, asked in by_compiler.items():
                if _answer_or_fail(executor, compiler, asked) > _SLOW_BATCH_SECONDS:
                    for _, guide, _ in asked:
                        guide.slow = True
    finally:
        slow.put(None)
        masks.close()
        for mask in list(guides):
            mask.fail("the thread that computes masks has ended")


def _serve_slow(slow: _Slow) -> None:
    """Answers those one by one whose masks may be slow, until None comes."""
    yield_to_engine()
    executor = _executor(1)
    while item := slow.get():
        compiler, asked = item
        seconds = _answer_or_fail(executor, compiler, [asked])
        asked[1].slow = seconds > _SLOW_MASK_SECONDS


def _answer_or_fail(
    executor: llguidance.LLExecutor, compiler: Compiler, asked: list[_Asked]
) -> float:
    """Returns how many seconds it took. Whatever is raised ends only these requests."""
    begin = time.perf_counter()
    try:
        with exit_gate.passing():
            _answer(executor, compiler, asked)
    except Exception as error:
        for mask, _, _ in asked:
            mask.fail(f"{type(error).__name__}: {error}")
    return time.perf_counter() - begin


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
            compiler.forget(guide.response_format)
            mask.fail(_failure(matcher))
            continue
        is_complete = matcher.is_accepting()
        # Before a token, a matcher is not stopped although none can follow.
        ends_here = matcher.is_stopped() or (is_complete and not row.any())
        if ends_here and not guide.can_end:
            mask.finish()
        else:
            mask.publish(row, is_complete)


def _failure(matcher: llguidance.LLMatcher) -> str:
    error = matcher.get_error()
    if error.startswith("NoExtensionBias"):
        return "no token of the vocabulary can follow in the grammar"
    return f"the grammar failed: {explain(error)}"
