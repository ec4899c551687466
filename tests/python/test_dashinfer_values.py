"""Values of DashInfer's interface: names of modules, enums, keys of configs, and the messages for
requests of features that do not exist here."""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings
from types import SimpleNamespace

import pytest

# Name -> members, in the order of their values if those are not given.
ENUMS = {
    "GenerateRequestStatus": (
        "Init", "ContextFinished", "Generating", "GenerateFinished", "GenerateInterrupted",
    ),
    "AsStatus": {
        "ALLSPARK_SUCCESS": 0,
        "ALLSPARK_PARAM_ERROR": 2,
        "ALLSPARK_EXCEED_LIMIT_ERROR": 7,
        "ALLSPARK_ALLSPARK_INVALID_CALL_ERROR": 8,
        "ALLSPARK_REQUEST_DENIED": 12,
        "ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR": 21,
        "ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR": 22,
        "ALLSPARK_LORA_NOT_FOUND": 23,
        "ALLSPARK_LORA_ALREADY_LOADED": 24,
        "ALLSPARK_LORA_IN_USE": 25,
        "ALLSPARK_STREAMING": 200,
    },
    "AsCacheMode": ("AsCacheDefault", "AsCacheQuantI8", "AsCacheQuantU4"),
    "AsMHAPrefill": {"AsPrefillDefault": 0, "AsPrefillFlashV2": 10, "AsPrefillXformer": 11},
    "AsEvictionStrategy": ("MaxLength", "Random"),
    "AsSchedulingStrategy": ("ContextPriority", "Balance"),
    "VocabType": ("VOCAB_TYPE_WPM", "VOCAB_TYPE_SPM", "VOCAB_TYPE_UGM", "VOCAB_TYPE_BPE"),
}  # fmt: skip
# Keys of a generation config: a value that changes nothing, and one that changes something.
GENERATION_KEYS = {
    "num_beams": (1, 1),
    "num_return_sequences": (1, 1),
    "temperature": (1.0, 0.5),
    "do_sample": (True, 1),
    "early_stopping": (True, 0),
    "repetition_penalty": (1.0, 1.5),
    "presence_penalty": (0, 1.0),
    "frequency_penalty": (0, 1.0),
    "length_penalty": (1.0, 1.0),
    "suppress_repetition_in_generation": (False, 1),
    "min_length": (0, 5),
    "max_length": (20, 12),
    "no_repeat_ngram_size": (0, 2),
    "eos_token_id": (2, 5),
    "uuid": ("", "request-7"),
    "stop_words_ids": ([], [[5], [6, 7]]),
    "lora_name": ("", ""),
    "bad_words_ids": ([], [[5, 6]]),
    "top_k": (50, 1),
    "top_p": (1.0, 0.5),
    "seed": (0, 1234),
    "logprobs": (False, 1),
    "top_logprobs": (0, 3),
    "mm_info": (None, None),
    "response_format": (None, {"type": "json_object"}),
    "vocab": (None, {}),
    "vocab_type": (None, 3),
    "enable_tensors_from_model_inference": (False, 1),
}
MODULES = {
    "": (
        "AsStatus", "AsModelConfig", "Engine", "GenerateRequestStatus", "MultiMediaInfo",
        "HuggingFaceModel", "save_allsparky_dltensor_tofile", "set_global_header", "ClientEngine",
        "GPTQSettings", "IQSettings", "QuantizationSettings", "AsModelRuntimeConfigBuilder",
        "ModelSerializerException", "QUANT_CONFIG_MAP", "get_quant_settings_cls", "AsCacheMode",
        "AsEngineStat", "GeneratedElements", "VocabType",
    ),
    ".engine": ("TargetDevice", "RequestStatInfo", "RoPEScaleMethod", "Engine"),
    ".model_loader": (
        "HuggingFaceModel", "DashInferModel", "LLM", "LoadFormat", "ModelSerializerException",
        "ConfigFieldMissingError",
    ),
    ".runtime_config": ("AsModelRuntimeConfigBuilder", "get_cache_mode_from_str"),
    ".generation_config": ("ASGenerationConfigBuilder", "GenerationConfigAdapter"),
    ".prompt_utils": ("PromptTemplate",),
    "._allspark": (*ENUMS, "AsModelConfig", "AsEngineStat", "AsFileInfo", "MultiMediaInfo"),
}  # fmt: skip


