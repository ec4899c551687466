"""Checkpoints of families that transformers has no class for: the equivalent model of a class that
it has, saved with the names, order and configuration of the family's own code.

Each function takes the configuration and weights of the transformers model and returns the
family's. A field of None is one that the family's configuration does not have.
"""

from __future__ import annotations

import json

# Fields that have the same name in all configurations.
COMMON = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)


def save_as(family, model, directory):
    from safetensors.torch import save_file

    config, weights = family(model.config.to_dict(), dict(model.state_dict()))
    directory.mkdir(exist_ok=True)
    present = {field: value for field, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(present))
    tensors = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    save_file(tensors, directory / "model.safetensors")


def _config(config, name, **fields):
    common = {field: config[field] for field in COMMON}
    return {**common, "architectures": [name], "rope_theta": _theta(config), **fields}


def _theta(config):
    return config["rope_parameters"]["rope_theta"]


def _fused(weights, parts, whole):
    """Stacks the tensors with ``parts`` in their names into one with ``whole`` in its name."""
    import torch

    fused = {}
    for name, tensor in weights.items():
        if parts[0] in name:
            stacked = [weights[name.replace(parts[0], part)] for part in parts]
            fused[name.replace(parts[0], whole)] = torch.cat(stacked)
        elif not any(part in name for part in parts):
            fused[name] = tensor
    return fused


def _renamed(weights, names):
    renamed = {}
    for name, tensor in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def internlm(config, weights):
    rotary = {"base": _theta(config), "type": "dynamic"}
    fields = {"bias": config["attention_bias"], "rotary": rotary, "rope_theta": None}
    return _config(config, "InternLMForCausalLM", **fields), weights


