"""The mapping of one GGUF architecture to one of the declarations in ``architectures/``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .source import Source

Fields = Callable[[Source, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """``names`` are modules of a layer that do not follow from the declaration (names.py), by
    GGUF's; ``fields`` returns the configuration beyond what all architectures have. A name with
    ``{e}`` is a module of each expert; one tensor has all of them.

    Where llama.cpp's layout differs from transformers': ``pairs``, rows of queries and keys that
    are rotated together are adjacent, not half a head apart; ``by_groups``, all queries are
    followed by all keys and values, not stored group by group; ``transposed``, matrices whose rows
    are output features, not input features; ``norms_with_one``, norms have one added.
    ``latents``: attention is over latents.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    fields: Fields = lambda source, config: {}
    pairs: bool = False
    by_groups: bool = False
    transposed: tuple[str, ...] = ()
    norms_with_one: bool = False
    layer_norm: bool = False
    latents: bool = False


def biased(source: Source, module: str) -> bool:
    """Whether this matrix of the layers has a bias; layer 0 is checked for all."""
    return source.tensor(f"blk.0.{module}.bias") is not None


def sliding_window(source: Source) -> int | None:
    return source.integer("attention.sliding_window", 0, 0) or None


def qkv_limit(source: Source) -> dict[str, Any]:
    """The bound of queries, keys and values, as in the ``attn_config`` of MPT and DBRX."""
    if not source.has("attention.clamp_kqv"):
        return {}
    return {"clip_qkv": source.number("attention.clamp_kqv")}
