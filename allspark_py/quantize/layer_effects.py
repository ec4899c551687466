"""layer_effects(): what quantising each weight of a model does, the worst first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from allspark.eval.facts import CheckpointFacts, checkpoint_facts
from allspark.eval.files import TextFacts, Texts, to_texts
from allspark.eval.windows import check_settings
from allspark.model_loader import HuggingFaceModel
from allspark.quantize.calibration import read_ids
from allspark.quantize.checks import check_others
from allspark.quantize.config import QuantizeConfig
from allspark.quantize.effects import Effect, weight_effects
from allspark.quantize.layers import LayerSource
from allspark.quantize.source import open_checkpoint

DEFAULT_TOKENS = 1024


@dataclass(frozen=True)
class LayerEffects:
    """The effects, and what they were measured on."""

    model: CheckpointFacts
    texts: list[TextFacts]
    context: int
    num_sequences: int  # that were read, each of `context` tokens
    weights: list[Effect]  # the worst first


def layer_effects(
    model: str,
    texts: Texts,
    config: QuantizeConfig | None = None,
    *,
    context: int = 512,
    tokens: int = DEFAULT_TOKENS,
    threads: int = 0,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> list[Effect]:
    """Rounds one weight at a time to its format, and measures what that changes: of all weights
    that the config quantises, also the embedding and the head.

    Args:
        model: a checkpoint, as for quantize_model; one that is quantised already is dequantised.
        texts: files, or `allspark.eval.Text`.
        config: the formats; its method is not used.
        context: tokens of a sequence.
        tokens: read so many at most, in sequences that are chosen from all texts.
        threads: 0: all cores. They do not change the result.
        progress: called with the number of layers that are done, and of all.

    Raises:
        TypeError, ValueError, OSError: as quantize_model.
    """
    config = config or QuantizeConfig()
    loader = open_checkpoint(model, None, config.data_type, trust_remote_code)
    return checkpoint_effects(
        loader, texts, config, context=context, tokens=tokens, threads=threads, progress=progress
    ).weights


def checkpoint_effects(
    loader: HuggingFaceModel,
    texts: Texts,
    config: QuantizeConfig,
    *,
    context: int = 512,
    tokens: int = DEFAULT_TOKENS,
    threads: int = 0,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> LayerEffects:
    """layer_effects() of a checkpoint that is open."""
    check_settings(context, tokens)
    plan = loader.plan(config.customized_quant_config())
    found = to_texts(texts)
    ids = read_ids(loader, found, tokens // context, context, field="context")
    check_others(LayerSource(plan))
    effects = weight_effects(plan, ids, threads, progress, tables=True)
    return LayerEffects(
        model=checkpoint_facts(loader),
        texts=[text.facts for text in found],
        context=context,
        num_sequences=len(ids),
        weights=sorted(effects, key=lambda effect: -effect.kl_divergence),
    )