def internlm2(config, weights):
    import torch

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads
    grouped = {}
    for name, tensor in _fused(weights, QKV, "attention.wqkv").items():
        if "wqkv" in name:
            q, k, v = tensor.split([heads * dim, kv_heads * dim, kv_heads * dim])
            groups = [part.unflatten(0, (kv_heads, -1)) for part in (q, k, v)]
            tensor = torch.cat(groups, 1).flatten(0, 1)
        grouped[name] = tensor
    names = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    fields = {
        "num_key_value_heads": kv_heads,
        "bias": config["attention_bias"],
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    return _config(config, "InternLM2ForCausalLM", **fields), _renamed(grouped, names)


def internlm3(config, weights):
    fields = {
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "bias": config["mlp_bias"],
        "qkv_bias": config["attention_bias"],
    }
    return _config(config, "InternLM3ForCausalLM", **fields), weights


def baichuan(config, weights, name="BaiChuanForCausalLM"):
    return _config(config, name), _fused(weights, QKV, "self_attn.W_pack")


def unit_head(model):
    """Normalises the rows of the head to length 1, as Baichuan2 does at each use."""
    import torch

    model.lm_head.weight.data = torch.nn.functional.normalize(model.lm_head.weight.data)


def baichuan2(config, weights):
    import torch

    head = weights["lm_head.weight"]
    # Powers of two, because dividing by them restores exactly the same values.
    lengths = 2.0 ** (torch.arange(len(head)) % 5 - 2)
    weights = {**weights, "lm_head.weight": head * lengths[:, None].to(head.dtype)}
    return baichuan(config, weights, "BaichuanForCausalLM")


def baichuan_alibi(config, weights):
    """Baichuan2 13B."""
    config, weights = baichuan2(config, weights)
    fields = {"model_max_length": config["max_position_embeddings"]}
    return {**config, **fields, "max_position_embeddings": None, "rope_theta": None}, weights


def make_alibi(model):
    """Gives a Llama model ALiBi: no rotation, and a mask with the heads' slopes."""
    import torch

    def add_mask(module, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        heads, position = module.config.num_attention_heads, torch.arange(ids.shape[1])
        assert heads & (heads - 1) == 0  # the slopes have a simple formula only then
        slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
        distance = position[None, :] - position[:, None]
        bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        mask = bias[None].to(module.embed_tokens.weight.dtype)
        return args, {**kwargs, "attention_mask": mask}

    model.model.register_forward_pre_hook(add_mask, with_kwargs=True)
    model.model.rotary_emb.inv_freq.zero_()


def without_head(config, weights):
    """A checkpoint of the model without its head, which is tied."""
    names = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    del names["lm_head.weight"]
    return {**config, "architectures": ["GPT2LMHeadModel"]}, names


def qwen1(config, weights):
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "self_attn.o_proj": "attn.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.w2",
        "mlp.up_proj": "mlp.w1",
        "mlp.down_proj": "mlp.c_proj",
    }
    fields = {
        "intermediate_size": 2 * config["intermediate_size"],
        "kv_channels": config["hidden_size"] // config["num_attention_heads"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rotary_emb_base": _theta(config),
        "rotary_pct": 1.0,
        "seq_length": config["max_position_embeddings"],
        "max_position_embeddings": 4 * config["max_position_embeddings"],
        "no_bias": True,
        "scale_attn_weights": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "rms_norm_eps": None,
        "rope_theta": None,
        "hidden_act": None,
    }
    fused = _fused(weights, QKV, "attn.c_attn")
    return _config(config, "QWenLMHeadModel", **fields), _renamed(fused, names)


def chatglm(config, weights):
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "model.layers": "transformer.encoder.layers",
        "lm_head": "transformer.output_layer",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    fields = {
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_residual_connection_post_layernorm": False,
        "ffn_hidden_size": config["intermediate_size"],
        "kv_channels": config["head_dim"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "num_layers": config["num_hidden_layers"],
        "original_rope": True,
        "padded_vocab_size": config["vocab_size"],
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": _theta(config) / 10000,
        "seq_length": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"] - 3,
    }
    rope = config["rope_parameters"]
    if rope["rope_type"] == "linear":  # ChatGLM2's, which divides positions by the ratio.
        fields |= {"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": rope["factor"]}
    others = ("num_hidden_layers", "intermediate_size", "max_position_embeddings", "rms_norm_eps")
    absent = dict.fromkeys((*others, "rope_theta", "hidden_act"))
    fused = _fused(weights, QKV, "self_attention.query_key_value")
    return _config(config, "ChatGLMModel", **{**absent, **fields}), _renamed(fused, names)


def minicpm(config, weights):
    fields = {
        "num_key_value_heads": config["num_key_value_heads"],
        "dim_model_base": int(config["hidden_size"] / config["logits_scaling"]),
        "scale_depth": config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
        "scale_emb": config["embedding_multiplier"],
        "tie_word_embeddings": None,  # absent means tied
    }
    del weights["lm_head.weight"]
    return _config(config, "MiniCPMForCausalLM", **fields), weights


def deepseek(config, weights):
    shared = config["shared_expert_intermediate_size"] // config["moe_intermediate_size"]
    fields = {
        "num_key_value_heads": config["num_key_value_heads"],
        "first_k_dense_replace": len(config["mlp_only_layers"]),
        "moe_intermediate_size": config["moe_intermediate_size"],
        "moe_layer_freq": 1,
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": shared,
        "norm_topk_prob": config["norm_topk_prob"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "scoring_func": "softmax",
    }
    named = {}
    for name, tensor in _by_expert(weights).items():
        if "shared_expert_gate" in name:
            continue  # It is zero, so the gate's sigmoid is a half.
        if "shared_expert.down_proj" in name:
            tensor = tensor / 2
        named[name.replace("shared_expert.", "shared_experts.")] = tensor
    return _config(config, "DeepseekForCausalLM", **fields), named


def no_gate(model):
    """Zeroes the shared expert's gate, whose sigmoid is then a half."""
    for name, parameter in model.named_parameters():
        if "shared_expert_gate" in name:
            parameter.data.zero_()


def _by_expert(weights):
    """Splits experts into separate tensors, as in most checkpoints."""
    named = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                named[f"{base}{e}.gate_proj.weight"], named[f"{base}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                named[name.removesuffix("down_proj") + f"{e}.down_proj.weight"] = down
        else:
            named[name] = tensor
    return named


def stacked(config, weights):
    """Experts in one tensor, as in transformers' memory and in some checkpoints."""
    names = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    return {**config, "architectures": [names[config["model_type"]]]}, weights


def gemma3(config, weights):
    """The configuration as transformers 4 wrote it."""
    rope = config["rope_parameters"]
    fields = {
        **{name: value for name, value in config.items() if name != "rope_parameters"},
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": None,
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        "rope_scaling": {"type": "linear", "factor": rope["full_attention"]["factor"]},
        "rope_theta": rope["full_attention"]["rope_theta"],
        "sliding_window_pattern": config["layer_types"].index("full_attention") + 1,
        "tie_word_embeddings": None,
    }
    del weights["lm_head.weight"]
    return fields, weights
