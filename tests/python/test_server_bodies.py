"""Bodies that are wrong many times are refused at the first wrong element."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from allspark.serve.json_body import validate  # noqa: E402
from allspark.serve.protocol import (  # noqa: E402
    anthropic,
    batches,
    common,
    interactive,
    management,
    responses,
    texts,
)
from pydantic import ValidationError  # noqa: E402
from support.http_server import CHAT, error_of  # noqa: E402

BODIES = sorted(
    {
        value
        for module in (anthropic, batches, common, interactive, management, responses, texts)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, common.RequestBody)
    },
    key=lambda each: each.__name__,
)
WRONG = object()  # of no type that a field takes


@pytest.mark.parametrize("body", BODIES, ids=lambda each: each.__name__)
def test_validation_ends_at_the_first_wrong_element(body):
    for name, field in body.model_fields.items():
        for value in ([WRONG] * 1000, {str(i): WRONG for i in range(1000)}):
            try:
                body.model_validate({field.alias or name: value})
            except ValidationError as error:
                assert error.error_count() < 20, name


def test_the_first_wrong_element_is_named(server):
    status, error = error_of(server.post(CHAT, messages=[{}, 7, 8]))
    assert (status, error["param"]) == (400, "messages[1]")
    status, error = error_of(server.post(CHAT, messages="x", logit_bias={"1": 1, "2": "x"}))
    assert status == 400 and error["param"].startswith("logit_bias")


@pytest.mark.parametrize(
    "megabytes, part", [(10, "1"), (1, '"x"'), (1, "[]"), (1, "null"), (1, "{}")]
)
def test_megabytes_of_wrong_elements_are_refused(server, megabytes, part):
    count = megabytes * 1_000_000 // (len(part) + 1)
    data = '{"model": "demo", "messages": [' + ",".join([part] * count)
    headers = {"content-type": "application/json"}
    status, error = error_of(server.client.post(CHAT, content=data + "]}", headers=headers))
    assert status == 400 and error["param"].startswith("messages"), error


def test_a_hundred_thousand_unknown_fields():
    names = {f"f{i}": i for i in range(100_000)}
    body = validate(common.ChatBody, {"messages": "x", **names})
    assert body.unknown_fields(3) == ["f0", "f1", "f10"]
