"""Requests made from the server's own OpenAPI document, by Schemathesis: of all kinds of values, in
and out of bounds. None may make an error of the server, end a connection, or leave anything."""

from __future__ import annotations

import os
import subprocess

import pytest

pytest.importorskip("fastapi")

from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from support import oracles  # noqa: E402
from support.http_server import CHAT, RunningServer  # noqa: E402
from support.waiting import wait_for_requests  # noqa: E402

EXAMPLES = 60  # of each route
CHECKS = "not_a_server_error,unsupported_method,content_type_conformance"


@pytest.mark.slow
def test_no_request_of_the_document_breaks_the_server(demo_model, tmp_path):
    program = oracles.environment("schemathesis") / "bin" / "schemathesis"
    model = ServedModel.open(str(demo_model), EngineConfig(max_batch_size=8), "demo")
    try:
        with RunningServer([model], allow_adapter_loading=True) as server:
            result = subprocess.run(
                [
                    str(program), "run", f"http://127.0.0.1:{server.port}/openapi.json",
                    "--max-examples", str(EXAMPLES), "--seed", "1", "--checks", CHECKS,
                    "--exclude-path-regex", "/(sleep|wakeup)$",  # others get 503 then, rightly
                    "--request-timeout", "30", "--continue-on-failure", "--no-color",
                ],
                capture_output=True, text=True, timeout=550, cwd=tmp_path,
                env={**os.environ, "HOME": str(tmp_path)},
            )  # fmt: skip
            assert result.returncode == 0, result.stdout[-8000:]
            assert "Network Error" not in result.stdout
            wait_for_requests(model, 0)
            fields = {"messages": [{"role": "user", "content": "What is 12+35?"}]}
            answer = server.post(CHAT, temperature=0, **fields).json()
            assert answer["choices"][0]["message"]["content"] == "12 + 35 = 47"
    finally:
        model.close()
