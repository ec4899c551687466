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


def serialized(source, directory, **options):
    from allspark.model_loader import HuggingFaceModel

    loader = HuggingFaceModel(str(source), "m", user_set_data_type="float32").load_model()
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
    its logits): weights that the engine keeps as integers have their scales rounded to bfloat16.
    """
    kept = dict(exact)
    restore(kept, graph)
    for name, values in exact.items():
        # Half a unit of 8 bits; the next integer is at least 1/127 away.
        assert (np.abs(kept[name] - values) <= 2.0**-8 * np.abs(values)).all(), name
    moved = logits_of(exact_model(with_weights(model, kept)), ids)
    reference = reference_for(with_weights(model, exact), ids, FLOAT32_FACTOR)
    return reference, np.abs(moved - reference.logits).max()
