"""The code of the DashInfer documents runs as written, except for the import line."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SNIPPET = '''
generated_ids = []

engine = allspark.Engine()

model_loader = allspark.HuggingFaceModel(model_local_path, safe_model_name)

(model_loader.load_model()
    .read_model_config()
    .serialize_to_memory(engine)
    .free_model())

# create engine runtime config.
runtime_cfg_builder = model_loader.create_reference_runtime_config_builder(safe_model_name, TargetDevice.CUDA, device_list, max_batch=8)
runtime_cfg = runtime_cfg_builder.build()

# install and start.
engine.install_model(runtime_cfg)
engine.start_model(safe_model_name)

# generation request.
gen_cfg = model_loader.create_reference_generation_config_builder(runtime_cfg)

status, handle, queue = engine.start_request_text(safe_model_name, model_loader, "who are you?", gen_cfg)


# sync request will block request until request is finished.
engine.sync_request(safe_model_name, handle)

# sync output
generated_elem = queue.Get()
generated_ids += generated_elem.ids_from_generate

# free request and model
engine.release_request(safe_model_name, handle)
engine.stop_model(safe_model_name)
'''  # noqa: E501

LOOP = '''
generated_ids = []
status = queue.GenerateStatus()

## in following 3 status, it means tokens are generating
while (status == GenerateRequestStatus.Init
        or status == GenerateRequestStatus.Generating
        or status == GenerateRequestStatus.ContextFinished):
    elements = queue.Get()
    if elements is not None:
        print(f"new token: {elements.ids_from_generate}")
        generated_ids += elements.ids_from_generate
    status = queue.GenerateStatus()
    if status == GenerateRequestStatus.GenerateFinished:
        break
        # This means generated is finished.
    if status == GenerateRequestStatus.GenerateInterrupted:
        break
        # This means the GPU has no available resources; the request has been halted by the engine.
        # The client should collect the tokens generated so far and initiate a new request later.
'''


def test_the_simple_snippet_runs_as_written(demo_model):
    import allspark
    from allspark.engine import TargetDevice

    names = {
        "allspark": allspark,
        "TargetDevice": TargetDevice,
        "model_local_path": str(demo_model),
        "safe_model_name": "demo",
        "device_list": [0],
    }
    exec(SNIPPET, names)
    assert names["status"] == allspark.AsStatus.ALLSPARK_SUCCESS
    assert names["generated_ids"]
    text = names["model_loader"].get_tokenizer().decode(names["generated_ids"])
    assert text


def test_the_output_loop_runs_as_written(demo_model):
    import allspark
    from allspark.engine import GenerateRequestStatus, TargetDevice

    engine = allspark.Engine()
    loader = allspark.HuggingFaceModel(str(demo_model), "demo")
    loader.load_model().read_model_config().serialize_to_memory(engine).free_model()
    config = loader.create_reference_runtime_config_builder(
        "demo", TargetDevice.CPU, [0], max_batch=8
    ).build()
    engine.install_model(config)
    engine.start_model("demo")
    generation = loader.create_reference_generation_config_builder(config).max_new_tokens(20)
    _, _, queue = engine.start_request_text("demo", loader, "who are you?", generation)
    names = {"queue": queue, "GenerateRequestStatus": GenerateRequestStatus}
    exec(LOOP, names)
    # The loop may see the terminal status before the last tokens; one more Get returns them.
    rest = queue.Get()
    ids = names["generated_ids"] + (rest.ids_from_generate if rest else [])
    assert len(ids) == queue.GeneratedLength()


def test_the_builder_snippet_runs_as_written():
    from allspark.generation_config import ASGenerationConfigBuilder

    names = {"ASGenerationConfigBuilder": ASGenerationConfigBuilder}
    exec(
        textwrap.dedent(
            """
            builder = ASGenerationConfigBuilder()
            config = (builder.do_sample()
                    .max_length(512)
                    .temperature(0.7)
                    .top_k(50)
                    .build())
            """
        ),
        names,
    )
    assert names["config"] == {
        "do_sample": True, "max_length": 512, "temperature": 0.7, "top_k": 50,
    }  # fmt: skip


def test_a_dashinfer_script_runs_unmodified(demo_model, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from dashinfer import allspark
            from dashinfer.allspark import *
            from dashinfer.allspark.engine import *
            from dashinfer.allspark.engine import TargetDevice, RequestStatInfo, RoPEScaleMethod
            from dashinfer.allspark.model_loader import HuggingFaceModel, DashInferModel, LLM
            from dashinfer.allspark.model_loader import LoadFormat, ModelSerializerException
            from dashinfer.allspark.model_loader import ConfigFieldMissingError
            from dashinfer.allspark.runtime_config import AsModelRuntimeConfigBuilder
            from dashinfer.allspark.runtime_config import get_cache_mode_from_str
            from dashinfer.allspark.generation_config import ASGenerationConfigBuilder
            from dashinfer.allspark.generation_config import GenerationConfigAdapter
            from dashinfer.allspark.prompt_utils import PromptTemplate
            from dashinfer.allspark._allspark import AsStatus, GenerateRequestStatus, AsCacheMode

            assert Engine is allspark.Engine, "one package, one class"
            assert HuggingFaceModel is allspark.HuggingFaceModel
            model_local_path, safe_model_name, device_list = sys.argv[1], "demo", [0]
            """
        )
        + SNIPPET
        + "print('generated', len(generated_ids), status)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "allspark.dashinfer_compat", str(script), str(demo_model)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("generated ")


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0)])
def test_compat_explains_itself(arguments, code):
    result = subprocess.run(
        [sys.executable, "-m", "allspark.dashinfer_compat", *arguments],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == code
    assert "SCRIPT" in result.stdout
