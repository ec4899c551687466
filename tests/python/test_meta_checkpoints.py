"""Meta's layout of Llama serialises to the same bytes as transformers' layout."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from allspark.model_loader import DashInferModel, HuggingFaceModel
from support.checkpoints import CONFIG, llama_tensors, shared_data, write_checkpoint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("error:.*float8")

PARAMS = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
          "vocab_size": -1}  # fmt: skip
# transformers' name -> Meta's, and the dimension that is split over ranks.
NAMES = {
    "model.embed_tokens": ("tok_embeddings", 1),
    "model.norm": ("norm", None),
    "lm_head": ("output", 0),
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.up_proj": ("feed_forward.w3", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
}


def in_pairs(rows, heads):
    """Row 2 i of a head is its row i; row 2 i + 1 is the row half a head further."""
    half = len(rows) // heads // 2
    order = [
        head * 2 * half + i + side * half
        for head in range(heads)
        for i in range(half)
        for side in (0, 1)
    ]
    return rows[order]


def meta_ranks(tensors, num_ranks, embedding_axis=1):
    ranks = [{"rope.freqs": np.ones(2, np.float32)} for _ in range(num_ranks)]
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        prefix, _, rest = module.partition("layers.")
        layer, _, rest = rest.partition(".")
        own, axis = NAMES[rest or module]
        if own == "tok_embeddings":
            axis = embedding_axis
        if own in ("attention.wq", "attention.wk"):
            values = in_pairs(values, 4 if own.endswith("q") else 2)
        own = f"layers.{layer}.{own}.weight" if rest else f"{own}.weight"
        for rank, part in enumerate(
            [values] * num_ranks if axis is None else np.split(values, num_ranks, axis)
        ):
            ranks[rank][own] = part
    return ranks


def write_meta(directory, ranks, params=PARAMS):
    directory.mkdir(exist_ok=True)
    (directory / "params.json").write_text(json.dumps(params))
    for number, rank in enumerate(ranks):
        state = {name: torch.tensor(np.ascontiguousarray(values)) for name, values in rank.items()}
        torch.save(state, directory / f"consolidated.{number:02d}.pth")
    return directory


def serialized(directory, out, name="m"):
    loader = HuggingFaceModel(str(directory), name, user_set_data_type="float32").load_model()
    loader.serialize_to_path(None, str(out))
    return (out / f"{name}.asparam").read_bytes()


@pytest.mark.parametrize(("num_ranks", "axis"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("tied", [False, True])
def test_same_bytes_as_from_transformers_layout(tmp_path, num_ranks, axis, tied):
    pytest.importorskip("allspark._allspark")
    config = {**CONFIG, "tie_word_embeddings": tied, "max_position_embeddings": 4096}
    tensors = llama_tensors(config)
    ranks = meta_ranks(tensors, num_ranks, axis)
    meta = serialized(write_meta(tmp_path / "meta", ranks), tmp_path / "a")
    write_checkpoint(tmp_path / "hf", tensors, config)
    assert meta[64:] == serialized(tmp_path / "hf", tmp_path / "b")[64:]  # Except for the file id.
    # The configuration is beside the files, as for any serialised model.
    written = DashInferModel(str(tmp_path / "a"), "m").read_model_config().get_model_config()
    expected = {key: written[key] for key in CONFIG}
    assert expected == config
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(("fields", "factor"), [({}, 32.0), ({"rope_scaling_factor": 8.0}, 8.0)])
def test_scaled_frequencies(tmp_path, fields, factor):
    """Llama 3.2's small models leave out their factor; others may too."""
    pytest.importorskip("allspark._allspark")
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**CONFIG, "rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": rope}
    tensors = llama_tensors(config)
    params = {**PARAMS, "rope_theta": 5e5, "use_scaled_rope": True, **fields}
    meta = serialized(write_meta(tmp_path / "meta", meta_ranks(tensors, 1), params), tmp_path / "a")
    write_checkpoint(tmp_path / "hf", tensors, config)
    assert meta[64:] == serialized(tmp_path / "hf", tmp_path / "b")[64:]


