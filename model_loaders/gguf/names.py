"""The names that the tensors of a GGUF file have in the declarations of ``architectures/``."""

from __future__ import annotations

from ..spec import find_architecture
from .family import Family

# GGUF's modules by the decoder's tensors; of several sources each has its own module.
_MODULES: dict[str, tuple[str, ...]] = {
    "embedding": ("token_embd",),
    "embedding_norm": ("token_embd_norm",),
    "position_embedding": ("position_embd",),
    "final_norm": ("output_norm",),
    "lm_head": ("output",),
    "attention_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    "o": ("attn_output",),
    "attention_post_norm": ("post_attention_norm",),
    "mlp_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "up": ("ffn_up",),
    "down": ("ffn_down",),
    "mlp_post_norm": ("post_ffw_norm",),
}
# Where the declaration has a single source.
_FUSED = {"qkv": ("attn_qkv",), "gate_up": ("ffn_up",)}


def module_names(family: Family) -> dict[str, str]:
    """The declaration's modules by GGUF's, which are without "blk.N."; ``{i}`` stands for N."""
    names: dict[str, str] = {}
    for rule in find_architecture(family.architecture).weights:
        target = rule.target.removeprefix("layers.{i}.")
        if target not in _MODULES:
            continue
        own = _FUSED[target] if len(rule.modules) < len(_MODULES[target]) else _MODULES[target]
        for module, name in zip(own, rule.modules, strict=True):
            names.setdefault(module, name)
    layer, _, _ = names["attn_output"].partition("{i}.")
    return names | {module: f"{layer}{{i}}.{name}" for module, name in family.names.items()}


def name_of(names: dict[str, str], own: str) -> tuple[str, str]:
    """The declaration's name of GGUF's tensor ``own``, and its module; an unknown name stays."""
    path, _, kind = own.rpartition(".")
    parts = path.split(".")
    in_layer = len(parts) == 3 and parts[0] == "blk"
    module = parts[2] if in_layer else path
    name = names.get(module, "")
    if not name or ("{i}" in name) != in_layer:
        return own, path
    if in_layer:
        name = name.replace("{i}", parts[1])
    return name if name.endswith(f"_{kind}") else f"{name}.{kind}", module
