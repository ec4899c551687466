"""Every call of DashInfer's Python interface, with each of its keywords, by position and by name.

CALLS is the interface in DashInfer's own documents and sources. A scenario makes each call in both
ways and notes it. The notes must equal the table, so that neither can lose a line unnoticed.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from pathlib import Path

import pytest
import yaml  # a dependency of transformers

CALLS = {
    "Engine": {
        "__init__": (),
        "install_model": ("as_model_config_struct",),
        "build_model_from_config_struct": ("as_model_config_struct",),
        "process_json_mode_arguments": ("generate_config",),
        "start_model": ("model_name",),
        "stop_model": ("model_name",),
        "release_model": ("model_name",),
        "start_request": ("model_name", "inputs", "generate_config"),
        "start_request_ids": ("model_name", "model", "input_ids", "generate_config_builder"),
        "start_request_text": (
            "model_name", "model", "input_str_or_array", "generate_config_builder",
        ),
        "stop_request": ("model_name", "request_handle"),
        "release_request": ("model_name", "request_handle"),
        "sync_request": ("model_name", "request_handle"),
        "get_no_wait": ("model_name", "result_queue"),
        "get_wait": ("model_name", "result_queue"),
        "get_request_status": ("model_name", "result_queue"),
        "unload_device_mem": ("model_name",),
        "load_device_mem": ("model_name",),
        "get_model_info": ("model_name",),
        "load_lora": ("model_name", "lora_name"),
        "unload_lora": ("model_name", "lora_name"),
        "get_file_information": ("asgraph_path", "asparam_path"),
        "get_as_engine_stat": ("model_name",),
        "get_op_profiling_info": ("model_name",),
        "get_rank_id": (),
        "get_version_full": (),
        "is_allspark_work_as_service": (),
    },
    "ResultQueue": {
        "GenerateStatus": (),
        "GeneratedLength": (),
        "RequestStatInfo": (),
        "Get": (),
        "GetWithTimeout": ("timeout_ms",),
        "GetNoWait": (),
    },
    "AsEngineStat": {"dict": (), "ToString": ()},
    "RequestStatInfo": {"__init__": ("info_dict",)},
    "AsModelConfig": {
        "__init__": (
            "model_name", "model_path", "weights_path", "compute_unit", "engine_max_length",
            "engine_max_batch", "engine_max_prefill_length", "swap_threshold", "text_graph",
            "num_threads", "matmul_precision", "lora_names", "cache_span_size",
            "cache_span_num_init", "cache_span_num_grow", "enable_prefix_cache",
            "prefix_cache_ttl", "prefill_mode", "cache_mode", "eviction_strategy",
            "scheduling_strategy", "enable_sparsity_matmul",
        ),
    },
    "AsModelRuntimeConfigBuilder": {
        "__init__": (),
        "model_name": ("model_name",),
        "model_dir": ("model_dir", "file_name_prefix"),
        "model_file_path": ("model_file_name", "weight_file_path"),
        "compute_unit": ("target_device", "device_id_array", "compute_thread_in_device"),
        "max_length": ("length",),
        "max_batch": ("batch",),
        "lora_max_rank": ("rank",),
        "lora_max_num": ("num",),
        "max_prefill_length": ("length",),
        "prefill_cache": ("enable",),
        "prefix_cache_ttl": ("ttl",),
        "enable_sparsity_matmul": ("enable",),
        "kv_cache_mode": ("cache_mode",),
        "kv_cache_span_size": ("span_size",),
        "parse_device_type": ("compute_unit",),
        "set_compute_unit_from_str": ("compute_unit",),
        "set_span_init_size": ("span_init_size",),
        "from_dict": ("rfield",),
        "update_from_dict": ("rfield",),
        "build": (),
    },
    "ASGenerationConfigBuilder": {
        "__init__": ("hf_gen_config", "seed", "eos_token_id"),
        "process_eos_tokens": ("hf_gen_config_token_id", "out_dict"),
        "update": ("update_fields",),
        "do_sample": ("flag",),
        "early_stopping": ("flag",),
        "log_probs": ("enable_logprobs", "top_logprobs"),
        "with_mm_info": ("info",),
        "build": (),
    },
    "HuggingFaceModel": {
        "__init__": (
            "pretrain_model_name_or_path", "pretrain_model_name", "in_memory_serialize",
            "user_set_data_type", "trust_remote_code",
        ),
        "load_model": ("override_data_type", "direct_load", "load_format"),
        "read_model_config": (),
        "set_rope_scale_method": ("method", "parameter_dict"),
        "init_quantization": ("enable", "customized_quant_config"),
        "init_tokenizer": ("padding_side",),
        "get_tokenizer": (),
        "create_reference_generation_config_builder": ("runtimeConfig",),
        "get_model_context_length": (),
        "create_reference_runtime_config_builder": (
            "engine_model_name", "device_type", "device_ids", "max_batch", "max_context_length",
        ),
        "serialize": (
            "engine", "model_output_dir", "enable_quant", "weight_only_quant",
            "customized_quant_config", "multinode_mode", "lora_cfg",
        ),
        "serialize_to_memory": (
            "engine", "enable_quant", "weight_only_quant", "multinode_mode",
            "customized_quant_config", "lora_cfg",
        ),
        "serialize_to_path": (
            "engine", "model_output_dir", "enable_quant", "weight_only_quant", "skip_if_exists",
            "multinode_mode", "customized_quant_config", "lora_cfg",
        ),
        "free_model": (),
        "free_memory_serialize_file": (),
        "export_model_diconfig": ("output_path",),
        "get_model_config": (),
    },
    "DashInferModel": {
        "__init__": (
            "pretrain_model_name_or_path", "pretrain_model_name", "config_file_path",
            "config_content",
        ),
    },
    "PromptTemplate": {"apply_chatml_template": ("inputs",)},
}  # fmt: skip
# Calls that exist but raise an error.
REFUSED = {
    "Engine": {
        "serialize_model_from_torch": (
            "model_name", "model_type", "torch_model", "model_config", "save_dir", "as_model_path",
            "as_weight_path", "data_type", "derive_type", "multigpu_mode", "do_binary_add_fused",
            "do_dynamic_quantize_convert", "quant_config", "enable_i8cache_mha",
            "mha_kv_cache_config", "use_dynamic_ntk", "use_logn_attn", "model_sequence_length",
            "seqlen_extrapolation", "lora_cfg", "rotary_base",
        ),
        "dump_build_meta_to_proto": ("model_proto", "weights_path", "torch_build_param"),
    },
    "HuggingFaceModel": {
        "get_as_quant_config_and_weight_process": ("weight_only_quant", "customized_quant_config"),
    },
    "MultiMediaInfo": {"__init__": ()},
    "ClientEngine": {"__init__": ()},
    "GPTQSettings": {"__init__": ("quant_cfg",)},
    "IQSettings": {"__init__": ("quant_cfg",)},
    "QuantizationSettings": {"__init__": ("quant_cfg",)},
    "get_quant_settings_cls": {"": ("method", "quant_cfg")},
    "save_allsparky": {"": ("bin_data", "attr")},
    "save_allsparky_dltensor_tofile": {"": ("path", "name", "dltensor", "attr")},
    "set_global_header": {"": ("weights_path",)},
}  # fmt: skip
ELEMENT_FIELDS = (
    "ids_from_generate", "log_probs_list", "token_logprobs_list", "tensors_from_model_inference",
    "prefix_cache_len", "prefix_len_gpu", "prefix_len_cpu",
)  # fmt: skip
STAT_KEYS = {
    "KEY_REQUEST_TIME_TS": ("arrival_time", "arrival_time"),
    "KEY_FIRST_TOKEN_TIME_TS": ("first_token_time", "first_token_time"),
    "KEY_LAST_TOKEN_TIME_TS": ("last_token_time", "last_token_time"),
    "KEY_TTFT_MS": ("time_to_first_token", "time_to_first_token"),
    "KEY_SCHEDULE_TIME_MS": ("time_in_queue", "time_in_queue"),
    "KEY_TOTAL_TIME_MS": ("finished_time", "finish_time"),
    "KEY_INPUT_LEN": ("context_token_length", "context_token_length"),
    "KEY_OUTPUT_LEN": ("generated_token_length", "generated_token_length"),
    "KEY_INPUT_CACHE_LEN": ("context_cached_length", "context_cached_length"),
    "KEY_CONTEXT_TPS": ("context_tps", "context_tps"),
    "KEY_GENERATE_TPS": ("generate_tps", "generate_tps"),
}
ENGINE_STATS = (
    "model_name", "total_span", "used_span", "free_span", "total_token", "free_token", "span_size",
    "pendding_request", "running_request", "total_device_memory_pool_size",
    "used_device_memory_pool_size", "total_generated_token", "total_prefill_token",
    "generate_token_persec", "process_token_persec", "token_usage_percentage",
    "prefix_cache_hit_token", "prefix_cache_miss_token", "prefix_cache_hit_rate",
    "prefix_cache_miss_rate",
)  # fmt: skip
class Caller:
    """Makes calls by position or by name, and notes them."""

    def __init__(self, named: bool):
        self.named = named
        self.calls: dict[str, dict[str, set[str]]] = {}

    def __call__(self, owner: object, name: str, **arguments):
        """Calls owner.name(...), or owner(...) for "__init__"; returns the result."""
        kind = owner if inspect.isclass(owner) else type(owner)
        known = self.calls.setdefault(kind.__name__, {}).setdefault(name, set())
        known |= set(arguments)
        function = owner if name == "__init__" else getattr(owner, name)
        return function(**arguments) if self.named else function(*arguments.values())


@pytest.fixture(params=[False, True], ids=["by position", "by name"])
def call(request):
    return Caller(request.param)


def noted(table):
    return {kind: {name: set(names) for name, names in calls.items()}
            for kind, calls in table.items()}  # fmt: skip


def test_every_call_by_position_and_by_name(dashinfer, demo_model, call, tmp_path):
    """Uses of a model in memory and of one in files, and of the builders of their configs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_builders(dashinfer, call)
        check_model_in_memory(dashinfer, call, demo_model, tmp_path)
        check_model_in_files(dashinfer, call, demo_model, tmp_path)
    assert call.calls == noted(CALLS)


