"""Fields of a request that this server does not know, or knows and does not serve."""

from __future__ import annotations

import logging

from allspark.serve.errors import ApiError
from allspark.serve.protocol.common import RequestBody
from allspark.serve.settings import ServerSettings

logger = logging.getLogger("allspark.serve")

# Fields of other servers that bind the output, or are a part of the prompt: an answer without them
# would be another one than was asked for.
_NEVER_DROPPED = frozenset({
    "allowed_token_ids", "image_data", "images", "input_ids", "logits_processors",
    "multi_modal_data", "prompt_embeds", "return_logprob", "return_routed_experts",
    "sampling_params", "use_beam_search", "videos",
})  # fmt: skip
# As vLLM's older clients begin the names of constraints.
_CONSTRAINT_PREFIX = "guided_"
_MAX_HEADER_CHARS = 1000
_MAX_NAMED = 100  # of a request's unknown fields, which may be millions
# Each name is logged once; a client that makes up names does not fill the log.
_MAX_LOGGED = 1000
_logged: set[str] = set()


def check_fields(body: RequestBody, settings: ServerSettings, beyond: tuple[str, ...] = ()) -> str:
    """The unknown fields of a request, for the header that names them. The log names them, too.

    Args:
        beyond: fields that are known and not served; each must be None or empty.

    Raises:
        ApiError: an unserved field asks for something, or, with strict_fields, one is unknown.
    """
    for name in beyond:
        if getattr(body, name, None):
            raise not_served(name)
    for name, value in (body.model_extra or {}).items():
        if value and (name in _NEVER_DROPPED or name.startswith(_CONSTRAINT_PREFIX)):
            raise not_served(_escaped(name))
    unknown = [_escaped(name) for name in body.unknown_fields[:_MAX_NAMED]]
    if unknown and settings.strict_fields:
        message = f"{unknown[0]} is not a field of this request"
        raise ApiError(400, message, param=unknown[0], code="unknown_field")
    for name in unknown:
        _log(name)
    return ", ".join(unknown)[:_MAX_HEADER_CHARS]


def not_served(name: str) -> ApiError:
    """The error for a field that asks for what there is not."""
    return ApiError(400, f"{name} is not served", param=name, code="unsupported_feature")


def _escaped(name: str) -> str:
    return name[:_MAX_HEADER_CHARS].encode("unicode_escape").decode()


def _log(name: str) -> None:
    if name not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(name)
        logger.warning("requests have the unknown field %s, which is ignored", name[:100])
