"""The engine alone, for server_start.py, in a process that imports nothing else of the benchmarks.

Says "up" once a model has started and "answered" after a request, and stays until its input ends.

usage: engine_start.py MODEL MAX_BATCH NUM_OUTPUT
"""

from __future__ import annotations

import sys

from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice

MODEL = "bench"


def main(folder: str, max_batch: int, num_output: int) -> None:
    engine = Engine()

    def expect(status: AsStatus) -> None:
        if status != AsStatus.ALLSPARK_SUCCESS:
            raise RuntimeError(f"{status.name}: {engine.last_error()}")

    loader = HuggingFaceModel(folder, MODEL).load_model().read_model_config()
    loader.serialize_to_memory(engine).free_model()
    builder = loader.create_reference_runtime_config_builder(
        MODEL, TargetDevice.CPU, max_batch=max_batch
    )
    builder.max_length(loader.get_model_context_length())
    expect(engine.install_model(builder.build()))
    expect(engine.start_model(MODEL))
    print("up", flush=True)
    config = {"max_new_tokens": num_output, "do_sample": False}
    status, handle, queue = engine.start_request_ids(MODEL, None, [3] * 16, config)
    expect(status)
    expect(engine.sync_request(MODEL, handle))
    if queue.error is not None:
        raise RuntimeError(queue.error)
    print("answered", flush=True)
    sys.stdin.read()
    expect(engine.stop_model(MODEL))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