def check_builders(dashinfer, call):
    device = dashinfer.engine.TargetDevice
    values = {
        "model_name": "m", "model_path": "a.asgraph", "weights_path": "a.asparam",
        "compute_unit": "CUDA:0,1", "engine_max_length": 100, "engine_max_batch": 4,
        "engine_max_prefill_length": 64, "swap_threshold": 0, "text_graph": True, "num_threads": 2,
        "matmul_precision": "medium_bf16", "lora_names": ["a"], "cache_span_size": 16,
        "cache_span_num_init": 99, "cache_span_num_grow": 1, "enable_prefix_cache": 0,
        "prefix_cache_ttl": 7, "prefill_mode": dashinfer.AsMHAPrefill.AsPrefillXformer,
        "cache_mode": dashinfer.AsCacheMode.AsCacheQuantU4,
        "eviction_strategy": dashinfer.AsEvictionStrategy.Random,
        "scheduling_strategy": dashinfer.AsSchedulingStrategy.Balance,
        "enable_sparsity_matmul": True,
    }  # fmt: skip
    config = call(dashinfer.AsModelConfig, "__init__", **values)
    for name, value in values.items():
        assert getattr(config, name) == ("" if name == "matmul_precision" else value), name

    make = dashinfer.AsModelRuntimeConfigBuilder
    builder = call(make, "__init__")
    call(builder, "model_name", model_name="m")
    call(builder, "model_dir", model_dir="d", file_name_prefix="a")
    assert builder.build().weights_path == "d/a.asparam"
    call(builder, "model_file_path", model_file_name="a.asgraph", weight_file_path="a.asparam")
    call(
        builder, "compute_unit", target_device=device.CUDA, device_id_array=[0, 1],
        compute_thread_in_device=2,
    )  # fmt: skip
    call(builder, "max_length", length="100")
    call(builder, "max_batch", batch=4)
    call(builder, "lora_max_rank", rank=8)
    call(builder, "lora_max_num", num="2")
    call(builder, "max_prefill_length", length=64)
    call(builder, "prefill_cache", enable=0)
    call(builder, "prefix_cache_ttl", ttl=7)
    call(builder, "enable_sparsity_matmul", enable=False)
    call(builder, "kv_cache_mode", cache_mode=dashinfer.AsCacheMode.AsCacheQuantU4)
    call(builder, "kv_cache_span_size", span_size=16)
    call(builder, "set_span_init_size", span_init_size=99)
    built = call(builder, "build")
    native = dashinfer._allspark._target.AsModelConfig.from_dict(config.to_dict())
    native.lora_max_rank, native.lora_max_num = 8, 2
    assert built == native and str(built) == str(native)
    for text in ("CUDA:3", "CPU:0"):
        call(builder, "set_compute_unit_from_str", compute_unit=text)
        assert builder.build().compute_unit == text
    for text, parsed in (("CUDA:0,1", ("CUDA", [0, 1])), ("CPU_NUMA:0,1", ("CPU_NUMA", [0, 1]))):
        assert call(make, "parse_device_type", compute_unit=text) == parsed
    fields = {
        "model_name": "m",
        "compute_unit": {
            "device_type": "cuda", "device_ids": [0, 1], "compute_thread_in_device": 2,
        },
        "engine_max_length": 100, "engine_max_batch": 4, "enable_prefix_cache": 0,
        "prefix_cache_ttl": 7, "kv_cache_mode": "AsCacheQuantU4", "kv_cache_span_size": 16,
        "enable_sparsity_matmul": False, "cache_span_num_init": 99, "engine_max_prefill_length": 64,
    }  # fmt: skip
    by_dict = call(make(), "from_dict", rfield=fields)
    by_dict.model_file_path("a.asgraph", "a.asparam").lora_max_rank(8).lora_max_num(2)
    assert by_dict.build() == built
    assert call(by_dict, "update_from_dict", rfield={"engine_max_batch": 5}) is by_dict
    assert by_dict.build().engine_max_batch == 5

    make = dashinfer.ASGenerationConfigBuilder
    generation = call(make, "__init__", hf_gen_config={"top_k": 3, "max_new_tokens": 1}, seed=7,
                      eos_token_id=9)  # fmt: skip
    call(generation, "do_sample", flag=1)
    call(generation, "early_stopping", flag=0)
    call(generation, "log_probs", enable_logprobs=1, top_logprobs=2)
    call(generation, "with_mm_info", info=None)
    call(generation, "update", update_fields={"top_p": 0.5})
    assert call(copy.deepcopy(generation), "build") == {
        "top_k": 3, "seed": 7, "eos_token_id": 9, "do_sample": 1, "early_stopping": 0,
        "logprobs": 1, "top_logprobs": 2, "mm_info": None, "top_p": 0.5,
    }  # fmt: skip
    out: dict = {}
    call(make, "process_eos_tokens", hf_gen_config_token_id=[3, 4], out_dict=out)
    assert out == {"eos_token_id": 3, "stop_words_ids": [[3], [4]]}
    make.process_eos_tokens(hf_eos=5, out_dict=out)
    assert out["eos_token_id"] == 5
    prompt = call(dashinfer.prompt_utils.PromptTemplate, "apply_chatml_template", inputs="Hi?")
    assert prompt.startswith("<|im_start|>system\n") and prompt.endswith("assistant\n")


