"""An example: load, serialise, install, ask, read in one of two ways, release.

usage: basic.py MODEL FOLDER {memory,files} {sync,async} DATA_TYPE
"""

import os
import sys

from dashinfer import allspark
from dashinfer.allspark._allspark import AsCacheMode, AsStatus, GenerateRequestStatus
from dashinfer.allspark.engine import TargetDevice
from dashinfer.allspark.prompt_utils import PromptTemplate

if __name__ == "__main__":
    model_path, folder, place, reading, data_type = sys.argv[1:]
    in_memory = place == "memory"
    name = "org/demo".replace("/", "_")
    loader = allspark.HuggingFaceModel(
        model_path,
        name,
        user_set_data_type=data_type,
        in_memory_serialize=in_memory,
        trust_remote_code=True,
    )
    engine = allspark.Engine()
    if in_memory:
        (
            loader.load_model()
            .read_model_config()
            .serialize_to_memory(engine, enable_quant=False, weight_only_quant=True)
            .export_model_diconfig(os.path.join(folder, "export", "diconfig.yaml"))
            .free_model()
        )
    else:
        (
            loader.load_model(direct_load=False, load_format=None)
            .read_model_config()
            .serialize_to_path(
                engine, folder, enable_quant=False, weight_only_quant=True, skip_if_exists=False
            )
            .free_model()
        )

    builder = loader.create_reference_runtime_config_builder(
        name, TargetDevice.CUDA, [0], max_batch=8
    )
    builder.max_length(256)
    builder.kv_cache_mode(AsCacheMode.AsCacheDefault)
    runtime_config = builder.build()
    engine.install_model(runtime_config)
    if in_memory:
        loader.free_memory_serialize_file()
    engine.start_model(name)

    for question in ("What is a ResultQueue?", "What is 4+5?"):
        text = PromptTemplate.apply_chatml_template(question)
        config = loader.create_reference_generation_config_builder(runtime_config)
        config.update({"top_k": 1})
        config.update({"repetition_penalty": 1.1})
        status, handle, queue = engine.start_request_text(name, loader, text, config)
        assert status == AsStatus.ALLSPARK_SUCCESS
        ids = []
        if reading == "sync":
            engine.sync_request(name, handle)
            assert queue.GenerateStatus() == GenerateRequestStatus.GenerateFinished
            ids += queue.Get().ids_from_generate
        else:
            status = queue.GenerateStatus()
            while status in (
                GenerateRequestStatus.Init,
                GenerateRequestStatus.Generating,
                GenerateRequestStatus.ContextFinished,
            ):
                print(f"status: {queue.GenerateStatus()}")
                elements = queue.Get()
                if elements is not None:
                    print(f"new: {elements.ids_from_generate}")
                    ids += elements.ids_from_generate
                status = queue.GenerateStatus()
                if status == GenerateRequestStatus.GenerateFinished:
                    break
                if status == GenerateRequestStatus.GenerateInterrupted:
                    break
        assert len(ids) == queue.GeneratedLength(), (ids, queue.GeneratedLength())
        print("answer:", loader.init_tokenizer().get_tokenizer().decode(ids))
        engine.release_request(name, handle)

    engine.stop_model(name)
    engine.release_model(name)
