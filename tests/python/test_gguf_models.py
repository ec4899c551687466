"""Models in GGUF files whose blocks are kept: the engine computes with the weights that the blocks
stand for, also where a weight has parts of several types, and takes the memory that the guide says.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.gguf_files import SCALES, llama_file, metadata, write_gguf
from support.model_file import PARTS, dequantise, read_tensors, restore
from support.quantized import GROUPED

gguf = pytest.importorskip("gguf")
native = pytest.importorskip("allspark._allspark")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import test_architectures as parity  # noqa: E402
from allspark.engine import TargetDevice  # noqa: E402
from allspark.model_loader.errors import CheckpointError  # noqa: E402
from allspark.model_loader.gguf.kept import KEPT_TYPES  # noqa: E402
from support.parity import FLOAT32_FACTOR, greedy, reference_for  # noqa: E402
from support.read_back import reference_of, serialized, with_weights  # noqa: E402
from test_gguf import write_row  # noqa: E402
from test_gguf_blocks import BITS_PER_WEIGHT  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*without a tokenizer"),
    pytest.mark.filterwarnings("error:.*weights are"),
    pytest.mark.torch,
]

# A block of the K types has 256 columns.
LARGE = {**GROUPED, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
IDS = np.random.default_rng(0).integers(3, GROUPED["vocab_size"], 40).tolist()


def llama(config=LARGE):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


def forms(graph):
    """{weight: (bits, group size, form)} of a file."""
    found = {}
    for quant in read_tensors(graph)[0].spec.weight_quant:
        assert not quant.asymmetric and not quant.float8 and not quant.reordered
        form = "table" if quant.table else "offset" if quant.offset else ""
        assert not (quant.half_scales and (quant.scale_codes or quant.power_scales))
        found[quant.tensor] = (quant.bits, quant.group_size, form)
    return found


def form_of(kind):
    form = KEPT_TYPES[kind]
    name = "table" if form.table else "offset" if form.offsets else ""
    return form.bits, form.group_size, name


def check(graph, exact, config=LARGE, ids=IDS):
    """The engine's logits against transformers', with the weights of the file and with the exact
    ones; from a whole prompt, and token by token."""
    kept = dict(exact)
    restore(kept, graph)
    own = reference_for(with_weights(llama(config), kept), ids, FLOAT32_FACTOR)
    reference, moved = reference_of(llama(config), exact, graph, ids)
    for chunks in ([], [1], [7]):
        logits = native.testing.forward_logits(str(graph), ids, chunks, 1, "", 16)
        own.check(logits)
        assert np.abs(logits - reference.logits).max() <= own.bound + moved
    return kept


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_every_type(tmp_path, kind):
    exact, _ = llama_file(tmp_path / "m.gguf", {"": kind}, LARGE)
    graph = serialized(tmp_path / "m.gguf", tmp_path / "out")
    found = forms(graph)
    assert set(found.values()) == {form_of(kind)}
    assert found.keys() == {
        "embedding", "lm_head",
        *(f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down")),
    }  # fmt: skip
    kept = check(graph, exact)
    for name, values in exact.items():
        np.testing.assert_array_equal(kept[name], values, err_msg=name)


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_tied_embeddings(tmp_path, kind):
    config = {**LARGE, "tie_word_embeddings": True}
    exact, _ = llama_file(tmp_path / "m.gguf", {"": kind}, config)
    graph = serialized(tmp_path / "m.gguf", tmp_path / "out")
    assert forms(graph)["embedding"] == form_of(kind) and "lm_head" not in forms(graph)
    check(graph, exact, config)


# Types by patterns of names, and the forms of the weights that have parts of several types.
MIXTURES = {
    "Q4_K_M": ({"v_proj": "Q6_K", "down": "Q6_K", "": "Q4_K"}, {"qkv": (6, 16, "offset")}),
    "Q5_K_M": ({"v_proj": "Q6_K", "down": "Q6_K", "": "Q5_K"}, {"qkv": (6, 16, "offset")}),
    "Q3_K_M": (
        {"v_proj": "Q5_K", "down": "Q5_K", "o_proj": "Q4_K", "": "Q3_K"},
        {"qkv": (6, 16, "offset")},
    ),
    "Q2_K": ({"v_proj": "Q4_K", "": "Q2_K"}, {"qkv": (4, 16, "offset")}),
    "IQ4_XS": ({"v_proj": "Q5_K", "": "IQ4_XS"}, {"qkv": (8, 32, "offset")}),
    "IQ4_NL": ({"v_proj": "IQ4_NL", "": "IQ4_XS"}, {"qkv": (4, 32, "table")}),
    "Q4_0": ({"v_proj": "Q4_1", "up": "Q5_0", "": "Q4_0"},
             {"qkv": (4, 32, "offset"), "gate_up": (6, 32, "")}),
    "Q8_0": ({"v_proj": "Q8_0", "gate": "Q6_K", "up": "Q8_0", "": "Q4_K"},
             {"qkv": (8, 32, "offset"), "gate_up": (8, 16, "")}),
}  # fmt: skip


@pytest.mark.parametrize("row", MIXTURES)
def test_mixtures_of_types(tmp_path, row):
    kinds, unified = MIXTURES[row]
    exact, _ = llama_file(tmp_path / "m.gguf", kinds, LARGE)
    graph = serialized(tmp_path / "m.gguf", tmp_path / "out")
    found = forms(graph)
    for name, form in unified.items():
        assert found[f"layers.0.{name}"] == found[f"layers.1.{name}"] == form
    assert found["layers.1.down"] == form_of(kinds.get("down", kinds[""]))
    check(graph, exact)


@pytest.mark.parametrize(
    ("row", "coded"), [("Q4_K_M", True), ("Q2_K", True), ("IQ4_XS", True), ("Q8_0", False)]
)
def test_scales_of_8_bits_of_mixtures(tmp_path, row, coded):
    """Only where all parts have them; then nothing is rounded."""
    exact, _ = llama_file(tmp_path / "m.gguf", MIXTURES[row][0], LARGE)
    graph = serialized(tmp_path / "m.gguf", tmp_path / "out")
    quants = {quant.tensor: quant for quant in read_tensors(graph)[0].spec.weight_quant}
    assert quants["layers.0.qkv"].scale_codes == coded
    assert quants["layers.0.qkv"].half_scales != coded
    kept = dict(exact)
    restore(kept, graph)
    for part in PARTS["qkv"] if coded else ():
        name = f"model.layers.0.{part}.weight"
        np.testing.assert_array_equal(kept[name], exact[name], err_msg=name)


@pytest.mark.parametrize("row", ["Q4_K_M", "IQ4_XS", "Q4_0"])
def test_greedy_tokens(tmp_path, row):
    exact, _ = llama_file(tmp_path / "m.gguf", MIXTURES[row][0], LARGE)
    kept = dict(exact)
    restore(kept, serialized(tmp_path / "m.gguf", tmp_path / "out"))
    model = with_weights(llama(), kept)
    expected, lead = greedy(model, IDS, 8)
    assert lead > 2 * reference_for(model, IDS + expected, FLOAT32_FACTOR).bound
    loader, engine = parity.image_of(str(tmp_path / "m.gguf"), "float32")
    config = loader.create_reference_runtime_config_builder(parity.NAME, TargetDevice.CPU, [0], 2)
    engine.install_model(config.build())
    assert int(engine.start_model(parity.NAME)) == 0, engine.last_error()
    assert parity.generate(engine, IDS, 8) == expected


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_int8_activations(tmp_path, kind):
    """They change a product by as much as the weights that Q8_0 keeps."""
    logits = {}
    for name in (kind, "Q8_0"):
        exact, _ = llama_file(tmp_path / f"{name}.gguf", {"": name}, LARGE)
        for options in ({}, {"enable_quant": True}):
            graph = serialized(tmp_path / f"{name}.gguf", tmp_path / "out", **options)
            quants = read_tensors(graph)[0].spec.weight_quant
            for quant in quants:
                expected = bool(options) and quant.tensor != "embedding"
                assert quant.quantize_activations == expected
            logits[name, bool(options)] = native.testing.forward_logits(
                str(graph), IDS, [], 1, "", 16
            )

    def change(name):
        plain = logits[name, False]
        return np.linalg.norm(logits[name, True] - plain) / np.linalg.norm(plain)

    assert 0 < change(kind) < 2 * change("Q8_0")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("compute_method", "activated"),
    [(None, False), ("weight_only", False), ("activate_quant", True)],
)
def test_keeping_by_name(tmp_path, compute_method, activated, tied):
    llama_file(tmp_path / "m.gguf", {"": "Q4_K"}, {**LARGE, "tie_word_embeddings": tied})
    settings = {"quant_method": "gguf"}
    if compute_method is not None:
        settings["compute_method"] = compute_method
    options = {"enable_quant": True, "customized_quant_config": settings}
    graph = serialized(tmp_path / "m.gguf", tmp_path / "out", **options)
    quants = read_tensors(graph)[0].spec.weight_quant
    assert len(quants) > 1
    for quant in quants:
        assert quant.offset
        # An embedding that is the head, too, is multiplied.
        is_product = tied or quant.tensor != "embedding"
        assert quant.quantize_activations == (activated and is_product)


def test_another_method_is_refused(tmp_path):
    llama_file(tmp_path / "m.gguf", {"": "Q4_K"}, LARGE)
    settings = {"enable_quant": True, "customized_quant_config": {"quant_method": "gptq"}}
    with pytest.raises(ValueError, match="'gptq', but the checkpoint's is 'gguf'"):
        serialized(tmp_path / "m.gguf", tmp_path / "out", **settings)


def test_a_head_that_is_kept_has_no_other_format(tmp_path):
    llama_file(tmp_path / "m.gguf", {"": "Q4_K"}, LARGE)
    config = {"quant_method": "gguf", "lm_head": "int8"}
    with pytest.raises(ValueError, match="given, but 'lm_head' is quantised in the checkpoint"):
        serialized(
            tmp_path / "m.gguf", tmp_path / "out", enable_quant=True, customized_quant_config=config
        )


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_memory(tmp_path, kind):
    config = {**LARGE, "vocab_size": 128}  # whole panels
    exact, stored = llama_file(tmp_path / "m.gguf", {"": kind}, config)
    file, _ = read_tensors(serialized(tmp_path / "m.gguf", tmp_path / "out"))
    names = [quant.tensor for quant in file.spec.weight_quant]
    ends = ("", "_high", "_scale", "_offset", "_block_scale", "_block_offset")
    own = {name + end for name in names for end in ends}
    bytes_here = sum(record.bytes for record in file.tensors if record.name in own)
    matrices = {name: entry[1] for name, entry in stored.items() if isinstance(entry, tuple)}
    elements = sum(exact[name].size for name in matrices)
    assert 8 * bytes_here == BITS_PER_WEIGHT[kind] * elements
    # The engine has no integers of 2 and 3 bits.
    most = {"Q2_K": 2.3, "Q3_K": 1.46}.get(kind, 1.3)
    assert bytes_here <= most * sum(raw.nbytes for raw in matrices.values())


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"])
def test_experts(tmp_path, monkeypatch, kind):
    write_row(tmp_path, "mixtral", monkeypatch, kind)
    graph = serialized(tmp_path / "m.gguf", tmp_path / "out")
    file, found = read_tensors(graph)
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    quants = {quant.tensor: quant for quant in file.spec.weight_quant}
    assert set(forms(graph).values()) == {form_of(kind)}
    type_id = gguf.GGMLQuantizationType[kind]
    for i in range(2):
        gate, up, down = (
            gguf.quants.dequantize(raw[f"blk.{i}.ffn_{part}_exps.weight"], type_id)
            for part in ("gate", "up", "down")
        )
        exact = {"gate_up": np.concatenate([gate, up], axis=1), "down": down}
        for name, values in exact.items():
            weight = dequantise(found, quants[f"layers.{i}.experts_{name}"])[0]
            np.testing.assert_array_equal(weight.astype(np.float32), values.reshape(weight.shape))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "Q4_1"])
def test_infinite_scales(tmp_path, kind):
    exact, stored = llama_file(tmp_path / "m.gguf", {"o_proj": kind, "": "F32"}, LARGE)
    name = "blk.1.attn_output.weight"
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    begin = SCALES[kind][0]
    tensors[name][3, begin : begin + 2] = np.array([np.inf], "<f2").view(np.uint8)
    entries = {
        own: (kind, values) if values.dtype == np.uint8 else values
        for own, values in tensors.items()
    }
    write_gguf(tmp_path / "m.gguf", "llama", entries, metadata(LARGE))
    scale = "o_scale" if kind == "Q4_1" else "o_block_scale"
    message = rf"m.gguf: tensor '{name}': tensor \"layers.1.{scale}\": row 3, column \d+ is"
    with pytest.raises(CheckpointError, match=message):
        serialized(tmp_path / "m.gguf", tmp_path / "out")


def test_an_offset_beyond_float16(tmp_path):
    """A symmetric weight's scales fit, and its zero point as an offset does not."""
    entries, scale = {}, np.array([3000], "<f2").view(np.uint8)
    llama_file(tmp_path / "m.gguf", {"v_proj": "Q5_0", "q_proj": "Q4_1", "": "F32"}, GROUPED)
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        values, kind = np.array(tensor.data), tensor.tensor_type.name
        if kind == "Q5_0":
            values[0, :2] = scale
        entries[tensor.name] = (kind, values) if values.dtype == np.uint8 else values
    entries["blk.0.attn_k.weight"] = ("Q4_1", entries["blk.0.attn_q.weight"][1][:32])
    entries["blk.1.attn_k.weight"] = ("Q4_1", entries["blk.1.attn_q.weight"][1][:32])
    write_gguf(tmp_path / "m.gguf", "llama", entries, metadata(GROUPED))
    message = r"layers.0.qkv_offset\": row 96, column 0 is -96000.*; it does not fit float16"
    with pytest.raises(CheckpointError, match=message):
        serialized(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.filterwarnings("default:.*weights are")
def test_types_without_a_common_form_become_floats(tmp_path):
    kinds = {"v_proj": "MXFP4", "gate": "IQ2_XS", "": "Q4_K"}
    exact, _ = llama_file(tmp_path / "m.gguf", kinds, LARGE)
    with pytest.warns(UserWarning, match="10 weights are IQ2_XS, MXFP4, Q4_K, and become float32"):
        graph = serialized(tmp_path / "m.gguf", tmp_path / "out")
    names = {name.rpartition(".")[2] for name in forms(graph)}
    assert names == {"embedding", "o", "down", "lm_head"}
    check(graph, exact)
