"""The log of prompts, which is off unless max_log_len says how much of each it has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from allspark.serve.catalog import Entry
from allspark.serve.choice import request_id
from allspark.serve.settings import ServerSettings

logger = logging.getLogger("allspark.serve.prompts")


def log_prompt(settings: ServerSettings, entry: Entry, ids: Sequence[int]) -> None:
    """Logs the first characters of a prompt that was started, at INFO, with its request's id."""
    bound = settings.max_log_len
    if bound is None or not logger.isEnabledFor(logging.INFO):
        return
    # A token of ordinary text has a character at least.
    text = entry.model.tokenizer.decode(list(ids[: bound + 1]), skip_special_tokens=False)
    logger.info("%s %s: %r", request_id.get(), entry.name, text[:bound])
