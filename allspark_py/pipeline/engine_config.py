"""EngineConfig: how a model is opened and what it may take, for the pipeline and the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allspark.pipeline import fields as f

# Weights and activations, in bits -> customized_quant_config of the serialiser.
PRECISIONS: dict[str, dict[str, Any]] = {
    name: {
        "quant_method": "instant_quant",
        "weight_format": weights,
        "group_size": group_size,
        "compute_method": compute,
        "lm_head": "int8",
    }
    for name, weights, group_size, compute in (
        ("A16W8", "int8", 0, "weight_only"),
        ("A8W8", "int8", 0, "activate_quant"),
        ("A16W4", "int4", 64, "weight_only"),
        ("A8W4", "int4", 64, "activate_quant"),
    )
}

CHECKPOINT_FORMATS = f.one_of(
    None, "hf", "llama", "awq", "gptq", "compressed-tensors", "fp8",
    others=("mxfp4",),
    reason="MXFP4 is read in compressed-tensors' form, and in GGUF files",
)  # fmt: skip

PREFILL_POLICIES = ("balanced", "throughput", "first_token", "smooth")


@dataclass
class EngineConfig:
    """Settings of one model.

    Raises ValueError or TypeError for a value that is none of those that its field takes.
    """

    data_type: str = f.mapped(
        "auto",
        "`bfloat16`, `float16` or `float32`: the compute type; auto: bfloat16, or what native "
        "files have",
        f.one_of("auto", "bfloat16", "float16", "float32"),
    )
    precision: str | None = f.mapped(
        None,
        "`A16W8`, `A8W8`, `A16W4` or `A8W4`: bits of activations and weights, to which weights are "
        "quantised when the model is opened; None: as the checkpoint has them",
        f.one_of(None, *PRECISIONS),
    )
    checkpoint_format: str | None = f.mapped(
        None,
        "`awq`, `gptq`, `compressed-tensors` or `fp8`: another checkpoint is refused; `hf`, "
        "`llama` or None: none is",
        CHECKPOINT_FORMATS,
    )
    session_len: int | None = f.mapped(
        None,
        "most tokens of a request, prompt and output; None: the model's context, or what the "
        "memory for keys and values can hold",
        f.whole(2, none=True),
    )
    max_batch_size: int | None = f.mapped(
        None, "most requests in one step; None: 64", f.whole(1, none=True)
    )
    max_waiting_requests: int = f.mapped(
        0, "requests that may wait beside them; 0: no bound", f.whole(0)
    )
    kv_cache_bits: int = f.mapped(
        16,
        "bits of cached keys and values; 16: the compute type; 6: keys 8, values 4",
        f.one_of(16, 8, 6, 4),
    )
    kv_cache_blocks: int = f.mapped(
        0, "blocks of keys and values; 0: what the batch can need", f.whole(0)
    )
    kv_cache_memory: float | None = f.mapped(
        None, "the part of the free memory that keys and values may take; None: half", f.real(0, 1)
    )
    block_size: int = f.mapped(32, "tokens of a block", f.one_of(16, 32, 64, 128))
    prefill_chunk: int = f.mapped(0, "most prompt tokens in one step; 0: the engine's", f.whole(0))
    prefill_policy: str = f.mapped(
        "balanced",
        "what a step computes where prompts wait and others decode: `balanced`, `throughput`, "
        "`first_token` or `smooth`",
        f.one_of(*PREFILL_POLICIES),
    )
    threads: int = f.mapped(0, "compute threads; 0: one for each core", f.whole(0))
    numa: bool = f.mapped(
        False,
        "True: each thread's part of weights, and of keys and values, lies on its own NUMA node; "
        "the weights take their memory once more",
        f.flag,
    )
    adapters: dict[str, str] | None = f.mapped(None, "LoRA adapters: name -> directory", f.paths)
    draft_model: str | None = f.mapped(
        None, "a smaller model of the same vocabulary, for speculative decoding", f.text
    )
    num_draft_tokens: int = f.mapped(5, "most tokens that it drafts at a time", f.whole(1, 64))
    prompt_lookup_num_tokens: int = f.mapped(
        0, "most tokens drafted by prompt lookup; 0: off", f.whole(0, 64)
    )
    rope_scaling_factor: float = f.mapped(
        0.0, "for sessions longer than the model was trained for", f.real(0)
    )
    use_logn_attn: bool = f.mapped(False, "log-n attention beyond the trained length", f.flag)
    revision: str | None = f.mapped(None, "branch, tag or commit of a model on a hub", f.text)
    download_dir: str | None = f.mapped(None, "where downloads go; None: the hub's cache", f.text)
    trust_remote_code: bool = f.mapped(
        False, "True runs the Python files of a checkpoint's tokenizer", f.flag
    )

    def __post_init__(self) -> None:
        f.check_fields(self)
