"""The weights that the loaders read from a quantised checkpoint, and how much the engine's form of
them may change the logits.
"""

from __future__ import annotations

import numpy as np
from support.model_file import restore
from support.parity import FLOAT32_FACTOR, exact_model, logits_of, reference_for


def weights_of(source):
    """{transformers' name: the weight read, in float32}."""
    from allspark.model_loader import HuggingFaceModel
    from allspark.model_loader.storage import as_float32

    entries = HuggingFaceModel(str(source), "m").load_model().checkpoint_tensors()
    weights = {}
    for name, entry in entries.items():
        with entry.open() as array:
            weights[name] = np.array(as_float32(array, entry.dtype))
    return weights


def serialized(source, directory, data_type="float32", **options):
    """The file that a checkpoint makes in a directory."""
    from allspark.model_loader import HuggingFaceModel

    loader = HuggingFaceModel(str(source), "m", user_set_data_type=data_type).load_model()
    loader.serialize_to_path(None, str(directory), **options)
    return directory / "m.asgraph"


def with_weights(model, weights):
    import torch

    state = {name: torch.tensor(values) for name, values in weights.items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    return model


def reference_of(model, exact, graph, ids):
    """(the Reference of ``model`` with the weights ``exact``, how much the file ``graph`` changes
    its logits): weights that the engine keeps as integers may have their scales rounded.
    """
    kept = dict(exact)
    for name, bound in restore(kept, graph).items():
        assert (np.abs(kept[name] - exact[name]) <= bound).all(), name
    moved = logits_of(exact_model(with_weights(model, kept)), ids)
    reference = reference_for(with_weights(model, exact), ids, FLOAT32_FACTOR)
    return reference, np.abs(moved - reference.logits).max()


def check_logits(config, weights, graph):
    """Compares the file ``graph`` with transformers' Llama of ``config`` and the same weights;
    ``weights`` have the numbers of the checkpoint.
    """
    import torch
    import transformers
    from allspark import _allspark as native

    kept = dict(weights)
    restore(kept, graph)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    model.load_state_dict({name: torch.tensor(values) for name, values in kept.items()})
    ids = np.random.default_rng(0).integers(3, config["vocab_size"], 40).tolist()
    ours = native.testing.forward_logits(str(graph), ids, [], 1, "", 16)
    reference_for(model, ids, FLOAT32_FACTOR).check(ours)
