"""Answers in a format: sums by a regular expression, a choice, and an object of a JSON schema.

usage: guided.py MODEL_DIR
"""

import json
import sys

from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice

ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # no white space between the parts
}
QUESTIONS = {
    "12+35": {"type": "regex", "regex": r"\d+ \+ \d+ = \d+"},
    "Is a ResultQueue pollable?": {"type": "choice", "choice": ["yes", "no"]},
    "Name an animal.": {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}},
}


def main(model_dir: str) -> None:
    engine = Engine()
    loader = HuggingFaceModel(model_dir, "guided").load_model().serialize_to_memory(engine)
    runtime_config = loader.create_reference_runtime_config_builder(
        "guided", TargetDevice.CPU, max_batch=4, max_context_length=512
    ).build()
    engine.install_model(runtime_config)
    engine.start_model("guided")

    tokenizer = loader.get_tokenizer()
    queues = []
    for question, response_format in QUESTIONS.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        config = loader.create_reference_generation_config_builder(runtime_config)
        config.response_format(response_format)
        # A format that cannot be enforced is refused here, and last_error() says why.
        status, _, queue = engine.start_request_text("guided", loader, prompt, config)
        if status != AsStatus.ALLSPARK_SUCCESS:
            sys.exit(f"guided: {engine.last_error()}")
        queues.append(queue)
    for question, queue in zip(QUESTIONS, queues, strict=True):
        ids = [token for elements in queue for token in elements.ids_from_generate]
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        print(json.dumps({"question": question, "answer": answer, "finish": queue.finish_reason}))
    engine.stop_model("guided")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
