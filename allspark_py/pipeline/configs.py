"""The config classes that LMDeploy documents, with their names, order and defaults.

Each field says what becomes of it (fields.py). The sources are LMDeploy's documents of 0.2, 0.4 and
0.13, and its code of 0.16; fields that the documents of 0.13 do not have stand at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from allspark.error_text import wrong_type
from allspark.pipeline import fields as f
from allspark.pipeline.engine_config import CHECKPOINT_FORMATS, EngineConfig

_ONE_DEVICE = "the CPU is one device; all of its cores compute"
_ONE_PROCESS = "one process serves a model"
_ALWAYS_METRICS = "the engine always counts"
_SCHEDULING = "every step holds prompts and decodes together"
_NO_GRAPHS = "there are no graphs to capture"
_NO_DIFFUSION = "diffusion models are not served"
_NO_EXPERT_ROUTES = "the experts of a token are not returned"
_NO_STATES = "models with recurrent states are not served"
_NO_IMAGES = "a model's language part alone is served"
_PREFIX_CACHE = "the prefix cache is always on: it changes no token"
_BITS_OF_CACHE = {0: 16, 8: 8, 4: 4}


def _cache_share(name: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        f.whole(1)(name, value)
    else:
        f.real(0, 1)(name, value)
        if value in (0, 1):
            raise ValueError(f"{name} is {value}; it must be a part in (0, 1) or a block count")


_DTYPE_NOTE = "`EngineConfig.data_type`"
_SHARE_NOTE = "`kv_cache_memory`, an integer `kv_cache_blocks`"
_DTYPES = f.one_of("auto", "float16", "bfloat16", "float32")
_FORMAT_NOTE = "`checkpoint_format`: another checkpoint is refused"
_POLICIES = f.one_of(
    0, 4, 8, others=(16, 17, 42), reason="keys and values are cached as integers, or as computed"
)


@dataclass
class TurbomindEngineConfig:
    """LMDeploy's settings of its C++ engine."""

    dtype: str = f.mapped("auto", _DTYPE_NOTE, _DTYPES)
    model_format: str | None = f.mapped(None, _FORMAT_NOTE, CHECKPOINT_FORMATS)
    tp: int = f.accepted(1, _ONE_DEVICE, f.whole(1))
    session_len: int | None = f.mapped(None, "`session_len`", f.whole(2, none=True))
    max_batch_size: int | None = f.mapped(None, "`max_batch_size`", f.whole(1, none=True))
    cache_max_entry_count: float = f.mapped(0.8, _SHARE_NOTE, _cache_share)
    cache_chunk_size: int = f.accepted(
        -1, "the pool is address space; memory is taken as it is used", f.whole(-1)
    )
    cache_block_seq_len: int = f.mapped(64, "`block_size`", f.one_of(16, 32, 64, 128))
    enable_prefix_caching: bool = f.accepted(False, _PREFIX_CACHE, f.flag)
    quant_policy: int = f.mapped(0, "`kv_cache_bits`: 0 is 16", _POLICIES)
    rope_scaling_factor: float = f.mapped(0.0, "`rope_scaling_factor`", f.real(0))
    use_logn_attn: bool = f.mapped(False, "`use_logn_attn`", f.flag)
    download_dir: str | None = f.mapped(None, "`download_dir`", f.text)
    revision: str | None = f.mapped(None, "`revision`", f.text)
    max_prefill_token_num: int = f.mapped(
        8192, "`prefill_chunk`, where it is below the engine's own", f.whole(0)
    )
    num_tokens_per_iter: int = f.mapped(0, "`prefill_chunk`", f.whole(0))
    max_prefill_iters: int = f.accepted(1, _SCHEDULING, f.whole(1))
    async_: int = f.accepted(1, "scheduling never waits for a result", f.one_of(0, 1))
    devices: list[int] | None = f.accepted(None, _ONE_DEVICE)
    empty_init: bool = f.refused(False, "weights come from the checkpoint")
    hf_overrides: dict[str, Any] | None = f.refused(None, "config.json is read as it is")
    enable_metrics: bool = f.accepted(True, _ALWAYS_METRICS, f.flag)
    communicator: str = f.accepted("nccl", _ONE_DEVICE, f.text)
    dp: int = f.refused(1, _ONE_PROCESS)
    cp: int = f.refused(1, _ONE_PROCESS)
    ep: int = f.refused(1, _ONE_PROCESS)
    device_num: int | None = f.accepted(None, _ONE_DEVICE)
    nnodes: int = f.refused(1, _ONE_PROCESS)
    node_rank: int = f.refused(0, _ONE_PROCESS)
    disable_vision_encoder: bool = f.accepted(False, _NO_IMAGES, f.flag)
    model_name: str | None = f.accepted(
        None, "as in LMDeploy since 0.2.1; ChatTemplateConfig names a template", f.text
    )
    # Of LMDeploy's later releases.
    attn_tp_size: int | None = f.accepted(None, _ONE_DEVICE, f.whole(1, none=True))
    attn_cp_size: int | None = f.refused(None, _ONE_PROCESS)
    attn_dp_size: int | None = f.refused(None, _ONE_PROCESS)
    mlp_tp_size: int | None = f.accepted(None, _ONE_DEVICE, f.whole(1, none=True))
    mlp_dp_size: int | None = f.refused(None, _ONE_PROCESS)
    outer_dp_size: int | None = f.refused(None, _ONE_PROCESS)
    dist_init_addr: str | None = f.refused(None, _ONE_PROCESS)
    cache_checkpoint_interval: int = f.accepted(4096, _NO_STATES, f.whole(0))
    cache_prompt: str = f.accepted("auto", _PREFIX_CACHE, f.text)
    cache_prompt_boundary_skip: int = f.accepted(1, _PREFIX_CACHE, f.whole(0))
    cache_generation: str = f.accepted("auto", _PREFIX_CACHE, f.text)
    language_model_only: bool = f.accepted(False, _NO_IMAGES, f.flag)

    def __post_init__(self) -> None:
        f.check_fields(self)

    def to_engine_config(self) -> EngineConfig:
        """The same settings for this engine. They are checked again."""
        f.check_fields(self)
        share = self.cache_max_entry_count
        is_count = isinstance(share, int)
        chunks = (self.num_tokens_per_iter, self.max_prefill_token_num)
        return EngineConfig(
            data_type=self.dtype,
            checkpoint_format=self.model_format,
            session_len=self.session_len,
            max_batch_size=self.max_batch_size,
            kv_cache_bits=_BITS_OF_CACHE[self.quant_policy],
            kv_cache_blocks=int(share) if is_count else 0,
            kv_cache_memory=None if is_count else share,
            block_size=self.cache_block_seq_len,
            prefill_chunk=_smallest_chunk(chunks),
            rope_scaling_factor=self.rope_scaling_factor,
            use_logn_attn=bool(self.use_logn_attn),
            revision=self.revision,
            download_dir=self.download_dir,
        )


