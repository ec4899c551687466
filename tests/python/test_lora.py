"""LoRA through the engine: adapters in PEFT's layout, against transformers with the same adapter in
float64, and against each other: the adapter of one request changes no bit of another's output.

The bounds are those of support/parity.py, for the model with its adapter.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from engine_fixture import read_all
from support.checkpoints import write_checkpoint
from support.int8 import quantized_rows, quantized_weight
from support.lora import LINEAR, PREFIX, adapter_tensors, modules_named, write_adapter
from support.model_file import restore
from support.parity import BFLOAT16_FACTOR, FLOAT32_FACTOR, randomize, reference_for

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("allspark._allspark")

# The models are far too small for several threads, and waiting threads would slow down the rest.
torch.set_num_threads(1)

from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice  # noqa: E402

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROWS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
ENDS = ("embed_tokens", "lm_head")
TARGETS = {"linear": LINEAR, "q-v": ("q_proj", "v_proj"), "all": (*LINEAR, *ENDS)}
SUCCESS = AsStatus.ALLSPARK_SUCCESS
NAME, PROMPT = "m", np.random.default_rng(0).integers(3, 101, 48).tolist()


class Adapted(torch.nn.Module):
    """A module, with the two matrices of an adapter added to it."""

    def __init__(self, base, a, b, scale):
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, x):
        if isinstance(self.base, torch.nn.Embedding):
            return self.base(x) + torch.nn.functional.embedding(x, self.a.T) @ self.b.T * self.scale
        return self.base(x) + self.shrunk(x) @ self.b.T * self.scale

    def shrunk(self, x):
        return x @ self.a.T


class AdaptedInt8(Adapted):
    """An adapter of a matrix that reads int8: 8 bits, with a scale per row of A, and one per 16 of
    the rank for B and what it reads. Its input is in int8 already."""

    def __init__(self, base, a, b, scale):
        padding = -len(a) % 16
        b = torch.nn.functional.pad(b, (0, padding))
        b = quantized_weight(b.reshape(len(b), -1, 16)).reshape(b.shape)
        a = torch.nn.functional.pad(quantized_weight(a), (0, 0, 0, padding))
        super().__init__(base, a.float(), b.float(), scale)

    def shrunk(self, x):
        return quantized_rows(super().shrunk(x), 16)


def with_int8_inputs(model):
    """The model with every matrix product on int8 activations, and its adapters in 8 bits."""
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, AdaptedInt8)):
            module.register_forward_pre_hook(lambda _, inputs: (quantized_rows(inputs[0]),))
    return model


def config_of(row):
    return {**BASE, **ROWS[row][1]}


def build(row, seed=1):
    prefix, fields = ROWS[row]
    config = getattr(transformers, f"{prefix}Config")(**{**BASE, **fields})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    randomize(model, seed)
    return model


def adapted(model, tensors, scale, linear=Adapted):
    """A copy of the model with the adapter added to its modules, in the model's type. ``linear``:
    the class of adapted matrices other than the embedding."""
    model = copy.deepcopy(model)
    for key, a in tensors.items():
        if "_A" not in key:
            continue
        path = key.removeprefix(PREFIX).split(".lora_")[0]
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        matrices = [
            torch.from_numpy(m).to(model.dtype) for m in (a, tensors[key.replace("_A", "_B")])
        ]
        base = getattr(owner, name)
        kind = Adapted if isinstance(base, torch.nn.Embedding) else linear
        setattr(owner, name, kind(base, *matrices, scale))
    return model


def make_adapter(directory, row, targets, rank=8, seed=5, alpha=None, exact_in_bfloat16=False):
    """An adapter's directory and tensors, as large as the weights it changes; its scale is 2."""
    tensors = adapter_tensors(modules_named(targets, config_of(row)), rank, config_of(row), seed)
    for key, value in tensors.items():
        if "embedding_A" in key:
            value *= 8  # The columns of a one-hot vector are not summed.
        if exact_in_bfloat16:
            tensors[key] = torch.from_numpy(value).bfloat16().float().numpy()
    fields = {"r": rank, "lora_alpha": 2 * rank if alpha is None else alpha}
    return write_adapter(directory, tensors, target_modules=list(targets), **fields), tensors