def check_model_in_memory(dashinfer, call, demo_model, tmp_path):
    success = dashinfer.AsStatus.ALLSPARK_SUCCESS
    loader = call(
        dashinfer.HuggingFaceModel, "__init__", pretrain_model_name_or_path=str(demo_model),
        pretrain_model_name="org/demo", in_memory_serialize=1, user_set_data_type="float16",
        trust_remote_code=0,
    )  # fmt: skip
    engine = call(dashinfer.Engine, "__init__")
    call(loader, "load_model", override_data_type=None, direct_load=1, load_format=None)
    assert call(loader, "read_model_config") is loader
    call(loader, "set_rope_scale_method", method=dashinfer.engine.RoPEScaleMethod.NO_SCALE,
         parameter_dict={})  # fmt: skip
    call(loader, "init_quantization", enable=0, customized_quant_config=None)
    assert loader.data_type == "float16"
    assert call(loader, "get_model_context_length") == 2048
    assert call(loader, "get_model_config")["hidden_size"] == 128
    folder = str(demo_model.parent)
    lora = {"input_base_dir": folder, "lora_names": ["demo_adapter"], "lora_only": 0}
    call(
        loader, "serialize", engine=engine, model_output_dir="", enable_quant=0,
        weight_only_quant=0, customized_quant_config=None, multinode_mode=True, lora_cfg=None,
    )  # fmt: skip
    call(
        loader, "serialize_to_memory", engine=engine, enable_quant=1, weight_only_quant=1,
        multinode_mode=0,
        customized_quant_config={"quant_method": "instant_quant", "weight_format": "int8"},
        lora_cfg=lora,
    )  # fmt: skip
    exported = tmp_path / "export" / "diconfig.yaml"
    assert call(loader, "export_model_diconfig", output_path=str(exported)) is loader
    check_export(dashinfer, exported)
    assert call(loader, "free_model") is loader
    assert call(loader, "init_tokenizer", padding_side="left") is loader
    tokenizer = call(loader, "get_tokenizer")
    assert loader.init_tokenizer().get_tokenizer() is tokenizer, "loaded once"

    builder = call(
        loader, "create_reference_runtime_config_builder", engine_model_name="m",
        device_type="CPU_NUMA", device_ids=[0, 1], max_batch=2, max_context_length=256,
    )  # fmt: skip
    config = builder.build()
    assert config.compute_unit == "CPU_NUMA" and config.engine_max_length == 256
    assert call(engine, "install_model", as_model_config_struct=config) == success
    call(loader, "free_memory_serialize_file")
    assert call(engine, "start_model", model_name="m") == success, engine.last_error()
    generation = call(
        loader, "create_reference_generation_config_builder", runtimeConfig=config
    ).update({"max_length": 60})
    assert len(generation.build()["vocab"]) == 1536
    assert "max_new_tokens" not in generation.build()
    assert call(engine, "process_json_mode_arguments", generate_config={}) is None

    check_requests(dashinfer, call, engine, loader, generation)
    lora_name = "demo_adapter"
    status = call(engine, "load_lora", model_name="m", lora_name=lora_name)
    assert status == success, engine.last_error()
    assert call(engine, "unload_lora", model_name="m", lora_name=lora_name) == success
    assert call(engine, "unload_device_mem", model_name="m") == success
    assert call(engine, "load_device_mem", model_name="m") == success
    assert "m" in call(engine, "get_model_info", model_name="m")
    stat = call(engine, "get_as_engine_stat", model_name="m")
    texts = call(stat, "dict")
    for name in ENGINE_STATS:
        assert str(getattr(stat, name)) == texts[name], name
    assert "total_generated_token" in call(stat, "ToString")
    assert "off" in call(engine, "get_op_profiling_info", model_name="m")
    assert call(engine, "get_rank_id") == 0
    assert "GitSha1" in call(engine, "get_version_full")
    assert call(engine, "is_allspark_work_as_service") is False
    assert call(engine, "stop_model", model_name="m") == success
    assert call(engine, "release_model", model_name="m") == success


