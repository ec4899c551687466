"""Random-weight checkpoints in the shapes of real models, in Hugging Face layout.

A model's speed depends on its shape and not on its values, so nothing is downloaded and torch is
not needed. Weights are bfloat16, seeded by tensor name, and written in pieces, so that little
memory is used for any size of model. The requests are token ids, but some engines refuse a model
without a tokenizer, so there is one with a token for each byte and one merge.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# Where environments, checkpoints and converted models are, unless --work-dir says otherwise.
WORK_DIR = Path("/tmp/allspark-bench")
_PIECE = 1 << 22  # Elements drawn at a time.


@dataclass(frozen=True)
class Shape:
    """The sizes that determine the cost of a model with grouped-query attention, and a gated MLP or
    experts with a gated shared expert."""

    title: str
    architecture: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    max_position: int
    # With experts, inner_size is the size of the shared expert.
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0

    _shared_name = "shared_expert"

    @property
    def has_qkv_bias(self) -> bool:
        return self.architecture.startswith("Qwen2")

    def config(self) -> dict[str, Any]:
        """The contents of config.json; all of these models have tied embeddings."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen2" if self.has_qkv_bias else "llama",
            **self._experts_config(),
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.inner_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def _experts_config(self) -> dict[str, Any]:
        if not self.num_experts:
            return {}
        return {
            "model_type": "qwen2_moe",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_size,
            "shared_expert_intermediate_size": self.inner_size,
        }

    def _mlp_tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        def gated(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
            up, down = (inner, self.hidden_size), (self.hidden_size, inner)
            names = {"gate_proj": up, "up_proj": up, "down_proj": down}
            return {f"{layer}mlp.{prefix}{name}.weight": shape for name, shape in names.items()}

        if not self.num_experts:
            return gated("", self.inner_size)
        shapes: dict[str, tuple[int, ...]] = {
            f"{layer}mlp.gate.weight": (self.num_experts, self.hidden_size),
            **gated(f"{self._shared_name}.", self.inner_size),
        }
        if self._router_rows > self.num_experts:
            shapes[f"{layer}mlp.shared_expert_gate.weight"] = (1, self.hidden_size)
        for expert in range(self.num_experts):
            shapes.update(gated(f"experts.{expert}.", self.expert_size))
        return shapes

    def _attention_tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        q_size, kv_size = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (size, self.hidden_size)
            if self.has_qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (self.hidden_size, q_size)
        return shapes

    @property
    def _router_rows(self) -> int:
        return self.num_experts + 1 if self.num_experts else 0

    @property
    def _attention_weights(self) -> int:
        q_size, kv_size = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden_size * (2 * q_size + 2 * kv_size)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, in the order of the file."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size)
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes.update(self._attention_tensors(prefix))
            shapes.update(self._mlp_tensors(prefix))
            shapes[f"{prefix}input_layernorm.weight"] = (self.hidden_size,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (self.hidden_size,)
        shapes["model.norm.weight"] = (self.hidden_size,)
        return shapes

    @property
    def body_weights(self) -> int:
        """Number of weights in the layers' matrix products, which are used for every token."""
        mlp = self.inner_size + self.experts_per_token * self.expert_size
        products = self.hidden_size * (3 * mlp + self._router_rows)
        return self.num_layers * (self._attention_weights + products)

    @property
    def head_weights(self) -> int:
        """Number of weights of the output head, which is used for every generated token."""
        return self.vocab_size * self.hidden_size

    def bytes_per_decoded_token(self, body_bits: float = 16, head_bits: float = 16) -> float:
        """Bytes of weights read to decode one token of one stream (the KV cache comes on top)."""
        return (body_bits * self.body_weights + head_bits * self.head_weights) / 8

    def prefill_flops(self, num_tokens: int) -> float:
        """Floating-point operations of a prompt: products and causal attention, and the head
        once."""
        products = 2.0 * self.body_weights * num_tokens + 2.0 * self.head_weights
        scores = num_tokens * (num_tokens + 1) / 2
        return products + 4.0 * self.num_layers * self.q_heads * self.head_dim * scores


@dataclass(frozen=True)
class LatentShape(Shape):
    """A shape with attention over latents, and experts with shared experts, as DeepSeek-V2-Lite.
    ``head_dim`` is the size of query heads, of which ``rotary_dim`` is rotated.
    """

    kv_latent: int = 0
    rotary_dim: int = 0
    value_dim: int = 0

    _shared_name = "shared_experts"

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "model_type": "deepseek_v2",
            "head_dim": None,
            "kv_lora_rank": self.kv_latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.head_dim - self.rotary_dim,
            "qk_rope_head_dim": self.rotary_dim,
            "v_head_dim": self.value_dim,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": self.inner_size // self.expert_size,
        }

    def _attention_tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        unrotated = self.head_dim - self.rotary_dim
        shapes = {
            "q_proj": (self.q_heads * self.head_dim, self.hidden_size),
            "kv_a_proj_with_mqa": (self.kv_latent + self.rotary_dim, self.hidden_size),
            "kv_a_layernorm": (self.kv_latent,),
            "kv_b_proj": (self.q_heads * (unrotated + self.value_dim), self.kv_latent),
            "o_proj": (self.hidden_size, self.q_heads * self.value_dim),
        }
        return {f"{layer}self_attn.{name}.weight": shape for name, shape in shapes.items()}

    @property
    def _router_rows(self) -> int:
        return self.num_experts

    @property
    def _attention_weights(self) -> int:
        shapes = self._attention_tensors("").values()
        return sum(rows * shape[0] for rows, *shape in shapes if shape)


SHAPES = {
    "0.5B": Shape("Qwen2.5-0.5B", "Qwen2ForCausalLM", 151936, 896, 4864, 24, 14, 2, 64,
                  1e6, 1e-6, 32768),
    "1B": Shape("Llama-3.2-1B", "LlamaForCausalLM", 128256, 2048, 8192, 16, 32, 8, 64,
                5e5, 1e-5, 32768),
    # With so little arithmetic, what remains is the engine's own work per step and token.
    "260K": Shape("stories260K", "LlamaForCausalLM", 512, 64, 172, 5, 8, 4, 8, 1e4, 1e-5, 2048),
    # Four of its 24 layers, and a fifth of its vocabulary.
    "A2.7B": Shape("Qwen1.5-MoE-A2.7B", "Qwen2MoeForCausalLM", 32000, 2048, 5632, 4, 16, 16, 128,
                   1e6, 1e-6, 8192, num_experts=60, experts_per_token=4, expert_size=1408),
    # Likewise four of DeepSeek-V2-Lite's 27 layers, all with experts.
    "V2-Lite": LatentShape("DeepSeek-V2-Lite", "DeepseekV2ForCausalLM", 32000, 2048, 2816, 4, 16,
                           16, 192, 1e4, 1e-6, 8192, num_experts=64, experts_per_token=6,
                           expert_size=1408, kv_latent=512, rotary_dim=64, value_dim=128),
    "tiny-moe": Shape("experts for tests", "Qwen2MoeForCausalLM", 320, 64, 128, 2, 4, 2, 16,
                      1e4, 1e-6, 2048, num_experts=8, experts_per_token=2, expert_size=64),
    "tiny-latents": LatentShape("latents for tests", "DeepseekV2ForCausalLM", 320, 64, 128, 2, 4, 4,
                                24, 1e4, 1e-6, 2048, num_experts=8, experts_per_token=2,
                                expert_size=64, kv_latent=64, rotary_dim=8, value_dim=64),
    "tiny": Shape("a model for tests", "Qwen2ForCausalLM", 320, 64, 128, 2, 4, 2, 16,
                  1e4, 1e-6, 2048),
}  # fmt: skip


def ensure_checkpoint(
    shape: str | Shape, directory: Path, seed: int = 0, silent_from: int | None = None
) -> Path:
    """The checkpoint of a shape in `directory`, written now unless a complete one is there. The
    layers from `silent_from` on add almost nothing, so that a shape with only the first layers
    gives nearly the same output."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    config_path = directory / "config.json"
    text = json.dumps(shape.config(), indent=1)
    if config_path.is_file() and config_path.read_text() == text:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config_path.unlink(missing_ok=True)
    with open(directory / "model.safetensors", "wb") as file:
        _write_safetensors(file, shape.tensors(), seed, silent_from)
    _write_tokenizer(directory, shape.vocab_size)
    config_path.write_text(text)  # Written last: if it exists, the weights are complete.
    return directory


def ensure_with_tokenizer(shape: str, directory: Path, tokenizer: Path | None) -> Path:
    """As ensure_checkpoint, with the tokenizer in this directory; None: one of bytes."""
    ensure_checkpoint(shape, directory)
    if tokenizer is not None:
        for path in tokenizer.glob("*token*"):
            shutil.copy(path, directory)
    return directory


def ensure_adapter(
    shape: Shape, directory: Path, modules: Sequence[str], rank: int, seed: int = 0
) -> Path:
    """A LoRA adapter in PEFT's layout for every layer's `modules` ("q_proj" ...) of a shape."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
    config_path = directory / "adapter_config.json"
    text = json.dumps(config)
    if config_path.is_file() and config_path.read_text() == text:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config_path.unlink(missing_ok=True)
    shapes = {}
    for name, weight in shape.tensors().items():
        module = name.removesuffix(".weight")
        if module != name and module.rsplit(".", 1)[-1] in modules:
            shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, weight[1])
            shapes[f"base_model.model.{module}.lora_B.weight"] = (weight[0], rank)
    with open(directory / "adapter_model.safetensors", "wb") as file:
        _write_safetensors(file, shapes, seed, None)
    config_path.write_text(text)
    return directory