def test_enums(dashinfer):
    for name, members in ENUMS.items():
        values = members if isinstance(members, dict) else {m: i for i, m in enumerate(members)}
        for member, value in values.items():
            assert int(getattr(getattr(dashinfer._allspark, name), member)) == value
    assert {device.name for device in dashinfer.engine.TargetDevice} == {"CUDA", "CPU", "CPU_NUMA"}
    assert {m.name: m.value for m in dashinfer.engine.RoPEScaleMethod} == {
        "NO_SCALE": 0, "YaRN": 3, "NTK": 4,
    }  # fmt: skip
    formats = {f.name: f.value for f in dashinfer.model_loader.LoadFormat}
    assert formats == {"AUTO": "auto", "PT": "pt", "SAFETENSORS": "safetensors"}
    get_mode = dashinfer.runtime_config.get_cache_mode_from_str
    for mode in dashinfer.AsCacheMode:
        assert get_mode(mode.name) == mode


def test_modules_and_names(dashinfer):
    for suffix, names in MODULES.items():
        module = importlib.import_module("dashinfer.allspark" + suffix)
        for name in names:
            assert getattr(module, name) is not None, name
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            module.nothing  # noqa: B018
    assert set(MODULES[""]) <= set(dashinfer.__all__)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dashinfer.helper")
    starred: dict = {}
    exec("from dashinfer.allspark import *; from dashinfer.allspark.engine import *", starred)
    assert starred["Engine"] is dashinfer.Engine is dashinfer.engine.Engine
    assert starred["TargetDevice"] is dashinfer.engine.TargetDevice


@pytest.fixture(scope="module")
def running(dashinfer, demo_model):
    engine = dashinfer.Engine()
    loader = dashinfer.HuggingFaceModel(str(demo_model), "demo")
    loader.load_model().serialize_to_memory(engine)
    builder = loader.create_reference_runtime_config_builder("m", "CPU", [], 4).max_length(64)
    engine.install_model(builder.build())
    engine.start_model("m")
    yield engine, loader
    engine.stop_model("m")


def outcome(engine, config, ids=(5, 6, 7)):
    status, handle, queue = engine.start_request("m", {"input_ids": list(ids)}, config)
    if handle is None:
        return status.name, engine.last_error()
    engine.sync_request("m", handle)
    elements = queue.Get()
    engine.release_request("m", handle)
    return status.name, elements


@pytest.mark.parametrize("key", GENERATION_KEYS)
@pytest.mark.parametrize("which", [0, 1], ids=["neutral", "set"])
def test_every_key_of_a_generation_config_is_taken(running, key, which):
    engine, loader = running
    value = GENERATION_KEYS[key][which]
    config = {"max_length": 20, "seed": 3, key: value}
    if key == "vocab" and which:
        config["vocab"] = loader.get_tokenizer().get_vocab()
    if key == "response_format" and which:
        config["vocab"] = loader.create_reference_generation_config_builder().build()["vocab"]
        config["response_format"] = {"type": "json_object", "json_schema": '{"enum": [1]}'}
    before = copy.copy(config)
    status, elements = outcome(engine, config)
    assert status == "ALLSPARK_SUCCESS", elements
    assert config == before, "the caller's dict"
    assert 1 <= len(elements.ids_from_generate) <= config["max_length"] - 3
    if config.get("response_format"):
        text = loader.get_tokenizer().decode(elements.ids_from_generate, skip_special_tokens=True)
        assert text.strip() == "1"


