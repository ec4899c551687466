"""The pipeline: forms of prompts, responses whole and in pieces, conversations, failures."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from allspark import AsStatus, HuggingFaceModel
from allspark.chat_template import BaseChatTemplate, ChatTemplateConfig
from allspark.pipeline import (
    EngineConfig,
    GenerationConfig,
    PytorchEngineConfig,
    Response,
    SpeculativeConfig,
    TurbomindEngineConfig,
    pipeline,
)
from allspark.pipeline import pipe as pipe_module
from allspark.pipeline.model_source import model_name_of
from allspark.pipeline.served_model import _check_format
from support.checkpoints import CONFIG, write_checkpoint
from support.held_masks import held_masks
from support.waiting import num_requests, wait_for_requests

QUESTIONS = ["What is a ResultQueue?", "What is 12+35?", "What is continuous batching?"]
SHORT = GenerationConfig(max_new_tokens=12)
LETTERS = {"type": "regex", "regex": "[a-z]{400}"}


@pytest.fixture(scope="module")
def pipe(demo_model):
    with pipeline(str(demo_model), backend_config=EngineConfig(max_batch_size=4)) as pipe:
        yield pipe


def chat(question):
    return [{"role": "user", "content": question}]


def sdk_ids(pipe, prompt, **fields):
    """What the engine gives for the ids of a prompt, without the end token."""
    model = pipe.model
    config = {**model.request_fields(), "do_sample": False, **fields}
    status, _, queue = model.engine.start_request_ids(model.name, None, prompt, config)
    assert status == AsStatus.ALLSPARK_SUCCESS, model.engine.last_error()
    ids = [token for elements in queue for token in elements.ids_from_generate]
    return ids[:-1] if ids[-1] in model.end_ids else ids


def collect(pieces):
    """The whole responses of a stream's pieces, by index."""
    whole = {}
    for piece in pieces:
        whole.setdefault(piece.index, Response()).extend(piece)
    return [whole[index] for index in sorted(whole)]


# Prompts.


def test_a_prompt_gives_a_response_and_a_list_gives_a_list(pipe):
    one = pipe(QUESTIONS[1])
    assert one.text == "12 + 35 = 47" and one.finish_reason == "stop"
    many = pipe(QUESTIONS)
    assert [response.index for response in many] == [0, 1, 2]
    assert many[1].text == one.text and many[1].token_ids == one.token_ids
    assert pipe([]) == []


def test_every_form_of_a_prompt_is_the_same_prompt(pipe):
    question = QUESTIONS[0]
    text = pipe.tokenizer.apply_chat_template(
        chat(question), tokenize=False, add_generation_prompt=True
    )
    ids = pipe.tokenizer.encode(text, add_special_tokens=False)
    forms = [question, chat(question), ids]
    expected = pipe(question)
    assert expected.input_token_len == len(ids)
    for form in forms:
        assert pipe(form).text == expected.text
        assert pipe([form])[0].token_ids == expected.token_ids
    assert pipe(text, do_preprocess=False).token_ids == expected.token_ids
    assert expected.token_ids == sdk_ids(pipe, ids)