class Served:
    """A model in an engine that runs."""

    def __init__(self, directory, data_type="float32", serialize=None, **settings):
        self.engine = Engine()
        self.loader = HuggingFaceModel(str(directory), NAME, user_set_data_type=data_type)
        self.loader.load_model().serialize_to_memory(self.engine, **(serialize or {}))
        builder = self.loader.create_reference_runtime_config_builder(
            NAME, TargetDevice.CPU, [0], 8
        )
        config = builder.update_from_dict({"kv_cache_span_size": 16, **settings}).build()
        assert self.engine.install_model(config) == SUCCESS, self.engine.last_error()
        assert self.engine.start_model(NAME) == SUCCESS, self.engine.last_error()

    def load(self, name, lora):
        assert self.engine.load_lora(NAME, name, lora) == SUCCESS, self.engine.last_error()

    def start(self, ids, lora="", **fields):
        fields = {"do_sample": False, "early_stopping": False, "lora_name": lora, **fields}
        return self.engine.start_request_ids(NAME, None, ids, fields)

    def logits(self, ids, lora=""):
        status, _, queue = self.start(
            ids,
            lora,
            prompt_only=True,
            output_logits="all",
            enable_tensors_from_model_inference=True,
        )
        assert status == SUCCESS, self.engine.last_error()
        (tensors,) = queue.Get().tensors_from_model_inference
        return tensors["logits"]

    def greedy(self, ids, lora="", length=16):
        status, _, queue = self.start(ids, lora, max_new_tokens=length)
        assert status == SUCCESS, self.engine.last_error()
        return read_all(queue)


# Against transformers.


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("row", ROWS)
def test_float32_logits(tmp_path, row, targets):
    model = build(row)
    model.save_pretrained(tmp_path / "base")
    directory, tensors = make_adapter(tmp_path / "lora", row, TARGETS[targets])
    reference = reference_for(adapted(model, tensors, 2.0), PROMPT, FLOAT32_FACTOR)
    served = Served(tmp_path / "base")
    alone = served.logits(PROMPT)
    served.load("a", directory)
    reference.check(served.logits(PROMPT, "a"))
    # The adapter changes much, so the test shows whether it is applied.
    assert np.abs(alone - reference.logits).max() > 1e4 * reference.bound
    np.testing.assert_array_equal(served.logits(PROMPT), alone)


@pytest.mark.parametrize("row", ROWS)
def test_bfloat16_logits(tmp_path, row):
    """With matrices that bfloat16 can hold, and a power of two as scale, ours are not rounded."""
    model = build(row).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    directory, tensors = make_adapter(
        tmp_path / "lora", row, TARGETS["all"], exact_in_bfloat16=True
    )
    reference = reference_for(adapted(model, tensors, 2.0), PROMPT, BFLOAT16_FACTOR)
    served = Served(tmp_path / "base", "bfloat16")
    served.load("a", directory)
    reference.check(served.logits(PROMPT, "a"))


@pytest.mark.parametrize("rank", [1, 3, 16, 64])
def test_ranks(tmp_path, rank):
    model = build("llama")
    model.save_pretrained(tmp_path / "base")
    directory, tensors = make_adapter(tmp_path / "lora", "llama", TARGETS["all"], rank, alpha=rank)
    reference = reference_for(adapted(model, tensors, 1.0), PROMPT, FLOAT32_FACTOR)
    served = Served(tmp_path / "base")
    served.load("a", directory)
    reference.check(served.logits(PROMPT, "a"))


QUANTISED = {
    "int8": {"weight_format": "int8"},
    "int4": {"weight_format": "int4", "group_size": 32},
    "a8w8": {"weight_format": "int8", "compute_method": "activate_quant"},
}


@pytest.mark.parametrize("form", QUANTISED)
def test_quantised_base_weights(tmp_path, form):
    """The adapter is added in full precision, or in 8 bits where the weights read int8."""
    # No activation of these is a near tie; if a prompt makes one, choose another seed.
    model = build("llama", seed=2)
    model.save_pretrained(tmp_path / "base")
    config = {**QUANTISED[form], "lm_head": "int8", "embedding": "int8"}
    options = {"enable_quant": True, "customized_quant_config": config}
    loader = HuggingFaceModel(str(tmp_path / "base"), NAME, user_set_data_type="float32")
    loader.load_model().serialize_to_path(None, str(tmp_path / "file"), **options)
    restored = {name: value.numpy() for name, value in model.state_dict().items()}
    restore(restored, tmp_path / "file" / f"{NAME}.asgraph")
    model.load_state_dict({name: torch.from_numpy(value) for name, value in restored.items()})

    directory, tensors = make_adapter(tmp_path / "lora", "llama", TARGETS["all"])
    if form == "a8w8":
        model = with_int8_inputs(adapted(model, tensors, 2.0, AdaptedInt8))
    else:
        model = adapted(model, tensors, 2.0)
    reference = reference_for(model, PROMPT, FLOAT32_FACTOR)
    served = Served(tmp_path / "base", serialize=options)
    served.load("a", directory)
    reference.check(served.logits(PROMPT, "a"))


