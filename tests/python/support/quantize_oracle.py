"""What the methods of allspark.quantize compute, written a second time: in float64, from the papers
and csrc/weights/README.md, one number after the other, without the package's own code. Also what
its tests have in common: calibration inputs, and checkpoints with a tokenizer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import numpy as np
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint


def bfloat16(values):
    """To the nearest bfloat16, to even where two are as near, as float64."""
    mantissa, exponent = np.frexp(np.asarray(values, np.float64))
    return np.ldexp(np.rint(mantissa * 2**8), exponent - 8)


def is_bfloat16(values):
    return not (np.ascontiguousarray(values, np.float32).view(np.uint32) & 0xFFFF).any()


def correlated(rng, tokens, features, spread=1.0):
    """Inputs like those of a layer: they depend on each other, and some are much larger."""
    mixed = rng.standard_normal((tokens, features)) @ rng.standard_normal((features, features))
    return (mixed / np.sqrt(features) * np.exp(spread * rng.standard_normal(features))).astype(
        np.float32
    )


@dataclass(frozen=True)
class Grid:
    """The scale and the zero point of each element of a weight, in float64."""

    scales: np.ndarray
    zeros: np.ndarray
    top: int

    @classmethod
    def of(cls, quantized):
        rows, features = quantized.values.shape
        per_group = features // quantized.scales.shape[1]
        middle = 2 ** (quantized.format.bits - 1)
        zeros = np.full(quantized.scales.shape, middle) if quantized.zeros is None else None
        return cls(
            np.repeat(quantized.scales.astype(np.float64), per_group, axis=1),
            np.repeat(quantized.zeros if zeros is None else zeros, per_group, axis=1).astype(float),
            2**quantized.format.bits - 1,
        )

    def places(self, weights, column):
        """Where the weights of a column lie between the integers, before rounding."""
        scales = self.scales[:, column]
        exact = np.divide(weights, scales, out=np.zeros_like(weights), where=scales != 0)
        return np.clip(exact, -self.zeros[:, column], self.top - self.zeros[:, column])

    def floats(self, values, column):
        return (values - self.zeros[:, column]) * self.scales[:, column]

    def to_float(self, values):
        return (values - self.zeros) * self.scales


@dataclass(frozen=True)
class GptqSteps:
    """`values` [rows, features], and how far each weight, as it was when its turn came, lay from
    the integer that it got: 0.5 at most, in steps of the grid, if that was the nearest."""

    values: np.ndarray
    distances: np.ndarray


def gptq_steps(weight, grid, products, damping=0.01, forced=None):
    """Algorithm 1 of the GPTQ paper (https://arxiv.org/abs/2210.17323) in float64, in blocks of one
    column. `forced`: integers that are taken instead of the nearest ones.
    """
    hessian = products.astype(np.float64)
    features = len(hessian)
    hessian = hessian + damping * np.trace(hessian) / features * np.eye(features)
    order = np.argsort(-np.diagonal(products), kind="stable")
    inverse = np.linalg.inv(hessian[np.ix_(order, order)])
    factor = np.linalg.cholesky((inverse + inverse.T) / 2).T
    left = weight.astype(np.float64)[:, order]
    values = np.zeros(weight.shape)
    distances = np.zeros(weight.shape)
    for step, column in enumerate(order):
        places = grid.places(left[:, step], column) + grid.zeros[:, column]
        chosen = np.rint(places) if forced is None else forced[:, column].astype(np.float64)
        values[:, column] = chosen
        distances[:, column] = np.abs(places - chosen)
        error = (left[:, step] - grid.floats(chosen, column)) / factor[step, step]
        left[:, step:] -= np.outer(error, factor[step, step:])
    return GptqSteps(values, distances)


def product_errors(weight, rounded, products):
    """Of each row: its squared error over all tokens, that row of (W - Q) X^T X (W - Q)^T."""
    error = weight.astype(np.float64) - rounded
    return np.einsum("ij,jk,ik->i", error, products.astype(np.float64), error)


def divided(inputs, scale):
    """A copy of InputStatistics, divided by `scale`."""
    made = replace(inputs, products=inputs.products.copy())
    made.divide(scale)
    return made


def log_probabilities(directory, sequences, quant_config=None):
    """Of a checkpoint in float32, in float64: [tokens of all sequences, vocabulary]."""
    from allspark import Engine
    from allspark import _allspark as native
    from allspark.model_loader import HuggingFaceModel

    loader = HuggingFaceModel(str(directory), "m", user_set_data_type="float32").load_model()
    loader.serialize_to_memory(
        Engine(), enable_quant=quant_config is not None, customized_quant_config=quant_config
    )
    logits = np.concatenate(
        [native.testing.forward_logits(loader._image, ids) for ids in sequences]
    ).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def divergence_of(directory, config, weight, sequences):
    """The mean KL divergence of a model that has this weight alone quantised from an exact one."""
    others = rf"^(?!{re.escape(weight)}$)layers"
    own_config = {**config.customized_quant_config(), "modules_to_not_convert": [others]}
    tables = [own_config.pop(key, None) for key in ("lm_head", "embedding")]
    if weight in ("lm_head", "embedding"):
        head, embedding = tables
        # Of a tied one, either says the format.
        own_config[weight] = head if weight == "lm_head" or embedding is None else embedding
    exact = log_probabilities(directory, sequences)
    own = log_probabilities(directory, sequences, own_config)
    return (np.exp(exact) * (exact - own)).sum(axis=1).mean()


class Serial:
    """An executor without threads."""

    map = staticmethod(map)


def word_checkpoint(directory, vocab_size):
    """Puts a tokenizer of numbered words beside a checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    return directory


def words(rng, count, vocab_size):
    """A text of so many of its words."""
    return " ".join(f"w{i}" for i in rng.integers(3, vocab_size, count))


SMALL = {
    **CONFIG,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "num_hidden_layers": 3,
    "vocab_size": 101,
}


def small_tensors(seed=0, config=SMALL):
    """Of a Llama whose activations stay of the size of 1."""
    tensors = llama_tensors(config, seed=seed)
    for name, values in tensors.items():
        if values.ndim == 1:
            tensors[name] = 1 + np.float32(0.2) * values
        elif "embed" not in name:
            tensors[name] = values * np.float32(values.shape[1] ** -0.5)
    return tensors


def small_checkpoint(directory, tensors=None, config=SMALL):
    if tensors is None:
        tensors = small_tensors(config=config)
    write_checkpoint(directory, tensors, config)
    return word_checkpoint(directory, config["vocab_size"])
