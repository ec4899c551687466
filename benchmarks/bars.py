"""What the figures must reach. A report says which bars are met, judged by unrounded numbers."""

from __future__ import annotations

from dataclasses import dataclass

BEST = "best"  # The best measured precision of this engine.
PEER = "the best peer"
LIMIT = "the limit"


@dataclass(frozen=True)
class Bar:
    """A figure of `engine` must be at least `least` times the figure that it is compared with."""

    metric: str  # workload.figure
    engine: str
    against: str  # PEER, LIMIT, or one engine
    least: float


# Each row is compared with the best precision of its best peer, whichever that is.
_AGAINST_PEERS = (
    "single.decode_tok_s", "single.ttft_ms", "p1024.prefill_tok_s",
    "b8.output_tok_s", "b32.output_tok_s", "b32.ttft_ms",
    "mixed.output_tok_s", "mixed.ttft_ms", "mixed.gap_p99_ms",
    "azure.output_tok_s", "azure.ttft_ms", "azure.gap_p99_ms",
    "shared.output_tok_s", "shared.ttft_ms", "shared_late.output_tok_s", "shared_late.ttft_ms",
    "long.prefill_tok_s", "long.decode_tok_s", "long16.output_tok_s",
)  # fmt: skip
# Decoding alone reads the weights, and prefilling multiplies; the machine's rates limit both.
_OF_THE_LIMIT = {
    "single.decode_tok_s": ("bf16", "A8W8", "A8W4"),
    "p1024.prefill_tok_s": ("bf16", "A8W8"),
}

# 32 streams over HTTP: against the same engine without a server, and against other servers.
_SERVED = "b32.output_tok_s"
_OF_SERVERS = (
    Bar(_SERVED, "allspark-serve bf16", "allspark bf16", 0.97),
    Bar(_SERVED, "allspark-serve A8W8", "allspark A8W8", 0.97),
    Bar(_SERVED, "allspark-serve bf16", "vllm-serve bf16", 1.2),
    Bar(_SERVED, "allspark-serve bf16", "llama.cpp BF16", 2.0),
    Bar(_SERVED, "allspark-serve A8W8", "vllm-serve bf16", 1.9),
    Bar(_SERVED, "allspark-serve A8W8", "llama.cpp BF16", 1.9),
    Bar("b32.gap_p99_ms", "allspark-serve bf16", "vllm-serve bf16", 1.0),
    Bar("b32.gap_p99_ms", "allspark-serve bf16", "llama.cpp BF16", 1.0),
)

BARS = (
    *_OF_SERVERS,
    *(Bar(metric, BEST, PEER, 1.0) for metric in _AGAINST_PEERS),
    *(
        Bar(metric, f"allspark {precision}", LIMIT, 0.8)
        for metric, precisions in _OF_THE_LIMIT.items()
        for precision in precisions
    ),
)
