"""The pipeline: arguments and configs that are wrong or of older scripts, and its log."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import subprocess
import sys

import pytest
from allspark.chat_template import ChatTemplateConfig
from allspark.pipeline import (
    EngineConfig,
    GenerationConfig,
    PytorchEngineConfig,
    SpeculativeConfig,
    TurbomindEngineConfig,
    pipeline,
)
from allspark.pipeline.arguments import bind
from allspark.pipeline.pipe import _older

QUESTION = "What is a ResultQueue?"
SHORT = GenerationConfig(max_new_tokens=12)


@pytest.fixture(scope="module")
def pipe(demo_model):
    with pipeline(str(demo_model), backend_config=EngineConfig(max_batch_size=4)) as pipe:
        yield pipe


@pytest.mark.parametrize("config", [{"max_new_tokens": 3}, 7, "greedy"])
def test_what_is_no_config_is_refused_by_name(pipe, config):
    async def generate():
        async for _ in pipe.generate("x", gen_config=config):
            pass

    for call in (pipe.infer, pipe.stream_infer, pipe.chat):
        with pytest.raises(TypeError, match="gen_config is a .*; it must be a GenerationConfig"):
            call("x", gen_config=config)
    with pytest.raises(TypeError, match="gen_config is a .*; it must be a GenerationConfig"):
        asyncio.run(generate())


def test_what_is_no_session_is_refused_by_name(pipe):
    with pytest.raises(TypeError, match="session is a str; it must be a Session"):
        pipe.chat("x", "y")
    for sessions in ("y", ["y"], 7):
        with pytest.raises(TypeError, match="sessions is a .*; it must be a Session or a list"):
            pipe.stream_infer("x", sessions)
    with pytest.raises(ValueError, match="there are 2 sessions for 1 prompts"):
        pipe.stream_infer("x", [pipe.session(), pipe.session()])


def test_a_config_is_checked_again_where_it_is_used(pipe):
    config = GenerationConfig()
    config.n = 2
    for call in (pipe.infer, pipe.stream_infer, pipe.chat):
        with pytest.raises(ValueError, match="GenerationConfig.n is 2; only 1 is served"):
            call("x", gen_config=config)
    with pytest.raises(ValueError, match="GenerationConfig.n is 2; only 1 is served"):
        pipe("x", gen_config=[config])


def test_arguments_of_older_scripts(pipe):
    with pytest.warns(UserWarning, match="use gen_config"):
        response = pipe.batch_infer(QUESTION, request_output_len=4, top_k=1)
    assert response.generate_token_len == 4 and response.session_id == 0
    with pytest.warns(UserWarning, match="use gen_config"):
        config = _older(None, {"request_output_len": 4})
    assert config == GenerationConfig(do_sample=True, max_new_tokens=4, top_k=40, top_p=0.8)
    with pytest.raises(TypeError, match="top_k is given beside gen_config"):
        pipe(QUESTION, gen_config=SHORT, top_k=1)
    with pytest.raises(TypeError, match="there is no parameter 'top_z'"):
        pipe(QUESTION, top_z=1)


def test_prompts_are_logged_only_where_asked(demo_model, caplog):
    caplog.set_level(logging.INFO, "allspark")
    for length, logged in ((None, False), (10, True)):
        caplog.clear()
        with pipeline(str(demo_model), log_level="INFO", max_log_len=length) as pipe:
            pipe("SECRET WORDS", gen_config=SHORT, do_preprocess=False)
        assert ("'SECRET WOR'" in caplog.text) == logged
    with pytest.raises(ValueError, match="log_level is 'LOUD'; it must be one of CRITICAL"):
        pipeline(str(demo_model), log_level="LOUD")


LOGGED = """
import logging, sys
from allspark.pipeline import GenerationConfig, pipeline
if sys.argv[2] == "own":
    logging.basicConfig(format="own: %(message)s")
for _ in range(2):
    with pipeline(sys.argv[1], log_level=sys.argv[3], max_log_len=9) as pipe:
        pipe("What is 3+4?", do_preprocess=False, gen_config=GenerationConfig(max_new_tokens=2))
