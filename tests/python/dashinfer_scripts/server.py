"""An HTTP server: an async generator for each request reads its queue in turns on the event loop.

usage: server.py MODEL FOLDER [--max-batch N] [--int8-kv-cache]

It sends requests to itself from several clients at once, prints what they got, and ends.
"""

import argparse
import asyncio
import json

from dashinfer import allspark
from dashinfer.allspark._allspark import GenerateRequestStatus
from dashinfer.allspark.engine import TargetDevice
from dashinfer.allspark.prompt_utils import PromptTemplate

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("folder")
parser.add_argument("--max-batch", type=int, default=8)
parser.add_argument("--max-length", type=int, default=256)
parser.add_argument("--int8-kv-cache", action="store_true")
args = parser.parse_args()

name = "demo"
loader = allspark.HuggingFaceModel(
    args.model, name, in_memory_serialize=False, trust_remote_code=True
)
engine = allspark.Engine()
loader.read_model_config()
loader.load_model().serialize_to_path(
    engine, args.folder, enable_quant=False, weight_only_quant=True, skip_if_exists=False
).free_model()
builder = loader.create_reference_runtime_config_builder(
    name, TargetDevice.CPU, [], max_batch=args.max_batch
)
builder.max_length(args.max_length)
if args.int8_kv_cache:
    builder.kv_cache_mode(allspark.AsCacheMode.AsCacheQuantI8)
runtime_config = builder.build()
engine.install_model(runtime_config)
engine.start_model(name)


async def generate(prompt):
    text = PromptTemplate.apply_chatml_template(prompt)
    config = loader.create_reference_generation_config_builder(runtime_config)
    config.update({"top_k": 1, "repetition_penalty": 1.1})
    status, handle, queue = engine.start_request_text(name, loader, text, config)
    status = queue.GenerateStatus()
    while status in (
        GenerateRequestStatus.Init,
        GenerateRequestStatus.Generating,
        GenerateRequestStatus.ContextFinished,
    ):
        elements = queue.Get()
        if elements is not None:
            yield loader.init_tokenizer().get_tokenizer().decode(elements.ids_from_generate)
            await asyncio.sleep(0)
        status = queue.GenerateStatus()
        if status == GenerateRequestStatus.GenerateFinished:
            break
        if status == GenerateRequestStatus.GenerateInterrupted:
            break
    engine.release_request(name, handle)


async def answer(reader, writer):
    prompt = json.loads(await reader.readline())["prompt"]
    async for delta in generate(prompt):
        writer.write(json.dumps({"text": delta}).encode() + b"\n")
        await writer.drain()
    writer.close()


async def ask(port, prompt):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps({"prompt": prompt}).encode() + b"\n")
    text = "".join([json.loads(line)["text"] async for line in reader])
    writer.close()
    return text


async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    prompts = ["What is 4+5?", "What is 2+6?"] * 4
    for prompt, text in zip(
        prompts, await asyncio.gather(*(ask(port, prompt) for prompt in prompts)), strict=True
    ):
        print(prompt, "->", text)
    server.close()


asyncio.run(main())
engine.stop_model(name)
engine.release_model(name)
