"""The config classes of the pipeline: fields, order and defaults as documented; what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from allspark import AsModelConfig
from allspark.pipeline import (
    ChatTemplateConfig,
    EngineConfig,
    GenerationConfig,
    Pipeline,
    PytorchEngineConfig,
    SpeculativeConfig,
    TurbomindEngineConfig,
)
from allspark.pipeline.engine_config import PREFILL_POLICIES
from allspark.pipeline.fields import rules
from allspark.pipeline.generation import to_fields

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
CLASSES = (
    GenerationConfig, TurbomindEngineConfig, PytorchEngineConfig, SpeculativeConfig, EngineConfig,
)  # fmt: skip

# The signatures that LMDeploy's documents of 0.13 print.
GENERATION = """n=1, max_new_tokens=512, do_sample=False, top_p=1.0, top_k=50, min_p=0.0,
temperature=0.8, repetition_penalty=1.0, ignore_eos=False, random_seed=None, stop_words=None,
bad_words=None, stop_token_ids=None, bad_token_ids=None, min_new_tokens=None,
skip_special_tokens=True, spaces_between_special_tokens=True, logprobs=None, response_format=None,
logits_processors=None, output_logits=None, output_last_hidden_state=None,
include_stop_str_in_output=False, with_cache=False, preserve_cache=False, migration_request=None,
return_routed_experts=False, repetition_ngram_size=0, repetition_ngram_threshold=0"""
PYTORCH = """dtype='auto', tp=1, dp=1, dp_rank=0, ep=1, session_len=None, max_batch_size=None,
attn_tp_size=None, mlp_tp_size=None, moe_tp_size=None, cache_max_entry_count=0.8,
prefill_interval=16, block_size=64, num_cpu_blocks=0, num_gpu_blocks=0, adapters=None,
max_prefill_token_num=4096, thread_safe=False, enable_prefix_caching=False, device_type='cuda',
eager_mode=False, custom_module_map=None, download_dir=None, revision=None, quant_policy=0,
distributed_executor_backend=None, empty_init=False, enable_microbatch=False, enable_eplb=False,
enable_mp_engine=False, mp_engine_backend='mp', model_format=None, enable_metrics=True,
hf_overrides=None, disable_vision_encoder=False, logprobs_mode=None,
enable_return_routed_experts=False, enable_transfer_obj_ref=False, dllm_block_length=None,
dllm_unmasking_strategy='low_confidence_dynamic', dllm_denoising_steps=None,
dllm_confidence_threshold=0.85"""
# Of TurboMind's config the documents give names, and defaults in words.
TURBOMIND = {
    "dtype": "auto", "model_format": None, "tp": 1, "session_len": None, "max_batch_size": None,
    "cache_max_entry_count": 0.8, "cache_chunk_size": -1, "cache_block_seq_len": 64,
    "enable_prefix_caching": False, "quant_policy": 0, "rope_scaling_factor": 0.0,
    "use_logn_attn": False, "download_dir": None, "revision": None, "max_prefill_token_num": 8192,
    "num_tokens_per_iter": 0, "max_prefill_iters": 1, "async_": 1, "devices": None,
    "empty_init": False, "hf_overrides": None, "enable_metrics": True,
}  # fmt: skip
# Of later releases, without an order.
LATER = {
    GenerationConfig: {"return_ppl": False},
    TurbomindEngineConfig: {
        "dp": 1, "cp": 1, "ep": 1, "device_num": None, "attn_tp_size": None, "attn_cp_size": None,
        "attn_dp_size": None, "mlp_tp_size": None, "mlp_dp_size": None, "outer_dp_size": None,
        "nnodes": 1, "node_rank": 0, "dist_init_addr": None, "communicator": "nccl",
        "cache_checkpoint_interval": 4096, "cache_prompt": "auto", "cache_prompt_boundary_skip": 1,
        "cache_generation": "auto", "language_model_only": False,
    },
    PytorchEngineConfig: {
        "kernel_block_size": -1, "prefix_cache_state_budget": 0,
        "prefix_cache_decode_state_interval": 0, "cudagraph_capture_batch_sizes": None,
        "language_model_only": False, "role": "Hybrid", "migration_backend": "DLSlime",
    },
}  # fmt: skip


def documented(text):
    return [(name, eval(value)) for name, value in re.findall(r"(\w+)=([^,]+)", text)]


def defaults(config_class):
    return [(field.name, field.default) for field in dataclasses.fields(config_class)]


@pytest.mark.parametrize(
    "config_class, text", [(GenerationConfig, GENERATION), (PytorchEngineConfig, PYTORCH)]
)
def test_fields_order_and_defaults_are_the_documented_ones(config_class, text):
    expected = documented(text)
    assert len(expected) > 25
    assert defaults(config_class)[: len(expected)] == expected


def test_fields_of_turbomind():
    assert defaults(TurbomindEngineConfig)[: len(TURBOMIND)] == list(TURBOMIND.items())
    assert TurbomindEngineConfig(model_name="x").model_name == "x"


@pytest.mark.parametrize("config_class", LATER)
def test_fields_of_later_releases(config_class):
    found = dict(defaults(config_class))
    assert {name: found[name] for name in LATER[config_class]} == LATER[config_class]
    config_class(**LATER[config_class])


def test_methods_have_the_documented_parameters():
    def parameters(name):
        return list(inspect.signature(getattr(Pipeline, name)).parameters)[1:]

    assert parameters("infer")[:5] == [
        "prompts", "gen_config", "do_preprocess", "adapter_name", "use_tqdm",
    ]  # fmt: skip
    assert parameters("stream_infer")[:6] == [
        "prompts", "sessions", "gen_config", "do_preprocess", "adapter_name", "stream_response",
    ]  # fmt: skip
    assert parameters("chat")[:5] == [
        "prompt", "session", "gen_config", "stream_response", "adapter_name",
    ]  # fmt: skip
    assert parameters("get_ppl") == ["input_ids"]


def test_prefill_policies_are_those_of_the_engine():
    *others, last = (f'"{name}"' for name in PREFILL_POLICIES)
    names = f"{', '.join(others)} or {last}"
    with pytest.raises(ValueError, match=f"prefill_policy is .fast.; it must be {names}"):
        AsModelConfig(model_name="m", prefill_policy="fast")
    for name in PREFILL_POLICIES:
        assert AsModelConfig(model_name="m", prefill_policy=name).prefill_policy == name


@pytest.mark.parametrize("config_class", CLASSES)
def test_every_field_says_what_becomes_of_it(config_class):
    for name, rule in rules(config_class).items():
        assert rule.treatment in ("mapped", "accepted", "refused"), name
        assert rule.note, name
        assert rule.treatment != "mapped" or rule.check is not None, name


@pytest.mark.parametrize("config_class", CLASSES[:3])
def test_a_refused_field_takes_its_default_alone(config_class):
    for name, rule in rules(config_class).items():
        if rule.treatment == "refused":
            with pytest.raises(ValueError, match=rf"{config_class.__name__}\.{name} is 'other';"):
                config_class(**{name: "other"})


@pytest.mark.parametrize(
    "config_class, values, message",
    [
        (GenerationConfig, {"n": 2}, "n is 2; only 1 is served"),
        (GenerationConfig, {"max_new_tokens": 0}, "max_new_tokens is 0; it must be None or an"),
        (GenerationConfig, {"top_p": 1.5}, r"top_p is 1.5; it must be a number in \[0, 1\]"),
        (GenerationConfig, {"top_p": float("nan")}, "top_p is nan"),
        (GenerationConfig, {"top_k": -1}, "top_k is -1; it must be an integer of at least 0"),
        (GenerationConfig, {"min_p": 2}, r"min_p is 2; it must be a number in \[0, 1\]"),
        (GenerationConfig, {"temperature": 3}, r"temperature is 3; .* in \[0, 2\]"),
        (GenerationConfig, {"random_seed": -1}, "random_seed is -1"),
        (GenerationConfig, {"random_seed": 1 << 63}, "random_seed is 9223372036854775808"),
        (GenerationConfig, {"logprobs": 21}, "logprobs is 21"),
        (GenerationConfig, {"stop_token_ids": [-1]}, r"stop_token_ids\[0\] is -1"),
        (GenerationConfig, {"output_logits": "some"}, "must be one of None, 'all', 'generation'"),
        (TurbomindEngineConfig, {"tp": 0}, "tp is 0"),
        (TurbomindEngineConfig, {"cache_max_entry_count": 0}, "cache_max_entry_count is 0"),
        (TurbomindEngineConfig, {"cache_max_entry_count": 1.5}, "cache_max_entry_count is 1.5"),
        (TurbomindEngineConfig, {"quant_policy": 5}, "quant_policy is 5; .* one of 0, 4, 8"),
        (TurbomindEngineConfig, {"rope_scaling_factor": -1.0}, "rope_scaling_factor is -1"),
        (TurbomindEngineConfig, {"quant_policy": 16}, "quant_policy is 16; .* 8: .* as integers"),
        (TurbomindEngineConfig, {"model_format": "mxfp4"}, "model_format is 'mxfp4'.*: MXFP4 is "),
        (TurbomindEngineConfig, {"model_format": "gguf"}, "is 'gguf'; it must .* 'fp8'$"),
        (PytorchEngineConfig, {"block_size": 48}, "block_size is 48; it must be one of 16, 32"),
        (PytorchEngineConfig, {"eviction_type": "swap"}, "eviction_type is 'swap'"),
        (SpeculativeConfig, {"method": "eagle3"}, "method is 'eagle3'; .*: layers that draft are"),
        (SpeculativeConfig, {"method": "draft_model"}, "model is '' where method is 'draft_model'"),
        (SpeculativeConfig, {"model": "x"}, "model is 'x' where method is 'prompt_lookup'"),
        (EngineConfig, {"precision": "A4W4"}, "precision is 'A4W4'"),
    ],
)
def test_wrong_values_are_named(config_class, values, message):
    with pytest.raises(ValueError, match=message):
        config_class(**values)


@pytest.mark.parametrize(
    "config_class, values, message",
    [
        (GenerationConfig, {"top_k": "40"}, r"top_k is '40' \(str\)"),
        (GenerationConfig, {"max_new_tokens": True}, r"max_new_tokens is True \(bool\)"),
        (GenerationConfig, {"do_sample": "yes"}, "do_sample is 'yes'; it must be a bool"),
        (GenerationConfig, {"stop_words": [1]}, r"stop_words is \[1\]; it must be a list of str"),
        (GenerationConfig, {"bad_token_ids": 3}, "bad_token_ids is 3"),
        (GenerationConfig, {"response_format": "json"}, "response_format is 'json'"),
        (PytorchEngineConfig, {"adapters": ["x"]}, r"adapters is \['x'\]; it must be a dict"),
        (PytorchEngineConfig, {"adapters": {"x": 1}}, "both must be str"),
        (TurbomindEngineConfig, {"revision": 7}, "revision is 7"),
    ],
)
def test_wrong_types_are_named(config_class, values, message):
    with pytest.raises(TypeError, match=message):
        config_class(**values)


@pytest.mark.parametrize(
    "config, name, value, message",
    [
        (TurbomindEngineConfig(), "empty_init", True, "empty_init is True; only False is served"),
        (TurbomindEngineConfig(), "quant_policy", 3, "quant_policy is 3; it must be one of 0, 4"),
        (PytorchEngineConfig(), "dp", 3, "dp is 3; only 1 is served: one process"),
        (SpeculativeConfig(), "method", "eagle3", "method is 'eagle3'"),
        (SpeculativeConfig(), "model", "x", "model is 'x' where method is 'prompt_lookup'"),
    ],
)
def test_a_config_is_checked_again_where_it_is_translated(config, name, value, message):
    setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        if isinstance(config, SpeculativeConfig):
            config.apply(EngineConfig())
        else:
            config.to_engine_config()


def test_turbomind_is_mapped():
    config = TurbomindEngineConfig(
        dtype="float16", model_format="gptq", session_len=100, max_batch_size=7, quant_policy=4,
        cache_block_seq_len=128, cache_max_entry_count=0.2, rope_scaling_factor=2.0,
        use_logn_attn=True, revision="r", download_dir="d", num_tokens_per_iter=64, tp=8,
    ).to_engine_config()  # fmt: skip
    assert config == EngineConfig(
        data_type="float16", checkpoint_format="gptq", session_len=100, max_batch_size=7,
        kv_cache_bits=4, block_size=128, kv_cache_memory=0.2, rope_scaling_factor=2.0,
        use_logn_attn=True, revision="r", download_dir="d", prefill_chunk=64,
    )  # fmt: skip
    assert TurbomindEngineConfig().to_engine_config().prefill_chunk == 0
    assert TurbomindEngineConfig(cache_max_entry_count=9).to_engine_config().kv_cache_blocks == 9


def test_pytorch_is_mapped():
    config = PytorchEngineConfig(
        adapters={"a": "p"}, num_gpu_blocks=5, max_prefill_token_num=100
    ).to_engine_config()
    assert config.adapters == {"a": "p"} and config.kv_cache_blocks == 5
    assert config.prefill_chunk == 100 and config.block_size == 64


def test_speculation_is_mapped():
    config = EngineConfig()
    SpeculativeConfig("ngram", num_speculative_tokens=3).apply(config)
    assert config.prompt_lookup_num_tokens == 3
    SpeculativeConfig("draft_model", "small", 7).apply(config)
    assert (config.draft_model, config.num_draft_tokens) == ("small", 7)


MODEL = SimpleNamespace(
    request_fields=lambda: {"max_length": 99, "eos_token_id": 7, "stop_token_ids": [8]},
    stop_strings=lambda: ["</s>"],
)
# Fields of a GenerationConfig, and what a request to MODEL has for them.
REQUESTED = [
    *(
        ({name: value}, {name: value})
        for name, value in {
            "do_sample": True, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "temperature": 0.5,
            "repetition_penalty": 1.5, "include_stop_str_in_output": True,
            "skip_special_tokens": False, "max_new_tokens": 3, "min_new_tokens": 2,
            "bad_words": ["a"], "response_format": {"type": "text"}, "output_logits": "all",
            "output_last_hidden_state": "generation",
        }.items()
    ),
    ({"max_new_tokens": None}, {"max_new_tokens": ...}),
    ({"random_seed": 5}, {"seed": 5}),
    ({"stop_words": ["a"], "stop_token_ids": [3]},
     {"stop_words": ["a", "</s>"], "stop_token_ids": [3, 8]}),
    ({"stop_words": "a", "ignore_eos": True},
     {"stop_words": ["a"], "stop_token_ids": [], "ignore_eos": True}),
    ({"bad_token_ids": [3, 4]}, {"bad_words_ids": [[3], [4]]}),
    ({"logprobs": 2}, {"logprobs": True, "top_logprobs": 2, "logprobs_mode": "raw"}),
    ({"repetition_ngram_size": 4, "repetition_ngram_threshold": 3},
     {"repetition_ngram_size": 4, "repetition_ngram_threshold": 3}),
    ({"repetition_ngram_size": 4}, {"repetition_ngram_size": ...}),
]  # fmt: skip


def test_every_mapped_field_is_requested():
    given = {name for fields, _ in REQUESTED for name in fields}
    rules_of = rules(GenerationConfig)
    assert given == {name for name, rule in rules_of.items() if rule.treatment == "mapped"}
    plain = to_fields(GenerationConfig(), MODEL, None)
    assert plain == {
        "do_sample": False, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "temperature": 0.8,
        "repetition_penalty": 1.0, "ignore_eos": False, "include_stop_str_in_output": False,
        "skip_special_tokens": True, "max_new_tokens": 512, "stop_words": ["</s>"],
        "stop_token_ids": [8], "eos_token_id": 7, "max_length": 99,
    }  # fmt: skip
    for fields, expected in REQUESTED:
        found = to_fields(GenerationConfig(**fields), MODEL, None)
        whole = {**plain, **expected}  # ...: left out
        assert found == {key: each for key, each in whole.items() if each is not ...}, fields
    assert to_fields(GenerationConfig(), MODEL, "a") == {**plain, "lora_name": "a"}


def section_of(config_class):
    is_lmdeploys = config_class in (TurbomindEngineConfig, PytorchEngineConfig)
    text = (DOCUMENTS / ("lmdeploy.md" if is_lmdeploys else "pipeline.md")).read_text()
    return text.split(f"### {config_class.__name__}\n")[1].split("\n### ")[0]


def test_the_page_has_every_field_with_its_treatment():
    for config_class in CLASSES:
        section = section_of(config_class)
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (\w+) \| (.+?) \|$", section, re.MULTILINE)
        expected = [
            (field.name, f"`{field.default!r}`", rule.treatment, rule.note)
            for field, rule in zip(
                dataclasses.fields(config_class), rules(config_class).values(), strict=True
            )
        ]
        assert rows == expected, config_class.__name__


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "tool", "content": "three"},
]


def test_the_page_has_every_field_of_a_chat_template():
    section = section_of(ChatTemplateConfig)
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (\w+) \| .+ \|$", section, re.MULTILINE)
    others = [field.name for field in dataclasses.fields(ChatTemplateConfig)][1:]
    assert rows == [("model_name", "–", "mapped"), *((name, "`None`", "mapped") for name in others)]


def test_every_field_of_a_chat_template_has_its_effect(demo_model):
    for name in ("system", "eosys", "user", "eoh", "assistant", "eoa", "separator"):
        template = ChatTemplateConfig("base", **{name: "<x>"}).chat_template
        assert "<x>" in template.messages2prompt(CONVERSATION[:3] + CONVERSATION[1:2]), name
    for name in ("tool", "eotool"):
        template = ChatTemplateConfig("base", **{name: "<x>"}).chat_template
        assert "<x>three" in template.messages2prompt(CONVERSATION) or name == "eotool"
        assert template.messages2prompt(CONVERSATION, tools=[{"name": "f"}]).count("<x>") == 2
    template = ChatTemplateConfig("base", meta_instruction="be kind").chat_template
    assert template.get_prompt("1+1") == "be kind1+1"
    assert ChatTemplateConfig("base", stop_words=["<x>"]).chat_template.stop_words == ["<x>"]
    assert ChatTemplateConfig("qwen", capability="completion").chat_template.get_prompt("a") == "a"
    template = ChatTemplateConfig("hf", model_path=str(demo_model)).chat_template
    assert template.get_prompt("a").startswith("<|im_start|>user\na<|im_end|>")
