"""A native queue, and what it returns, for tests of those who read it."""

from __future__ import annotations

from types import SimpleNamespace

from allspark._allspark import GenerateRequestStatus as Status
from allspark.text_queue import TextElements


class NativeElements(TextElements):
    """As GeneratedElements, whose members it has."""

    has_tokens_only = False


class SteppedNative:
    """A native queue whose request takes as many steps before a call as `choices` say. After these
    it takes one step before each call, so that every loop ends."""

    request_id = 1

    def __init__(self, choices, tokens, end=Status.GenerateFinished, elements=None):
        self._choices = iter(choices)
        self._tokens, self._end = list(tokens), end
        self._elements = elements or (lambda ids: SimpleNamespace(ids_from_generate=ids))
        self._status = Status.Init
        self._num_done = self._num_taken = 0

    def _step(self):
        if self._num_done < len(self._tokens):
            self._num_done += 1
            self._status = Status.ContextFinished if self._num_done == 1 else Status.Generating
        else:
            self._status = self._end

    def _before_a_call(self):
        for _ in range(next(self._choices, 1)):
            self._step()

    def run_to_the_end(self):
        while self._status != self._end:
            self._step()

    def status(self):
        self._before_a_call()
        return self._status

    @property
    def is_terminal(self):
        self._before_a_call()
        return self._status == self._end

    def generated_length(self):
        self._before_a_call()
        return self._num_done

    def finish_reason(self):
        return "length" if self._status == self._end else ""

    def get_nowait(self):
        self._before_a_call()
        return self._take()

    def read(self):
        self._before_a_call()
        is_end = self._status == self._end
        self._before_a_call()
        elements = self._take()
        ids = elements.ids_from_generate if elements else []
        return self.request_id, ids, 0, None, is_end

    def get(self, timeout_ms):
        self._before_a_call()
        while timeout_ms < 0 and self._num_done == self._num_taken and self._status != self._end:
            self._step()
        return self._take()

    def _take(self):
        begin, self._num_taken = self._num_taken, self._num_done
        ids = self._tokens[begin : self._num_done]
        return self._elements(ids) if ids else None
