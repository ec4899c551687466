"""Many streams on one asyncio event loop: no thread per request, no polling.

usage: async_streams.py MODEL_DIR [NUM_STREAMS]
"""

import asyncio
import sys

from allspark import Engine, HuggingFaceModel, TargetDevice


async def answer(engine: Engine, loader: HuggingFaceModel, question: str) -> str:
    tokenizer = loader.get_tokenizer()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    config = loader.create_reference_generation_config_builder()
    status, handle, queue = engine.start_request_ids("async", loader, ids, config)
    if queue is None:
        return f"refused ({status.name}): {engine.last_error()}"
    tokens = []
    try:
        async for elements in queue:
            tokens += elements.ids_from_generate
    finally:  # also when this task is cancelled: the engine stops computing for it
        engine.release_request("async", handle)
    return tokenizer.decode(tokens, skip_special_tokens=True)


async def main(model_dir: str, num_streams: int) -> None:
    engine = Engine()
    loader = HuggingFaceModel(model_dir, "async").load_model().serialize_to_memory(engine)
    context = loader.get_model_context_length()
    runtime_config = loader.create_reference_runtime_config_builder(
        "async", TargetDevice.CPU, max_batch=64, max_context_length=min(context, 2048)
    ).build()
    engine.install_model(runtime_config)
    engine.start_model("async")
    questions = [f"What is {i % 50}+{i % 49}?" for i in range(num_streams)]
    answers = await asyncio.gather(*(answer(engine, loader, q) for q in questions))
    for question, text in list(zip(questions, answers, strict=True))[:5]:
        print(f"{question} {text}")
    print(f"{len(answers)} answers")
    engine.stop_model("async")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 100))
