"""/v1/files and /v1/batches, by OpenAI's own client and by hand."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from allspark.chat_template import ChatTemplateConfig
from allspark.pipeline import EngineConfig

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from allspark.batch.answer import Answer  # noqa: E402
from allspark.batch.origin import Origin  # noqa: E402
from allspark.batch.output import OutputFile  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve.batches import service, validation  # noqa: E402
from allspark.serve.batches.record import BatchRecord  # noqa: E402
from allspark.serve.batches.run import BatchRun  # noqa: E402
from allspark.serve.batches.store import FileStore  # noqa: E402
from allspark.serve.ids import make_id  # noqa: E402
from openai import APIStatusError, ConflictError, NotFoundError, OpenAI  # noqa: E402
from support.http_server import CHAT, COMPLETIONS, RunningServer, error_of, paused  # noqa: E402
from support.waiting import wait_for_requests, wait_until  # noqa: E402

EMBEDDINGS = "/v1/embeddings"
FINISHED = {"completed", "failed", "cancelled", "expired"}


@pytest.fixture(scope="module")
def model(demo_model, repo_root):
    config = EngineConfig(
        max_batch_size=8, adapters={"threes": str(repo_root / "examples" / "demo_adapter")}
    )
    model = ServedModel.open(str(demo_model), config, "demo")
    yield model
    model.close()


def client_of(server):
    return OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    )


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def chat_line(index, text="What is 12+35?", **body):
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], **body}
    return {"custom_id": f"line-{index}", "method": "POST", "url": CHAT, "body": body}


def to_file(lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(client, lines):
    data = lines if isinstance(lines, bytes) else to_file(lines)
    return client.files.create(file=("requests.jsonl", data), purpose="batch")


def begin(client, lines, endpoint=CHAT, **fields):
    file = upload(client, lines)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


def finish(client, batch, seconds=60):
    """The batch at its end, of which a client learns by asking."""

    def finished():
        now = client.batches.retrieve(batch.id)
        return now if now.status in FINISHED else None

    return wait_until(finished, seconds, batch)


def lines_of(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


# Files.


def test_a_file_is_kept_as_it_came(client):
    data = bytes(range(256)) * 5000 + b"\r\n--boundary\r\n"
    file = upload(client, data)
    assert (file.bytes, file.filename, file.purpose) == (len(data), "requests.jsonl", "batch")
    assert client.files.content(file.id).content == data
    assert client.files.retrieve(file.id) == file
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(NotFoundError):
            call(file.id)


def test_files_come_in_pages(client):
    made = [upload(client, b"{}\n") for _ in range(5)]
    ids = [file.id for file in made]
    assert [file.id for file in client.files.list(limit=2)][:5] == ids[::-1]
    page = client.files.list(limit=2, order="asc", after=ids[1])
    assert [file.id for file in page.data] == ids[2:4] and page.has_more
    assert client.files.list(purpose="batch_output").data == [
        file for file in client.files.list().data if file.purpose == "batch_output"
    ]
    for file_id in ids:
        client.files.delete(file_id)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"data": {"purpose": "vision"}}, "purpose"),
        ({"data": {}}, "purpose"),
        ({"files": {}, "data": {"purpose": "batch"}}, None),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, "file"),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, "file"),
        ({"data": {"purpose": "batch", "expires_after[anchor]": "x"}}, "expires_after[anchor]"),
        ({"data": {"purpose": "batch", "long": "x" * 5000}}, None),
        ({"data": {f"f{i}": "x" for i in range(20)}}, None),
    ],
)
def test_uploads_that_are_refused(server, fields, param):
    before = server.client.get("/v1/files").json()["data"]
    response = server.client.post("/v1/files", **{"files": {"file": b"{}"}, **fields})
    status, error = error_of(response)
    assert status in (400, 415) and error["param"] == param
    assert server.client.get("/v1/files").json()["data"] == before
    kept = {path.name for path in server.server.state.batches.files.folder.glob("file-*")}
    assert {name.removesuffix(".json") for name in kept} == {file["id"] for file in before}


def test_a_form_that_breaks_off_is_refused(server):
    kind = {"content-type": "multipart/form-data; boundary=b"}
    begin = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc'
    for body in (begin, b"nothing", b"--b\r\n" + b"X" * 5000):
        status, error = error_of(server.client.post("/v1/files", content=body, headers=kind))
        assert status == 400, error
    kind = {"content-type": f"multipart/form-data; boundary={'b' * 300}"}
    status, error = error_of(server.client.post("/v1/files", content=begin, headers=kind))
    assert status == 400, error


def test_bounds_of_files(model, tmp_path):
    settings = {"max_file_bytes": 100_000, "max_stored_bytes": 150_000, "max_files": 3}
    with RunningServer([model], files_dir=str(tmp_path), **settings) as server:
        def send(size):
            form = {"files": {"file": b"x" * size}, "data": {"purpose": "batch"}}
            return server.client.post("/v1/files", **form)

        assert send(100_000).status_code == 200
        status, error = error_of(send(100_001))
        assert status == 413 and "100000 bytes" in error["message"]
        assert error_of(send(10_000_000))[0] == 413
        status, error = error_of(send(60_000))
        assert status == 400 and "150000 bytes" in error["message"]
        assert send(10).status_code == send(20).status_code == 200
        status, error = error_of(send(1))
        assert status == 400 and "3 files" in error["message"]
        assert len(list(tmp_path.glob("file-*"))) == 6


def test_names_of_files_are_no_paths(server):
    for name in ("..", "lock", "%2e%2e%2flock", "file-" + "0" * 32):
        assert server.client.get(f"/v1/files/{name}/content").status_code == 404


# Batches.


def test_answers_are_those_of_the_route(client, server):
    bodies = [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 7, "n": 2},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": 5},
        {"temperature": 0, "model": "threes"},
    ]
    lines = [chat_line(index, **body) for index, body in enumerate(bodies)]
    batch = finish(client, begin(client, lines, metadata={"of": "a test"}))
    assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 4, 0)
    assert batch.metadata == {"of": "a test"}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    found = lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in found] == [line["custom_id"] for line in lines]
    for line, asked in zip(found, lines, strict=True):
        response = line["response"]
        assert line["error"] is None and response["status_code"] == 200
        answer = server.client.post(CHAT, json=asked["body"]).json()
        for name in ("choices", "model", "object", "system_fingerprint"):
            assert response["body"][name] == answer[name]
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_completions_and_embeddings(client, server):
    body = {"model": "demo", "prompt": "1+1", "temperature": 0, "echo": True}
    lines = [{"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": body}]
    batch = finish(client, begin(client, lines, COMPLETIONS))
    (line,) = lines_of(client, batch.output_file_id)
    answer = server.client.post(COMPLETIONS, json=body).json()
    assert line["response"]["body"]["choices"] == answer["choices"]
    body = {"model": "demo", "input": ["one", "two"]}
    lines = [{"custom_id": "a", "method": "POST", "url": EMBEDDINGS, "body": body}]
    batch = finish(client, begin(client, lines, EMBEDDINGS))
    (line,) = lines_of(client, batch.output_file_id)
    assert line["response"]["body"] == server.client.post(EMBEDDINGS, json=body).json()


def test_faults_of_bodies_are_errors_of_their_lines(client):
    lines = [
        chat_line(0, temperature=9),
        chat_line(1, temperature=0),
        chat_line(2, model="nothing"),
        chat_line(3, stream=True),
        chat_line(4, text="word " * 5000),
        chat_line(5, temperature=0),
    ]
    batch = finish(client, begin(client, lines))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 4)
    found = lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in found] == ["line-1", "line-5"]
    errors = lines_of(client, batch.error_file_id)
    statuses = [(line["custom_id"], line["response"]["status_code"]) for line in errors]
    assert statuses == [("line-0", 400), ("line-2", 404), ("line-3", 400), ("line-4", 400)]
    params = [line["response"]["body"]["error"]["param"] for line in errors]
    assert params == ["temperature", "model", "stream", "messages"]


def test_what_there_is_never_room_for_is_an_error(demo_model):
    config = EngineConfig(max_batch_size=2, max_waiting_requests=2)
    model = ServedModel.open(str(demo_model), config, "demo")
    try:
        with RunningServer([model]) as server:
            client = client_of(server)
            lines = [chat_line(0, n=4), chat_line(1, n=5), chat_line(2)]
            batch = finish(client, begin(client, lines))
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
            (line,) = lines_of(client, batch.error_file_id)
            assert line["response"]["status_code"] == 400
            assert line["response"]["body"]["error"]["param"] == "n"
            status, error = error_of(server.post(COMPLETIONS, prompt=["1+1"] * 3, n=2))
            assert (status, error["param"]) == (400, "prompt")
            assert "6 outputs; at most 4" in error["message"]
            # Texts of which no output is made wait for those before them.
            answer = server.post(EMBEDDINGS, input=["one two three " * 30] * 20)
            assert len(answer.json()["data"]) == 20
    finally:
        model.close()


def test_numbers_are_read_as_over_http(server, client):
    for fields in (
        {"json_schema": {"type": "integer", "maximum": 2**70}},
        {"max_tokens": 2**70},
        {"seed": 2**64},
    ):
        line = chat_line(0, **{"max_tokens": 4, "seed": 1, "temperature": 0, **fields})
        http = server.client.post(CHAT, json=line["body"])
        batch = finish(client, begin(client, [line]))
        (found,) = lines_of(client, batch.output_file_id or batch.error_file_id)
        assert found["response"]["status_code"] == http.status_code
        if http.status_code == 200:
            expected = http.json()["choices"]
            assert found["response"]["body"]["choices"] == expected
        else:
            assert found["response"]["body"] == http.json()


@pytest.mark.parametrize(
    "line, code, message",
    [
        (b"{", "invalid_json", "no JSON"),
        (b"[]", "invalid_request", "must be an object"),
        ({"custom_id": "x"}, "missing_required_parameter", "method is missing"),
        ({**chat_line(0), "custom_id": 7}, "invalid_request", "custom_id is 7"),
        ({**chat_line(0), "method": "GET"}, "invalid_request", "method is 'GET'"),
        ({**chat_line(0), "url": EMBEDDINGS}, "invalid_url", "it must be '/v1/chat/completions'"),
        ({**chat_line(0), "body": "x"}, "invalid_request", "body is 'x'"),
        (chat_line(1), "duplicate_custom_id", "as in a line before"),
    ],
)
def test_a_file_that_is_no_batch_fails(client, line, code, message):
    data = to_file([chat_line(1)]) + b"\n" + (line if isinstance(line, bytes) else to_file([line]))
    batch = finish(client, begin(client, data))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    (error,) = batch.errors.data
    assert (error.code, error.line) == (code, 3) and message in error.message


def test_files_without_lines_and_with_too_many(client, monkeypatch):
    (error,) = finish(client, begin(client, b"\n \n")).errors.data
    assert error.code == "empty_file"
    monkeypatch.setattr(validation, "MAX_REQUESTS", 2)
    (error,) = finish(client, begin(client, [chat_line(i) for i in range(3)])).errors.data
    assert (error.code, error.line) == ("too_many_requests", 3)
    monkeypatch.setattr(validation, "MAX_ERRORS", 2)
    assert len(finish(client, begin(client, b"{\n{\n{\n")).errors.data) == 2


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
def test_batches_that_are_refused(server, client, fields, param):
    file = upload(client, b"{}\n")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
    status, error = error_of(server.client.post("/v1/batches", json=body))
    assert status == 400 and error["param"] == param
    client.files.delete(file.id)


def test_batches_of_no_file(client):
    with pytest.raises(NotFoundError):
        client.batches.create(
            input_file_id="file-x", endpoint=CHAT, completion_window="24h"
        )
    output = finish(client, begin(client, [chat_line(0)])).output_file_id
    with pytest.raises(APIStatusError, match="purpose"):
        client.batches.create(input_file_id=output, endpoint=CHAT, completion_window="24h")
    with pytest.raises(NotFoundError):
        client.batches.retrieve("batch_x")


def test_batches_come_in_pages(client):
    ids = [finish(client, begin(client, [chat_line(0, max_tokens=1)])).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [ids[2], ids[1]] and page.has_more
    rest = client.batches.list(limit=2, after=ids[1])
    assert rest.data[0].id == ids[0]
    for query, message in (
        ({"limit": 0}, "limit is '0'; it must be a whole number, 1 to 100"),
        ({"limit": 101}, "limit is '101'"),
        ({"after": "batch_x"}, "after is 'batch_x'; no item of the list has it"),
    ):
        with pytest.raises(APIStatusError, match=message) as caught:
            client.batches.list(**query)
        assert caught.value.status_code == 400


def test_cancelling_keeps_what_is_there(client, model):
    lines = [chat_line(0, temperature=0), *(chat_line(i, ignore_eos=True) for i in range(1, 9))]
    with paused(model):
        batch = begin(client, lines)
        wait_for_requests(model, 7)  # a place of the step stays free
        with pytest.raises(ConflictError):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        batch = finish(client, batch)
        wait_for_requests(model, 0)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    assert batch.request_counts.total == 9 and batch.output_file_id is None
    with pytest.raises(ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_batches_run_one_after_the_other(client, model, started):
    with paused(model):
        first = begin(client, [chat_line(i, max_tokens=5) for i in range(30)])
        wait_for_requests(model, 7)
        second = begin(client, [chat_line(0, max_tokens=6)])
        while client.batches.retrieve(second.id).status == "validating":
            time.sleep(0.001)
    assert finish(client, first).status == finish(client, second).status == "completed"
    assert [fields["max_new_tokens"] for fields in started] == [5] * 30 + [6]


def test_no_other_request_has_the_lowest_priority(server):
    status, error = error_of(server.post(CHAT, messages="x", priority=-1_000_000))
    assert status == 400 and error["param"] == "priority"
    assert server.post(CHAT, messages="x", priority=-999_999).status_code == 200


def test_lines_have_the_lowest_priority(client, started):
    """Whatever a line says, its request reaches the engine with the lowest priority of all."""
    finish(client, begin(client, [chat_line(0, priority=5), chat_line(1)]))
    body = {"model": "demo", "input": "x"}
    line = {"custom_id": "a", "method": "POST", "url": EMBEDDINGS, "body": body}
    finish(client, begin(client, [line], EMBEDDINGS))
    assert [fields["priority"] for fields in started] == [-1_000_000] * 3


def test_too_many_batches(client, model, monkeypatch):
    monkeypatch.setattr(service, "MAX_UNFINISHED", 1)
    with paused(model):
        batch = begin(client, [chat_line(0, temperature=0)])
        with pytest.raises(APIStatusError, match="1 batches have not finished"):
            begin(client, [chat_line(0)])
    assert finish(client, batch).status == "completed"


def test_the_oldest_records_are_forgotten(client, server, monkeypatch):
    finish(client, begin(client, [chat_line(0, max_tokens=1)]))
    monkeypatch.setattr(service, "MAX_KEPT", 1)
    batch = finish(client, begin(client, [chat_line(0, max_tokens=1)]))
    assert [each.id for each in client.batches.list()] == [batch.id]
    kept = list(server.server.state.batches.files.folder.glob("batch_*.json"))
    assert [path.stem for path in kept] == [batch.id]


def test_a_batch_expires(model, tmp_path):
    with RunningServer([model], files_dir=str(tmp_path), batch_window=1) as server:
        client = client_of(server)
        with paused(model):
            batch = finish(client, begin(client, [chat_line(i) for i in range(10)]))
        assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None
        assert batch.request_counts.failed == 10
        errors = lines_of(client, batch.error_file_id)
        assert [line["custom_id"] for line in errors] == [f"line-{i}" for i in range(10)]
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}
        origins = [Origin(batch.id, number, batch.created_at) for number in range(1, 11)]
        ids = [f"batch_req_{origin.random_bytes(16).hex()}" for origin in origins]
        assert [line["id"] for line in errors] == ids  # as after any restart
        wait_for_requests(model, 0)


# Restarts.


def sampled(count):
    lines = [chat_line(i, text=f"What is {i}+1?", temperature=1.5) for i in range(count)]
    lines[5]["body"]["temperature"] = 9  # its answer is in the other file
    return lines


def output_of(server, batch_id):
    record = server.server.state.batches.get(batch_id)
    files = server.server.state.batches.files
    return [files.path_of(name) for name in (record.output_file, record.error_file)]


def test_a_kept_folder_is_resumed_after_a_restart(model, tmp_path):
    with RunningServer([model], files_dir=str(tmp_path)) as server:
        client = client_of(server)
        whole = finish(client, begin(client, sampled(40)))
        paths = output_of(server, whole.id)
        expected = [path.read_bytes() for path in paths]
        assert len(expected[0].splitlines()) == 39 and len(expected[1].splitlines()) == 1
        uploaded = whole.input_file_id
    record = json.loads((tmp_path / f"{whole.id}.json").read_text())
    for size in (0, 1, len(expected[0]) // 2, len(expected[0]) - 1):
        # As the folder was when so many bytes of answers were written.
        head = expected[0][:size]
        paths[0].write_bytes(head)
        paths[1].write_bytes(expected[1] if head.count(b"\n") > 5 else b"")
        for path in paths:
            (tmp_path / f"{path.name}.json").unlink(missing_ok=True)
        partial = {**record, "status": "in_progress", "ending": None, "output_file_id": None}
        (tmp_path / f"{whole.id}.json").write_text(json.dumps(partial))
        (tmp_path / ("file-" + "f" * 32)).write_bytes(b"an upload that broke off")
        with RunningServer([model], files_dir=str(tmp_path)) as server:
            client = client_of(server)
            batch = finish(client, client.batches.retrieve(whole.id))
            assert batch.status == "completed"
            assert (batch.request_counts.completed, batch.request_counts.failed) == (39, 1)
            assert client.files.content(batch.output_file_id).content == expected[0]
            assert client.files.content(batch.error_file_id).content == expected[1]
            assert client.files.retrieve(uploaded).filename == "requests.jsonl"
        assert not (tmp_path / ("file-" + "f" * 32)).exists()


def test_a_server_that_ends_stops_its_batches(model, tmp_path):
    with paused(model):
        with RunningServer([model], files_dir=str(tmp_path)) as server:
            batch = begin(client_of(server), sampled(20))
            wait_for_requests(model, 7)
        wait_for_requests(model, 0)
    record = json.loads((tmp_path / f"{batch.id}.json").read_text())
    assert record["status"] == "in_progress"
    with RunningServer([model], files_dir=str(tmp_path)) as server:
        client = client_of(server)
        assert finish(client, client.batches.retrieve(batch.id)).status == "completed"


def test_requests_end_while_batches_stop(model):
    """Of a server that shuts down: what clients wait for is answered, batches can go on later."""
    with RunningServer([model]) as server, ThreadPoolExecutor(1) as pool:
        with paused(model):
            begin(client_of(server), [chat_line(i) for i in range(9)])
            wait_for_requests(model, 7)
            answer = pool.submit(server.post, CHAT, messages="x", max_tokens=3)
            wait_for_requests(model, 8)
            server.server.stop()
            wait_for_requests(model, 1)
        assert answer.result(30).status_code == 200


def test_answers_and_errors_are_written_in_the_order_of_the_lines(tmp_path, monkeypatch):
    """Each write is a whole number of lines, and after each the two files have the first lines."""
    store = FileStore(tmp_path, 10, 1 << 20)
    names = [make_id("file") for _ in range(3)]
    record = BatchRecord("batch_1", names[0], CHAT, 0, 0, names[1], names[2])
    run = BatchRun(None, store, record)
    written = []
    write = OutputFile.write

    def spy(self, data):
        write(self, data)
        written.append(data)

    monkeypatch.setattr(OutputFile, "write", spy)
    run._write([Answer(b"%d\n" % i, is_error=i in (2, 3, 6)) for i in range(8)])
    run.close()
    store.close()
    assert b"".join(written).split() == [b"%d" % i for i in range(8)]
    assert (record.completed, record.failed) == (5, 3)
    assert store.path_of(names[2]).read_bytes() == b"2\n3\n6\n"


def test_a_start_removes_the_temporary_files_of_servers_that_were_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running = FileStore(None, 10, 1 << 20)
    left = tmp_path / "allspark-files-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "file-0").touch()
    just_made = tmp_path / "allspark-files-new"
    just_made.mkdir()
    (tmp_path / "allspark-files-link").symlink_to(left)

    store = FileStore(None, 10, 1 << 20)
    assert not left.exists()
    assert just_made.exists()
    assert (running.folder / "lock").exists()
    store.close()
    running.close()
    assert not store.folder.exists() and not running.folder.exists()


def test_a_cancelled_batch_is_cancelled_after_a_restart(model, tmp_path):
    with RunningServer([model], files_dir=str(tmp_path)) as server:
        client = client_of(server)
        batch = finish(client, begin(client, [chat_line(0, max_tokens=1)]))
        client.files.delete(batch.output_file_id)
    path = tmp_path / f"{batch.id}.json"
    record = {**json.loads(path.read_text()), "status": "cancelling", "ending": None}
    path.write_text(json.dumps(record))
    (tmp_path / record["output_file"]).write_bytes(b'{"id": "whole"}\n{"id": "torn')
    with RunningServer([model], files_dir=str(tmp_path)) as server:
        client = client_of(server)
        batch = finish(client, client.batches.retrieve(batch.id))
        assert batch.status == "cancelled" and batch.request_counts.completed == 1
        assert lines_of(client, batch.output_file_id) == [{"id": "whole"}]


@pytest.fixture(scope="module")
def other(model, demo_model):
    config = EngineConfig(max_batch_size=8)
    other = ServedModel.open(str(demo_model), config, "other", engine=model.engine)
    yield other
    other.close()


@pytest.mark.parametrize("name, is_another", [("demo", True), ("other", False), (None, True)])
def test_a_batch_does_not_go_on_with_another_model(model, other, tmp_path, name, is_another):
    """Of those that its lines name, or of the only one where they name none."""
    changed = dataclasses.replace(model, template=ChatTemplateConfig("llama2").chat_template)
    lines = sampled(20)
    for line in lines:
        line["body"]["model"] = name
    models, folder = [model, other] if name else [model], str(tmp_path)
    asked = other if name == "other" else model
    with paused(asked), RunningServer(models, files_dir=folder) as server:
        batch = begin(client_of(server), lines)
        wait_for_requests(asked, 7)
    record = json.loads((tmp_path / f"{batch.id}.json").read_text())
    (tmp_path / record["output_file"]).write_bytes(b'{"id": "whole"}\n{"id": "torn')
    with RunningServer([changed, other], files_dir=folder) as server:
        client = client_of(server)
        batch = finish(client, client.batches.retrieve(batch.id))
        assert lines_of(client, batch.output_file_id)[0] == {"id": "whole"}
        assert batch.status == ("failed" if is_another else "completed")
        if is_another:
            (error,) = batch.errors.data
            assert error.code == "model_changed" and "the model 'demo' is not" in error.message
            assert batch.request_counts.completed == 1


def test_a_folder_has_one_server(model, tmp_path):
    with (
        RunningServer([model], files_dir=str(tmp_path)),
        pytest.raises(OSError, match="another server keeps its files there"),
    ):
        RunningServer([model], files_dir=str(tmp_path))


def test_a_temporary_folder_ends_with_the_server(model):
    with RunningServer([model]) as server:
        folder = server.server.state.batches.files.folder
        upload(client_of(server), b"{}\n")
        assert len(list(folder.iterdir())) == 3
    assert not folder.exists()


def test_a_damaged_record_is_named(model, tmp_path):
    (tmp_path / "batch_1.json").write_text("{")
    with pytest.raises(ValueError, match="batch_1.json is no record"):
        RunningServer([model], files_dir=str(tmp_path))
