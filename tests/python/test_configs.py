"""Builders of runtime and generation configs, prompts, and incremental decoding."""

from __future__ import annotations

import pytest
from allspark import (
    AsCacheMode,
    ASGenerationConfigBuilder,
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    AsStatus,
    Detokenizer,
    Engine,
    HuggingFaceModel,
    PromptTemplate,
    TargetDevice,
)
from allspark.runtime_config import get_cache_mode_from_str


def test_runtime_builder_sets_every_field():
    config = (
        AsModelRuntimeConfigBuilder()
        .model_name("my_model")
        .model_dir("/path/to/model", "model_prefix")
        .compute_unit(TargetDevice.CUDA, [0, 1], 3)
        .max_batch("32")
        .max_length(2048)
        .max_prefill_length(256)
        .prefill_policy("smooth")
        .kv_cache_mode(AsCacheMode.AsCacheQuantU4)
        .kv_cache_span_size(64)
        .set_span_init_size(100)
        .interrupt_on_cache_exhaustion()
        .prefill_cache(False)
        .prefix_cache_ttl(60)
        .lora_max_rank("8")
        .lora_max_num(2)
        .max_waiting_requests(7)
        .token_mask_timeout_ms(500)
        .max_draft_rows(40)
        .rope_scaling_factor(2.5)
        .use_logn_attn()
        .op_profiling()
        .draft_model("small", 7)
        .enable_sparsity_matmul(False)
        .build()
    )
    assert config == AsModelConfig(
        model_name="my_model",
        model_path="/path/to/model/model_prefix.asgraph",
        weights_path="/path/to/model/model_prefix.asparam",
        compute_unit="CUDA:0,1",
        num_threads=3,
        engine_max_batch=32,
        engine_max_length=2048,
        engine_max_prefill_length=256,
        prefill_policy="smooth",
        cache_mode=AsCacheMode.AsCacheQuantU4,
        cache_span_size=64,
        cache_span_num_init=100,
        interrupt_on_cache_exhaustion=True,
        enable_prefix_cache=False,
        prefix_cache_ttl=60,
        lora_max_rank=8,
        lora_max_num=2,
        max_waiting_requests=7,
        token_mask_timeout_ms=500,
        max_draft_rows=40,
        rope_scaling_factor=2.5,
        use_logn_attn=True,
        op_profiling=True,
        draft_model="small",
        num_draft_tokens=7,
    )
    assert "my_model" in repr(config)


def test_runtime_from_dict_equals_the_builder():
    fields = {
        "model_name": "m",
        "compute_unit": {
            "device_type": "cuda",
            "device_ids": [0, 1],
            "compute_thread_in_device": 2,
        },
        "engine_max_length": 100,
        "engine_max_batch": 32,
        "kv_cache_mode": "AsCacheQuantI8",
        "engine_max_prefill_length": 64,
    }
    built = (
        AsModelRuntimeConfigBuilder().model_name("m").compute_unit("CUDA", [0, 1], 2)
        .max_length(100).max_batch(32).kv_cache_mode(AsCacheMode.AsCacheQuantI8)
        .max_prefill_length(64).build()
    )  # fmt: skip
    assert AsModelRuntimeConfigBuilder().from_dict(fields).build() == built
    assert built != AsModelRuntimeConfigBuilder().from_dict({**fields, "model_name": "n"}).build()
    named = AsModelRuntimeConfigBuilder().kv_cache_mode("AsCacheQuantI8").build()
    assert named.cache_mode is AsCacheMode.AsCacheQuantI8


def test_build_gives_a_copy():
    builder = AsModelRuntimeConfigBuilder().model_name("a")
    first = builder.build()
    assert builder.model_name("b").build().model_name == "b"
    assert first.model_name == "a"


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda b: b.compute_unit("TPU"), ValueError, "TPU"),
        (lambda b: b.compute_unit("CPU", 2), TypeError, "device_id_array is 2; it must be a list"),
        (lambda b: b.set_compute_unit_from_str("CPU_NUMA:-1"), ValueError, "is 'CPU_NUMA:-1'; it"),
        (lambda b: b.max_length("long"), ValueError, "long"),
        (lambda b: b.max_length(1.5), TypeError, "engine_max_length"),
        (lambda b: b.kv_cache_mode(9), TypeError, "cache_mode"),
        (lambda b: b.kv_cache_mode("int8"), ValueError, "kv_cache_mode is 'int8'; it must be one"),
        (lambda b: b.set_compute_unit_from_str("CPU"), ValueError, "CPU"),
        (lambda b: b.enable_sparsity_matmul(True), NotImplementedError, "sparsity"),
        (lambda b: b.update_from_dict({"max_batches": 1}), ValueError, "max_batches"),
        (lambda b: b.from_dict({"model_name": "m"}), ValueError, "compute_unit"),
        (lambda b: get_cache_mode_from_str("int8"), ValueError, "AsCacheQuantI8"),
    ],
)
def test_runtime_builder_refuses_nonsense(call, error, match):
    with pytest.raises(error, match=match):
        call(AsModelRuntimeConfigBuilder())


