"""Asks a model one question and prints the answer as it is generated.

usage: quickstart.py MODEL_DIR PROMPT
"""

import sys

from allspark import AsStatus, Detokenizer, Engine, HuggingFaceModel, PromptTemplate, TargetDevice


def main(model_dir: str, question: str) -> int:
    engine = Engine()
    loader = HuggingFaceModel(model_dir, "quickstart")
    loader.load_model().read_model_config().serialize_to_memory(engine).free_model()
    runtime_config = loader.create_reference_runtime_config_builder(
        "quickstart",
        TargetDevice.CPU,
        max_batch=1,
        max_context_length=min(2048, loader.get_model_context_length()),
    ).build()
    for step in (
        lambda: engine.install_model(runtime_config),
        lambda: engine.start_model("quickstart"),
    ):
        if step() != AsStatus.ALLSPARK_SUCCESS:
            print(f"quickstart: {engine.last_error()}", file=sys.stderr)
            return 1

    tokenizer = loader.get_tokenizer()
    if getattr(tokenizer, "chat_template", None):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
    elif "<|im_start|>" in tokenizer.get_vocab():
        prompt = PromptTemplate.apply_chatml_template(question)
    else:
        prompt = question  # a base model: it continues the text
    config = loader.create_reference_generation_config_builder(runtime_config).max_new_tokens(256)

    status, handle, queue = engine.start_request_text("quickstart", loader, prompt, config)
    if status != AsStatus.ALLSPARK_SUCCESS:
        print(f"quickstart: {engine.last_error()}", file=sys.stderr)
        return 1
    print(f"> {question}")
    text = Detokenizer(tokenizer)
    for elements in queue:
        print(text.put(elements.ids_from_generate), end="", flush=True)
    print(text.flush())
    info = queue.RequestStatInfo()
    print(
        f"[{info['generated_token_length']} tokens, first after {info['time_to_first_token']} ms, "
        f"{info['generate_tps']} tokens/s, ended by {queue.finish_reason}]\n"
    )
    engine.release_request("quickstart", handle)
    engine.stop_model("quickstart")
    engine.release_model("quickstart")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2]))
