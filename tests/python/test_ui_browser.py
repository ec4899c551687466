"""The page /ui in a browser: what people do with it, and its scripts by themselves."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys

import pytest

pytest.importorskip("fastapi")

from allspark.pipeline.served_model import ServedModel  # noqa: E402
from support.browser import By, Keys, WebDriverWait, chromium, resize, set_dark  # noqa: E402
from support.http_server import RunningServer  # noqa: E402
from support.upstream import Upstream, page_before  # noqa: E402

pytestmark = pytest.mark.slow

MODELS = [{"id": "first", "max_model_len": 300}, {"id": "second", "max_model_len": 4000}]


@pytest.fixture(scope="module")
def driver():
    with chromium() as driver:
        yield driver


class Page:
    """The page as its user sees it."""

    def __init__(self, driver, url):
        self.driver = driver
        self.url = url
        resize(driver, 1280, 800)
        set_dark(driver, False)
        driver.get_log("browser")  # what other tests left there
        self.open()

    def open(self):
        self.driver.get(f"{self.url}/ui")
        self.wait(lambda: self.find("#send").is_enabled())

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        return [each.text for each in self.all(selector)]

    def wait(self, condition):
        WebDriverWait(self.driver, 20, 0.02).until(lambda _: condition())

    def wait_for(self, selector, text):
        """Until the last of the elements has this text."""
        try:
            self.wait(lambda: self.texts(selector)[-1:] == [text])
        except Exception:
            raise AssertionError(f"{selector}: {self.texts(selector)}") from None

    def type(self, text, *keys):
        self.find("#prompt").send_keys(text, *keys)

    def set(self, selector, text):
        box = self.find(selector)
        box.clear()
        box.send_keys(text)

    def script(self, text, *values):
        return self.driver.execute_script(text, *values)

    def module(self, text, *values):
        """What the body of an async function returns; its values are `v`."""
        body = f"const v = [...arguments], end = v.pop(); (async () => {{ {text} }})().then(end)"
        return self.driver.execute_async_script(body, *values)

    @property
    def active(self):
        return self.driver.switch_to.active_element

    def faults(self):
        """Errors of the scripts, and what the policy stopped."""
        log = self.driver.get_log("browser")
        return [each for each in log if each["level"] == "SEVERE" and each["source"] != "network"]


@pytest.fixture
def upstream():
    upstream = Upstream()
    upstream.models = MODELS
    yield upstream
    upstream.close()


@pytest.fixture
def page(driver, upstream):
    with page_before(upstream.url) as server:
        page = Page(driver, f"http://127.0.0.1:{server.port}")
        page.wait(lambda: page.texts("#model option") == ["first", "second"])
        yield page
        assert page.faults() == []
        driver.get("about:blank")  # ends what runs


def chunk(**delta):
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def end(reason="stop", prompt=17, output=5, cached=0):
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    parts = [{"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
             {"choices": [], "usage": usage}]  # fmt: skip
    frames = [json.dumps(part).encode() for part in parts] + [b"[DONE]"]
    return b"".join(b"data: " + frame + b"\n\n" for frame in frames)


def put(upstream, *pieces):
    for piece in pieces:
        upstream.pieces.put(piece)


def body_of(upstream):
    return json.loads(upstream.asked.get(timeout=60)[3])


def ask(page, upstream, question, answer):
    """One whole turn; the body of its request."""
    page.type(question, Keys.ENTER)
    put(upstream, chunk(content=answer), end(), None)
    page.wait_for(".answer .content", answer)
    page.wait_for("#send", "Send")
    return body_of(upstream)


# A conversation.


def test_a_model_answers(driver, demo_model):
    model = ServedModel.open(str(demo_model), name="demo")
    with RunningServer([model]) as server:
        page = Page(driver, f"http://127.0.0.1:{server.port}")
        page.wait(lambda: page.texts("#model option") == ["demo"])
        page.set("#temperature", "0")
        page.type("What is 12+35?", Keys.ENTER)
        page.wait_for(".answer .content", "12 + 35 = 47")
        page.wait_for("#status", "The answer is complete.")
        assert re.match(r"\d+ tokens · .*prompt 17 tokens", page.texts(".facts")[-1])
        page.type("What is 3+4?", Keys.ENTER)
        page.wait_for(".answer .content", "3 + 4 = 7")
        assert page.texts(".answer h2") == ["demo", "demo"]
        assert page.faults() == []
        driver.get("about:blank")
    model.close()


def test_an_answer_is_seen_as_it_comes(page, upstream):
    page.type("Hello", Keys.ENTER)
    put(upstream, chunk(role="assistant", content=""), chunk(content="One"))
    page.wait_for(".answer .content", "One")
    assert page.find(".answer").get_attribute("aria-busy") == "true"
    assert page.find("#send").text == "Stop" and page.find("#status").text == "Answering."
    assert page.texts(".question .content") == ["Hello"] and not page.find("#empty").is_displayed()
    put(upstream, chunk(content=" two"), b": keep-alive\n\n")
    page.wait_for(".answer .content", "One two")
    put(upstream, end(output=9, cached=16), None)
    page.wait_for("#send", "Send")
    facts = page.texts(".facts")[-1]
    assert re.fullmatch(
        r"9 tokens · [\d.]+ tokens/s · prompt 17 tokens, 16 of them cached · first after [\d.]+ s",
        facts,
    )
    assert page.find(".answer").get_attribute("aria-busy") == "false"
    body = body_of(upstream)
    assert body == {
        "model": "first", "max_tokens": 512, "messages": [{"role": "user", "content": "Hello"}],
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_conversation_goes_on(page, upstream):
    ask(page, upstream, "Q1", "A1")
    body = ask(page, upstream, "Q2", "A2")
    contents = [(m["role"], m["content"]) for m in body["messages"]]
    assert contents == [("user", "Q1"), ("assistant", "A1"), ("user", "Q2")]


def test_an_answer_that_its_length_ended_says_so(page, upstream):
    page.type("Hi", Keys.ENTER)
    put(upstream, chunk(content="x"), end("length"), None)
    page.wait(lambda: "ended by its length" in page.texts(".facts")[-1])


@pytest.mark.parametrize("way", ["button", "key", "key elsewhere"])
def test_an_answer_can_be_stopped(page, upstream, way):
    page.type("Hello", Keys.ENTER)
    put(upstream, chunk(content="A part"))
    page.wait_for(".answer .content", "A part")
    put(upstream, "wait")
    if way == "button":
        page.find("#send").click()
    else:
        box = page.find("#prompt" if way == "key" else "#system")
        box.send_keys(Keys.ESCAPE)
    assert upstream.is_gone.wait(60)
    page.wait_for("#send", "Send")
    assert page.texts(".facts")[-1] == "stopped" and page.texts(".answer .error") == [""]
    assert page.find("#status").text == "Stopped."
    body_of(upstream)
    assert ask(page, upstream, "Go on", "Yes")["messages"][1]["content"] == "A part"


def test_a_question_can_be_changed(page, upstream):
    ask(page, upstream, "Q1", "A1")
    ask(page, upstream, "Q2", "A2")
    page.all(".edit")[0].click()
    assert page.active.get_attribute("value") == "Q1"
    page.active.send_keys(Keys.ESCAPE)  # gives it up
    assert page.texts(".question .content") == ["Q1", "Q2"] and page.active.text == "Edit"
    page.all(".edit")[0].click()
    page.active.send_keys(" changed", Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "twice", Keys.ENTER)
    put(upstream, chunk(content="A3"), end(), None)
    page.wait_for(".answer .content", "A3")
    assert page.texts(".question .content") == ["Q1 changed\ntwice"]
    assert page.texts(".answer .content") == ["A3"]
    assert [m["content"] for m in body_of(upstream)["messages"]] == ["Q1 changed\ntwice"]


def test_an_answer_can_be_asked_for_again(page, upstream):
    ask(page, upstream, "Q1", "A1")
    ask(page, upstream, "Q2", "A2")
    page.all(".retry")[1].click()
    put(upstream, chunk(content="A3"), end(), None)
    page.wait_for(".answer .content", "A3")
    assert page.texts(".answer .content") == ["A1", "A3"]
    assert [m["content"] for m in body_of(upstream)["messages"]] == ["Q1", "A1", "Q2"]
    page.all(".retry")[0].click()
    put(upstream, chunk(content="A4"), end(), None)
    page.wait_for(".answer .content", "A4")
    assert page.texts(".question .content") == ["Q1"] and page.texts(".answer .content") == ["A4"]


def test_another_question_while_an_answer_runs_ends_it(page, upstream):
    page.type("Q1", Keys.ENTER)
    put(upstream, chunk(content="A"))
    page.wait_for(".answer .content", "A")
    page.type("waits", Keys.ENTER)
    assert page.find("#prompt").get_attribute("value") == "waits"
    put(upstream, "wait")
    page.find(".edit").click()
    page.active.send_keys("!", Keys.ENTER)
    assert upstream.is_gone.wait(60)
    put(upstream, chunk(content="B"), end(), None)
    page.wait_for(".answer .content", "B")
    assert page.texts(".question .content") == ["Q1!"] and len(page.all(".answer")) == 1


def test_a_conversation_is_kept_until_it_is_ended(page, upstream):
    ask(page, upstream, "Q1", "A1")
    page.set("#system", "Be brief.")
    page.set("#top_k", "7")
    page.open()
    assert page.texts(".question .content") == ["Q1"] and page.texts(".answer .content") == ["A1"]
    assert page.texts(".facts")[-1].startswith("5 tokens")
    assert page.find("#system").get_attribute("value") == "Be brief."
    body = ask(page, upstream, "Q2", "A2")
    assert len(body["messages"]) == 4 and body["top_k"] == 7
    page.find("#new").click()
    page.wait(lambda: page.all(".message") == [])
    assert page.find("#empty").is_displayed() and page.active.get_attribute("id") == "prompt"
    page.open()
    assert page.all(".message") == []
    assert page.script("return localStorage.length") == 0


def test_what_had_come_is_kept_when_the_page_is_loaded_again(page, upstream):
    page.type("Q1", Keys.ENTER)
    put(upstream, chunk(content="A part"))
    page.wait_for(".answer .content", "A part")
    put(upstream, "wait")
    page.open()
    assert upstream.is_gone.wait(60)
    assert page.texts(".question .content") == ["Q1"]
    assert page.texts(".answer .content") == ["A part"]
    page.find(".retry").click()
    put(upstream, chunk(content="All"), end(), None)
    page.wait_for(".answer .content", "All")


# Settings.


def test_settings_are_fields_of_the_request(page, upstream):
    page.set("#system", "Be brief.")
    for name, value in {"temperature": "0.25", "top_p": "0.5", "top_k": "3", "seed": "11"}.items():
        page.set(f"#{name}", value)
    page.find("#max_tokens").clear()
    page.find("#settings summary").click()
    page.set("#more", '{"stop": ["x"], "messages": [], "stream": false}')
    page.find("#model").send_keys("second")
    body = ask(page, upstream, "Hi", "Hello")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    fields = {key: body[key] for key in ("temperature", "top_p", "top_k", "seed", "stop", "model")}
    assert fields == {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "seed": 11, "stop": ["x"],
                      "model": "second"}  # fmt: skip
    assert "max_tokens" not in body and body["stream"] is True and len(body["messages"]) == 2
    page.find("#reset").click()
    body = ask(page, upstream, "Hi", "Hello again")
    assert body["max_tokens"] == 512 and not body.keys() & {"temperature", "top_p", "stop", "seed"}
    assert body["messages"][0]["role"] == "user"


def test_sliders_and_numbers_are_one(page):
    slider = page.find("[aria-label='Temperature, slider']")
    assert "unset" in slider.get_attribute("class")
    slider.send_keys(Keys.HOME)
    assert page.find("#temperature").get_attribute("value") == "0"
    slider.send_keys(Keys.ARROW_RIGHT)
    assert page.find("#temperature").get_attribute("value") == "0.01"
    assert "unset" not in slider.get_attribute("class")
    page.set("#temperature", "1.25")
    assert slider.get_attribute("value") == "1.25"
    page.set("#temperature", "1.9")  # the server says what it takes
    assert slider.get_attribute("value") == "1.5"


def test_a_models_length_bounds_the_slider(page):
    slider = page.find("[aria-label='Maximum new tokens, slider']")
    assert slider.get_attribute("max") == "300"
    page.find("#model").send_keys("second")
    page.wait(lambda: slider.get_attribute("max") == "4000")


@pytest.mark.parametrize(("text", "width"), [("{", 1280), ("[1]", 1280), ("3", 390)])
def test_fields_that_are_no_json_are_refused(page, upstream, text, width):
    page.find("#settings summary").click()
    page.set("#more", text)
    resize(page.driver, width, 844)
    page.type("Hi", Keys.ENTER)
    page.wait(lambda: page.find("#more-error").is_displayed())
    assert "JSON" in page.find("#more-error").text and page.active.get_attribute("id") == "more"
    assert page.all(".message") == [] and upstream.asked.empty()
    assert page.find("#prompt").get_attribute("value") == "Hi"


# Reasoning and tools.


def test_reasoning_is_folded(page, upstream):
    page.type("Hi", Keys.ENTER)
    put(upstream, chunk(reasoning_content="I th", reasoning="I th"), chunk(reasoning="ink"))
    page.wait(lambda: page.find(".answer .reasoning").is_displayed())
    put(upstream, chunk(content="So"), end(), None)
    page.wait_for(".answer .content", "So")
    details = page.find(".answer .reasoning")
    assert details.get_attribute("open") is None and "I think" not in details.text
    page.find(".answer .reasoning summary").click()
    assert page.find(".answer .reasoning .plain").text == "I think"
    body_of(upstream)
    body = ask(page, upstream, "Q2", "A2")
    assert body["messages"][1] == {"role": "assistant", "content": "So"}


def test_tool_calls_are_folded(page, upstream):
    page.type("Hi", Keys.ENTER)

    def call(index, **function):
        return chunk(tool_calls=[{"index": index, "id": "c", "function": function}])

    put(upstream, call(0, name="weather", arguments=""), call(0, arguments='{"city": "Pa'))
    put(upstream, call(0, arguments='ris"}'), call(1, name="clock", arguments="{"))
    put(upstream, end("tool_calls"), None)
    page.wait_for("#send", "Send")
    assert page.texts(".call summary") == ["Call of the tool weather", "Call of the tool clock"]
    assert not page.find(".call pre").is_displayed()
    for summary in page.all(".call summary"):
        summary.click()
    assert page.texts(".call pre") == ['{\n  "city": "Paris"\n}', "{"]


# Errors.


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (400, {}, {"error": {"message": "top_k: it is -9."}}, "Error 400: top_k: it is -9."),
        (429, {"retry-after": "3"}, {"error": {"message": "full"}},
         "Error 429: full. Try again in 3 s."),
        (500, {}, "no JSON", 'Error 500: "no JSON".'),
    ],
)  # fmt: skip
def test_errors_of_the_server_are_shown(page, upstream, status, headers, body, message):
    upstream.status, upstream.headers = status, {"content-type": "application/json", **headers}
    page.type("Hi", Keys.ENTER)
    put(upstream, json.dumps(body).encode(), None)
    page.wait_for(".answer .error", message)
    page.wait_for("#send", "Send")
    upstream.status, upstream.headers = 200, {"content-type": "text/event-stream"}
    body_of(upstream)
    page.find(".retry").click()
    put(upstream, chunk(content="Now"), end(), None)
    page.wait_for(".answer .content", "Now")
    assert len(page.all(".answer")) == 1 and page.texts(".answer .error") == [""]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((b'data: {"error": {"message": "the engine failed"}}\n\n', None), "the engine failed"),
        ((None,), "The answer broke off: the connection was closed before its end."),
        ((b"data: {no json}\n\n", None), "The answer broke off: "),
        (("break",), "broke off the answer"),
    ],
)
def test_errors_within_an_answer_are_shown(page, upstream, pieces, message):
    page.type("Hi", Keys.ENTER)
    put(upstream, chunk(content="A part"), *pieces)
    page.wait_for("#send", "Send")
    assert message in page.texts(".answer .error")[-1]
    assert page.texts(".answer .content") == ["A part"]


def test_a_server_that_is_away(driver, upstream):
    with page_before(upstream.url) as server:
        page = Page(driver, f"http://127.0.0.1:{server.port}")
        page.wait(lambda: page.texts("#model option") == ["first", "second"])
    page.type("Hi", Keys.ENTER)
    page.wait(lambda: "The server cannot be reached" in page.texts(".answer .error")[-1])
    assert page.faults() == []


def test_a_key_is_asked_for(driver, demo_model):
    model = ServedModel.open(str(demo_model), name="demo")
    with RunningServer([model], api_keys=("secret",)) as server:
        page = Page(driver, f"http://127.0.0.1:{server.port}")
        page.wait(lambda: page.find("#key-panel").is_displayed())
        page.wait(lambda: page.active.get_attribute("id") == "key")
        assert not page.find("#notice").is_displayed()
        page.active.send_keys("wrong", Keys.ENTER)
        page.wait(lambda: "the key is missing or wrong" in page.find("#notice").text)
        page.active.send_keys("secret", Keys.ENTER)
        page.wait(lambda: page.texts("#model option") == ["demo"])
        for selector in ("#key-panel", "#notice"):
            assert not page.find(selector).is_displayed()
        assert page.active.get_attribute("id") == "prompt"
        page.set("#temperature", "0")
        page.type("What is 3+4?", Keys.ENTER)
        page.wait_for(".answer .content", "3 + 4 = 7")
        assert page.script("return localStorage.length") == 0
        assert "secret" not in page.driver.page_source and page.driver.get_cookies() == []
        driver.get("about:blank")
    model.close()


def test_a_key_is_asked_for_when_an_answer_needs_it(page, upstream):
    upstream.status, upstream.headers = 401, {"content-type": "application/json"}
    page.type("Hi", Keys.ENTER)
    put(upstream, b'{"error": {"message": "no key"}}', None)
    page.wait_for(".answer .error", "Error 401: no key.")
    page.wait(lambda: page.active.get_attribute("id") == "key")
    assert "authorization" not in upstream.asked.get(timeout=60)[2]
    upstream.status, upstream.headers = 200, {"content-type": "text/event-stream"}
    page.active.send_keys("K", Keys.ENTER)
    page.wait(lambda: not page.find("#key-panel").is_displayed())
    page.find(".retry").click()
    put(upstream, chunk(content="Yes"), end(), None)
    page.wait_for(".answer .content", "Yes")
    assert upstream.asked.get(timeout=60)[2]["authorization"] == "Bearer K"


# Keys, size and colours.


def test_keys(page, upstream):
    assert page.active.get_attribute("id") == "prompt"
    page.type("  ", Keys.ENTER)
    assert page.all(".message") == []
    page.find("#prompt").clear()
    page.type("one", Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "two", Keys.ENTER)
    put(upstream, chunk(content="ok"), end(), None)
    page.wait_for(".answer .content", "ok")
    assert page.texts(".question .content") == ["one\ntwo"]
    assert page.active.get_attribute("id") == "prompt"
    assert page.find("#prompt").get_attribute("value") == ""
    body_of(upstream)
    # All controls are reached by the Tab key, and show that they are.
    seen = set()
    for _ in range(40):
        page.active.send_keys(Keys.TAB)
        seen.add(page.active.get_attribute("id") or page.active.get_attribute("class"))
        if page.active.tag_name in ("button", "input", "textarea", "select"):
            shown = page.script("return getComputedStyle(arguments[0]).outlineStyle", page.active)
            assert shown == "solid"
    assert {"model", "new", "prompt", "send", "system", "reset", "copy", "edit", "retry",
            "temperature"} <= seen  # fmt: skip


def test_an_enter_that_ends_a_composed_character_sends_nothing(page):
    page.type("に")
    page.script(
        "arguments[0].dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true,"
        " bubbles: true}))",
        page.find("#prompt"),
    )
    assert page.all(".message") == []


def test_a_phone(page, upstream):
    resize(page.driver, 390, 844)
    page.type("y" * 200, Keys.ENTER)
    for text in ("word " * 50, "x" * 300, "```\n" + "z" * 400 + "\n```", "|a|" + "w" * 300 + "|"):
        put(upstream, chunk(content=f"{text}\n\n"))
    put(upstream, end(), None)
    page.wait_for("#send", "Send")
    assert page.script("return document.documentElement.scrollWidth") <= 390
    assert page.script("return document.getElementById('scroll').scrollWidth") <= 390
    assert not page.find("#settings").is_displayed()
    toggle = page.find("#toggle")
    toggle.click()
    assert page.find("#settings").is_displayed() and not page.find("#prompt").is_displayed()
    assert toggle.get_attribute("aria-expanded") == "true"
    assert page.script("return document.documentElement.scrollWidth") <= 390
    toggle.click()
    assert page.find("#prompt").is_displayed() and toggle.get_attribute("aria-expanded") == "false"
    for each in page.all("#send, #new, #toggle, #prompt"):
        box = each.rect
        assert 0 <= box["x"] and box["x"] + box["width"] <= 390 and box["height"] >= 32


def test_a_scrollbar_does_not_move_the_column(page, upstream):
    page.type("Hi", Keys.ENTER)
    put(upstream, chunk(content="line\n\n" * 60), end(), None)
    page.wait_for("#send", "Send")
    bar = "const s = document.getElementById('scroll'); return s.offsetWidth - s.clientWidth"
    assert page.script(bar) > 0
    assert abs(page.find("#messages").rect["x"] - page.find("#prompt").rect["x"]) < 1


def luminance(color):
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("is_dark", [False, True])
def test_colours_can_be_read(page, upstream, is_dark):
    set_dark(page.driver, is_dark)
    upstream.status, upstream.headers = 400, {"content-type": "application/json"}
    page.type("Hi", Keys.ENTER)
    put(upstream, b'{"error": {"message": "no"}}', None)
    page.wait_for(".answer .error", "Error 400: no.")
    back = page.script("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(back) < 0.1) == is_dark
    for selector in (".question .content", ".answer h2", ".answer .error", ".retry", "#send",
                     "#hint", "#settings label", "header h1"):  # fmt: skip
        text, behind = page.script(
            "let node = arguments[0]; const text = getComputedStyle(node).color;"
            "while (getComputedStyle(node).backgroundColor === 'rgba(0, 0, 0, 0)')"
            " node = node.parentElement;"
            "return [text, getComputedStyle(node).backgroundColor]",
            page.find(selector),
        )
        light, dark = sorted((luminance(text), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (selector, text, behind)


def test_the_end_stays_in_sight_unless_the_reader_leaves_it(page, upstream):
    page.type("Hi", Keys.ENTER)
    put(upstream, chunk(content="line\n\n" * 60))
    left = """const s = document.getElementById("scroll");
              return s.scrollHeight - s.scrollTop - s.clientHeight"""
    page.wait(lambda: len(page.all(".answer .content p")) == 60)
    page.wait(lambda: page.script(left) < 2)
    page.script("document.getElementById('scroll').scrollTop = 100")
    page.wait(lambda: page.module("await new Promise(requestAnimationFrame); return true"))
    put(upstream, chunk(content="line\n\n" * 20))
    page.wait(lambda: len(page.all(".answer .content p")) == 80)
    assert page.script("return document.getElementById('scroll').scrollTop") == 100
    put(upstream, end(), None)
    page.wait_for("#send", "Send")


def test_copies(page, upstream):
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", permissions)
    read = "return await navigator.clipboard.readText()"
    page.type("Hi", Keys.ENTER)
    text = "**Bold**\n\n```python\nprint(1)\n```\n"
    put(upstream, chunk(content=text), end(), None)
    page.wait_for("#send", "Send")
    page.find(".answer footer .copy").click()
    page.wait_for(".answer footer .copy", "Copied")
    assert page.module(read) == text
    page.find(".copy-code").click()
    page.wait_for(".copy-code", "Copied")
    assert page.module(read) == "print(1)\n"
    # Without TLS a browser gives no clipboard.
    page.script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.find(".question .copy").click()
    page.wait_for(".question .copy", "Copied")


# The scripts by themselves.

EVENTS = """
const {events} = await import("/ui/api.js");
const bytes = new TextEncoder().encode(v[0]);
const stream = new ReadableStream({start(control) {
  for (let i = 0; i < bytes.length; i += v[1]) control.enqueue(bytes.slice(i, i + v[1]));
  control.close();
}});
const found = [];
for await (const data of events(stream)) found.push(data);
return found;
"""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_in_pieces(page, size):
    text = (
        ": comment\n\ndata: one\n\ndata:two\r\n\r\nevent: x\rdata: thr\u00e9e \U0001f600\r\r"
        "data: a\r\ndata:  b\r\n\r\nid: 7\n\ndata: cut off"
    )
    found = page.module(EVENTS, text, size)
    assert found == ["one", "two", "thr\u00e9e \U0001f600", "a\n b"]


MARKDOWN = """
const {Markdown} = await import("/ui/markdown.js");
const show = (node) => {
  if (node.nodeType === 3) return node.data;
  const name = node.localName + (node.start > 1 ? node.start : "");
  const target = node.href ? "=" + node.getAttribute("href") : "";
  return `(${name}${target}${[...node.childNodes].map((each) => " " + show(each)).join("")})`;
};
const root = document.createElement("div");
const view = new Markdown(root);
for (let i = 0; i < v[0].length; i += v[1]) view.put(v[0].slice(i, i + v[1]));
root.normalize();
return [...root.childNodes].map(show).join("");
"""


def rendered(page, text, size=10_000):
    return page.module(MARKDOWN, text, size)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("one\ntwo\n\nthree", "(p one\ntwo)(p three)"),
        ("a **b *c*** d", "(p a  (strong b  (em c))  d)"),
        ("`a*b*` ``c`d`` ~~e~~", "(p (code a*b*)   (code c`d)   (del e))"),
        ("snake_case_name 2*3*4 * 5 _em_", "(p snake_case_name 2 (em 3) 4 * 5  (em em))"),
        (r"\*no\* **open", "(p *no* **open)"),
        ("# T\n## U\ntext", "(h3 T)(h4 U)(p text)"),
        ("####### no\n#no", "(p ####### no\n#no)"),
        ("- a\n- b\n  more\n\n- c\nafter", "(ul (li a) (li b\nmore) (li c\nafter))"),
        ("- a\n\nafter", "(ul (li a))(p after)"),
        ("3. a\n   - b\n   - c\n4. d", "(ol3 (li a (ul (li b) (li c))) (li d))"),
        ("- a\n1. b", "(ul (li a))(ol (li b))"),
        ("> a\n> b\n\n---", "(blockquote a\nb)(hr)"),
        ("```py\nx = '<b>'\n\n# y\n```\nz",
         "(figure (figcaption py (button Copy)) (pre (code x = '<b>'\n\n# y\n)))(p z)"),
        ("1. a\n   ```\n   x\n   ```\n2. b",
         "(ol (li a (figure (figcaption code (button Copy)) (pre (code x\n)))) (li b))"),
        ("~~~\n```\n~~~", "(figure (figcaption code (button Copy)) (pre (code ```\n)))"),
        ("| a | b |\n|---|:-:|\n| 1 | **2** |",
         "(div (table (tr (th a) (th b)) (tr (td 1) (td (strong 2)))))"),
        ("[a](https://x.org/y) [b](javascript:alert(1)) ![c](http://x/y.png)",
         "(p (a=https://x.org/y a)  [b](javascript:alert(1)) ! (a=http://x/y.png c))"),
        ("<img src=x onerror=alert(1)><script>x</script>",
         "(p <img src=x onerror=alert(1)><script>x</script>)"),
        ("a\r\nb", "(p a\nb)"),
    ],
)  # fmt: skip
def test_markdown_becomes_nodes(page, text, nodes):
    assert rendered(page, text) == nodes
    for size in (1, 2, 5):
        assert rendered(page, text, size) == nodes, size


COST = """
const {Markdown} = await import("/ui/markdown.js");
const root = document.createElement("div");
const view = new Markdown(root);
const make = document.createElement, add = Element.prototype.append;
let made = 0;
Element.prototype.append = function (...nodes) { made += nodes.length; add.apply(this, nodes); };
const costs = [];
for (let i = 0; i < 4000; i++) {
  made = 0;
  view.put(v[0]);
  costs.push(made);
}
Element.prototype.append = add;
return [Math.max(...costs), root.textContent.length];
"""


@pytest.mark.parametrize(
    ("piece", "nodes"),
    [("a **b**\n\n", 8), ("- a **b**\n", 8), ("word ", 8), ("| a |\n", 8), ("> a\n", 8), ("a\n", 8),
     ("**x", 2048)],  # one line, until it is longer than what is looked through
)  # fmt: skip
def test_the_work_for_a_piece_does_not_grow(page, piece, nodes):
    most, length = page.module(COST, piece)
    assert length >= 4000
    assert most <= nodes
    code, _ = page.module(COST.replace("const costs", 'view.put("```\\n");const costs'), piece)
    assert code <= 2


def test_what_was_read_stays_where_it_is(page, upstream):
    """A selection in text that is complete is not lost while more comes."""
    page.type("Hi", Keys.ENTER)
    put(upstream, chunk(content="First paragraph.\n\nSecond"))
    page.wait(lambda: len(page.all(".answer .content p")) == 2)
    first = page.find(".answer .content p")
    put(upstream, *(chunk(content=f" {i}") for i in range(50)), end(), None)
    page.wait_for("#send", "Send")
    assert first.text == "First paragraph."  # else selenium calls it stale
    assert page.texts(".answer .content p")[1].endswith("48 49")


def test_the_pictures_of_the_documents_can_be_made_again(driver, demo_model, tmp_path, repo_root):
    """With the demo model in place of the one that they show."""
    script = [sys.executable, str(repo_root / "scripts" / "pictures.py")]
    command = [*script, "--model", str(demo_model), "--output", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    sizes = {}
    for path in tmp_path.iterdir():
        head = path.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        sizes[path.name] = struct.unpack(">II", head[16:])
    assert sizes["ui.png"] == (1280, 800) and sizes["ui-phone.png"] == (390, 844)
    assert set(sizes) == {path.name for path in (repo_root / "docs" / "images").iterdir()}