def check_requests(dashinfer, call, engine, loader, generation):
    success = dashinfer.AsStatus.ALLSPARK_SUCCESS
    finished = dashinfer.GenerateRequestStatus.GenerateFinished
    ids = loader.get_tokenizer().encode("What is 4+5?")
    starts = (
        ("start_request", {"inputs": {"input_ids": ids}, "generate_config": generation.build()}),
        ("start_request_ids", {"model": loader, "input_ids": ids,
                               "generate_config_builder": generation}),
        ("start_request_text", {"model": loader, "input_str_or_array": "What is 4+5?",
                                "generate_config_builder": generation}),
    )  # fmt: skip
    outputs = []
    for name, arguments in starts:
        status, handle, queue = call(engine, name, model_name="m", **arguments)
        assert status == success, engine.last_error()
        assert call(engine, "sync_request", model_name="m", request_handle=handle) == success
        assert call(queue, "GenerateStatus") == finished
        assert call(engine, "get_request_status", model_name="m", result_queue=queue) == finished
        elements = call(queue, "Get")
        for field in ELEMENT_FIELDS:
            assert hasattr(elements, field), field
        outputs.append(elements.ids_from_generate)
        assert call(queue, "GeneratedLength") == len(outputs[-1])
        assert call(queue, "GetWithTimeout", timeout_ms=1) is None
        assert call(queue, "GetNoWait") is None
        stat = call(queue, "RequestStatInfo")
        named = call(dashinfer.engine.RequestStatInfo, "__init__", info_dict=stat)
        for key, (text, attribute) in STAT_KEYS.items():
            assert dashinfer.engine.RequestStatInfo.Key[key].value == text
            assert getattr(named, attribute) == stat[text]
        assert call(engine, "stop_request", model_name="m", request_handle=handle) == success
        assert call(engine, "release_request", model_name="m", request_handle=handle) == success
    assert outputs[0] == outputs[1] == outputs[2]
    assert loader.get_tokenizer().decode(outputs[0]) .strip() == "4 + 5 = 9<|im_end|>"

    _, handle, queue = engine.start_request_ids("m", loader, ids, generation)
    read = []
    while new := call(engine, "get_wait", model_name="m", result_queue=queue):
        read += new
    assert read == outputs[0]
    assert call(engine, "get_no_wait", model_name="m", result_queue=queue) == []
    engine.release_request("m", handle)