# The engine's own prefill chunk. A greater one gives no speed, and longer gaps.
_OWN_CHUNK = 512


def _smallest_chunk(chunks: tuple[int, ...]) -> int:
    smallest = min((chunk for chunk in chunks if chunk > 0), default=0)
    return smallest if smallest < _OWN_CHUNK else 0


@dataclass
class PytorchEngineConfig:
    """LMDeploy's settings of its PyTorch engine; here the same engine serves both."""

    dtype: str = f.mapped("auto", _DTYPE_NOTE, _DTYPES)
    tp: int = f.accepted(1, _ONE_DEVICE, f.whole(1))
    dp: int = f.refused(1, _ONE_PROCESS)
    dp_rank: int = f.refused(0, _ONE_PROCESS)
    ep: int = f.refused(1, _ONE_PROCESS)
    session_len: int | None = f.mapped(None, "`session_len`", f.whole(2, none=True))
    max_batch_size: int | None = f.mapped(None, "`max_batch_size`", f.whole(1, none=True))
    attn_tp_size: int | None = f.accepted(None, _ONE_DEVICE, f.whole(1, none=True))
    mlp_tp_size: int | None = f.accepted(None, _ONE_DEVICE, f.whole(1, none=True))
    moe_tp_size: int | None = f.accepted(None, _ONE_DEVICE, f.whole(1, none=True))
    cache_max_entry_count: float = f.mapped(0.8, _SHARE_NOTE, _cache_share)
    prefill_interval: int = f.accepted(16, _SCHEDULING, f.whole(1))
    block_size: int = f.mapped(64, "`block_size`", f.one_of(16, 32, 64, 128))
    num_cpu_blocks: int = f.accepted(0, "nothing is swapped out", f.whole(0))
    num_gpu_blocks: int = f.mapped(0, "`kv_cache_blocks`", f.whole(0))
    adapters: dict[str, str] | None = f.mapped(None, "`adapters`", f.paths)
    max_prefill_token_num: int = f.mapped(
        4096, "`prefill_chunk`, where it is below the engine's own", f.whole(0)
    )
    thread_safe: bool = f.accepted(False, "every call is thread-safe", f.flag)
    enable_prefix_caching: bool = f.accepted(False, _PREFIX_CACHE, f.flag)
    device_type: str = f.accepted("cuda", "the CPU computes", f.one_of("cuda", "cpu"))
    eager_mode: bool = f.accepted(False, _NO_GRAPHS, f.flag)
    custom_module_map: dict[str, str] | None = f.refused(None, "no code of a checkpoint is run")
    download_dir: str | None = f.mapped(None, "`download_dir`", f.text)
    revision: str | None = f.mapped(None, "`revision`", f.text)
    quant_policy: int = f.mapped(0, "`kv_cache_bits`: 0 is 16", _POLICIES)
    distributed_executor_backend: str | None = f.accepted(
        None, _ONE_DEVICE, f.one_of(None, "uni", "mp", "ray")
    )
    empty_init: bool = f.refused(False, "weights come from the checkpoint")
    enable_microbatch: bool = f.accepted(False, _SCHEDULING, f.flag)
    enable_eplb: bool = f.accepted(False, _ONE_DEVICE, f.flag)
    enable_mp_engine: bool = f.refused(False, _ONE_PROCESS)
    mp_engine_backend: str = f.accepted("mp", _ONE_DEVICE, f.one_of("mp", "ray"))
    model_format: str | None = f.mapped(None, _FORMAT_NOTE, CHECKPOINT_FORMATS)
    enable_metrics: bool = f.accepted(True, _ALWAYS_METRICS, f.flag)
    hf_overrides: dict[str, Any] | None = f.refused(None, "config.json is read as it is")
    disable_vision_encoder: bool = f.accepted(False, _NO_IMAGES, f.flag)
    logprobs_mode: str | None = f.accepted(
        None, "log-probabilities need no setting of the engine",
        f.one_of(None, "raw_logits", "raw_logprobs"),
    )  # fmt: skip
    enable_return_routed_experts: bool = f.refused(False, _NO_EXPERT_ROUTES)
    enable_transfer_obj_ref: bool = f.accepted(False, _ONE_PROCESS, f.flag)
    dllm_block_length: int | None = f.refused(None, _NO_DIFFUSION)
    dllm_unmasking_strategy: str = f.refused("low_confidence_dynamic", _NO_DIFFUSION)
    dllm_denoising_steps: int | None = f.refused(None, _NO_DIFFUSION)
    dllm_confidence_threshold: float = f.refused(0.85, _NO_DIFFUSION)
    role: str = f.refused("Hybrid", "one engine computes prompts and outputs")
    migration_backend: str = f.accepted("DLSlime", "nothing migrates")
    eviction_type: str = f.accepted(
        "recompute", "what is preempted is computed again", f.one_of("recompute", "copy")
    )
    model_name: str = f.accepted("", "ChatTemplateConfig names a template", f.text)
    # Of LMDeploy's later releases.
    cudagraph_capture_batch_sizes: list[int] | None = f.accepted(None, _NO_GRAPHS)
    kernel_block_size: int = f.accepted(-1, "the kernels take every block size", f.whole(-1))
    prefix_cache_state_budget: int = f.accepted(0, _NO_STATES, f.whole(0))
    prefix_cache_decode_state_interval: int = f.accepted(0, _NO_STATES, f.whole(0))
    language_model_only: bool = f.accepted(False, _NO_IMAGES, f.flag)

    def __post_init__(self) -> None:
        f.check_fields(self)

    def to_engine_config(self) -> EngineConfig:
        """The same settings for this engine. They are checked again."""
        f.check_fields(self)
        share = self.cache_max_entry_count
        is_count = isinstance(share, int)
        return EngineConfig(
            data_type=self.dtype,
            checkpoint_format=self.model_format,
            session_len=self.session_len,
            max_batch_size=self.max_batch_size,
            kv_cache_bits=_BITS_OF_CACHE[self.quant_policy],
            kv_cache_blocks=self.num_gpu_blocks or (int(share) if is_count else 0),
            kv_cache_memory=None if is_count else share,
            block_size=self.block_size,
            prefill_chunk=_smallest_chunk((self.max_prefill_token_num,)),
            adapters=self.adapters,
            revision=self.revision,
            download_dir=self.download_dir,
        )


