"""A benchmark: batches of random prompts from one DLPack capsule, waited for together.

usage: performance.py MODEL FOLDER
"""

import sys

import numpy as np
import torch
import torch.utils.dlpack
from dashinfer import allspark
from dashinfer.allspark.engine import TargetDevice

INPUT, OUTPUT = 20, 8

if __name__ == "__main__":
    loader = allspark.HuggingFaceModel(sys.argv[1], "model", user_set_data_type="float32")
    engine = allspark.Engine()
    loader.load_model().read_model_config()
    loader.serialize_to_path(engine, sys.argv[2], skip_if_exists=True).free_model()
    runtime_config = loader.create_reference_runtime_config_builder(
        "model", TargetDevice.CPU_NUMA, [0, 1], max_batch=8
    ).build()
    engine.install_model(runtime_config)
    engine.start_model("model")
    config = {
        "num_beams": 1, "num_return_sequences": 1, "temperature": 0.8, "do_sample": 1,
        "early_stopping": 0, "top_k": 1, "top_p": 0.8, "max_length": INPUT + OUTPUT,
    }  # fmt: skip
    ids = np.random.default_rng(1).integers(3, 1000, (1, INPUT)).astype(np.int64)
    tensor = torch.Tensor(ids).to(torch.int64)
    inputs = {
        "input_ids": torch.utils.dlpack.to_dlpack(tensor.cpu()),
        "attention_mask": torch.utils.dlpack.to_dlpack(torch.ones_like(tensor)),
    }
    num_requests = 0
    for batch in (1, 2, 4):
        handles, queues = [], []
        for _ in range(batch):
            config["uuid"] = str(num_requests)
            num_requests += 1
            status, handle, queue = engine.start_request("model", inputs, generate_config=config)
            assert status == allspark.AsStatus.ALLSPARK_SUCCESS, engine.last_error()
            handles.append(handle)
            queues.append(queue)
        assert engine.sync_request("model", None) == allspark.AsStatus.ALLSPARK_SUCCESS
        outputs = []
        for handle, queue in zip(handles, queues, strict=True):
            while True:  # another way in which DashInfer reads ended requests
                status = engine.get_request_status("model", queue)
                if status == allspark.GenerateRequestStatus.GenerateFinished:
                    outputs.append(engine.get_no_wait("model", queue))
                    break
            assert engine.get_wait("model", queue) == []
            engine.release_request("model", request_handle=handle)
        assert all(output == outputs[0] and len(output) == OUTPUT for output in outputs), outputs
        print(engine.get_op_profiling_info("model"))
    assert torch.equal(tensor, torch.from_numpy(ids))  # the capsule still holds the script's data
    files = (f"{sys.argv[2]}/model.{ending}" for ending in ("asgraph", "asparam"))
    info = engine.get_file_information(*files)
    assert info.create_version_graph == info.create_version_param == info.current_version_engine
    assert not engine.is_allspark_work_as_service()
    print("done:", num_requests)
    engine.stop_model("model")
    engine.release_model("model")
