"""What the figures must reach. A report says which bars are met, judged by unrounded numbers."""

from __future__ import annotations

from dataclasses import dataclass

BEST = "best"  # The best measured precision of this engine.
PEER = "the best peer"
LIMIT = "the limit"
NOTHING = "nothing"


@dataclass(frozen=True)
class Bar:
    """A figure of `engine` must be at least `least` times the figure that it is compared with.
    With `most` the figure itself is judged, in the unit that its table has."""

    metric: str  # workload.figure
    engine: str
    against: str = NOTHING  # PEER, LIMIT, or one engine
    least: float = 1.0
    most: float | None = None

    @property
    def wanted(self) -> str:
        if self.most is not None:
            return f"at most {self.most:g}"
        return f"{self.least:g} of {self.against}"

    def is_met(self, value: float) -> bool:
        """`value`: the ratio, or the figure where that is limited."""
        return value >= self.least if self.most is None else value <= self.most


@dataclass(frozen=True)
class OwnBar:
    """What a benchmark of this engine alone must reach. `verdicts.py` knows the figure by its
    name."""

    benchmark: str
    figure: str
    bound: float
    is_least: bool = False  # else the bound is the most

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.is_least else value <= self.bound


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

# 32 streams over HTTP, against other servers. Against the same engine without a server:
# server_speed.py, whose turns follow each other closely enough for so small a difference.
_SERVED = "b32.output_tok_s"
_OF_SERVERS = (
    Bar(_SERVED, "allspark-serve bf16", "vllm-serve bf16", 1.2),
    Bar(_SERVED, "allspark-serve bf16", "llama.cpp BF16", 2.0),
    Bar(_SERVED, "allspark-serve A8W8", "vllm-serve bf16", 1.9),
    Bar(_SERVED, "allspark-serve A8W8", "llama.cpp BF16", 1.9),
    # Against the engine's own clock: runs beside each other differ by more than what is asked. Of
    # requests that come alone: those behind others wait for these, whenever they came.
    Bar("b32.ttft_later_ms", "allspark-serve bf16", most=3.0),
    Bar("b32.ttft_later_ms", "allspark-serve A8W8", most=3.0),
    Bar("b32.gap_p99_ms", "allspark-serve bf16", "vllm-serve bf16", 1.0),
    Bar("b32.gap_p99_ms", "allspark-serve bf16", "llama.cpp BF16", 1.0),
)

# Files of others, as they are: against llama.cpp, and against forms of this engine's own.
_OF_FORMATS = (
    Bar("single.decode_tok_s", "allspark A8Q4_K_M", "llama.cpp Q4_K_M", 1.15),
    Bar("p1024.prefill_tok_s", "allspark A8Q4_K_M", "llama.cpp Q4_K_M", 2.0),
    Bar("single.rss_of_source", "allspark A8Q4_K_M", most=1.25),
    Bar("single.decode_tok_s", "allspark A8MXFP4", "allspark A8W4", 0.95),
    Bar("single.decode_tok_s", "allspark FP8", "allspark bf16", 1.7),
)

BARS = (
    *_OF_SERVERS,
    *_OF_FORMATS,
    *(Bar(metric, BEST, PEER, 1.0) for metric in _AGAINST_PEERS),
    *(
        Bar(metric, f"allspark {precision}", LIMIT, 0.8)
        for metric, precisions in _OF_THE_LIMIT.items()
        for precision in precisions
    ),
)

OWN_BARS = (
    OwnBar("http_streams", "CPU a frame, of the bare protocol's", 4.0),
    OwnBar("long_prompt", "p99 gap, steps more than quiet", 2.0),
    OwnBar("batch", "prompt lines: tokens/s, of the SDK's", 0.97, is_least=True),
    OwnBar("batch", "request lines: tokens/s, of the SDK's", 0.97, is_least=True),
    OwnBar("batch", "prompt lines: peak memory, MB more", 150.0),
    OwnBar("batch", "request lines: peak memory, MB more", 150.0),
    OwnBar("choices", "questions/s, of transformers'", 2.0, is_least=True),
    OwnBar("choices", "largest difference of log-likelihoods", 1e-3),
    OwnBar("choices", "questions with the same answers", 1.0, is_least=True),
    OwnBar("quantizing", "s, of llm-compressor's", 0.5),
    OwnBar("quantizing", "peak memory, of llm-compressor's", 0.4),
    OwnBar("quantizing", "peak memory, of that with half of the layers", 1.02),
    OwnBar("server_speed", "bf16: tokens/s, of the SDK's", 0.97, is_least=True),
    OwnBar("server_speed", "A8W8: tokens/s, of the SDK's", 0.97, is_least=True),
    OwnBar("server_start", "s until it answers", 3.0),
    OwnBar("server_start", "memory, MB above the engine's", 150.0),
)