BackendConfig = EngineConfig | TurbomindEngineConfig | PytorchEngineConfig


def to_engine_config(config: BackendConfig | None) -> EngineConfig:
    """A config of its own: the caller's stays as it is. It is checked again."""
    if config is None:
        return EngineConfig()
    if isinstance(config, EngineConfig):
        return replace(config)
    if isinstance(config, (TurbomindEngineConfig, PytorchEngineConfig)):
        return config.to_engine_config()
    expected = "an EngineConfig, TurbomindEngineConfig or PytorchEngineConfig"
    raise wrong_type("backend_config", config, expected)


@dataclass
class SpeculativeConfig:
    """Speculative decoding: it changes the speed, never the output."""

    method: str = f.mapped(
        "prompt_lookup",
        "`prompt_lookup` (also `ngram`): `prompt_lookup_num_tokens`; `draft_model`: `draft_model`",
        f.one_of(
            "prompt_lookup", "ngram", "draft_model",
            others=("eagle", "eagle3", "deepseek_mtp", "qwen3_5_mtp"),
            reason="layers that draft are not read; draft_model takes a smaller model",
        ),
    )  # fmt: skip
    model: str = f.mapped("", "`draft_model`: what it names", f.text)
    num_speculative_tokens: int = f.mapped(1, "most tokens drafted at a time", f.whole(1, 64))

    def __post_init__(self) -> None:
        f.check_fields(self)
        if (self.method == "draft_model") != bool(self.model):
            raise ValueError(
                f"SpeculativeConfig.model is {self.model!r} where method is {self.method!r}; "
                "a draft_model needs one, the others have none"
            )

    def apply(self, config: EngineConfig) -> None:
        """Sets the fields of an EngineConfig. They are checked again."""
        self.__post_init__()
        if self.method == "draft_model":
            config.draft_model = self.model
            config.num_draft_tokens = self.num_speculative_tokens
        else:
            config.prompt_lookup_num_tokens = self.num_speculative_tokens


