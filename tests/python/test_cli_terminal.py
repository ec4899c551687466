"""The command `chat` in a terminal: lines are edited, an empty one sends, Ctrl-C ends little."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("allspark._allspark")

from support.terminal import CTRL_C, CTRL_D, ENTER, LEFT, Terminal  # noqa: E402

PROMPT = "\n>>> "


def chat(demo_model, *flags):
    terminal = Terminal("chat", demo_model, "--session-len", 2048, *flags)
    terminal.wait_for(PROMPT)
    terminal.press("/set temperature 0", ENTER)
    terminal.wait_for(PROMPT, 2)
    return terminal


def test_a_line_is_edited_and_an_empty_one_sends(demo_model):
    with chat(demo_model, "--model-name", "mine") as terminal:
        assert "mine. An empty line sends what was typed." in terminal.text
        terminal.press("What is 3+?", LEFT, "4", ENTER)
        time.sleep(0.2)
        assert "3 + 4 = 7" not in terminal.text
        terminal.press(ENTER)
        terminal.wait_for("3 + 4 = 7")
        terminal.press("exit", ENTER)
        assert terminal.end() == 0 and "Traceback" not in terminal.text


def test_a_line_may_be_longer_than_a_terminal_keeps(demo_model, tmp_path):
    file = tmp_path / "saved.json"
    with chat(demo_model) as terminal:
        text = "word " * 2000
        for begin in range(0, len(text), 1000):  # a terminal takes some at a time
            terminal.press(("" if begin else "/system ") + text[begin : begin + 1000])
            time.sleep(0.05)
        terminal.press(ENTER)
        terminal.wait_for("a new conversation with this system prompt")
        terminal.press(f"/save {file}", ENTER)
        terminal.wait_for("1 messages are in")
    (message,) = json.loads(file.read_text())
    assert message["content"] == text.strip()


def test_ctrl_c_drops_what_was_typed_and_ctrl_d_ends(demo_model):
    with chat(demo_model) as terminal:
        terminal.press("What is 9+9?", ENTER, "and then")
        terminal.wait_for("and then")  # shown by who reads it: it waits for keys again
        terminal.press(CTRL_C)
        terminal.wait_for(PROMPT, 3)
        terminal.press("What is 3+4?", ENTER, ENTER)
        terminal.wait_for("3 + 4 = 7")
        terminal.wait_for(PROMPT, 4)
        assert "18" not in terminal.text
        terminal.press(CTRL_D)
        assert terminal.end() == 0 and "Traceback" not in terminal.text


def test_what_is_set_is_shown_in_lines(demo_model):
    with chat(demo_model) as terminal:
        terminal.press("/set", ENTER)
        terminal.wait_for("repetition_ngram_threshold=0")
        shown = terminal.text.rpartition("/set\n")[2].partition("\n\n")[0].splitlines()
        assert len(shown) > 1 and all(len(line) <= 80 for line in shown)
        assert "temperature=0," in terminal.text and "migration_request" not in terminal.text
        terminal.press("/set heat 1", ENTER)
        terminal.wait_for("there is no setting 'heat'; /set shows them")


@pytest.mark.slow
def test_chat_in_tmux(demo_model):
    """As a user of tmux sees it: lines that wrap, an answer, and the shell after it."""
    if shutil.which("tmux") is None:
        pytest.skip("no tmux here (scripts/setup.sh --slow installs it)")

    def tmux(*words):
        command = ["tmux", "-L", "allspark-test", "-f", "/dev/null", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def screen(text):
        end = time.monotonic() + 60
        while text not in (shown := tmux("capture-pane", "-p", "-t", "0")):
            assert time.monotonic() < end, shown
            time.sleep(0.05)
        return shown

    command = [sys.executable, "-m", "allspark.cli", "chat", str(demo_model)]
    shell = f"{shlex.join(command)}; echo status $?; sleep 60"
    try:
        tmux("new-session", "-d", "-x", "60", "-y", "30", shell)
        assert "demo_model. An empty line sends what was typed." in screen(">>>")
        tmux("send-keys", "/set do_sample false", "Enter", "What is", "Enter", "12+35?", "Enter")
        tmux("send-keys", "Enter")
        assert "12 + 35 = 47" in screen("= 47")
        tmux("send-keys", "/stats", "Enter")
        assert "a second" in screen("the first after")
        tmux("send-keys", "exit", "Enter")
        screen("status 0")
    finally:
        subprocess.run(["tmux", "-L", "allspark-test", "kill-server"], capture_output=True)
