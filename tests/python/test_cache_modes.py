"""The mode of the KV cache is set for the engine. Text requests give the same bits in it, whether
their prefix was computed or found in the cache."""

from __future__ import annotations

import numpy as np
import pytest
from allspark import AsCacheMode, AsStatus, Engine, HuggingFaceModel, TargetDevice

native = pytest.importorskip("allspark._allspark")
OK = AsStatus.ALLSPARK_SUCCESS

TEXT = "A ResultQueue gives the tokens of one request, in the order in which they were chosen. "


@pytest.fixture(scope="module")
def loader(demo_model):
    return HuggingFaceModel(str(demo_model), "demo").load_model().read_model_config()


@pytest.fixture(scope="module")
def engine(loader):
    """One image, served in every mode by one engine."""
    engine = Engine()
    loader.serialize_to_memory(engine)
    for mode in AsCacheMode:
        engine.register_image(mode.name, loader._image)
        builder = loader.create_reference_runtime_config_builder(
            mode.name, TargetDevice.CPU, max_batch=4, max_context_length=512
        )
        builder.kv_cache_mode(mode).kv_cache_span_size(16)
        assert engine.install_model(builder.build()) == OK, engine.last_error()
        assert engine.start_model(mode.name) == OK, engine.last_error()
    return engine


def run(engine, loader, mode, text):
    """Tokens, logits, and how many tokens of the prompt were found in the cache."""
    config = {"do_sample": False, "max_new_tokens": 20, "output_logits": "generation"}
    status, handle, queue = engine.start_request_text(mode.name, loader, text, config)
    assert status == OK, engine.last_error()
    ids, logits, found = [], [], 0
    for elements in queue:
        ids += elements.ids_from_generate
        logits += [tensors["logits"] for tensors in elements.tensors_from_model_inference]
        found = elements.prefix_cache_len
    assert engine.release_request(mode.name, handle) == OK
    return ids, np.concatenate(logits), found


@pytest.mark.parametrize("mode", AsCacheMode, ids=lambda mode: mode.name)
def test_text_is_computed_in_the_mode(engine, loader, mode):
    prompt = loader.get_tokenizer().encode(TEXT * 3)
    ids, logits, _ = run(engine, loader, mode, TEXT * 3)
    expected = native.testing.forward_logits(
        loader._image, prompt + ids[:-1], [7], 2, cache_mode=mode
    )
    assert logits.tobytes() == expected[len(prompt) - 1 :].tobytes()
    again = run(engine, loader, mode, TEXT * 3)
    assert again[0] == ids
    assert again[1].tobytes() == logits.tobytes()
    assert again[2] == (len(prompt) - 1) // 16 * 16


def test_modes_differ_in_size_and_in_bits(engine, loader):
    infos = [engine.get_as_model_info(mode.name) for mode in AsCacheMode]
    default, int8, uint4, int8_uint4 = (info.bytes_per_token for info in infos)
    assert uint4 < int8_uint4 < int8 < default
    assert int8_uint4 == (int8 + uint4) / 2
    logits = [run(engine, loader, mode, TEXT)[1][0] for mode in AsCacheMode]
    assert len({row.tobytes() for row in logits}) == len(AsCacheMode)