@dataclass
class GenerationConfig:
    """What a prompt asks for. Without do_sample the likeliest token is taken."""

    n: int = f.refused(1, "a prompt has one response; give it n times, with n seeds")
    max_new_tokens: int | None = f.mapped(
        512, "most output tokens; None: what is left of session_len", f.whole(1, none=True)
    )
    do_sample: bool = f.mapped(False, "`do_sample`", f.flag)
    top_p: float = f.mapped(1.0, "`top_p`", f.real(0, 1))
    top_k: int = f.mapped(50, "`top_k`; 0: all", f.whole(0))
    min_p: float = f.mapped(0.0, "`min_p`", f.real(0, 1))
    temperature: float = f.mapped(0.8, "`temperature`", f.real(0, 2))
    repetition_penalty: float = f.mapped(1.0, "`repetition_penalty`", f.real(0.01, 100))
    ignore_eos: bool = f.mapped(False, "`ignore_eos`", f.flag)
    random_seed: int | None = f.mapped(
        None, "`seed`; None: another one each time", f.whole(0, (1 << 63) - 1, none=True)
    )
    stop_words: list[str] | None = f.mapped(
        None, "`stop_words`: strings of any number of tokens", f.texts
    )
    bad_words: list[str] | None = f.mapped(None, "`bad_words`", f.texts)
    stop_token_ids: list[int] | None = f.mapped(
        None, "`stop_token_ids`; the output leaves them out", f.token_ids
    )
    bad_token_ids: list[int] | None = f.mapped(None, "`bad_words_ids`", f.token_ids)
    min_new_tokens: int | None = f.mapped(None, "`min_new_tokens`", f.whole(0, none=True))
    skip_special_tokens: bool = f.mapped(True, "`skip_special_tokens`", f.flag)
    spaces_between_special_tokens: bool = f.accepted(
        True, "fast tokenizers, which all are here, add none", f.flag
    )
    logprobs: int | None = f.mapped(
        None, "`logprobs` and `top_logprobs`", f.whole(0, 20, none=True)
    )
    response_format: dict[str, Any] | None = f.mapped(None, "`response_format`", f.mapping)
    logits_processors: list[Callable[..., Any]] | None = f.refused(
        None, "no Python runs between a step's logits and its tokens; use logit_bias of the engine"
    )
    output_logits: str | None = f.mapped(
        None, "`output_logits`", f.one_of(None, "all", "generation")
    )
    output_last_hidden_state: str | None = f.mapped(
        None, "`output_last_hidden_state`", f.one_of(None, "all", "generation")
    )
    include_stop_str_in_output: bool = f.mapped(False, "`include_stop_str_in_output`", f.flag)
    with_cache: bool = f.refused(False, "one engine computes prompts and outputs")
    preserve_cache: bool = f.refused(False, "one engine computes prompts and outputs")
    migration_request: Any = f.refused(None, "one engine computes prompts and outputs")
    return_routed_experts: bool = f.refused(False, _NO_EXPERT_ROUTES)
    repetition_ngram_size: int = f.mapped(0, "`repetition_ngram_size`", f.whole())
    repetition_ngram_threshold: int = f.mapped(0, "`repetition_ngram_threshold`", f.whole())
    return_ppl: bool = f.refused(False, "get_ppl of a pipeline gives it")

    def __post_init__(self) -> None:
        f.check_fields(self)
