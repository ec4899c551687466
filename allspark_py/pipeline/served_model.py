"""ServedModel: a running model together with what its texts need."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allspark._allspark import AsCacheMode, AsStatus
from allspark.chat_template import ChatTemplate, ChatTemplateConfig, choose
from allspark.engine import Engine, TargetDevice
from allspark.pipeline.engine_config import PRECISIONS, EngineConfig
from allspark.pipeline.model_source import blocks_of, default_precision, open_loader
from allspark.statuses import to_exception

if TYPE_CHECKING:
    from allspark.model_loader import LLM

DEFAULT_BATCH = 64
CACHE_MODES = {
    16: AsCacheMode.AsCacheDefault,
    8: AsCacheMode.AsCacheQuantI8,
    6: AsCacheMode.AsCacheQuantK8V4,
    4: AsCacheMode.AsCacheQuantU4,
}


@dataclass
class ServedModel:
    """One model of an engine, started. Thread-safe, as the engine is."""

    engine: Engine
    name: str
    loader: LLM
    tokenizer: Any
    template: ChatTemplate
    session_len: int  # most tokens of a request, prompt and output
    max_batch_size: int
    # Tokens that end an output: the checkpoint's, and those of the template.
    end_ids: tuple[int, ...]
    # Of the checkpoint's generation_config.json: temperature, top_p, top_k, repetition_penalty.
    sampling_defaults: dict[str, float]
    adapter_digests: dict[str, str]  # of their files, by name
    config: EngineConfig  # by which it was opened
    is_closed: bool = False

    @classmethod
    def open(
        cls,
        source: str,
        config: EngineConfig | None = None,
        name: str = "model",
        engine: Engine | None = None,
        chat_template: ChatTemplateConfig | str | None = None,
    ) -> ServedModel:
        """Opens, installs and starts a model.

        Args:
            source: what model_source.open_loader takes.
            engine: where the model runs; None: an engine of its own.
            chat_template: a config, a name, or None for the tokenizer's own.

        Raises:
            ValueError, OSError: the model or a setting is refused.
            OutOfMemoryError, AllSparkError: the engine cannot run it.
        """
        config = config or EngineConfig()
        engine = engine or Engine()
        loader = open_loader(
            source,
            name,
            None if config.data_type == "auto" else config.data_type,
            config.revision,
            config.download_dir,
            config.trust_remote_code,
        )
        _check_format(loader, config.checkpoint_format)
        _check_data_type(loader, config.data_type)
        tokenizer = loader.get_tokenizer()
        template = choose(tokenizer, source, chat_template)
        _serialize(loader, engine, config.precision or default_precision(source))
        session_len = _install(engine, name, loader, config)
        digests = {}
        try:
            _succeed(engine, engine.start_model(name))
            for adapter, path in (config.adapters or {}).items():
                _succeed(engine, engine.load_lora(name, adapter, path))
                digests[adapter] = _digest(path)
        except BaseException:
            _remove(engine, name)
            raise
        loader.free_model()
        return cls(
            engine=engine,
            name=name,
            loader=loader,
            tokenizer=tokenizer,
            template=template,
            session_len=session_len,
            max_batch_size=config.max_batch_size or DEFAULT_BATCH,
            end_ids=_end_ids(loader, tokenizer, template),
            sampling_defaults=_sampling_defaults(loader),
            adapter_digests=digests,
            config=config,
        )

    @property
    def adapters(self) -> list[str]:
        """The adapters that are loaded now."""
        return self.engine.list_loras(self.name)

    def load_adapter(self, name: str, path: str) -> AsStatus:
        """Loads an adapter while the model runs; engine.last_error() says why it failed."""
        status = self.engine.load_lora(self.name, name, path)
        if status == AsStatus.ALLSPARK_SUCCESS:
            self.adapter_digests[name] = _digest(path)
        return status

    @property
    def max_outputs(self) -> int | None:
        """Outputs that can run and wait at once; None: any number."""
        waiting = self.config.max_waiting_requests
        return self.max_batch_size + waiting if waiting else None

    @functools.cached_property
    def max_prompt_chars(self) -> int:
        """Characters above which no text fits into session_len: what so many of the longest tokens
        have, four times, since a tokenizer may join characters before it looks for tokens."""
        return 4 * self.session_len * max(map(len, self.tokenizer.get_vocab()))

    @functools.cached_property
    def tokenizer_digest(self) -> str:
        """Of all by which a fast tokenizer makes ids of texts; of others, of the vocabulary."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            description = backend.to_str()
        else:
            description = repr(sorted(self.tokenizer.get_vocab().items()))
        return hashlib.sha256(description.encode()).hexdigest()

    def stop_strings(self) -> list[str]:
        """Texts at which the chat template's answers end, beside `end_ids`."""
        words = self.template.stop_words or []
        return [word for word in words if _token_of(self.tokenizer, word) is None]

    def request_fields(self) -> dict[str, Any]:
        """What every request to this model has in its generation config."""
        fields: dict[str, Any] = {"max_length": self.session_len}
        if self.end_ids:
            fields["eos_token_id"] = self.end_ids[0]
            fields["stop_token_ids"] = list(self.end_ids[1:])
        if self.config.prompt_lookup_num_tokens:
            fields["prompt_lookup_num_tokens"] = self.config.prompt_lookup_num_tokens
        return fields

    def close(self) -> None:
        """Ends all requests and frees the model; a second call has no effect."""
        self.is_closed = True
        _remove(self.engine, self.name)