@pytest.mark.parametrize(
    "prompts, error, message",
    [
        (None, TypeError, "prompts is None; it must be a str"),
        (b"x", TypeError, "prompts is a bytes"),
        (7, TypeError, "prompts is a int"),
        ({"role": "user"}, TypeError, "prompts is a dict"),
        (["x", None], TypeError, r"prompts\[1\] is None"),
        (["x", []], ValueError, r"prompts\[1\] is empty"),
        ([[1, "x"]], TypeError, r"prompts\[0\]\[1\] is 'x'; it must be a token id"),
        ([[1, True]], TypeError, r"prompts\[0\]\[1\] is True"),
        ([chat("x") + ["y"]], TypeError, r"prompts\[0\]\[1\] is 'y'; it must be a message"),
        (("x", object()), ValueError, "vision-language models are not served"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(pipe, prompts, error, message):
    with pytest.raises(error, match=message):
        pipe(prompts)
    with pytest.raises(error, match=message):
        pipe.stream_infer(prompts)


def test_each_prompt_may_have_its_own_config(pipe):
    configs = [GenerationConfig(max_new_tokens=n) for n in (3, 5)]
    responses = pipe(QUESTIONS[:2], gen_config=configs)
    assert [len(response.token_ids) for response in responses] == [3, 5]
    with pytest.raises(ValueError, match="gen_config has 2 configs for 3 prompts"):
        pipe(QUESTIONS, gen_config=configs)
    with pytest.raises(TypeError, match=r"gen_config\[1\] is a dict"):
        pipe(QUESTIONS[:2], gen_config=[configs[0], {}])


def test_more_prompts_than_there_is_room_for(pipe):
    responses = pipe([f"What is {i}+{i}?" for i in range(60)], gen_config=SHORT)
    assert [response.index for response in responses] == list(range(60))
    assert responses[21].text == "21 + 21 = 42"
    wait_for_requests(pipe.model, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bound_on_those_that_wait_refuses_no_prompt_of_a_call(demo_model, stream):
    # A request that a stop word ends, and one that nobody reads any more, hold their places for
    # a step.
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True, stop_words=["1", "3"])
    bounded = EngineConfig(max_batch_size=2, max_waiting_requests=1)
    with pipeline(str(demo_model), backend_config=bounded) as pipe:
        prompts = [f"What is {i}+{i}?" for i in range(30)]
        for _ in range(3):
            if stream:
                responses = collect(pipe.stream_infer(prompts, gen_config=config))
                next(left := pipe.stream_infer(prompts, gen_config=config))
                left.close()
            else:
                responses = pipe(prompts, gen_config=config)
            assert [each.error_message for each in responses] == [None] * len(prompts)


def test_progress_is_shown_where_it_is_asked_for(pipe, capsys):
    prompts = ["What is 3+4?"] * 2
    pipe(prompts, gen_config=SHORT)
    assert capsys.readouterr().err == ""
    pipe(prompts, gen_config=SHORT, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


# Failures.


def test_a_failing_prompt_is_a_response_and_its_siblings_go_on(pipe):
    prompts = [QUESTIONS[1], [1] * 5000, [99999], QUESTIONS[1]]
    responses = pipe(prompts)
    assert responses[0].text == responses[3].text == "12 + 35 = 47"
    assert responses[0].error_code is None and responses[0].error_message is None
    long = responses[1]
    assert (long.text, long.finish_reason, long.error_code) == (
        "", "length", "context_length_exceeded",
    )  # fmt: skip
    assert "5000 tokens; session_len, with output, is 2048" in long.error_message
    assert (responses[2].finish_reason, responses[2].error_code) == ("error", "invalid_request")
    assert "99999; it must be in [0, 1535]" in responses[2].error_message


@pytest.mark.parametrize(
    "config, adapter, code, message",
    [
        (GenerationConfig(response_format={"type": "xml"}), None, "invalid_request", "xml"),
        (GenerationConfig(stop_token_ids=[99999]), None, "invalid_request", "99999"),
        (SHORT, "nobody", "model_not_found", "nobody"),
    ],
)
def test_a_refused_setting_is_an_error_of_its_prompts(pipe, config, adapter, code, message):
    response = pipe(QUESTIONS[0], gen_config=config, adapter_name=adapter)
    assert (response.finish_reason, response.error_code) == ("error", code)
    assert message in response.error_message and response.text == ""
    piece = list(pipe.stream_infer(QUESTIONS[0], gen_config=config, adapter_name=adapter))
    assert piece == [response]


# What a config asks for.


@pytest.mark.parametrize("stream", [False, True])
def test_stop_words_of_many_tokens(pipe, stream):
    whole = pipe(QUESTIONS[2]).text

    def answer(**fields):
        config = GenerationConfig(stop_words=[whole[10:24]], **fields)
        if stream:
            return collect(pipe.stream_infer(QUESTIONS[2], gen_config=config))[0]
        return pipe(QUESTIONS[2], gen_config=config)

    response = answer()
    assert (response.text, response.finish_reason) == (whole[:10], "stop")
    assert answer(include_stop_str_in_output=True).text == whole[:24]


def test_stop_tokens_are_left_out_of_the_output(pipe):
    whole = pipe(QUESTIONS[2])
    config = GenerationConfig(stop_token_ids=[whole.token_ids[4]], logprobs=1)
    response = pipe(QUESTIONS[2], gen_config=config)
    assert response.token_ids == whole.token_ids[:4] and response.generate_token_len == 4
    assert len(response.logprobs) == 4 and response.finish_reason == "stop"
    assert collect(pipe.stream_infer(QUESTIONS[2], gen_config=config)) == [response]
    config.include_stop_str_in_output = True
    assert pipe(QUESTIONS[2], gen_config=config).token_ids == whole.token_ids[:5]


def test_lengths(pipe):
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    response = pipe(QUESTIONS[1], gen_config=config)
    assert (response.generate_token_len, response.finish_reason) == (40, "length")
    response = pipe(QUESTIONS[1], gen_config=GenerationConfig(min_new_tokens=20, max_new_tokens=30))
    assert 20 <= response.generate_token_len <= 30
    config = GenerationConfig(max_new_tokens=None, ignore_eos=True)
    response = pipe([5] * 2040, gen_config=config)
    assert (response.generate_token_len, response.finish_reason) == (8, "length")


def test_sampling_repeats_with_a_seed(pipe):
    def texts(**fields):
        config = GenerationConfig(do_sample=True, temperature=1.5, max_new_tokens=20, **fields)
        return [response.text for response in pipe(["x", "x"], gen_config=config)]

    assert len({*texts(random_seed=3), *texts(random_seed=3)}) == 1
    assert len({*texts(), *texts()}) > 1


def test_bad_words_and_bad_tokens_never_appear(pipe):
    whole = pipe(QUESTIONS[1])
    config = GenerationConfig(bad_token_ids=whole.token_ids[:1], max_new_tokens=12)
    assert whole.token_ids[0] not in pipe(QUESTIONS[1], gen_config=config).token_ids
    config = GenerationConfig(bad_words=["47"], max_new_tokens=12)
    assert "47" not in pipe(QUESTIONS[1], gen_config=config).text


def test_log_probabilities_have_the_token_itself(pipe):
    config = GenerationConfig(logprobs=2, max_new_tokens=5)
    response = pipe(QUESTIONS[1], gen_config=config)
    assert len(response.logprobs) == len(response.token_ids) == 5
    for token, row in zip(response.token_ids, response.logprobs, strict=True):
        assert token in row and 2 <= len(row) <= 3 and max(row.values()) <= 0


def test_logits_and_hidden_states(pipe):
    config = GenerationConfig(
        output_logits="generation", output_last_hidden_state="all", max_new_tokens=3
    )
    for response in (
        pipe([5, 6, 7], gen_config=config),
        *collect(pipe.stream_infer([5, 6, 7], gen_config=config)),
    ):
        assert response.logits.shape == (3, 1536) and response.logits.dtype == np.float32
        assert response.logits.argmax(axis=1).tolist() == response.token_ids
        assert response.last_hidden_state.shape == (5, 128)
    config = GenerationConfig(output_logits="generation")
    response = pipe("What is 3+4?", gen_config=config)
    assert response.finish_reason == "stop"
    ids = response.logits.argmax(axis=1).tolist()
    assert ids[:-1] == response.token_ids and ids[-1] in pipe.model.end_ids


def test_a_format_is_kept(pipe):
    config = GenerationConfig(
        response_format={"type": "regex_schema", "regex_schema": "call me [A-Za-z]{1,10}"}
    )
    assert pipe("hi", gen_config=config).text.startswith("call me ")


def test_special_tokens_are_text_only_where_asked(pipe):
    config = GenerationConfig(skip_special_tokens=False, ignore_eos=True, max_new_tokens=16)
    end = pipe.tokenizer.convert_ids_to_tokens(pipe.model.end_ids[0])
    assert end in pipe(QUESTIONS[1], gen_config=config).text
    config.skip_special_tokens = True
    assert end not in pipe(QUESTIONS[1], gen_config=config).text


# Streams.


def test_pieces_add_up_to_the_whole(pipe):
    pieces = list(pipe.stream_infer(QUESTIONS))
    whole = pipe(QUESTIONS)
    for joined, response in zip(collect(pieces), whole, strict=True):
        joined.cached_tokens = response.cached_tokens  # the second time finds more
        assert joined == response
    ends = [piece.index for piece in pieces if piece.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]


def test_a_whole_text_is_cleaned_up_no_more_than_one_that_streams(pipe, monkeypatch):
    tokenizer = pipe.model.tokenizer
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", True)
    # Without it, transformers from 5 on cleans up for no BPE.
    also_for_bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    monkeypatch.setattr(tokenizer, also_for_bpe, True, raising=False)
    monkeypatch.setattr(type(tokenizer), "clean_up_tokenization", lambda *_: "cleaned up")
    assert tokenizer.decode([1]) == "cleaned up"
    assert pipe(QUESTIONS) == collect(pipe.stream_infer(QUESTIONS))


def test_prompts_come_interleaved(pipe):
    config = GenerationConfig(response_format=LETTERS, max_new_tokens=100)
    pieces = []
    with held_masks() as masks:
        stream = pipe.stream_infer(QUESTIONS, gen_config=config)
        masks.release()
        for piece in stream:
            assert piece.finish_reason is None
            pieces.append(piece)
            if {piece.index for piece in pieces} == {0, 1, 2}:
                break
            masks.release()
        masks.release(1000)
        pieces += stream
    ends = [piece.index for piece in pieces if piece.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]


def test_a_stream_may_come_whole(pipe):
    pieces = list(pipe.stream_infer(QUESTIONS, stream_response=False))
    assert len(pieces) == 3
    assert {piece.text for piece in pieces} == {response.text for response in pipe(QUESTIONS)}


def test_a_stream_that_nobody_reads_any_more_stops_its_requests(pipe):
    config = GenerationConfig(max_new_tokens=None, ignore_eos=True)
    # Many, so that some still run however long this thread is held up.
    stream = pipe.stream_infer(QUESTIONS * 100, gen_config=config)
    next(stream)
    assert num_requests(pipe.model) > 0
    stream.close()
    wait_for_requests(pipe.model, 0)


def test_threads_share_a_pipeline(pipe):
    expected = [response.text for response in pipe(QUESTIONS)]
    found = []

    def ask():
        found.append([response.text for response in pipe(QUESTIONS)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_on_an_event_loop(pipe):
    async def ask():
        return [piece async for piece in pipe.generate(QUESTIONS[1])]

    assert collect(asyncio.run(ask()))[0].text == "12 + 35 = 47"

    async def stop():
        config = GenerationConfig(response_format=LETTERS, max_new_tokens=100)
        pieces = []
        async for piece in pipe.generate("x", session_id=7, gen_config=config):
            pieces.append(piece)
            pipe.stop_session(7)
        return pieces

    with held_masks() as masks:
        masks.release()
        assert asyncio.run(stop())[-1].finish_reason == "abort"
    pipe.stop_session(8)  # nobody's

    async def refused():
        return [piece async for piece in pipe.generate([99999])]

    assert asyncio.run(refused())[0].error_code == "invalid_request"
    with pytest.raises(ValueError, match="step 3"):
        asyncio.run(anext(pipe.generate("x", step=3)))


# Conversations.


def test_a_turn_computes_what_it_adds(pipe):
    session = pipe.chat("What is 3+4?", gen_config=SHORT)
    assert session.history == [("What is 3+4?", "3 + 4 = 7")]
    first = session.conversation._ids
    assert session.step == len(first)
    assert pipe.chat("What is 5+5?", session, gen_config=SHORT) is session
    assert session.conversation._ids[: len(first)] == first
    assert [answer for _, answer in session.history] == ["3 + 4 = 7", "5 + 5 = 10"]
    assert str(session) == (
        "USER:\nWhat is 3+4?\nASSISTANT:\n3 + 4 = 7\nUSER:\nWhat is 5+5?\nASSISTANT:\n5 + 5 = 10\n"
    )
    # The same as all messages at once.
    messages = chat("What is 3+4?") + [{"role": "assistant", "content": "3 + 4 = 7"}]
    assert pipe(messages + chat("What is 5+5?"), gen_config=SHORT).text == "5 + 5 = 10"
    session.close()
    assert session.history == [] and session.step == 0


def test_a_long_conversation_finds_its_beginning_in_the_cache(pipe):
    session = pipe.session(GenerationConfig(max_new_tokens=40))
    for question in QUESTIONS:
        pipe.chat(question, session)
    assert session.response.cached_tokens >= 32


def test_streamed_turns(pipe):
    session = pipe.session(SHORT)
    pieces = list(pipe.chat("What is 3+4?", session, stream_response=True))
    assert "".join(piece.text for piece in pieces) == "3 + 4 = 7" == session.response.text
    assert session.history == [("What is 3+4?", "3 + 4 = 7")]


@pytest.mark.parametrize(
    "name, capability, texts",
    [
        ("codellama", "infilling", ["a <FILL> b", "c <FILL> d"]),
        ("codellama", "completion", ["def f", "def g"]),
        ("qwen", "chat", None),
    ],
)
def test_only_turns_of_a_chat_follow_on_each_other(pipe, monkeypatch, name, capability, texts):
    template = ChatTemplateConfig(name, capability=capability).chat_template
    monkeypatch.setattr(pipe.model, "template", template)
    session = pipe.session(SHORT)
    for text in texts or QUESTIONS:
        alone = pipe(text, gen_config=SHORT)
        pipe.chat(text, session)
        assert session.response.error_message is None
    is_same = session.response.input_token_len == alone.input_token_len
    assert is_same == (capability != "chat")
    assert len(session.history) == len(texts or QUESTIONS)


def test_a_turn_that_fails_is_not_remembered(pipe):
    session = pipe.chat("What is 3+4?", gen_config=SHORT)
    pipe.chat("x " * 4000, session)
    assert session.response.error_code == "context_length_exceeded"
    assert len(session.history) == 1 and len(session.conversation.messages) == 2
    assert pipe.chat("What is 5+5?", session, gen_config=SHORT).response.text == "5 + 5 = 10"
    with pytest.raises(TypeError, match="prompt is a list; it must be a str"):
        pipe.chat(["x"], session)


def test_an_error_in_a_users_template_is_that_of_its_prompt(pipe, monkeypatch):
    class Own(BaseChatTemplate):
        def messages2prompt(self, messages, sequence_start=True, **kwargs):
            return {"a": "What is 3+4?"}[messages if isinstance(messages, str) else "b"]

    monkeypatch.setattr(pipe.model, "template", Own())
    right, wrong = pipe(["a", "c"], gen_config=SHORT)
    assert right.error_code is None and right.token_ids
    assert (wrong.finish_reason, wrong.error_code) == ("error", "internal_error")
    assert wrong.error_message == "KeyError: 'c'"
    session = pipe.chat("b")
    assert session.history == [] and session.conversation.messages == []
    assert session.response.error_code == "internal_error"


def test_half_a_character_is_an_error_of_its_prompt(pipe):
    right, wrong = pipe(["What is 3+4?", "\ud800"], gen_config=SHORT)
    assert right.error_code is None and right.token_ids
    assert wrong.finish_reason == "error"
    assert "the text has a lone surrogate at character " in wrong.error_message


def test_a_turn_that_raises_is_not_remembered(pipe, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no engine")

    session = pipe.session()
    monkeypatch.setattr(pipe_module, "run", fail)
    with pytest.raises(RuntimeError, match="no engine"):
        pipe.chat("x", session)
    assert session.history == [] and session.conversation.messages == []
    assert (session.response.finish_reason, session.response.error_message) == (
        "error", "no engine",
    )  # fmt: skip


def test_a_turn_can_be_aborted_from_another_thread(pipe):
    session = pipe.session(GenerationConfig(max_new_tokens=None, ignore_eos=True))
    model = pipe.model

    def abort():
        while model.engine.get_as_engine_stat(model.name).pending_request == 0:
            time.sleep(0.001)
        session.abort()
        ended.wait(20)  # at once: an abort need not wait for memory
        model.engine.load_device_mem(model.name)

    model.engine.unload_device_mem(model.name)  # the turn waits meanwhile
    ended = threading.Event()
    thread = threading.Thread(target=abort)
    thread.start()
    pipe.chat("x", session)
    ended.set()
    thread.join()
    assert session.response.finish_reason == "abort" and len(session.history) == 1


@contextlib.contextmanager
def without_memory(pipe):
    """Nothing is computed meanwhile, so no output reaches its length before it is aborted."""
    pipe.model.engine.unload_device_mem(pipe.model.name)
    yield
    pipe.model.engine.load_device_mem(pipe.model.name)


def test_an_abort_before_the_start_is_not_lost(pipe):
    endless = GenerationConfig(max_new_tokens=None, ignore_eos=True)
    session = pipe.session(endless)
    pieces = pipe.chat("x", session, stream_response=True)
    session.abort()
    with without_memory(pipe):
        assert list(pieces)[-1].finish_reason == session.response.finish_reason == "abort"
    pipe.chat("x", session, GenerationConfig(max_new_tokens=2, ignore_eos=True))
    assert session.response.finish_reason == "length"  # an abort is of one turn

    left = pipe.chat("x", session, stream_response=True)
    next(left)
    pieces = pipe.chat("x", session, stream_response=True)
    left.close()  # does not take the abort from the turn after it
    session.abort()
    with without_memory(pipe):
        assert list(pieces)[-1].finish_reason == "abort"

    sessions = [pipe.session(), pipe.session()]
    pieces = pipe.stream_infer(["x", "x"], sessions, endless)
    for session in sessions:
        session.abort()
    with without_memory(pipe):
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["abort"] * 2


# The rest.


def test_perplexity_is_that_of_the_engine(pipe):
    inputs = [[1, 2, 3], [3, 4, 5, 6]]
    expected = pipe.model.engine.get_ppl(pipe.model.name, None, inputs)
    assert pipe.get_ppl(inputs) == expected
    assert pipe.get_ppl(inputs[0]) == expected[:1]


def test_closing_frees_the_model(demo_model):
    pipe = pipeline(str(demo_model), "demo")
    engine = pipe.model.engine
    assert engine.list_models() == ["demo"]
    pipe.close()
    pipe.close()
    assert engine.list_models() == []
    response = pipe("x")
    assert response.error_code == "engine_unavailable"
    assert response.error_message == "the model 'demo' is closed"
    assert pipe.chat("x").history == []


def test_an_adapter_is_asked_for_by_name(demo_model, repo_root):
    config = EngineConfig(adapters={"threes": str(repo_root / "examples" / "demo_adapter")})
    with pipeline(str(demo_model), backend_config=config) as pipe:
        assert pipe.model.adapters == ["threes"]
        # The adapter reads every 2 as a 3.
        texts = [pipe(QUESTIONS[1], adapter_name=name).text for name in (None, "threes")]
        assert texts[0].endswith("47") and texts[1].endswith("48")
    config = PytorchEngineConfig(adapters={"nobody": "/nowhere"})
    with pytest.raises(Exception, match="/nowhere"):
        pipeline(str(demo_model), backend_config=config)


def test_speculation_changes_no_output(demo_model, pipe):
    speculative = SpeculativeConfig("ngram", num_speculative_tokens=4)
    config = EngineConfig(max_batch_size=4)
    with pipeline(
        str(demo_model), backend_config=config, speculative_config=speculative
    ) as drafting:
        assert drafting.model.request_fields()["prompt_lookup_num_tokens"] == 4
        assert [r.text for r in drafting(QUESTIONS)] == [r.text for r in pipe(QUESTIONS)]


@pytest.mark.parametrize("name", ["model", "draft"])
@pytest.mark.parametrize("memory", [None, 0.5])
def test_a_draft_model_drafts(demo_model, tmp_path, monkeypatch, pipe, name, memory):
    """Also where the model is installed again for a smaller cache, and whatever its name is."""
    monkeypatch.setattr("allspark.pipeline.served_model.free_memory", lambda: 10 << 20)
    config = {**CONFIG, "vocab_size": 1536, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    draft = write_checkpoint(tmp_path / "small", config=config)
    speculative = SpeculativeConfig("draft_model", str(draft), 4)
    backend = EngineConfig(max_batch_size=4, kv_cache_memory=memory)
    with pipeline(str(demo_model), name, backend, speculative_config=speculative) as drafting:
        info = drafting.model.engine.get_as_model_info(name)
        assert (info.total_token < 4 * 2048) == (memory is not None)
        assert [r.text for r in drafting(QUESTIONS)] == [r.text for r in pipe(QUESTIONS)]
        text = drafting.model.engine.metrics_text()
        assert int(re.search(r"^allspark_draft_tokens_total\S* (\d+)$", text, re.M)[1]) > 0


# Models and settings.


def test_settings_reach_the_engine(demo_model):
    config = TurbomindEngineConfig(
        tp=2, session_len=256, max_batch_size=3, quant_policy=8, cache_block_seq_len=16,
        cache_max_entry_count=40,
    )  # fmt: skip
    # The later form of the call has no model_name.
    with pipeline(str(demo_model), config) as pipe:
        info = pipe.model.engine.get_as_model_info(pipe.model_name)
        assert (info.engine_max_length, info.engine_max_batch) == (256, 3)
        assert (info.span_size, info.cache_mode.name) == (16, "AsCacheQuantI8")
        assert info.total_span in range(40, 56) and pipe.session_len == 256


def test_every_setting_reaches_the_engine(demo_model, monkeypatch):
    from allspark import Engine

    seen = []

    def refuse(self, config):
        seen.append(config)
        return self._statuses.fail(AsStatus.ALLSPARK_PARAM_ERROR, "seen")

    monkeypatch.setattr(Engine, "install_model", refuse)
    config = EngineConfig(
        prefill_policy="smooth", prefill_chunk=48, threads=3, numa=True, use_logn_attn=True,
        rope_scaling_factor=2.0, max_waiting_requests=5, adapters={str(i): "/x" for i in range(7)},
    )  # fmt: skip
    with pytest.raises(ValueError, match="seen"):
        pipeline(str(demo_model), backend_config=config)
    (found,) = seen
    assert (found.prefill_policy, found.engine_max_prefill_length) == ("smooth", 48)
    assert (found.num_threads, found.compute_unit) == (3, "CPU_NUMA")
    assert found.use_logn_attn and found.rope_scaling_factor == 2.0
    assert (found.max_waiting_requests, found.lora_max_num) == (5, 7)


def test_a_share_of_memory_bounds_the_cache(demo_model, monkeypatch):
    monkeypatch.setattr("allspark.pipeline.served_model.free_memory", lambda: 10 << 20)
    config = TurbomindEngineConfig(cache_max_entry_count=0.5)
    with pipeline(str(demo_model), backend_config=config) as pipe:
        info = pipe.model.engine.get_as_model_info(pipe.model_name)
        assert info.total_token * info.bytes_per_token < 8 << 20
        assert pipe("What is 3+4?", gen_config=SHORT).text == "3 + 4 = 7"


def test_a_context_that_memory_cannot_hold_is_shortened(demo_model, monkeypatch):
    from allspark import Engine

    install = Engine.install_model

    def refuses_long_ones(self, config):
        if config.engine_max_length > 1024:
            return self._statuses.fail(AsStatus.ALLSPARK_MEMORY_ERROR, "too long")
        return install(self, config)

    monkeypatch.setattr(Engine, "install_model", refuses_long_ones)
    monkeypatch.setattr("allspark.pipeline.served_model.free_memory", lambda: 3 << 20)
    with pipeline(str(demo_model)) as pipe:
        assert pipe.session_len == 1024
    with pytest.raises(MemoryError, match="too long"):
        pipeline(str(demo_model), backend_config=EngineConfig(session_len=2048))


def test_a_context_that_the_given_blocks_cannot_hold_is_shortened(demo_model):
    config = TurbomindEngineConfig(cache_max_entry_count=2)
    with pipeline(str(demo_model), backend_config=config) as pipe:
        assert pipe.session_len == 2 * 64
        assert pipe("What is 3+4?").text == "3 + 4 = 7"
    config = EngineConfig(kv_cache_blocks=2, session_len=2048)
    with pytest.raises(MemoryError, match="needs 2048 tokens"):
        pipeline(str(demo_model), backend_config=config)


def test_models_of_every_kind(demo_model, tmp_path, monkeypatch):
    expected = pipeline(str(demo_model))(QUESTIONS[1]).text
    loader = HuggingFaceModel(str(demo_model), "native").load_model()
    loader.serialize_to_path(None, str(tmp_path / "native"))
    for source in (tmp_path / "native", tmp_path / "native" / "native.asgraph"):
        with pipeline(str(source)) as pipe:
            assert pipe(QUESTIONS[1]).text == expected
    native = str(tmp_path / "native")
    with pytest.raises(ValueError, match="precision is 'A8W8'; a serialised model"):
        pipeline(native, backend_config=EngineConfig(precision="A8W8"))
    for config in (EngineConfig(data_type="float32"), TurbomindEngineConfig(dtype="float32")):
        with pytest.raises(ValueError, match="data_type is 'float32'; .*, 'bfloat16' here"):
            pipeline(native, backend_config=config)
    with pipeline(native, backend_config=EngineConfig(data_type="bfloat16")) as pipe:
        assert pipe(QUESTIONS[1]).text == expected
    with pipeline(str(demo_model), backend_config=EngineConfig(precision="A8W8")) as pipe:
        assert pipe(QUESTIONS[1]).text == expected


@pytest.mark.parametrize(
    "source, error, message",
    [
        ("", ValueError, "model_path is empty"),
        (None, TypeError, "model_path is None"),
        ("/nowhere/at/all", OSError, "/nowhere/at/all"),
        ("./nowhere", OSError, "nowhere"),
    ],
)
def test_what_is_no_model_is_named(source, error, message):
    with pytest.raises(error, match=message):
        pipeline(source)


def test_a_checkpoint_of_another_format_is_refused(demo_model):
    config = TurbomindEngineConfig(model_format="awq")
    message = r"^checkpoint_format \(LMDeploy: model_format\) is 'awq', but the checkpoint is"
    with pytest.raises(ValueError, match=message):
        pipeline(str(demo_model), backend_config=config)


@pytest.mark.parametrize("expected", [None, "hf", "llama", "gptq", "awq"])
def test_a_checkpoint_is_of_its_own_format(expected):
    config = {"quantization_config": {"quant_method": "gptq"}}
    loader = SimpleNamespace(get_model_config=lambda: config)
    if expected != "awq":
        _check_format(loader, expected)
        return
    with pytest.raises(ValueError, match="is 'awq', but the checkpoint has 'gptq'"):
        _check_format(loader, expected)


@pytest.mark.parametrize(
    "source, name",
    [
        ("a/b/Qwen2.5-7B/", "Qwen2.5-7B"),
        ("modelscope:qwen/Qwen", "Qwen"),
        ("x/model.gguf", "model"),
        ("/", "model"),
    ],
)
def test_names_of_models(source, name):
    assert model_name_of(source) == name