# Several adapters in one batch.


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """A llama with adapters of several ranks and modules, and the outputs of each alone."""
    folder = tmp_path_factory.mktemp("crowd")
    build("llama").save_pretrained(folder / "base")
    served = Served(folder / "base", lora_max_num=5, engine_max_prefill_length=32)
    for seed, (targets, rank) in enumerate(
        [(LINEAR, 8), (("q_proj", "v_proj"), 3), (ENDS, 16), ((*LINEAR, *ENDS), 1)]
    ):
        directory, _ = make_adapter(folder / str(seed), "llama", targets, rank, seed)
        served.load(f"lora-{seed}", directory)
    return served, folder


def test_adapters_in_one_batch_change_no_bit(crowd):
    served, _ = crowd
    names = ["", *served.engine.list_loras(NAME)]
    prompts = [PROMPT[: 20 + 7 * i] for i in range(3)]
    alone = {(name, len(ids)): served.greedy(ids, name) for name in names for ids in prompts}
    assert len({tuple(alone[name, len(PROMPT[:34])]) for name in names}) == len(names)
    states = served.engine.clear_prefix_cache(NAME)
    assert states > 0
    queues = {
        (name, len(ids)): served.start(ids, name, max_new_tokens=16)[2]
        for ids in prompts
        for name in names
    }
    assert {key: read_all(queue) for key, queue in queues.items()} == alone


def test_an_unknown_adapter_is_refused(crowd):
    served, _ = crowd
    status, handle, queue = served.start(PROMPT, "lora-9")
    assert (status, handle, queue) == (AsStatus.ALLSPARK_LORA_NOT_FOUND, None, None)
    assert "lora_name is 'lora-9'; loaded are 'lora-0'" in served.engine.last_error()
    assert served.engine.unload_lora(NAME, "lora-9") == AsStatus.ALLSPARK_LORA_NOT_FOUND
    with pytest.raises(KeyError, match="other"):
        served.engine.list_loras("other")


def test_an_adapter_in_use_stays(crowd):
    served, folder = crowd
    for _ in range(20):  # On a busy machine the request may have ended before the second call.
        _, handle, _ = served.start(PROMPT, "lora-1", max_new_tokens=400)
        status = served.engine.unload_lora(NAME, "lora-1")
        served.engine.release_request(NAME, handle)
        served.engine.sync_request(NAME)
        if status != SUCCESS:
            break
        served.load("lora-1", folder / "1")
    assert status == AsStatus.ALLSPARK_LORA_IN_USE
    assert "have not ended" in served.engine.last_error()
    assert served.engine.load_lora(NAME, "lora-1", "x") == AsStatus.ALLSPARK_IO_ERROR
    assert served.engine.list_loras(NAME) == [f"lora-{i}" for i in range(4)]


def test_another_adapter_under_the_same_name_finds_no_old_blocks(crowd, tmp_path):
    served, folder = crowd
    served.load("swapped", folder / "0")
    old = served.greedy(PROMPT, "swapped")
    assert served.engine.find_prefix(NAME, PROMPT, "swapped") > 0
    assert served.engine.load_lora(NAME, "swapped", folder / "3") == (
        AsStatus.ALLSPARK_LORA_ALREADY_LOADED
    )
    assert served.engine.unload_lora(NAME, "swapped") == SUCCESS
    served.load("swapped", folder / "3")
    assert served.engine.find_prefix(NAME, PROMPT, "swapped") == 0
    new = served.greedy(PROMPT, "swapped")
    assert new == served.greedy(PROMPT, "lora-3") != old
    assert served.engine.unload_lora(NAME, "swapped") == SUCCESS


