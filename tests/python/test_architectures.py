"""Every architecture against transformers: a random two-layer model, converted, must give the same
logits within rounding and the same greedy tokens, for every way to run it.

One row of ROWS per variant. support/parity.py explains the bounds.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from support import families
from support.checkpoints import safetensors_bytes, shared_data
from support.parity import (
    BFLOAT16_FACTOR,
    FLOAT32_FACTOR,
    decide_experts,
    exact_model,
    greedy,
    logits_of,
    randomize,
    reference_for,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
native = pytest.importorskip("allspark._allspark")

# The models are far too small for several threads, and waiting threads would slow down the rest.
torch.set_num_threads(1)

from allspark.engine import Engine, TargetDevice  # noqa: E402
from allspark.model_loader import HuggingFaceModel  # noqa: E402
from allspark.model_loader.errors import UnexplainedTensorError  # noqa: E402

# Sizes with tails: vocabulary and inner size are not multiples of a vector; two query heads per KV
# head.
BASE = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,  # large, so that it shows
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 11, "use_sliding_window": True}


def rope(kind, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)

LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.5, 2.0, 2.0, 2.5, 3.0],
    long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 9.0],
    original_max_position_embeddings=32,
)
PHI3 = {"pad_token_id": 0}
GLM = {"head_dim": 16, "pad_token_id": 0}
GEMMA = {"head_dim": 16, "tie_word_embeddings": True}
GEMMA2 = {
    **GEMMA,
    "attn_implementation": "eager",  # the only one with a soft cap in transformers
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 20.0,
    "query_pre_attn_scalar": 20,
    "sliding_window": 11,
}
GEMMA3 = {
    **GEMMA,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "sliding_window": 11,
}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.22,
}
MINICPM = {
    "attention_multiplier": 16**-0.5,
    "embedding_multiplier": 12.0,
    "logits_scaling": 64 / 16,
    "residual_multiplier": 1.4 / 2**0.5,
}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
MIXTRAL = {**EXPERTS, "intermediate_size": 64, "num_local_experts": 8}
QWEN_MOE = {
    **EXPERTS,
    "num_experts_per_tok": 3,
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "sliding_window": None,
}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 128, "norm_topk_prob": False}
GLM4_MOE = {
    **EXPERTS,
    "head_dim": 16,
    "pad_token_id": 0,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}
SPLIT_HEADS = {"num_key_value_heads": 4}  # without groups
LATENTS = {
    **EXPERTS,
    **SPLIT_HEADS,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
LITE = {**LATENTS, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1}
YARN64 = {"factor": 4.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64}
DBRX = {
    "d_model": 64,
    "max_seq_len": 256,
    "n_heads": 4,
    "n_layers": 2,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 5e5},
    **rope("default", rope_theta=5e5),
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
}
PHI2 = {**SPLIT_HEADS, "layer_norm_eps": 1e-2}
NEOX = {**SPLIT_HEADS, "layer_norm_eps": 1e-2, "rotary_pct": 0.5}
STARCODER2 = {"norm_epsilon": 1e-2, "tie_word_embeddings": True}
OLDER = {**SPLIT_HEADS, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": True}
GPT2 = {**OLDER, "n_inner": 172}
FALCON = {**OLDER, "ffn_hidden_size": 172, "num_ln_in_parallel_attn": None}
FALCON40 = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
FALCON_RW = {**FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
# With ALiBi in these sizes, transformers would use another attention function.
BLOOM = {**OLDER, "attn_implementation": "eager"}

# Name -> (transformers' prefix, changes to BASE, and, for families without a class in transformers,
# a function that saves such a model).
ROWS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-3.1-rope": ("Llama", LLAMA3),
    "llama-linear-rope": ("Llama", rope("linear", factor=3.0)),
    "llama-yarn-rope": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("Llama", {"num_key_value_heads": 4}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": ("Llama", {"hidden_act": "relu"}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, **rope("default", rope_theta=1e6)}),
    "qwen2-window": ("Qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-head-dim": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-window-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, **WINDOW,
                                    "max_window_layers": 0}),
    "yi": ("Llama", rope("default", rope_theta=5e6)),
    "codellama": ("Llama", {**SPLIT_HEADS, **rope("default", rope_theta=1e6)}),
    "internlm": ("Llama", {**SPLIT_HEADS, "attention_bias": True}, families.internlm),
    "internlm2": ("Llama", rope("default", rope_theta=1e6), families.internlm2),
    "internlm2-bias": ("Llama", {"attention_bias": True}, families.internlm2),
    "internlm3": ("Llama", {"attention_bias": True, "mlp_bias": True}, families.internlm3),
    "baichuan": ("Llama", SPLIT_HEADS, families.baichuan),
    "baichuan2": ("Llama", SPLIT_HEADS, families.baichuan2),
    "qwen1": ("Qwen2", SPLIT_HEADS, families.qwen1),
    "phi3": ("Phi3", PHI3),
    "phi3-window": ("Phi3", {**PHI3, "sliding_window": 11}),
    "phi3-longrope": ("Phi3", {**PHI3, **LONGROPE, "original_max_position_embeddings": 32}),
    "phi4-mini": ("Phi3", {**PHI3, **rope("default", partial_rotary_factor=0.75),
                           "tie_word_embeddings": True}),
    "glm": ("Glm", {**GLM, "num_key_value_heads": 1}),
    "chatglm3": ("Glm", {**GLM, **rope("default", partial_rotary_factor=0.5)}, families.chatglm),
    "chatglm2-32k": ("Glm", {**GLM, **rope("linear", factor=4.0, partial_rotary_factor=0.5)},
                     families.chatglm),
    "glm4": ("Glm4", GLM),
    "granite": ("Granite", GRANITE),
    "granite-tied": ("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "minicpm": ("Granite", {**MINICPM, "tie_word_embeddings": True}, families.minicpm),
    "gemma": ("Gemma", GEMMA),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-1b": ("Gemma3", GEMMA3, families.gemma3),
    "olmo2": ("Olmo2", {}),
    "starcoder2": ("Starcoder2", STARCODER2),
    "starcoder2-window": ("Starcoder2", {**STARCODER2, "sliding_window": 11, "use_bias": False}),
    "phi2": ("Phi", PHI2),
    "gpt-neox": ("GPTNeoX", NEOX),
    "gpt-neox-sequential": ("GPTNeoX", {**NEOX, "use_parallel_residual": False,
                                        "attention_bias": False, "hidden_act": "gelu_fast"}),
    "gpt2": ("GPT2", GPT2),
    "gpt2-hub": ("GPT2", GPT2, families.without_head),
    "falcon": ("Falcon", FALCON),
    "falcon-40b": ("Falcon", FALCON40),
    "falcon-11b": ("Falcon", {**FALCON40, "num_ln_in_parallel_attn": 1,
                              "tie_word_embeddings": False}),
    "falcon-rw": ("Falcon", FALCON_RW),
    "bloom": ("Bloom", BLOOM),
    "bloom-6-heads": ("Bloom", {**BLOOM, "hidden_size": 96, "num_attention_heads": 6,
                                "num_key_value_heads": 6}),
    "mpt": ("Mpt", {**BLOOM, "max_seq_len": 256}),
    "mpt-limit": ("Mpt", {**BLOOM, "max_seq_len": 256, "attn_config": {"clip_qkv": 0.5}}),
    "baichuan-13b": ("Llama", SPLIT_HEADS, families.baichuan_alibi),
    "mixtral": ("Mixtral", {**MIXTRAL, "sliding_window": None}),
    "mixtral-window": ("Mixtral", {**MIXTRAL, "sliding_window": 11}),
    "mixtral-stacked": ("Mixtral", {**MIXTRAL, "sliding_window": None}, families.stacked),
    "qwen2-moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2-moe-dense": ("Qwen2Moe", {**QWEN2_MOE, "mlp_only_layers": [0]}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "head_dim": 16}),
    "qwen3-moe-window": ("Qwen3Moe", {**QWEN_MOE, "head_dim": 16, **WINDOW,
                                      "max_window_layers": 1}),
    "qwen3-moe-step": ("Qwen3Moe", {**QWEN_MOE, "head_dim": 16, "decoder_sparse_step": 2}),
    "qwen3-moe-stacked": ("Qwen3Moe", {**QWEN_MOE, "head_dim": 16}, families.stacked),
    "deepseek-moe": ("Qwen2Moe", {**QWEN2_MOE, "mlp_only_layers": [0], "qkv_bias": False},
                     families.deepseek),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "glm4-moe-plain": ("Glm4Moe", {**GLM4_MOE, "n_group": 1, "use_qk_norm": False,
                                   "attention_bias": True, "norm_topk_prob": False}),
    "deepseek-v2": ("DeepseekV2", {**LATENTS, "topk_method": "group_limited_greedy"}),
    "deepseek-v2-lite": ("DeepseekV2", LITE),
    "deepseek-v2-yarn": ("DeepseekV2", {**LITE, **rope("yarn", mscale=0.7, **YARN64)}),
    "deepseek-v3": ("DeepseekV3", LATENTS),
    "deepseek-v3-yarn": ("DeepseekV3", {**LATENTS, **rope("yarn", mscale=0.9, **YARN64),
                                        "norm_topk_prob": False}),
    "dbrx": ("Dbrx", DBRX),
    "dbrx-plain": ("Dbrx", {**DBRX, "ffn_config": {**DBRX["ffn_config"],
                                                   "moe_normalize_expert_weights": None}}),
    "glm-4": ("Glm", {**GLM, **rope("default", partial_rotary_factor=0.5, rope_theta=5e6)},
              families.chatglm),
}  # fmt: skip

PROMPT_LENGTH = 40
NUM_GREEDY = 64
NAME = "model"


def build(row, seed=1):
    """The transformers model of a row, in float32, with random weights."""
    prefix, fields, *family = ROWS[row]
    names = (f"{prefix}{end}" for end in ("ForCausalLM", "LMHeadModel"))
    model_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    config = model_class.config_class(**{**BASE, "attn_implementation": "sdpa", **fields})
    model = model_class(config).eval()
    randomize(model, seed)
    decide_experts(model, seed)
    if family in ([families.baichuan2], [families.baichuan_alibi]):
        families.unit_head(model)
    if family == [families.baichuan_alibi]:
        families.make_alibi(model)
    if family == [families.deepseek]:
        families.no_gate(model)
    model.family = family[0] if family else None
    logits_of(model, prompt_ids())  # Frequencies that depend on the length get the prompts' values.
    return model


def prompt_ids(length=PROMPT_LENGTH, seed=0):
    return np.random.default_rng(seed).integers(3, BASE["vocab_size"], length).tolist()


def save(model, directory):
    if model.family is None:
        model.save_pretrained(directory)
    else:
        families.save_as(model.family, model, directory)
    return str(directory)


def image_of(directory, data_type):
    """The model serialised to memory, and its loader, which keeps the image alive."""
    loader = HuggingFaceModel(directory, NAME, user_set_data_type=data_type)
    engine = Engine()
    loader.load_model().serialize_to_memory(engine).free_model()
    return loader, engine


def forward(loader, ids, chunk_sizes=(), block_size=16, num_threads=2):
    return native.testing.forward_logits(
        loader._image, ids, list(chunk_sizes), num_threads, "", block_size
    )


def generate(engine, ids, num_tokens):
    fields = {
        "do_sample": False,
        "max_new_tokens": num_tokens,
        "early_stopping": False,
    }
    status, handle, queue = engine.start_request_ids(NAME, None, ids, fields)
    assert int(status) == 0, engine.last_error()
    engine.sync_request(NAME, handle)
    tokens = []
    while (element := queue.GetNoWait()) is not None:
        tokens += element.ids_from_generate
    engine.release_request(NAME, handle)
    return tokens


@pytest.mark.parametrize("row", ROWS)
def test_float32_logits(tmp_path, row):
    model = build(row)
    ids = prompt_ids(PROMPT_LENGTH + NUM_GREEDY)
    reference = reference_for(model, ids, FLOAT32_FACTOR)
    loader, _ = image_of(save(model, tmp_path), "float32")
    whole = forward(loader, ids)
    reference.check(whole)
    # A row depends only on its own tokens: chunks, blocks and threads change no bit.
    for chunks, block_size, num_threads in (((1,), 16, 2), ((7,), 32, 1), ((64,), 128, 2)):
        np.testing.assert_array_equal(forward(loader, ids, chunks, block_size, num_threads), whole)


@pytest.mark.parametrize("row", ROWS)
def test_bfloat16_logits(tmp_path, row):
    model = build(row).to(torch.bfloat16)
    ids = prompt_ids(PROMPT_LENGTH + NUM_GREEDY)
    reference = reference_for(model, ids, BFLOAT16_FACTOR)
    loader, _ = image_of(save(model, tmp_path), "bfloat16")
    whole = forward(loader, ids)
    reference.check(whole)
    np.testing.assert_array_equal(forward(loader, ids, (7,)), whole)


@pytest.mark.parametrize("row", ROWS)
def test_float32_greedy_tokens(tmp_path, row):
    """64 tokens through the engine: whole and chunked prefill, then again from the prefix cache."""
    model = build(row)
    ids = prompt_ids()
    expected, lead = greedy(model, ids, NUM_GREEDY)
    bound = reference_for(model, ids + expected, FLOAT32_FACTOR).bound
    # Only then must the tokens be equal. If a row's seed gives a near tie, choose another seed.
    assert lead > 2 * bound
    loader, engine = image_of(save(model, tmp_path), "float32")
    for chunk in (0, 7):
        config = loader.create_reference_runtime_config_builder(NAME, TargetDevice.CPU, [0], 2)
        config.max_prefill_length(chunk).kv_cache_span_size(16)
        engine.install_model(config.build())
        assert int(engine.start_model(NAME)) == 0, engine.last_error()
        assert generate(engine, ids, NUM_GREEDY) == expected
        assert generate(engine, ids, NUM_GREEDY) == expected
        assert engine.get_as_engine_stat(NAME).prefix_cache_hit_token > 0
        assert int(engine.stop_model(NAME)) == 0 and int(engine.release_model(NAME)) == 0


def states_of(model, ids):
    with torch.no_grad():
        return model.base_model(torch.tensor([ids])).last_hidden_state[0].double().numpy()


@pytest.mark.parametrize("row", ROWS)
def test_float32_states_embeddings_and_scores(tmp_path, row):
    """Outputs of a prompt without generation, in chunks, against float64."""
    model = build(row)
    ids = prompt_ids(100)
    states = states_of(exact_model(model), ids)
    bound = FLOAT32_FACTOR * np.abs(states_of(model, ids) - states).max()
    reference = reference_for(model, ids, FLOAT32_FACTOR)
    loader, engine = image_of(save(model, tmp_path), "float32")
    config = loader.create_reference_runtime_config_builder(NAME, TargetDevice.CPU, [0], 2)
    engine.install_model(config.max_prefill_length(33).build())
    assert int(engine.start_model(NAME)) == 0, engine.last_error()

    fields = {
        "prompt_only": True,
        "output_logits": "all",
        "enable_tensors_from_model_inference": True,
    }
    _, _, queue = engine.start_request_ids(NAME, None, ids, fields)
    (tensors,) = queue.Get().tensors_from_model_inference
    reference.check(tensors["logits"])
    assert np.abs(tensors["hidden_states"] - states).max() <= bound
    with torch.no_grad():
        first = model.base_model(torch.tensor([ids]), output_hidden_states=True).hidden_states[0][0]
    # Bloom has a norm in between, which rounds.
    worst = bound if "Bloom" in type(model).__name__ else 0
    np.testing.assert_allclose(tensors["inputs_embedding"], first.numpy(), rtol=0, atol=worst)

    # A vector that is off by e is off by at most 2 e / |v| once it is divided by its length |v|. In
    # addition, there are three roundings of elements up to 1.
    for pooling, exact in (("mean", states.mean(0)), ("last", states[-1])):
        length = np.linalg.norm(exact)
        error = engine.embed(NAME, None, ids, pooling)[0] - exact / length
        worst = 2 * np.sqrt(len(exact)) * bound / length + 3 * np.sqrt(len(exact)) * 2.0**-24
        assert np.linalg.norm(error) <= worst
        error = engine.embed(NAME, None, ids, pooling, normalize=False)[0] - exact
        assert np.abs(error).max() <= bound + np.abs(exact).max() * 2.0**-24

    # If logits are off by at most e, a log-probability is off by at most 2 e; and it is rounded.
    log_probs = reference.logits[:-1] - np.logaddexp.reduce(reference.logits[:-1], -1)[:, None]
    exact = log_probs[np.arange(len(ids) - 1), ids[1:]]
    (score,) = engine.score(NAME, None, ids)
    worst = 2 * reference.bound + np.abs(exact).max() * 2.0**-23
    assert np.abs(np.array(score.logprobs) - exact).max() <= worst
    assert abs(engine.get_ppl(NAME, None, ids)[0] + exact.mean()) <= worst
    engine.stop_model(NAME)


@pytest.mark.parametrize("form", ["shards", "bin"])
def test_other_checkpoint_forms_give_the_same_model(tmp_path, form):
    model = build("llama")
    ids = prompt_ids()
    expected = forward(image_of(save(model, tmp_path / "single"), "float32")[0], ids)
    if form == "shards":
        model.save_pretrained(tmp_path / form, max_shard_size="80KB")
        assert len(list((tmp_path / form).glob("*.safetensors"))) > 2
    else:
        model.config.save_pretrained(tmp_path / form)
        torch.save(model.state_dict(), tmp_path / form / "pytorch_model.bin")
    loader, _ = image_of(str(tmp_path / form), "float32")
    np.testing.assert_array_equal(forward(loader, ids), expected)


def test_float32_checkpoint_in_bfloat16(tmp_path):
    """Conversion rounds each weight once, with the same result as a checkpoint in bfloat16."""
    model = build("qwen3")
    ids = prompt_ids()
    loader, _ = image_of(save(model, tmp_path / "a"), "bfloat16")
    model.to(torch.bfloat16)
    rounded, _ = image_of(save(model, tmp_path / "b"), "bfloat16")
    # Norms stay float32 in our format, so they are rounded only in the bfloat16 checkpoint.
    difference = np.abs(forward(loader, ids) - forward(rounded, ids))
    reference = reference_for(model, ids, BFLOAT16_FACTOR)
    assert difference.max() <= 2 * reference.bound


def test_a_mystery_tensor_is_refused(tmp_path):
    save(build("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    from safetensors.numpy import load

    tensors = load(path.read_bytes())
    path.write_bytes(safetensors_bytes({**tensors, "mystery": np.zeros(3, np.float32)}))
    loader = HuggingFaceModel(str(tmp_path), NAME).load_model()
    with pytest.raises(UnexplainedTensorError, match="no rule explains 'mystery'"):
        loader.serialize_to_memory(Engine())


# The trained model (stories).


@pytest.fixture(scope="module")
def stories():
    directory = shared_data() / "checkpoints" / "stories260K"
    loader, engine = image_of(str(directory), "float32")
    return loader, engine, json.loads((directory / "reference.json").read_text())


def test_stories_greedy(stories):
    loader, engine, reference = stories
    config = loader.create_reference_runtime_config_builder(NAME, TargetDevice.CPU, [0], 2)
    engine.install_model(config.build())
    assert int(engine.start_model(NAME)) == 0, engine.last_error()
    expected = reference["greedy_ids"]
    assert generate(engine, reference["prompt_ids"], len(expected)) == expected
    engine.stop_model(NAME)
    engine.release_model(NAME)


def test_stories_top_logits(stories):
    loader, _, reference = stories
    last = forward(loader, reference["prompt_ids"])[-1]
    order = np.argsort(last)[::-1][:5]
    assert order.tolist() == [token for token, _ in reference["last_logits_top5"]]
    expected = [logit for _, logit in reference["last_logits_top5"]]
    np.testing.assert_allclose(last[order], expected, atol=2e-5)  # given to five decimals


def test_stories_nll(stories):
    """Mean NLL over the first 60 complete stories, as in reference.json."""
    loader, _, reference = stories
    text = (shared_data() / "text" / "tinystories_val.txt").read_text()
    documents = [re.sub(r"\s*\n\s*", "\n", part.strip()) for part in text.split("<|endoftext|>")]
    tokenizer = loader.get_tokenizer()
    total, count = 0.0, 0
    for document in documents[1:61]:
        ids = tokenizer.encode(document)[:512]
        logits = forward(loader, ids, (64,)).astype(np.float64)[:-1]
        logits -= logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= log_probs[np.arange(len(ids) - 1), ids[1:]].sum()
        count += len(ids) - 1
    assert count == reference["ppl"]["tokens"]
    assert total / count == pytest.approx(reference["ppl"]["nll_per_token"], abs=1e-4)
