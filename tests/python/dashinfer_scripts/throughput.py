"""A benchmark: a pool of threads, each of which polls the status of one request and reads it.

usage: throughput.py MODEL
"""

import random
import sys
from concurrent.futures import ThreadPoolExecutor

from dashinfer import allspark

NUM_REQUESTS, NUM_THREADS, NUM_OUTPUT = 40, 8, 6


def one_request(index, engine, loader, prompt, config):
    status, handle, queue = engine.start_request_ids("model", loader, prompt, config)
    if status != allspark.AsStatus.ALLSPARK_SUCCESS:
        sys.exit(1)
    ids, valid = [], True
    while True:
        status = queue.GenerateStatus()
        if status == allspark.GenerateRequestStatus.Init:
            pass
        elif status in (
            allspark.GenerateRequestStatus.Generating,
            allspark.GenerateRequestStatus.GenerateFinished,
        ):
            elements = queue.Get()
            if elements is not None:
                ids.extend(elements.ids_from_generate)
                print(f"{index}: {ids} {elements.prefix_cache_len} {elements.prefix_len_gpu}")
            if status == allspark.GenerateRequestStatus.GenerateFinished:
                break
        elif status == allspark.GenerateRequestStatus.GenerateInterrupted:
            valid = False
            break
        else:
            print(f"[Error] Unexpected status: {status}")
            valid = False
            break
    engine.stop_request("model", handle)
    engine.release_request("model", request_handle=handle)
    return valid, ids


if __name__ == "__main__":
    loader = allspark.HuggingFaceModel(
        sys.argv[1],
        "a_model",
        in_memory_serialize=True,
        user_set_data_type="float16",
        trust_remote_code=True,
    )
    engine = allspark.Engine()
    (
        loader.load_model()
        .read_model_config()
        .serialize(
            engine,
            model_output_dir=".",
            enable_quant=0,
            weight_only_quant=False,
            customized_quant_config={},
        )
        .free_model()
    )
    builder = loader.create_reference_runtime_config_builder(
        "model", "CUDA", [0, 1], max_batch=NUM_THREADS
    )
    builder.max_length(128)
    builder.prefill_cache(0)
    runtime_config = builder.build()
    engine.install_model(runtime_config)
    loader.free_memory_serialize_file()
    engine.start_model("model")
    loader.read_model_config().init_tokenizer().get_tokenizer()

    random.seed(1)
    tasks = []
    for index in range(NUM_REQUESTS):
        prompt = [random.randrange(3, 1000) for _ in range(random.randrange(1, 30))]
        config = loader.create_reference_generation_config_builder(runtime_config)
        config.early_stopping(0)
        config.update({"max_length": len(prompt) + 1 + index % NUM_OUTPUT})
        tasks.append((index, engine, loader, prompt, config))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        results = list(pool.map(lambda task: one_request(*task), tasks))
    if engine.get_rank_id() == 0:
        for index, (valid, ids) in enumerate(results):
            assert valid and len(ids) == 1 + index % NUM_OUTPUT, (index, valid, ids)
        print(f"done: {sum(valid for valid, _ in results)} of {NUM_REQUESTS}")
    engine.stop_model("model")
    engine.release_model("model")
