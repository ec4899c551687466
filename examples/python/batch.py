"""Answers a file of prompts, one per line, and prints one JSON object per answer, in order.

usage: batch.py MODEL_DIR PROMPTS.txt
"""

import json
import sys
from pathlib import Path

from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice


def main(model_dir: str, prompts_file: str) -> None:
    prompts = Path(prompts_file).read_text().splitlines()
    engine = Engine()
    loader = HuggingFaceModel(model_dir, "batch").load_model().serialize_to_memory(engine)
    runtime_config = loader.create_reference_runtime_config_builder(
        "batch", TargetDevice.CPU, max_batch=16, max_context_length=512
    ).build()
    engine.install_model(runtime_config)
    engine.start_model("batch")

    tokenizer = loader.get_tokenizer()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    config = loader.create_reference_generation_config_builder(runtime_config)
    # The whole file is one call: the engine batches what fits and queues the rest.
    status, handles, queues = engine.start_request_text("batch", loader, texts, config)
    if status != AsStatus.ALLSPARK_SUCCESS:
        sys.exit(f"batch: {engine.last_error()}")
    engine.sync_request("batch", handles)
    for prompt, queue in zip(prompts, queues, strict=True):
        ids = [token for elements in queue for token in elements.ids_from_generate]
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        print(json.dumps({"prompt": prompt, "answer": answer, "finish": queue.finish_reason}))
    engine.release_request("batch", handles)
    engine.stop_model("batch")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
