"""From a GenerationConfig to the generation config of an engine's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspark.pipeline.configs import GenerationConfig
from allspark.pipeline.served_model import ServedModel

# Fields that have the same name and meaning in both.
_SAME = (
    "do_sample", "top_p", "top_k", "min_p", "temperature", "repetition_penalty", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
# The same, where they are not None.
_SAME_IF_SET = (
    "max_new_tokens", "min_new_tokens", "bad_words", "response_format", "output_logits",
    "output_last_hidden_state",
)  # fmt: skip


def to_fields(config: GenerationConfig, model: ServedModel, adapter: str | None) -> dict[str, Any]:
    """The fields of start_request_ids for a prompt to this model."""
    fields = model.request_fields()
    fields.update({name: getattr(config, name) for name in _SAME})
    for name in _SAME_IF_SET:
        if (value := getattr(config, name)) is not None:
            fields[name] = value
    if config.random_seed is not None:
        fields["seed"] = config.random_seed
    own = config.stop_words or []
    stops = [own] if isinstance(own, str) else list(own)
    ends = list(config.stop_token_ids or ())
    if not config.ignore_eos:
        stops += model.stop_strings()
        ends += fields.get("stop_token_ids", [])
    fields.update(stop_words=stops, stop_token_ids=ends)
    if config.bad_token_ids:
        fields["bad_words_ids"] = [[token] for token in config.bad_token_ids]
    if config.logprobs:
        # LMDeploy's are of the model's own logits.
        fields.update(logprobs=True, top_logprobs=config.logprobs, logprobs_mode="raw")
    if config.repetition_ngram_size > 0 and config.repetition_ngram_threshold > 0:
        fields["repetition_ngram_size"] = config.repetition_ngram_size
        fields["repetition_ngram_threshold"] = config.repetition_ngram_threshold
    if adapter:
        fields["lora_name"] = adapter
    return fields


def end_ids(fields: dict[str, Any]) -> frozenset[int]:
    """The single tokens that end a request with these fields."""
    ids = set(fields["stop_token_ids"])
    if not fields.get("ignore_eos") and "eos_token_id" in fields:
        ids.add(fields["eos_token_id"])
    return frozenset(ids)


def count_without_end(ids: Sequence[int], ends: frozenset[int], includes_end: bool) -> int:
    """How many of the last ids of an output are part of it: one of `ends`, which can only be the
    last, is not, unless `includes_end`."""
    has_end = bool(ids) and ids[-1] in ends
    return len(ids) - (has_end and not includes_end)
