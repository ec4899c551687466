"""The limit of time of chat templates ends what does not end, and nothing else, on any thread."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from allspark.chat_template import TimeLimitError, time_limit
from allspark.chat_template.time_limit import call_within


@pytest.fixture(autouse=True)
def _nothing_comes_late():
    """An exception that came after a call would end this loop."""
    yield
    end = time.monotonic() + 0.01
    while time.monotonic() < end:
        pass


@pytest.fixture
def fast_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def spin(seconds=60.0):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return "ended"


def test_results_and_errors_pass():
    assert call_within(60, lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(KeyError, match="x"):
        call_within(60, {}.__getitem__, "x")


def raise_interrupt():
    raise KeyboardInterrupt


def test_an_interrupt_passes():
    with pytest.raises(KeyboardInterrupt):
        call_within(60, raise_interrupt)


def test_a_loop_ends():
    begin = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"^it took longer than 0.05 s$") as caught:
        call_within(0.05, spin)
    assert 0.05 <= time.monotonic() - begin < 30
    assert isinstance(caught.value, ValueError)


def test_except_exception_does_not_hold_it():
    def stubborn():
        while True:
            try:
                spin()
            except Exception:
                pass

    with pytest.raises(TimeLimitError):
        call_within(0.02, stubborn)


@pytest.fixture
def entries(monkeypatch):
    """The entries of the calls of a test."""
    found = []

    class Entry(time_limit._Entry):
        __slots__ = ()

        def __init__(self, *arguments):
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(time_limit, "_Entry", Entry)
    return found


def test_an_exception_that_a_finaliser_swallows_is_sent_again(entries, monkeypatch):
    monkeypatch.setattr(time_limit, "_RESEND_SECONDS", 0.05)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    in_finaliser, is_after = threading.Event(), threading.Event()
    send = time_limit._send

    def send_in_turn(entry):
        """The first one comes in the finaliser, the others after it."""
        if entry in entries:
            assert (is_after if entry.num_sent else in_finaliser).wait(60)
        return send(entry)

    monkeypatch.setattr(time_limit, "_send", send_in_turn)

    class Slow:
        def __del__(self):
            in_finaliser.set()
            spin()

    def swallow():
        item = Slow()
        del item
        seen.append("after")
        is_after.set()
        spin()

    seen = []
    with pytest.raises(TimeLimitError):
        call_within(0.02, swallow)
    assert seen == ["after"]


def test_short_calls_around_the_limit(fast_switches):
    """Every call ends by itself or by the limit, and none is disturbed afterwards."""
    seen, num_rounds = Counter(), 0

    def work(seed):
        chance = random.Random(seed)
        own = Counter()
        for _ in range(1500):
            limit = chance.random() * 2e-4
            try:
                try:
                    call_within(limit, spin, limit * (0.5 + chance.random()))
                    own["ended"] += 1
                except TimeLimitError:
                    own["late"] += 1
                for _ in range(50):
                    pass
            except BaseException as error:
                own[type(error).__name__] += 1
        seen.update(own)

    before = threading.active_count()
    end = time.monotonic() + 60
    # Where the watchdog gets no core in time, one round may have few that are late.
    while min(seen["ended"], seen["late"]) <= 50 and time.monotonic() < end:
        seeds = range(4 * num_rounds, 4 * num_rounds + 4)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        num_rounds += 1
    assert {*seen} <= {"ended", "late"} and sum(seen.values()) == 6000 * num_rounds
    assert min(seen["ended"], seen["late"]) > 50
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("allspark-time-limit") == 1
    assert threading.active_count() <= before + 1


def test_one_of_many_threads_ends():
    results = {}

    def work(key, seconds):
        try:
            results[key] = call_within(60 if key else 0.1, spin, seconds)
        except TimeLimitError:
            results[key] = "late"

    threads = [threading.Thread(target=work, args=(i, 0.0 if i else 60.0)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: "late", **{i: "ended" for i in range(1, 8)}}


def send_to_self():
    """As the watchdog does, but the exception arrives at the next check of this thread."""
    return functools.partial(
        time_limit._set_async_exception, threading.get_ident(), id(time_limit._Stop)
    )


def test_an_exception_that_arrives_after_the_function(entries):
    """It is sent by the last thing that the function does, which is no Python code."""
    send = send_to_self()

    def call():
        entries[-1].num_sent += 1
        return send()

    for function in (send, call):
        with pytest.raises(TimeLimitError):
            call_within(60, function)


def test_an_exception_while_the_call_is_left(entries, monkeypatch):
    """The caller waits for the watchdog, which sends meanwhile."""
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        entries[-1].num_sent += 1
        entries[-1].sending = False
        send_to_self()()

    def call():
        entries[-1].sending = True

    monkeypatch.setattr(time_limit.time, "sleep", sleep)
    with pytest.raises(TimeLimitError):
        call_within(60, call)
    assert waits == [0]


def test_an_exception_that_did_not_arrive_is_removed(entries):
    """The caller takes back what the watchdog sent: nothing comes later."""

    class Entry:
        thread_id = threading.get_ident()
        watchdog = None
        sending = leaving = False
        num_sent = 1

    time_limit._leave(Entry)
    for _ in range(100):
        pass


def test_a_left_call_is_not_disturbed(entries):
    assert call_within(60, int, "7") == 7
    assert entries[-1].leaving
    assert not time_limit._send(entries[-1])
    assert entries[-1].num_sent == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_a_limit_too():
    call_within(60, int)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call_within(0.05, spin)
        except TimeLimitError:
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_process_ends_while_the_thread_sleeps():
    code = (
        "import sys\n"
        "from allspark.chat_template.time_limit import call_within\n"
        "call_within(1000, int)\n"
        "sys.exit(5)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (5, b"")


# With templates.

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    pytest.importorskip("transformers")
    from allspark.model_loader.tokenizer import load_tokenizer

    return load_tokenizer(demo_model)


def test_templates_have_a_limit(tokenizer, monkeypatch):
    from allspark.chat_template import TokenizerTemplate, tokenizer_template

    assert tokenizer_template.MAX_SECONDS == 2.0
    messages = [{"role": "user", "content": "a"}]
    endless = TokenizerTemplate(tokenizer, LOOP)
    own = TokenizerTemplate(tokenizer)

    def within(seconds, render, *arguments):
        """Only a template that does not end needs a short limit."""
        return call_within(seconds if render.__self__ is endless else 60, render, *arguments)

    monkeypatch.setattr(tokenizer_template, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(tokenizer_template, "call_within", within)
    expected = own.render(messages)
    results = []

    def work(index):
        try:
            results.append(endless.render(messages) if index == 0 else own.render(messages))
        except TimeLimitError as error:
            results.append(str(error))

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = "the chat template does not end: it took longer than 0.1 s"
    assert Counter(results) == {late: 2, expected: 6}
    assert own.render(messages) == expected


def test_templates_of_many_forms_have_a_limit(tokenizer, monkeypatch):
    from allspark.chat_template import TokenizerTemplate, tokenizer_template

    monkeypatch.setattr(tokenizer_template, "MAX_SECONDS", 0.05)
    body = "{% for a in range(99999) %}{% for b in range(9999) %}"
    for inner in (
        "x", "{{ [3, 1] | sort | join }}", "{% set x = namespace(a=b) %}", "{{ b | tojson }}",
        "{% macro f() %}{{ b }}{% endmacro %}{{ f() }}", "{% if b is divisibleby 3 %}{% endif %}",
    ):  # fmt: skip
        text = body + inner + "{% endfor %}{% endfor %}"
        for _ in range(2):
            with pytest.raises(TimeLimitError):
                TokenizerTemplate(tokenizer, text).render([{"role": "user", "content": "a"}])


AFTERWARDS = """
import sys
from allspark.chat_template.time_limit import TimeLimitError, call_within

def endless():
    while True:
        pass

for _ in range(3):
    try:
        call_within(0.02, endless)
    except TimeLimitError:
        pass
calls = []
sys.setprofile(lambda frame, event, argument: calls.append(event))
(lambda: None)()
sys.setprofile(None)
assert "call" in calls
"""


def test_a_profiler_works_afterwards():
    """An exception that was sent and withdrawn would stop the interpreter there."""
    subprocess.run([sys.executable, "-c", AFTERWARDS], check=True, timeout=60)