@pytest.mark.parametrize("ids", [[0, 1], [1]])
def test_nodes_of_the_cpu_are_refused(ids):
    unit = "CPU:" + ",".join(map(str, ids))
    builders = (
        AsModelRuntimeConfigBuilder().compute_unit(TargetDevice.CPU, ids),
        AsModelRuntimeConfigBuilder().set_compute_unit_from_str(unit),
    )
    for builder in builders:
        status = Engine().install_model(builder.model_name("m").build())
        assert status == AsStatus.ALLSPARK_PARAM_ERROR
        refused = builder.build().validate()
        assert refused.message.startswith(f'compute_unit is "{unit}"; it must be CPU:0')
    for ids in (None, [], [0]):
        config = AsModelRuntimeConfigBuilder().compute_unit("CPU", ids).build()
        assert config.compute_unit == "CPU:0"


def test_parse_device_type():
    parse = AsModelRuntimeConfigBuilder.parse_device_type
    assert parse("CUDA:0,1") == ("CUDA", [0, 1])
    assert parse("CPU_NUMA:1") == ("CPU_NUMA", [1])
    assert parse("CPU_NUMA") == ("CPU_NUMA", [])
    for text in ("CPU_NUMA:", "NUMA:0", "CPU"):
        with pytest.raises(ValueError, match="must be like 'CPU:0', 'CPU_NUMA' or 'CUDA:0,1'"):
            parse(text)


def test_numa_nodes():
    builder = AsModelRuntimeConfigBuilder()
    assert builder.compute_unit(TargetDevice.CPU_NUMA).build().compute_unit == "CPU_NUMA"
    config = builder.compute_unit("cpu_numa", [0, 1], 4).build()
    assert (config.compute_unit, config.num_threads) == ("CPU_NUMA:0,1", 4)
    assert builder.set_compute_unit_from_str("CPU_NUMA:1").build().compute_unit == "CPU_NUMA:1"


@pytest.mark.parametrize(
    "device, ids, unit",
    [
        (TargetDevice.CPU, None, "CPU:0"),
        (TargetDevice.CPU_NUMA, None, "CPU_NUMA"),
        (TargetDevice.CPU_NUMA, (0, 1), "CPU_NUMA:0,1"),
    ],
)
def test_a_loader_takes_the_ids_of_its_device_by_default(demo_model, device, ids, unit):
    loader = HuggingFaceModel(str(demo_model), "demo").read_model_config()
    config = loader.create_reference_runtime_config_builder("m", device, ids).build()
    assert config.compute_unit == unit


def test_generation_builder_starts_from_a_hugging_face_config():
    builder = ASGenerationConfigBuilder(
        {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "do_sample": True,
         "eos_token_id": [5, 6], "early_stopping": False, "transformers_version": "5",
         "repetition_penalty": 1.05, "bad_words_ids": [[1, 2]], "min_p": None, "num_beams": None}
    )  # fmt: skip
    assert builder.build() == {
        "do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.7, "eos_token_id": 5,
        "stop_words_ids": [[5], [6]], "repetition_penalty": 1.05, "bad_words_ids": [[1, 2]],
    }  # fmt: skip
    assert ASGenerationConfigBuilder({"eos_token_id": 2}).build() == {
        "do_sample": False, "eos_token_id": 2,
    }  # fmt: skip
    assert ASGenerationConfigBuilder().build() == {}


def test_generation_builder_warns_of_what_it_leaves_out():
    with pytest.warns(UserWarning, match="typical_p=0.9"):
        ASGenerationConfigBuilder({"typical_p": 0.9})


def test_ignore_eos_drops_the_eos_tokens_of_a_hugging_face_config():
    builder = ASGenerationConfigBuilder({"eos_token_id": [5, 6]})
    builder.stop_words_ids([*builder.build()["stop_words_ids"], [7, 8]])
    assert builder.build()["stop_words_ids"] == [[5], [6], [7, 8]]
    assert builder.ignore_eos().build()["stop_words_ids"] == [[7, 8]]


def test_stop_words_are_beside_the_eos_tokens_of_a_hugging_face_config():
    builder = ASGenerationConfigBuilder({"eos_token_id": [5, 6]}).stop_words_ids([[7, 8]])
    assert builder.build()["stop_words_ids"] == [[5], [6], [7, 8]]
    assert builder.update(stop_words_ids=[[9]]).build()["stop_words_ids"] == [[5], [6], [9]]


def test_an_eos_token_of_the_caller_is_the_only_one():
    hf = {"eos_token_id": [5, 6]}
    for builder in (
        ASGenerationConfigBuilder(hf, eos_token_id=9),
        ASGenerationConfigBuilder(hf).eos_token_id(9),
        ASGenerationConfigBuilder(hf).update({"eos_token_id": 9}),
    ):
        assert builder.build() == {"do_sample": False, "eos_token_id": 9}
        assert builder.stop_words_ids([[7]]).build()["stop_words_ids"] == [[7]]


def test_update_chains():
    builder = ASGenerationConfigBuilder(seed=1).update({"top_k": 3}, top_p=0.5)
    assert builder.build() == {"seed": 1, "top_k": 3, "top_p": 0.5}


def test_chatml():
    text = PromptTemplate.apply_chatml_template("Hi?", "Be brief.")
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


class Bytes:
    """A tokenizer whose tokens are bytes, spaces dropped at the start as SentencePiece does."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace").lstrip(" ")


@pytest.mark.parametrize("text", ["plain text", "naïve – 日本語 🎉!", " leading"])
def test_detokenizer_equals_decoding_at_once(text):
    ids = list(text.encode())
    stream = Detokenizer(Bytes())
    pieces = [stream.put([token]) for token in ids]
    assert "".join(pieces) + stream.flush() == Bytes().decode(ids)
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_detokenizer_flushes_what_stays_incomplete():
    stream = Detokenizer(Bytes())
    assert stream.put("日".encode()[:2]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