def _byte_alphabet() -> list[str]:
    """The characters that stand for the 256 bytes in byte-level vocabularies."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    codes = visible + list(range(256, 256 + len(hidden)))
    return [chr(code) for _, code in sorted(zip(visible + hidden, codes, strict=True))]


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    end = "<|endoftext|>"
    tokens = [end, *_byte_alphabet(), "zz"]
    tokens += [f"zz{token_id:06d}" for token_id in range(len(tokens), vocab_size)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    spec = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": end, "special": True, **dict.fromkeys(flags, False)}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [["z", "z"]],
        },
    }
    names = {key: end for key in ("bos_token", "eos_token", "pad_token")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (directory / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _is_silent(name: str, silent_from: int | None) -> bool:
    if silent_from is None or not name.endswith(("o_proj.weight", "down_proj.weight")):
        return False
    return int(name.split(".")[2]) >= silent_from


def _write_safetensors(
    file: BinaryIO, shapes: dict[str, tuple[int, ...]], seed: int, silent_from: int | None
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, shape in shapes.items():
        deviation = 0.001 if _is_silent(name, silent_from) else 0.02
        for piece in _random_bf16(name, shape, seed, deviation):
            file.write(piece.tobytes())


def _random_bf16(
    name: str, shape: tuple[int, ...], seed: int, deviation: float
) -> Iterator[np.ndarray]:
    """Normally distributed values; for norms, around one."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    mean = 1.0 if name.endswith("norm.weight") else 0.0
    left = int(np.prod(shape))
    while left > 0:
        count = min(left, _PIECE)
        values = rng.standard_normal(count, np.float32) * np.float32(deviation) + np.float32(mean)
        # A bfloat16 is the upper half of a float32.
        yield (values.view(np.uint32) >> 16).astype("<u2")
        left -= count