@pytest.mark.parametrize(
    ("config", "ids", "status"),
    [
        ({"max_length": 65}, [1], "ALLSPARK_EXCEED_LIMIT_ERROR"),
        ({}, [1] * 64, "ALLSPARK_EXCEED_LIMIT_ERROR"),
        ({"top_k": -1}, [1], "ALLSPARK_PARAM_ERROR"),
        ({"top_p": 1.5}, [1], "ALLSPARK_PARAM_ERROR"),
        ({"repetition_penalty": -1.0}, [1], "ALLSPARK_PARAM_ERROR"),
        ({"presence_penalty": 3.0}, [1], "ALLSPARK_PARAM_ERROR"),
        ({"frequency_penalty": -3.0}, [1], "ALLSPARK_PARAM_ERROR"),
        ({"logprobs": True, "top_logprobs": 21}, [1], "ALLSPARK_PARAM_ERROR"),
        ({"lora_name": "nobody"}, [1], "ALLSPARK_LORA_NOT_FOUND"),
        ({"do_sample": 2}, [1], "ALLSPARK_PARAM_ERROR"),
        ({"no_such_key": 1}, [1], "ALLSPARK_PARAM_ERROR"),
        ({"response_format": {"type": "json_object"}, "vocab": 5}, [1], "ALLSPARK_PARAM_ERROR"),
        (
            {"response_format": {"type": "json_object"}, "vocab": {"a": 0, "</s>": 1}}, [1],
            "ALLSPARK_PARAM_ERROR",
        ),
    ],
)  # fmt: skip
def test_what_a_start_refuses(running, config, ids, status):
    assert outcome(running[0], config, ids)[0] == status


def test_guided_requests_need_tokens_once(dashinfer, running, demo_model):
    engine = dashinfer.Engine()
    loader = dashinfer.HuggingFaceModel(str(demo_model), "demo")
    loader.load_model().serialize_to_memory(engine)
    engine.install_model(loader.create_reference_runtime_config_builder("m", "CPU").build())
    engine.start_model("m")
    form = {"response_format": {"type": "json_object", "json_schema": '{"enum": [true]}'}}
    status, message = outcome(engine, form)
    assert status == "ALLSPARK_PARAM_ERROR" and "'vocab' in the config" in message
    vocab = loader.get_tokenizer().get_vocab()
    outputs = []
    for more in ({"vocab": vocab, "eos_token_id": 2}, {"eos_token_id": 2}):
        status, elements = outcome(engine, {**form, **more})
        assert status == "ALLSPARK_SUCCESS", elements
        outputs.append(loader.get_tokenizer().decode(elements.ids_from_generate).strip())
    assert outputs == ["true<|im_end|>"] * 2
    engine.stop_model("m")


def test_images_are_refused_by_name(running):
    status, message = outcome(running[0], {"mm_info": object()})
    assert status == "ALLSPARK_PARAM_ERROR" and message.startswith("mm_info is not served")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda d, b: b.compute_unit(d.engine.TargetDevice.CPU_NUMA, [0, 1]), "CPU_NUMA:0,1"),
        (lambda d, b: b.compute_unit("cpu", [1]), "CPU:1"),
        (lambda d, b: b.set_compute_unit_from_str("CPU:0,1"), "CPU:0,1"),
        (lambda d, b: d.AsModelConfig(swap_threshold=5), "swap_threshold is 5"),
        (lambda d, b: d.AsModelConfig(matmul_precision="medium_fp16"), "'medium_fp16'"),
        (
            lambda d, b: b.update_from_dict({"eviction_strategy": "Random"}),
            "eviction_strategy is <AsEvictionStrategy.Random: 1>",
        ),
    ],
)  # fmt: skip
def test_what_changes_nothing_warns(dashinfer, act, words):
    builder = dashinfer.AsModelRuntimeConfigBuilder()
    with pytest.warns(UserWarning) as caught:
        act(dashinfer, builder)
    assert len(caught) == 1 and words in str(caught[0].message)
    has_nodes = words.endswith(":0,1")
    assert builder.build().compute_unit == ("CPU_NUMA" if has_nodes else "CPU:0")


