"""The command `client`: the loop of `chat` with a server, whose errors end nothing."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

pytest.importorskip("allspark._allspark")

from allspark.cli import main  # noqa: E402
from allspark.cli.chat import PipelineBackend  # noqa: E402
from allspark.cli.client import RemoteBackend  # noqa: E402
from allspark.cli.talk import Talk  # noqa: E402
from allspark.pipeline import pipeline  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.remote import models  # noqa: E402
from allspark.remote.blocking import BlockingClient  # noqa: E402
from support.fake_openai import STREAM, FakeServer, cut, delta, ended_early, usage  # noqa: E402
from support.http_server import RunningServer  # noqa: E402
from support.ports import kept_port  # noqa: E402


@pytest.fixture(scope="module")
def server(demo_model):
    model = ServedModel.open(str(demo_model), name="demo")
    with RunningServer([model], api_keys=("a key",)) as running:
        yield f"http://127.0.0.1:{running.port}"
    model.close()


CONVERSATION = """/set temperature 0
What is
3+4?

/stats
/set temperature 9
What is 5+5?

/set temperature 0
/retry
/set
/set messages []
/save {file}
/nothing
end
/retry
/system Be brief.
What is 12+35?
"""


def test_client_answers_what_is_typed(server, tmp_path, capsys, monkeypatch):
    file = tmp_path / "conversation.json"
    monkeypatch.setattr(sys, "stdin", io.StringIO(CONVERSATION.format(file=file)))
    monkeypatch.setenv("ALLSPARK_API_KEY", "a key")
    assert main(["client", server]) == 0
    out = capsys.readouterr().out
    assert "3 + 4 = 7\n" in out and out.endswith("47\n")
    assert re.search(r"tokens asked \(\d+ of them cached\), 8 answered", out)
    # The question that failed is asked anew.
    assert out.count("5 + 5 = 10") == 1
    for line in (
        "[400: temperature: Input should be less than or equal to 2; it is 9]",
        "model='demo', stream_options={'include_usage': True}, temperature=0",
        "messages is for the conversation to say",
        f"4 messages are in {file}",
        "there is no command /nothing",
        "there is no question yet",
    ):
        assert line in out, line
    roles = [message["role"] for message in json.loads(file.read_text())]
    assert roles == ["user", "assistant"] * 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--api-key", "wrong"], "/v1/models: 401: the key is missing or wrong"),
        (["--api-key", "\n"], "the API key must be printable ASCII"),
    ],
)
def test_a_wrong_key_ends_the_client(server, arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("ALLSPARK_API_KEY", raising=False)
    assert main(["client", server, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_no_server_and_no_url(capsys):
    with kept_port() as port:
        assert main(["client", f"127.0.0.1:{port}"]) == 1
    assert f"no server at http://127.0.0.1:{port}/v1: " in capsys.readouterr().err
    assert main(["client", "ftp://x"]) == 1
    assert "the URL is 'ftp://x'; it must be" in capsys.readouterr().err


# What the server and the terminal can do.


class Terminal(io.StringIO):
    """Where an answer is shown; the user presses Ctrl-C once this text has been."""

    def __init__(self, stop_after=None):
        super().__init__()
        self._stop_after = stop_after

    def flush(self):
        if self._stop_after is not None and self._stop_after in self.getvalue():
            self._stop_after = None
            raise KeyboardInterrupt


def talk(backend, typed, out=None):
    out = out or Terminal()
    Talk(backend, io.StringIO(typed), out).run()
    return out.getvalue()


def remote(server):
    return RemoteBackend(BlockingClient(f"{server.url}/v1", {}), "m")


def answered(*events):
    def answer(request, connection):
        connection.send(STREAM)
        for event in events:
            connection.event(event)
        connection.finish()

    return answer


def page(request, connection):
    connection.whole(200, b"<h1>hello</h1>", "text/html")


@pytest.mark.parametrize(
    "answer, shown",
    [
        (cut, "half an\n[the connection ended in the middle of the answer]"),
        (ended_early, "half an\n[the stream ended before the answer did]"),
        (page, "[the answer is text/html, not a stream of events]"),
        (lambda _, connection: connection.close(), "[http://127.0.0.1:"),
        (lambda _, connection: connection.send(b"hi\r\n\r\n"), "[no HTTP server at "),
        (lambda _, connection: connection.whole(429, {"error": {"message": "busy"}}),
         "[429: busy]"),
        (lambda _, connection: connection.whole(502, b""), "[502: Reason]"),
        (answered(delta("a"), {"error": {"message": "no memory"}}), "a\n[no memory]"),
        (answered(b"{nonsense"), "[the server sent what is no JSON: '{nonsense']"),
        (answered({"choices": [3]}), "[the server sent choices of another form: [3]]"),
        (answered([1]), "[the server sent '[1]' as an event]"),
    ],
)  # fmt: skip
def test_a_failure_is_shown_and_the_chat_goes_on(answer, shown):
    def at_first(request, connection):
        if len(server.requests) == 1:
            answer(request, connection)
            connection.close()
        else:
            answered(delta("well"), delta(None, "stop"))(request, connection)

    with FakeServer(at_first) as server:
        backend = remote(server)
        out = talk(backend, "one\n\ntwo\n\n/stats\n")
    assert out.startswith(shown) and "\nwell\nan unknown number of tokens asked, " in out
    assert [message["content"] for message in backend.messages] == ["two", "well"]
    # What failed is not part of the conversation.
    assert [m["content"] for m in server.requests[1]["body"]["messages"]] == ["two"]


def test_an_answer_that_comes_whole_is_taken():
    body = {"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}]}

    def answer(request, connection):
        connection.whole(200, body)

    with FakeServer(answer) as server:
        assert talk(remote(server), "q\n\n") == "all\n"


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"])
def test_a_server_that_says_nothing_of_its_models_is_not_waited_for(sent, monkeypatch, capsys):
    def answer(request, connection):
        connection.send(sent)
        connection.sock.settimeout(5)
        connection.sock.recv(1)  # until the client closes

    monkeypatch.setattr(models, "_WAIT_S", 0.05)
    with FakeServer(answer) as server:
        assert main(["client", server.url]) == 1
        assert f"{server.url}/v1 gives no answer in time" in capsys.readouterr().err


def test_a_stream_of_lines_is_read():
    def answer(request, connection):
        lines = b'{"text": "a"}\n\n{"text": "b"}\n'
        connection.whole(200, lines, "application/x-ndjson")

    with FakeServer(answer) as server:
        found = list(BlockingClient(server.url, {}).events("/lines", {}))
    assert found == [{"text": "a"}, {"text": "b"}]


def test_reasoning_is_shown_and_not_sent_back():
    answer = answered(
        delta(reasoning_content="let me"), delta(reasoning_content=" see"), delta("yes"),
        delta(None, "stop"), usage(5, 4),
    )  # fmt: skip
    with FakeServer(answer) as server:
        backend = remote(server)
        out = talk(backend, "q\n\n/stats\n")
    assert out.startswith("<think>\nlet me see\n</think>\n\nyes\n5 tokens asked, 4 answered in ")
    assert backend.messages[1] == {"role": "assistant", "content": "yes"}


def test_a_model_does_not_steer_the_terminal():
    answer = answered(delta("a\x1b[2Jb\tc\nd\x9b\ud800"), delta(None, "stop"))
    with FakeServer(answer) as server:
        assert talk(remote(server), "q\n\n") == "a\ufffd[2Jb\tc\nd\ufffd?\n"


def test_ctrl_c_stops_the_answer_alone():
    closed = []

    def answer(request, connection):
        if len(server.requests) > 1:
            answered(delta("more"), delta(None, "stop"))(request, connection)
            return
        connection.send(STREAM)
        connection.event(delta("one"))
        closed.append(connection.sock.recv(1))  # nothing comes until the client closes

    with FakeServer(answer) as server:
        backend = remote(server)
        out = talk(backend, "q\n\nr\n\n", Terminal(stop_after="one"))
    assert out == "one\nmore\n" and closed == [b""]
    sent = [message["content"] for message in server.requests[1]["body"]["messages"]]
    assert sent == ["q", "one", "r"]


def test_what_was_stopped_before_its_first_piece_is_no_answer():
    with FakeServer(answered(delta(reasoning_content="hm"), delta("x", "stop"))) as server:
        backend = remote(server)
        talk(backend, "q\n\n", Terminal(stop_after="hm"))
        assert backend.messages == []
        assert talk(backend, "/retry\n") == "there is no question yet\n"


def test_retry_takes_the_last_answer_back():
    def answer(request, connection):
        number = len(server.requests)
        answered(delta(f"answer {number}"), delta(None, "stop"))(request, connection)

    with FakeServer(answer) as server:
        backend = remote(server)
        out = talk(backend, "/system be brief\none\n\ntwo\n\n/retry\n/retry\n")
    assert out.splitlines()[1:] == ["answer 1", "answer 2", "answer 3", "answer 4"]
    contents = [message["content"] for message in backend.messages]
    assert contents == ["be brief", "one", "answer 1", "two", "answer 4"]
    assert [m["content"] for m in server.requests[3]["body"]["messages"]] == contents[:-1]


def test_fields_of_requests():
    with FakeServer(answered(delta("x", "stop"))) as server:
        typed = (
            "/set top_k 5\n/set stop [\"a\"]\n/set stream_options null\n/set model other\nq\n\n"
            "/set top_k null\nq\n\n/set model null\n"
        )  # fmt: skip
        out = talk(remote(server), typed)
    assert out.endswith("model must be the name of one\n")
    bodies = [request["body"] for request in server.requests]
    assert [set(body) for body in bodies] == [
        {"model", "messages", "stream", "top_k", "stop"}, {"model", "messages", "stream", "stop"},
    ]  # fmt: skip
    assert (bodies[0]["model"], bodies[0]["top_k"], bodies[0]["stop"]) == ("other", 5, ["a"])


# The loop with a model in this process.


def test_ctrl_c_in_chat_keeps_what_came(demo_model):
    with pipeline(str(demo_model), log_level="ERROR") as pipe:
        backend = PipelineBackend(pipe)
        backend.set("do_sample", False)
        out = talk(backend, "What is 3+4?\n\n/retry\n", Terminal(stop_after="3"))
        first, second = out.splitlines()
        assert "3 + 4 = 7".startswith(first) and second == "3 + 4 = 7"
        assert [message["content"] for message in backend.messages] == ["What is 3+4?", second]


def test_a_question_that_fails_in_chat_can_be_asked_anew(demo_model):
    with pipeline(str(demo_model), log_level="ERROR") as pipe:
        backend = PipelineBackend(pipe)
        backend.set("response_format", {"type": "nonsense"})
        out = talk(backend, "What is 3+4?\n\n/set response_format null\n/retry\n")
    failure, answer = out.splitlines()
    assert failure.startswith("[") and "nonsense" in failure and failure.endswith("]")
    assert "3 + 4 = 7" in answer
