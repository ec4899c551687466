"""RequestStatInfo: the statistics of one request, with names."""

from __future__ import annotations

import enum


class RequestStatInfo:
    """The dict of `ResultQueue.RequestStatInfo()` as attributes; ms, tokens, tokens/s."""

    class Key(str, enum.Enum):
        KEY_REQUEST_TIME_TS = "arrival_time"
        KEY_FIRST_TOKEN_TIME_TS = "first_token_time"
        KEY_LAST_TOKEN_TIME_TS = "last_token_time"
        KEY_TTFT_MS = "time_to_first_token"
        KEY_SCHEDULE_TIME_MS = "time_in_queue"
        KEY_TOTAL_TIME_MS = "finished_time"
        KEY_INPUT_LEN = "context_token_length"
        KEY_OUTPUT_LEN = "generated_token_length"
        KEY_INPUT_CACHE_LEN = "context_cached_length"
        KEY_CONTEXT_TPS = "context_tps"
        KEY_GENERATE_TPS = "generate_tps"
        KEY_DRAFT_LEN = "draft_token_length"
        KEY_ACCEPTED_DRAFT_LEN = "accepted_draft_token_length"

    def __init__(self, info: dict[str, int]):
        self.info = dict(info)
        self.arrival_time = info["arrival_time"]
        self.first_token_time = info["first_token_time"]
        self.last_token_time = info["last_token_time"]
        self.time_to_first_token = info["time_to_first_token"]
        self.time_in_queue = info["time_in_queue"]
        self.finish_time = info["finished_time"]
        self.context_token_length = info["context_token_length"]
        self.generated_token_length = info["generated_token_length"]
        self.context_cached_length = info["context_cached_length"]
        self.context_tps = info["context_tps"]
        self.generate_tps = info["generate_tps"]
        self.draft_token_length = info["draft_token_length"]
        self.accepted_draft_token_length = info["accepted_draft_token_length"]

    def __repr__(self) -> str:
        return f"RequestStatInfo({self.info})"