def test_what_asks_for_nothing_does_not_warn(dashinfer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        builder = dashinfer.AsModelRuntimeConfigBuilder()
        for device, ids in (("cpu", None), ("CPU", []), ("CPU", [0]), ("cuda", [0, 1])):
            builder.compute_unit(device, ids)
        builder.update_from_dict({"lora_names": [], "cuda_mem": {}})
        builder.update_from_dict({"eviction_strategy": "MaxLength"})
        for precision in ("highest", "high"):
            assert dashinfer.AsModelConfig(matmul_precision=precision).matmul_precision == ""


def test_config_keeps_to_its_fields(dashinfer):
    config = dashinfer.AsModelConfig("m")
    config.swap_threshold = -1
    assert copy.copy(config) == config and copy.copy(config).swap_threshold == -1
    with pytest.raises(AttributeError, match="no field 'modle_name'"):
        config.modle_name = "m"
    with pytest.raises(AttributeError, match="no field 'modle_name'"):
        config.modle_name  # noqa: B018
    with pytest.raises(TypeError, match="22 arguments, 23 given"):
        dashinfer.AsModelConfig(*[""] * 23)


def test_a_config_shares_no_list(dashinfer):
    dashinfer.AsModelConfig().lora_names.append("a")
    assert dashinfer.AsModelConfig().lora_names == []


def test_an_adapter_lies_beside_the_model_or_is_named_by_its_path(dashinfer):
    engine, calls = dashinfer.Engine(), []

    def load(*arguments):
        calls.append(arguments)
        return SimpleNamespace(ok=True)

    engine._native = SimpleNamespace(load_lora=load, model_spec=None)
    engine._loras.note_folder(dashinfer.AsModelConfig("m", weights_path="/models/m.asparam"))
    for name in ("a", "/loras/a.aslora"):
        assert engine.load_lora("m", name) == dashinfer.AsStatus.ALLSPARK_SUCCESS
    assert calls == [
        ("m", "a", "/models/a.aslora"),
        ("m", "/loras/a.aslora", "/loras/a.aslora"),
    ]
    assert engine.load_lora("m", "/loras/a") == dashinfer.AsStatus.ALLSPARK_PARAM_ERROR


def test_profiling_by_the_environment(dashinfer, monkeypatch):
    monkeypatch.setenv("AS_PROFILE", "ON")
    assert dashinfer.AsModelRuntimeConfigBuilder().build().op_profiling is True
    monkeypatch.delenv("AS_PROFILE")
    assert dashinfer.AsModelConfig().op_profiling is False


QUANTISATION = {
    "a16w8": {"quant_method": "instant_quant", "weight_format": "int8"},
    "a16w8 in groups": {"quant_method": "iq", "weight_format": "int8", "group_size": 128},
    "a16w4": {"quant_method": "instant_quant", "weight_format": "uint4"},
    "a8w8": {
        "quant_method": "instant_quant", "weight_format": "int8",
        "compute_method": "activate_quant",
    },
    "fp8": {
        "quant_method": "instant_quant", "weight_format": "fp8_e4m3",
        "compute_method": "activate_quant",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", QUANTISATION)
def test_dicts_of_quantisation(dashinfer, demo_model, form):
    loader = dashinfer.HuggingFaceModel(str(demo_model), "demo").load_model()
    refused = form == "fp8"  # one scale per tensor is not supported
    with pytest.raises(NotImplementedError) if refused else contextlib.nullcontext():
        loader.serialize_to_memory(
            dashinfer.Engine(), enable_quant=True, customized_quant_config=QUANTISATION[form]
        )