def check_export(dashinfer, path):
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert list(fields) == ["model", "runtime_config", "generation_config", "tokenizer"]
    assert fields["model"]["rms_norm_eps"] == 1e-5 and fields["model"]["vocab_size"] == 1536
    assert fields["generation_config"]["eos_token_id"] == 2
    # Used like a script would.
    config = dashinfer.AsModelRuntimeConfigBuilder().from_dict(fields["runtime_config"]).build()
    assert config.validate().ok and config.engine_max_batch == 64
    dashinfer.ASGenerationConfigBuilder().update(fields["generation_config"])
    assert Path(fields["tokenizer"]["local_path"], "tokenizer.json").is_file()


def check_model_in_files(dashinfer, call, demo_model, tmp_path):
    success = dashinfer.AsStatus.ALLSPARK_SUCCESS
    loader = dashinfer.HuggingFaceModel(str(demo_model), "org/demo", in_memory_serialize=False)
    loader.load_model(load_format=dashinfer.model_loader.LoadFormat.SAFETENSORS)
    engine = dashinfer.Engine()
    for skip in (False, True):
        call(
            loader, "serialize_to_path", engine=engine, model_output_dir=str(tmp_path / "out"),
            enable_quant=0, weight_only_quant=1, skip_if_exists=skip, multinode_mode=1,
            customized_quant_config=None, lora_cfg=None,
        )  # fmt: skip
    graph, param = (str(tmp_path / "out" / f"org_demo.as{end}") for end in ("graph", "param"))
    info = call(engine, "get_file_information", asgraph_path=graph, asparam_path=param)
    assert info.create_version_graph == info.create_version_param == info.current_version_engine
    assert isinstance(info, dashinfer.AsFileInfo)
    call(
        dashinfer.model_loader.DashInferModel, "__init__",
        pretrain_model_name_or_path=str(tmp_path / "out"), pretrain_model_name="model",
        config_file_path=None, config_content=None,
    )  # fmt: skip
    config = loader.create_reference_runtime_config_builder(
        "m", dashinfer.engine.TargetDevice.CUDA, [0], 1
    ).max_length(128).build()
    assert call(engine, "build_model_from_config_struct", as_model_config_struct=config) == success
    engine.release_model("m")
    with pytest.raises(NotImplementedError, match="config_file_path is not served"):
        dashinfer.model_loader.DashInferModel(graph, "m", "dimodel_config.yaml")
    with pytest.raises(ValueError, match=rf"{graph} says "):
        engine.get_file_information(graph, graph)


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in REFUSED for n in REFUSED[k]])
@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
def test_what_is_not_served_says_so_when_it_is_called(dashinfer, kind, name, named):
    arguments = dict.fromkeys(REFUSED[kind][name])
    owner = getattr(dashinfer, kind)
    made = {"HuggingFaceModel": ("a path", "m")}.get(kind, ())
    function = getattr(owner(*made), name) if name not in ("", "__init__") else owner
    said = kind if name in ("", "__init__") else name
    with pytest.raises(NotImplementedError, match=f"^{said} is not served: "):
        function(**arguments) if named else function(*arguments.values())


