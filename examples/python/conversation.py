"""Asks one question after the other in one conversation: each turn computes its new tokens alone.

usage: conversation.py MODEL_DIR QUESTION...
"""

import json
import sys

from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice


def main(model_dir: str, questions: list[str]) -> None:
    engine = Engine()
    loader = HuggingFaceModel(model_dir, "chat").load_model().serialize_to_memory(engine)
    runtime_config = (
        loader.create_reference_runtime_config_builder(
            "chat", TargetDevice.CPU, max_batch=4, max_context_length=512
        )
        .kv_cache_span_size(16)  # finds more of short texts than the default
        .build()
    )
    engine.install_model(runtime_config)
    engine.start_model("chat")

    tokenizer = loader.get_tokenizer()
    ids: list[int] = []  # the whole conversation, as the model saw it
    for question in questions:
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids += tokenizer.encode(turn)
        config = loader.create_reference_generation_config_builder(runtime_config)
        status, _, queue = engine.start_request_ids("chat", loader, ids, config)
        if status != AsStatus.ALLSPARK_SUCCESS:
            sys.exit(f"conversation: {engine.last_error()}")
        answer = [token for elements in queue for token in elements.ids_from_generate]
        found = queue.RequestStatInfo()["context_cached_length"]
        print(json.dumps({
            "question": question, "answer": tokenizer.decode(answer, skip_special_tokens=True),
            "prompt_tokens": len(ids), "from_cache": found,
        }))  # fmt: skip
        ids += answer
    engine.stop_model("chat")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
