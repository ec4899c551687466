"""What the figures have to reach. A report says which bars are met, by the unrounded number."""

from __future__ import annotations

from dataclasses import dataclass

BEST = "best"  # The best of this engine's precisions that were measured.
PEER = "best peer"
LIMIT = "limit"


@dataclass(frozen=True)
class Bar:
    """A figure of `engine` has to be at least `least` times what it is compared with."""

    metric: str  # workload.figure
    engine: str
    against: str
    least: float


# The best precision of the best peer is the measure of a row, whichever that is.
_AGAINST_PEERS = (
    "single.decode_tok_s", "single.ttft_ms", "p1024.prefill_tok_s",
    "b8.output_tok_s", "b32.output_tok_s", "b32.ttft_ms",
    "mixed.output_tok_s", "mixed.ttft_ms", "mixed.gap_p99_ms",
    "azure.output_tok_s", "azure.ttft_ms", "azure.gap_p99_ms",
    "shared.output_tok_s", "shared.ttft_ms", "shared_late.output_tok_s", "shared_late.ttft_ms",
    "long.prefill_tok_s", "long.decode_tok_s", "long16.output_tok_s",
)  # fmt: skip
# Decoding alone reads the weights, and prefilling multiplies: the machine's own rates bound both.
_OF_THE_LIMIT = {
    "single.decode_tok_s": ("bf16", "A8W8", "A8W4"),
    "p1024.prefill_tok_s": ("bf16", "A8W8"),
}

BARS = (
    *(Bar(metric, BEST, PEER, 1.0) for metric in _AGAINST_PEERS),
    *(
        Bar(metric, f"allspark {precision}", LIMIT, 0.8)
        for metric, precisions in _OF_THE_LIMIT.items()
        for precision in precisions
    ),
)