def test_limits(tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    served = Served(tmp_path / "base", lora_max_num=2, lora_max_rank=4)
    small, _ = make_adapter(tmp_path / "small", "llama", LINEAR, 4)
    large, _ = make_adapter(tmp_path / "large", "llama", LINEAR, 5)
    assert served.engine.load_lora(NAME, "a", large) == (
        AsStatus.ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR
    )
    assert "rank 5; lora_max_rank is 4" in served.engine.last_error()
    served.load("a", small)
    served.load("b", small)
    assert served.engine.load_lora(NAME, "c", small) == (
        AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR
    )
    assert served.engine.unload_lora(NAME, "a") == SUCCESS
    served.load("c", small)


def test_an_adapter_of_another_model_is_refused(crowd, tmp_path):
    served, _ = crowd
    config = {**BASE, "intermediate_size": 88}
    tensors = adapter_tensors(modules_named(("down_proj",), config), 4, config)
    directory = write_adapter(tmp_path / "lora", tensors, target_modules=["down_proj"])
    assert served.engine.load_lora(NAME, "x", directory) == AsStatus.ALLSPARK_PARAM_ERROR
    assert "down_proj.lora_A.weight' has shape [4, 88], expected ['rank', 96]" in (
        served.engine.last_error()
    )
    write_checkpoint(tmp_path / "other", config={**config, "architectures": ["LlamaForCausalLM"]})
    from allspark.model_loader import LoraAdapter

    loader = HuggingFaceModel(str(tmp_path / "other"), "other")
    path = LoraAdapter(directory, loader).serialize_to_path(tmp_path / "x.aslora")
    assert served.engine.load_lora(NAME, "x", path) == AsStatus.ALLSPARK_PARAM_ERROR
    assert "'layers.0.down' reads 88 features; the model has 96" in served.engine.last_error()


# Ways to load an adapter into the engine.


def test_ways_to_load_give_the_same_bits(tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    directory, _ = make_adapter(tmp_path / "loras" / "a", "llama", LINEAR)
    lora_cfg = {"input_base_dir": str(tmp_path / "loras"), "lora_names": ["a"]}
    served = Served(tmp_path / "base", serialize={"lora_cfg": lora_cfg})
    served.load("a", None)
    expected = served.logits(PROMPT, "a")
    from allspark.model_loader import DashInferModel, LoraAdapter

    served.loader.serialize_to_path(None, str(tmp_path / "out"), lora_cfg=lora_cfg)
    native = DashInferModel(str(tmp_path / "out"), NAME)
    adapter = LoraAdapter(directory, native)
    for lora in (directory, tmp_path / "out" / "a.aslora", adapter, adapter.serialize_to_memory()):
        served.load("b", lora)
        np.testing.assert_array_equal(served.logits(PROMPT, "b"), expected)
        assert served.engine.unload_lora(NAME, "b") == SUCCESS
    builder = native.create_reference_runtime_config_builder("files", TargetDevice.CPU)
    assert served.engine.install_model(builder.build()) == SUCCESS
    assert served.engine.load_lora("files", "a") == SUCCESS, served.engine.last_error()
    assert served.engine.load_lora("files", "b") == AsStatus.ALLSPARK_IO_ERROR
    assert "b.aslora" in served.engine.last_error()
    assert served.engine.load_lora("files", "../a") == AsStatus.ALLSPARK_PARAM_ERROR
    assert "lora_name is '../a', which is not the name of a file" in served.engine.last_error()


def test_embedding_and_head_of_a_checkpoint_with_copies(tmp_path):
    """PEFT also saves the base weights of such adapters; with a checkpoint they are compared."""
    model = build("llama-tied")
    model.save_pretrained(tmp_path / "base")
    directory, tensors = make_adapter(tmp_path / "lora", "llama-tied", ENDS)
    weight = model.get_input_embeddings().weight.detach().numpy()
    copies = {
        f"{PREFIX}{path}.base_layer.weight": weight for path in ("model.embed_tokens", "lm_head")
    }
    write_adapter(directory, {**tensors, **copies}, r=8, lora_alpha=16, target_modules=list(ENDS))
    served = Served(tmp_path / "base")
    assert served.engine.load_lora(NAME, "a", directory) == AsStatus.ALLSPARK_PARAM_ERROR
    assert "loader of the base model's checkpoint" in served.engine.last_error()
    from allspark.model_loader import LoraAdapter

    served.load("a", LoraAdapter(directory, served.loader))
    reference = reference_for(adapted(model, tensors, 2.0), PROMPT, FLOAT32_FACTOR)
    reference.check(served.logits(PROMPT, "a"))