"""


@pytest.mark.parametrize("own", ["own", "none"])
@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_log_that_is_asked_for_is_shown_once(demo_model, own, level):
    command = [sys.executable, "-c", LOGGED, str(demo_model), own, level]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    if level == "WARNING":
        assert lines == []
        return
    begin = "own: " if own == "own" else r"[-0-9]+ [:,0-9]+ INFO allspark(\.chat_template)?: "
    assert [bool(re.match(begin, line)) for line in lines] == [True] * 4, lines
    assert lines[0].endswith("is TokenizerTemplate('hf')")
    assert lines[1].endswith("prompt: 'What is 3'")


def test_a_config_of_the_caller_stays_as_it_is(demo_model):
    config = EngineConfig(session_len=64, max_batch_size=1)
    before = dataclasses.replace(config)
    speculation = SpeculativeConfig("ngram", num_speculative_tokens=3)
    with pipeline(
        str(demo_model), backend_config=config, speculative_config=speculation,
        trust_remote_code=True,
    ) as pipe:  # fmt: skip
        assert pipe.backend_config.prompt_lookup_num_tokens == 3
        assert pipe.backend_config.trust_remote_code
    assert config == before


TEMPLATE = ChatTemplateConfig("llama2")
SPECULATIVE = SpeculativeConfig()


@pytest.mark.parametrize(
    "backend", [EngineConfig(), TurbomindEngineConfig(), PytorchEngineConfig()]
)
@pytest.mark.parametrize("template", [TEMPLATE, "llama2", None])
def test_positions_of_both_generations_of_calls(backend, template):
    """With a model's name in front, or without it."""
    values = {"backend_config": backend, "chat_template_config": template, "log_level": "INFO",
              "max_log_len": 9, "speculative_config": SPECULATIVE}  # fmt: skip
    for count in range(len(values) + 1):
        newer = dict(list(values.items())[:count])
        assert bind(tuple(newer.values()), {}) == newer
        for name in ("m", None):
            older = {"model_name": name, **newer}
            # Nothing but Nones says nothing, in either form.
            if any(older.values()):
                assert bind(tuple(older.values()), {}) == older
    assert bind((backend,), {"model_name": "m"}) == {"backend_config": backend, "model_name": "m"}


@pytest.mark.parametrize(
    "args, expected",
    [
        ((None, TEMPLATE), ("backend_config", "chat_template_config")),
        ((None, None, TEMPLATE), ("model_name", "backend_config", "chat_template_config")),
        ((None, None, "llama2"), ("model_name", "backend_config", "chat_template_config")),
        ((None, None, "INFO"), ("backend_config", "chat_template_config", "log_level")),
        (
            (None, None, None, "INFO"),
            ("model_name", "backend_config", "chat_template_config", "log_level"),
        ),
    ],
)
def test_positions_of_calls_without_a_backend(args, expected):
    assert tuple(bind(args, {})) == expected


def test_no_argument_by_position_is_lost(demo_model):
    path, config = str(demo_model), EngineConfig(session_len=64, max_batch_size=1)
    with pipeline(path, config, "llama2", "ERROR") as pipe:
        assert pipe.session_len == 64 and pipe.chat_template.name == "llama2"
    with pytest.raises(ValueError, match="log_level is 'LOUD'"):
        pipeline(path, config, TEMPLATE, "LOUD")
    with pytest.raises(TypeError, match="two values for 'backend_config'"):
        pipeline(path, config, backend_config=config)
    with pytest.raises(TypeError, match="after model_path; 6 given"):
        pipeline(path, config, None, "ERROR", None, None, None)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"speculative_config": "ngram"}, TypeError, "speculative_config is a str; it must be a"),
        ({"max_log_len": "all"}, TypeError, r"max_log_len is 'all' \(str\); it must be None or an"),
        ({"max_log_len": -1}, ValueError, "max_log_len is -1"),
        ({"model_name": 7}, TypeError, r"model_name is 7 \(int\); it must be a str"),
        ({"log_level": "LOUD"}, ValueError, "log_level is 'LOUD'; it must be one of CRITICAL"),
        ({"backend_config": {}}, TypeError, "backend_config is a dict; it must be an EngineConfig"),
        ({"chat_template_config": 7}, TypeError, "config is a int; it must be a ChatT"),
        ({"tp": 2}, TypeError, "pipeline has no parameter 'tp'"),
    ],
)
def test_wrong_arguments_of_pipeline_are_named(demo_model, arguments, error, message):
    with pytest.raises(error, match=message):
        pipeline(str(demo_model), **arguments)