def test_serialised_beside_the_checkpoint(tmp_path):
    """config.json exists afterwards; the checkpoint is still read as Meta's."""
    pytest.importorskip("allspark._allspark")
    write_meta(tmp_path, meta_ranks(llama_tensors(CONFIG), 1))
    first = serialized(tmp_path, tmp_path)
    assert (tmp_path / "config.json").exists()
    assert serialized(tmp_path, tmp_path)[64:] == first[64:]


def test_tokenizer_without_settings(tmp_path):
    source = shared_data() / "checkpoints" / "stories260K"
    write_meta(tmp_path, meta_ranks(llama_tensors(CONFIG), 1))
    shutil.copy(source / "tokenizer.model", tmp_path)
    text = "Once upon a time"
    expected = HuggingFaceModel(str(source), "s").get_tokenizer().encode(text)
    assert HuggingFaceModel(str(tmp_path), "m").get_tokenizer().encode(text) == expected


def change(rank, name, edit):
    def apply(ranks):
        values = edit(ranks[rank].pop(name))
        if values is not None:
            ranks[rank][name] = values

    return apply


WQ = "layers.0.attention.wq.weight"
W1 = "layers.0.feed_forward.w1.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(1, WQ, lambda a: None), f"01.pth: tensor '{WQ}' is missing, consolidated.00"),
        (change(0, WQ, lambda a: None), f"01.pth: tensor '{WQ}' is not in consolidated.00"),
        (change(1, WQ, lambda a: a[:4]), f"'{WQ}' is float32 .4, 16., but float32 .8, 16. in"),
        (change(1, WQ, lambda a: a.astype("f2")), f"'{WQ}' is float16 .8, 16., but float32"),
        (lambda ranks: [rank.pop(W1) for rank in ranks], f"tensor '{W1}' is missing"),
        (lambda ranks: [r.update({W1: r[W1].ravel()}) for r in ranks], "expected two dimensions"),
        (lambda ranks: [r.update({WQ: r[WQ][:3]}) for r in ranks], "6 rows in all ranks, expected"),
        (lambda ranks: [r.update({"x": r[W1]}) for r in ranks], "no rule explains 'x'"),
        (lambda ranks: [r.update({WQ: r[WQ][:, :8]}) for r in ranks], "does not fit 'layers.0"),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(tmp_path, edit, message):
    pytest.importorskip("allspark._allspark")
    ranks = meta_ranks(llama_tensors(CONFIG), 2)
    edit(ranks)
    write_meta(tmp_path, ranks)
    with pytest.raises(ValueError, match=message):
        serialized(tmp_path, tmp_path / "out")


def test_a_rank_that_is_missing(tmp_path):
    write_meta(tmp_path, meta_ranks(llama_tensors(CONFIG), 2))
    (tmp_path / "consolidated.00.pth").unlink()
    with pytest.raises(FileNotFoundError, match="consolidated.00.pth is missing"):
        HuggingFaceModel(str(tmp_path), "m").load_model()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "params.json: dim is 0, expected 1"),
        ({"n_heads": None}, "'n_heads' is missing"),
        ({"rope_theta": 5e5, "use_scaled_rope": "yes"}, "use_scaled_rope is 'yes'"),
        ({"rope_theta": 12345.0}, "rope_theta is 12345.0, supported are 10000.0"),
    ],
)
def test_bad_parameters_are_refused_by_name(tmp_path, fields, message):
    write_meta(tmp_path, meta_ranks(llama_tensors(CONFIG), 1), {**PARAMS, **fields})
    with pytest.raises((ValueError, NotImplementedError), match=message):
        HuggingFaceModel(str(tmp_path), "m").load_model()
