"""Fields of a request that this server does not know, or knows and does not serve."""

from __future__ import annotations

import logging
from typing import Any

from allspark.serve.errors import ApiError
from allspark.serve.protocol.common import FORMAT_FIELDS, RequestBody
from allspark.serve.settings import ServerSettings

logger = logging.getLogger("allspark.serve")

# Fields of other servers that bind the output, are a part of the prompt, or ask for more than text:
# an answer without them would be another one than was asked for.
_OF_OTHER_SERVERS = (
    "allowed_token_ids", "image_data", "images", "input_ids", "logits_processors",
    "multi_modal_data", "output_config", "output_format", "prompt_embeds", "return_logprob",
    "return_routed_experts", "sampling_params", "truncate_prompt_tokens", "use_beam_search",
    "videos",
)  # fmt: skip
# The same of the engine's own fields, on routes that do not have them.
_OF_THE_ENGINE = (
    "best_of", "enable_tensors_from_model_inference", "eos_token_id", "lora_name",
    "max_new_tokens", "normalize", "num_beams", "num_generated_in_prompt", "num_return_sequences",
    "output_last_hidden_state", "output_logits", "pooling", "prompt_logprobs",
    "prompt_logprobs_start", "prompt_only", "stop_words",
)  # fmt: skip
_NEVER_DROPPED = frozenset({*_OF_OTHER_SERVERS, *_OF_THE_ENGINE})
# Those whose empty values ask for something, too: for any JSON, or to go on after EOS.
_NEVER_EMPTY = frozenset({*FORMAT_FIELDS, "early_stopping"})
# As vLLM's older clients begin the names of constraints.
_CONSTRAINT_PREFIX = "guided_"
_MAX_HEADER_CHARS = 1000
_MAX_NAMED = 100  # of a request's unknown fields, which may be millions
# Each name is logged once; a client that makes up names does not fill the log.
_MAX_LOGGED = 1000
_logged: set[str] = set()


def check_fields(body: RequestBody, settings: ServerSettings, beyond: tuple[str, ...] = ()) -> None:
    """Refuses fields that are not served. The log names unknown ones, which are ignored.

    Args:
        beyond: fields that are known and not served; each must be None or empty.

    Raises:
        ApiError: an unserved field asks for something, or, with strict_fields, one is unknown.
    """
    for name in beyond:
        if getattr(body, name, None):
            raise not_served(name)
    for name, value in (body.model_extra or {}).items():
        if _must_be_served(name, value):
            raise not_served(_escaped(name))
    unknown = _unknown(body)
    if unknown and settings.strict_fields:
        message = f"{unknown[0]} is not a field of this request"
        raise ApiError(400, message, param=unknown[0], code="unknown_field")
    for name in unknown:
        _log(name)


def unknown_names(body: RequestBody) -> str:
    """The unknown fields of a request, for the header that names them."""
    return ", ".join(_unknown(body))[:_MAX_HEADER_CHARS]


def _unknown(body: RequestBody) -> list[str]:
    return [_escaped(name) for name in body.unknown_fields(_MAX_NAMED)]


def _must_be_served(name: str, value: Any) -> bool:
    if name in _NEVER_EMPTY:
        return value is not None
    return bool(value) and (name in _NEVER_DROPPED or name.startswith(_CONSTRAINT_PREFIX))


def not_served(name: str) -> ApiError:
    """The error for a field that asks for what there is not."""
    return ApiError(400, f"{name} is not served", param=name, code="unsupported_feature")


def _escaped(name: str) -> str:
    return name[:_MAX_HEADER_CHARS].encode("unicode_escape").decode()


def _log(name: str) -> None:
    if name not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(name)
        logger.warning("requests have the unknown field %s, which is ignored", name[:100])
