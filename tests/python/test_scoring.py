"""Scores, embeddings and tensors: against transformers, against each other, and who owns them."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace

import numpy as np
import pytest
from allspark import AllSparkError, AsStatus
from engine_fixture import GREEDY, MAX_LENGTH, VOCAB_SIZE, start_engine


@pytest.fixture(scope="module")
def running(checkpoint):
    engine, _ = start_engine(checkpoint, engine_max_prefill_length=64)
    yield engine
    engine.stop_model("m")


def ids_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def tensors_of(engine, ids, config) -> dict[str, np.ndarray]:
    """All tensors that the request returns, with joined rows."""
    status, _, queue = engine.start_request_ids("m", None, ids, config)
    assert status == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
    parts: dict[str, list] = {}
    for elements in queue:
        for tensors in elements.tensors_from_model_inference:
            for name, array in tensors.items():
                parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def test_scores_are_those_of_the_logits(running):
    inputs = [ids_of(length, length) for length in (2, 3, 65, 200, MAX_LENGTH)]
    scores = running.score("m", None, inputs, top_logprobs=3)
    assert [score.ids for score in scores] == inputs
    for ids, score in zip(inputs, scores, strict=True):
        logits = tensors_of(running, ids, {"prompt_only": True, "output_logits": "all"})["logits"]
        assert logits.shape == (len(ids), VOCAB_SIZE)
        exact = logits[:-1].astype(np.float64)
        exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
        expected = exact[np.arange(len(ids) - 1), ids[1:]]
        assert np.abs(np.array(score.logprobs) - expected).max() < 1e-5
        assert math.isclose(score.cross_entropy, -expected.mean(), rel_tol=1e-6)
        assert score.perplexity == math.exp(score.cross_entropy)
        assert len(score.top_logprobs) == len(ids) - 1
        assert [top[0][0] for top in score.top_logprobs] == exact.argmax(-1).tolist()
    # One at a time gives the same bits; a single input is a list of one.
    assert [running.score("m", None, ids, 3)[0] for ids in inputs] == scores
    assert running.get_ppl("m", None, inputs) == [score.cross_entropy for score in scores]


def test_every_form_of_input(running):
    ids = ids_of(20)
    rows = np.array([ids, ids_of(20, 1)])
    expected = running.get_ppl("m", None, rows.tolist())
    torch = pytest.importorskip("torch")
    mixed, tuples = [rows[0], torch.tensor(rows[1])], tuple(map(tuple, rows))
    for inputs in (rows, torch.tensor(rows), mixed, tuples):
        assert running.get_ppl("m", None, inputs) == expected
    for inputs in (ids, np.array(ids), torch.tensor(ids)):
        assert running.get_ppl("m", None, inputs) == expected[:1]
    assert running.get_ppl("m", None, []) == []
    assert running.embed("m", None, []).shape == (0, 0)
    with pytest.raises(ValueError, match=r"inputs\[1\]: a text needs a tokenizer"):
        running.get_ppl("m", None, [ids, "text"])


def test_texts_are_tokenised(demo_model):
    engine, loader = start_engine(demo_model)
    texts = ["What is a ResultQueue?", "How are you?"]
    ids = [loader.get_tokenizer().encode(text) for text in texts]
    losses = engine.get_ppl("m", loader, texts)
    assert losses == engine.get_ppl("m", None, ids)
    assert engine.get_ppl("m", loader, texts[0]) == losses[:1]
    assert np.array_equal(engine.embed("m", loader, texts), engine.embed("m", None, ids))
    engine.stop_model("m")


def test_a_text_that_is_no_unicode_is_refused(running):
    loader = SimpleNamespace(get_tokenizer=lambda: None)
    with pytest.raises(
        ValueError, match=r"inputs\[0\]: the text has a lone surrogate at character 1"
    ):
        running.score("m", loader, ["a\ud800"])


def test_refusals_name_the_input(running):
    with pytest.raises(ValueError, match=r"inputs\[1\] has 1 tokens; a score needs 2"):
        running.score("m", None, [[1, 2], [3]])
    with pytest.raises(ValueError, match=rf"inputs\[0\]: input_ids has {MAX_LENGTH + 1} tokens"):
        running.score("m", None, ids_of(MAX_LENGTH + 1))
    with pytest.raises(ValueError, match=r"inputs\[1\]: input_ids\[0\] is -1"):
        running.embed("m", None, [[1], [-1]])
    with pytest.raises(ValueError, match="top_logprobs is 21"):
        running.score("m", None, [1, 2], top_logprobs=21)
    with pytest.raises(ValueError, match=r'pooling is "max"'):
        running.embed("m", None, [1], pooling="max")
    with pytest.raises(ValueError, match='pooling is ""'):
        running.embed("m", None, [1], pooling="")
    with pytest.raises(TypeError, match=r"inputs\[1\]: input_ids has elements of type float64"):
        running.score("m", None, [[1, 2], [1.5]])
    with pytest.raises(ValueError, match="no model 'nobody'"):
        running.score("nobody", None, [1, 2])


def test_more_inputs_than_may_wait(checkpoint):
    engine, _ = start_engine(checkpoint, engine_max_batch=2, max_waiting_requests=3)
    inputs = [ids_of(5 + i % 30, i) for i in range(100)]
    assert engine.embed("m", None, inputs).shape == (100, 16)
    engine.stop_model("m")
    with pytest.raises(AllSparkError, match="Stop"):
        engine.embed("m", None, inputs)


def test_embeddings_compute_no_logits_and_leave_no_request(running):
    before = running.get_as_engine_stat("m")
    running.embed("m", None, [ids_of(40, seed) for seed in range(10)])
    after = running.get_as_engine_stat("m")
    assert after.total_prefill_token - before.total_prefill_token == 400
    assert after.total_generated_token == before.total_generated_token
    assert (after.pending_request, after.running_request, after.used_span) == (0, 0, 0)


def test_tensors_are_dlpack_that_outlives_everything(checkpoint):
    torch = pytest.importorskip("torch")
    engine, _ = start_engine(checkpoint)
    config = {**GREEDY, "enable_tensors_from_model_inference": True, "output_logits": "generation"}
    _, handle, queue = engine.start_request_ids("m", None, [1, 2, 3], config)
    engine.sync_request("m", handle)
    (tensors,) = queue.Get().tensors_from_model_inference
    assert {name: array.shape for name, array in tensors.items()} == {
        "hidden_states": (10, 16), "inputs_embedding": (10, 16), "logits": (8, VOCAB_SIZE),
    }  # fmt: skip
    hidden = tensors["hidden_states"]
    kept = hidden.copy()
    from_numpy, from_torch = np.from_dlpack(hidden), torch.from_dlpack(hidden)
    address = hidden.ctypes.data
    assert from_numpy.ctypes.data == from_torch.data_ptr() == address, "nobody copies"
    assert from_torch.dtype == torch.float32
    del tensors, hidden, queue, engine
    gc.collect()
    assert np.array_equal(from_numpy, kept) and np.array_equal(from_torch.numpy(), kept)
    from_torch += 1  # The caller owns it.
    assert np.array_equal(from_numpy, kept + 1)


def test_rows_go_with_the_tokens(running):
    config = {**GREEDY, "output_logits": "all", "output_last_hidden_state": "generation"}
    _, _, queue = running.start_request_ids("m", None, ids_of(70), config)
    num_tokens = 0
    for elements in queue:
        ids, (tensors,) = elements.ids_from_generate, elements.tensors_from_model_inference
        assert len(tensors["logits"]) == len(ids) + (69 if num_tokens == 0 else 0)
        assert len(tensors["hidden_states"]) == len(ids)
        assert tensors["logits"][-len(ids) :].argmax(-1).tolist() == ids
        num_tokens += len(ids)
    assert num_tokens == 8


def test_text_queues_have_tensors_too(demo_model):
    engine, loader = start_engine(demo_model)
    config = {"prompt_only": True, "pooling": "last", "skip_special_tokens": True}
    _, _, queue = engine.start_request_text("m", loader, "What is 1+1?", config)
    (elements,) = list(queue)
    assert elements.text == "" and len(elements.tensors_from_model_inference) == 1
    engine.stop_model("m")
