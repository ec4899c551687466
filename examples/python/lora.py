"""One question to a model and to its LoRA adapters, all in one batch.

usage: lora.py MODEL_DIR QUESTION ADAPTER_DIR...

An adapter is a directory in PEFT's layout; examples/demo_adapter is one for examples/demo_model.
"""

import sys
from pathlib import Path

from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice


def main(model_dir: str, question: str, adapter_dirs: list[str]) -> None:
    engine = Engine()
    loader = HuggingFaceModel(model_dir, "lora").load_model().serialize_to_memory(engine)
    runtime_config = (
        loader.create_reference_runtime_config_builder(
            "lora", TargetDevice.CPU, max_batch=8, max_context_length=512
        )
        .lora_max_num(len(adapter_dirs))
        .build()
    )
    engine.install_model(runtime_config)
    engine.start_model("lora")
    for directory in adapter_dirs:  # also while requests run
        if engine.load_lora("lora", Path(directory).name, directory) != AsStatus.ALLSPARK_SUCCESS:
            sys.exit(f"lora: {engine.last_error()}")

    tokenizer = loader.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    queues = {}
    for lora_name in ["", *engine.list_loras("lora")]:
        config = loader.create_reference_generation_config_builder(runtime_config)
        config.lora_name(lora_name)  # "": the base model
        _, _, queues[lora_name] = engine.start_request_text("lora", loader, prompt, config)
    for lora_name, queue in queues.items():
        ids = [token for elements in queue for token in elements.ids_from_generate]
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        print(f"{lora_name or 'without an adapter'}: {answer}")
    engine.stop_model("lora")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