def _succeed(engine: Engine, status: AsStatus) -> None:
    if status != AsStatus.ALLSPARK_SUCCESS:
        raise to_exception(status, engine.last_error())


def _digest(path: str) -> str:
    """Of an adapter's file, or of the files in its folder that make it."""
    files = [Path(path)] if os.path.isfile(path) else sorted(Path(path).glob("adapter_*"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        for block in blocks_of(file):
            digest.update(block)
    return digest.hexdigest()


def _remove(engine: Engine, name: str) -> None:
    if name in engine.list_models():
        engine.stop_model(name)
        engine.release_model(name)


def _check_format(loader: LLM, expected: str | None) -> None:
    if expected in (None, "hf", "llama"):
        return
    section = loader.get_model_config().get("quantization_config")
    found = section.get("quant_method") if isinstance(section, Mapping) else None
    if found != expected:
        kind = "is not quantised" if found is None else f"has {found!r}"
        raise ValueError(
            f"checkpoint_format (LMDeploy: model_format) is {expected!r}, but the checkpoint {kind}"
        )


def _check_data_type(loader: LLM, expected: str) -> None:
    from allspark.model_loader import DashInferModel
    from allspark.model_loader.convert import data_type_of

    if expected == "auto" or not isinstance(loader, DashInferModel):
        return
    found = data_type_of(loader.decoder_spec())
    if found != expected:
        raise ValueError(
            f"data_type is {expected!r}; a serialised model has the type that `allspark convert` "
            f"gave it, {found!r} here"
        )


def _serialize(loader: LLM, engine: Engine, precision: str | None) -> None:
    from allspark.model_loader import HuggingFaceModel

    if isinstance(loader, HuggingFaceModel):
        quantization = PRECISIONS.get(precision or "")
        loader.serialize_to_memory(
            engine, enable_quant=quantization is not None, customized_quant_config=quantization
        )
    elif precision is not None:
        raise ValueError(
            f"precision is {precision!r}; a serialised model has the precision that "
            "`allspark convert` gave it"
        )


def _install(engine: Engine, name: str, loader: LLM, config: EngineConfig) -> int:
    """Installs the model; returns how many tokens a request may have."""
    builder = loader.create_reference_runtime_config_builder(name, TargetDevice.CPU)
    device = TargetDevice.CPU_NUMA if config.numa else TargetDevice.CPU
    builder.compute_unit(device, None, config.threads)
    builder.max_batch(config.max_batch_size or DEFAULT_BATCH)
    builder.max_waiting_requests(config.max_waiting_requests)
    builder.max_prefill_length(config.prefill_chunk)
    builder.prefill_policy(config.prefill_policy)
    builder.kv_cache_mode(CACHE_MODES[config.kv_cache_bits])
    builder.kv_cache_span_size(config.block_size)
    builder.rope_scaling_factor(config.rope_scaling_factor)
    builder.use_logn_attn(bool(config.use_logn_attn))
    builder.lora_max_num(max(5, len(config.adapters or ())))
    draft = None
    if config.draft_model is not None:
        # Its weights live as long as this loader, for every install: the engine holds them for
        # the first alone.
        draft = _open_draft(engine, config.draft_model, f"{name}.draft")
        builder.draft_model(_installed_name(draft), config.num_draft_tokens)
    context = loader.get_model_context_length()
    if config.kv_cache_blocks:
        context = min(context, config.kv_cache_blocks * config.block_size)
    session_len = config.session_len or context
    builder.max_length(session_len)
    builder.set_span_init_size(config.kv_cache_blocks)
    status = engine.install_model(builder.build())
    if status == AsStatus.ALLSPARK_MEMORY_ERROR and config.session_len is None:
        session_len = _longest_session(engine, name, builder, context)
        status = engine.install_model(builder.max_length(session_len).build())
    _succeed(engine, status)
    if config.kv_cache_memory is not None and not config.kv_cache_blocks:
        blocks = _blocks_within(engine, name, config.kv_cache_memory, session_len)
        if blocks is not None:
            engine.release_model(name)
            _succeed(engine, engine.install_model(builder.set_span_init_size(blocks).build()))
    return session_len


def _longest_session(engine: Engine, name: str, builder: Any, context: int) -> int:
    """The most tokens for which half of the free memory has room, in 1,024s."""
    _succeed(engine, engine.install_model(builder.max_length(2).build()))
    per_token = engine.get_as_model_info(name).bytes_per_token
    engine.release_model(name)
    fits = free_memory() // 2 // per_token // 1024 * 1024
    return max(2, min(context, fits))


def _blocks_within(engine: Engine, name: str, share: float, session_len: int) -> int | None:
    """The blocks that a part of the free memory holds; None if all that are needed fit."""
    info = engine.get_as_model_info(name)
    block_bytes = info.bytes_per_token * info.span_size
    blocks = int(free_memory() * share) // block_bytes
    longest = -(-session_len // info.span_size) + 1
    return max(blocks, longest) if blocks < info.total_span else None


def free_memory() -> int:
    """Bytes of memory that the machine could give now. Limits of control groups are the engine's
    to see."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return 1024 * int(fields["MemAvailable"].split()[0])


def _open_draft(engine: Engine, source: str, name: str) -> LLM:
    loader = open_loader(source, name)
    _serialize(loader, engine, None)
    return loader.free_model()


def _installed_name(draft: LLM) -> str:
    """What a runtime config calls a draft model."""
    files = getattr(draft, "files", None)
    return str(files[0]) if files is not None else draft.pretrain_model_name


def _end_ids(loader: LLM, tokenizer: Any, template: ChatTemplate) -> tuple[int, ...]:
    eos = loader.get_generation_config().get("eos_token_id")
    ids = [eos] if isinstance(eos, int) else list(eos or ())
    ids.append(getattr(tokenizer, "eos_token_id", None))
    ids += [_token_of(tokenizer, word) for word in template.stop_words or []]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _sampling_defaults(loader: LLM) -> dict[str, float]:
    found = loader.get_generation_config()
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    return {name: found[name] for name in names if found.get(name) is not None}


def _token_of(tokenizer: Any, word: str) -> int | None:
    """The id of a text that is one special token of the tokenizer; None for any other."""
    if word not in getattr(tokenizer, "get_added_vocab", dict)():
        return None
    token: int = tokenizer.convert_tokens_to_ids(word)
    return token
