"""Scripts written for LMDeploy run unmodified, and every name that it documents is there.

The snippets are those of LMDeploy's documents. Models of a hub are links in the working directory.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

pytest.importorskip("allspark._allspark")

from allspark.lmdeploy_compat import install  # noqa: E402
from allspark.lmdeploy_compat.not_served import CONSTANTS, METHODS, MODULES, NAMES  # noqa: E402

MODELS_OF_HUBS = ("internlm/internlm2-chat-7b", "internlm/internlm-chat-7b", "THUDM/chatglm2-6b")
ADAPTER = "chenchi/lora-chatglm2-6b-guodegang"


@pytest.fixture(scope="module", autouse=True)
def lmdeploy():
    from allspark.chat_template import MODELS

    install()
    module = importlib.import_module("lmdeploy")
    before = dict(MODELS._classes)
    yield module
    MODELS._classes.clear()
    MODELS._classes.update(before)
    for name in [name for name in sys.modules if name.split(".")[0] == "lmdeploy"]:
        del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if "lmdeploy" not in type(each).__module__]


@pytest.fixture
def hub(tmp_path, monkeypatch, demo_model, repo_root):
    """A working directory in which names on a hub are the demo model."""
    for name in (*MODELS_OF_HUBS, "internlm2-chat-7b-4bit"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(demo_model)
    (tmp_path / ADAPTER).parent.mkdir()
    (tmp_path / ADAPTER).symlink_to(repo_root / "examples" / "demo_adapter")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def pipe(lmdeploy, demo_model):
    with lmdeploy.pipeline(str(demo_model), model_name="demo") as pipe:
        yield pipe


def run(source: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a script in the working directory."""
    with open("script.py", "w") as file:
        file.write(textwrap.dedent(source))
    result = subprocess.run(
        [sys.executable, "-m", "allspark.lmdeploy_compat", "script.py", *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == status, result.stdout + result.stderr
    return result


# Snippets of the documents.

DEFAULTS = """
from lmdeploy import pipeline

pipe = pipeline('internlm/internlm2-chat-7b')
response = pipe(['Hi, pls intro yourself', 'Shanghai is'])
print(response)
"""
CACHE = """
from lmdeploy import pipeline, TurbomindEngineConfig

# decrease the ratio of the k/v cache occupation to 20%
backend_config = TurbomindEngineConfig(cache_max_entry_count=0.2)

pipe = pipeline('internlm/internlm2-chat-7b',
                backend_config=backend_config)
response = pipe(['Hi, pls intro yourself', 'Shanghai is'])
print(response)
"""
SAMPLING = """
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
pipe = pipeline('internlm/internlm2-chat-7b',
                backend_config=backend_config)
response = pipe(['Hi, pls intro yourself', 'Shanghai is'],
                gen_config=gen_config)
print(response)
"""
STREAM = """
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
pipe = pipeline('internlm/internlm2-chat-7b',
                backend_config=backend_config)
prompts = [[{
    'role': 'user',
    'content': 'Hi, pls intro yourself'
}], [{
    'role': 'user',
    'content': 'Shanghai is'
}]]
response = pipe(prompts,
                gen_config=gen_config)
for item in pipe.stream_infer(prompts, gen_config=gen_config):
    print(item)
"""
PYTORCH = """
from lmdeploy import pipeline, GenerationConfig, PytorchEngineConfig

backend_config = PytorchEngineConfig(session_len=2048)
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
pipe = pipeline('internlm/internlm-chat-7b',
                backend_config=backend_config)
prompts = [[{
    'role': 'user',
    'content': 'Hi, pls intro yourself'
}], [{
    'role': 'user',
    'content': 'Shanghai is'
}]]
response = pipe(prompts, gen_config=gen_config)
print(response)
"""
ADAPTERS = """
from lmdeploy import pipeline, GenerationConfig, PytorchEngineConfig

backend_config = PytorchEngineConfig(session_len=2048,
                                     adapters=dict(lora_name_1='chenchi/lora-chatglm2-6b-guodegang'))
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
pipe = pipeline('THUDM/chatglm2-6b',
                backend_config=backend_config)
prompts = [[{
    'role': 'user',
    'content': '您猜怎么着'
}]]
response = pipe(prompts, gen_config=gen_config, adapter_name='lora_name_1')
print(response)
"""
CACHE_BITS = """
from lmdeploy import pipeline, TurbomindEngineConfig
engine_config = TurbomindEngineConfig(quant_policy=8)
pipe = pipeline("internlm/internlm2-chat-7b", backend_config=engine_config)
response = pipe(["Hi, pls intro yourself", "Shanghai is"])
print(response)
"""
LONG_CONTEXT = """
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(rope_scaling_factor=2.0, session_len=160000)
pipe = pipeline('internlm/internlm2-chat-7b', backend_config=backend_config)
prompt = 'Use a long prompt to replace this sentence'
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
response = pipe(prompt, gen_config=gen_config)
print(response)
"""
EXAMPLE = """
import lmdeploy
pipe = lmdeploy.pipeline('internlm/internlm-chat-7b')
response = pipe(['hi','say this is a test'])
print(response)
"""


@pytest.mark.parametrize(
    "source",
    [DEFAULTS, CACHE, SAMPLING, STREAM, PYTORCH, ADAPTERS, CACHE_BITS, LONG_CONTEXT, EXAMPLE],
    ids=[
        "defaults", "cache", "sampling", "stream", "pytorch", "adapters", "cache_bits",
        "long_context", "example",
    ],
)  # fmt: skip
def test_snippet(hub, capsys, source):
    names: dict = {"__name__": "__main__"}
    exec(source, names)
    assert "Response(text=" in capsys.readouterr().out
    many = names["response"]
    for response in many if isinstance(many, list) else [many]:
        assert response.text and response.finish_reason in ("stop", "length")
    names["pipe"].close()


def test_passkey_snippet(hub, capsys):
    """The page's function; the session is shorter than there."""
    source = """
    import numpy as np
    from lmdeploy import pipeline
    from lmdeploy import TurbomindEngineConfig

    session_len = 1200
    backend_config = TurbomindEngineConfig(rope_scaling_factor=2.0, session_len=session_len)
    pipe = pipeline('internlm/internlm2-chat-7b', backend_config=backend_config)

    def passkey_retrival(session_len, n_round=5):
        tok = pipe.tokenizer
        garbage = 'The grass is green. The sky is blue. The sun is yellow. Here we go.'
        for _ in range(n_round):
            n_times = (session_len - 1000) // len(tok.encode(garbage))
            n_garbage_prefix = np.random.randint(0, n_times)
            garbage_prefix = ' '.join([garbage] * n_garbage_prefix)
            pass_key = np.random.randint(1, 50000)
            information_line = f'The pass key is {pass_key}. Remember it.'
            prompt = ' '.join([garbage_prefix, information_line, 'What is the pass key?'])
            response = pipe([prompt])
            print(pass_key, response)

    passkey_retrival(session_len, 2)
    pipe.close()
    """
    exec(textwrap.dedent(source), {})
    assert capsys.readouterr().out.count("Response(text=") == 2


def test_perplexity_snippet(hub, demo_model, lmdeploy):
    (hub / "datasets.py").write_text("def load_dataset(*args): pass\n")
    out = run(
        """
        from datasets import load_dataset
        from lmdeploy import TurbomindEngineConfig
        from lmdeploy.turbomind import TurboMind
        import numpy as np

        # load model and tokenizer
        engine_config = TurbomindEngineConfig(rope_scaling_factor=2.0, session_len=160000)
        engine = TurboMind.from_pretrained('internlm/internlm2-chat-7b', engine_config)
        tokenizer = engine.tokenizer
        generator = engine.create_instance()

        # get perplexity
        text = 'Use a long prompt to replace this sentence'
        input_ids = tokenizer.encode(text)
        loss = generator.get_ppl(input_ids)[0]
        ppl = np.exp(loss)
        print(type(generator.get_ppl([input_ids, input_ids])), float(ppl))
        """
    ).stdout.split()
    assert "numpy.ndarray" in out[1] and float(out[-1]) > 1


TEMPLATE = """
from lmdeploy.model import MODELS, BaseChatTemplate


@MODELS.register_module(name='customized_model')
class CustomizedModel(BaseChatTemplate):
    \"\"\"A customized chat template.\"\"\"

    def __init__(self,
                 system='<|im_start|>system\\n',
                 meta_instruction='You are a robot developed by LMDeploy.',
                 user='<|im_start|>user\\n',
                 assistant='<|im_start|>assistant\\n',
                 eosys='<|im_end|>\\n',
                 eoh='<|im_end|>\\n',
                 eoa='<|im_end|>',
                 separator='\\n',
                 stop_words=['<|im_end|>', '<|action_end|>']):
        super().__init__(system=system,
                         meta_instruction=meta_instruction,
                         eosys=eosys,
                         user=user,
                         eoh=eoh,
                         assistant=assistant,
                         eoa=eoa,
                         separator=separator,
                         stop_words=stop_words)


from lmdeploy import ChatTemplateConfig, pipeline

messages = [{'role': 'user', 'content': 'who are you?'}]
pipe = pipeline('internlm/internlm2-chat-7b',
                chat_template_config=ChatTemplateConfig('customized_model'))
for response in pipe.stream_infer(messages):
    print(response.text, end='')
"""


def test_template_snippet_and_its_server(hub, capsys, lmdeploy):
    names: dict = {"__name__": "test_lmdeploy_compat_script"}
    exec(TEMPLATE, names)
    assert capsys.readouterr().out
    prompt = names["pipe"].chat_template.get_prompt("x")
    assert "developed by LMDeploy" in prompt
    names["pipe"].close()
    # A server's process does not know the class; it gets its fields.
    from allspark.lmdeploy_compat.api_server import _template
    from allspark.lmdeploy_compat.serving import _template_job

    config = lmdeploy.ChatTemplateConfig("customized_model")
    job = json.loads(json.dumps(_template_job(config, None)))
    assert job["fields"]["stop_words"][1] == "<|action_end|>"
    sent = _template({**job, "name": "sent_model"}).chat_template
    assert sent.get_prompt("x") == prompt and sent.stop_words == job["fields"]["stop_words"]
    config.meta_instruction = "Another."
    assert _template_job(config, None)["fields"]["meta_instruction"] == "Another."
    assert json.loads(_template_job("vicuna", None)) == json.loads(_template_job(None, "vicuna"))
    names["CustomizedModel"].get_prompt = lambda self, prompt, sequence_start=True: prompt
    with pytest.raises(NotImplementedError, match="CustomizedModel.get_prompt"):
        _template_job(config, None)


def test_spawned_processes_find_lmdeploy(hub):
    source = """
    import multiprocessing, sys
    from lmdeploy import GenerationConfig
    from helper import NAME

    def work(queue):
        import lmdeploy.messages
        queue.put((lmdeploy.messages.GenerationConfig.__module__, GenerationConfig().top_k, NAME))

    if __name__ == '__main__':
        context = multiprocessing.get_context('spawn')
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(queue.get(), sys.argv)
        process.join()
    """
    (hub / "helper.py").write_text("NAME = 'beside'\n")
    out = run(source, "--an", "argument").stdout
    assert out.strip() == (
        "('allspark.pipeline.configs', 50, 'beside') ['script.py', '--an', 'argument']"
    )


def test_the_command_says_how_it_is_used():
    command = [sys.executable, "-m", "allspark.lmdeploy_compat"]
    for arguments, status in (([], 2), (["--help"], 0)):
        result = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert result.returncode == status and "SCRIPT" in result.stdout
    for name in ("lmdeploy_compat", "dashinfer_compat"):
        command = [sys.executable, "-m", f"allspark.{name}", "/nowhere/x.py"]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 2
        assert result.stderr == f"allspark.{name}: /nowhere/x.py: no such file\n"


# Names.

DOCUMENTED = {
    "lmdeploy": "pipeline Pipeline serve client Tokenizer GenerationConfig EngineGenerationConfig "
    "TurbomindEngineConfig PytorchEngineConfig ChatTemplateConfig VisionConfig SpeculativeConfig "
    "__version__ version_info",
    "lmdeploy.messages": "GenerationConfig EngineGenerationConfig TurbomindEngineConfig "
    "PytorchEngineConfig VisionConfig SpeculativeConfig Response ResponseType QuantPolicy "
    "EngineRole MigrationBackend",
    "lmdeploy.model": "MODELS BaseChatTemplate ChatTemplateConfig",
    "lmdeploy.serve.openai.api_client": "APIClient get_model_list",
    "lmdeploy.serve.gradio.turbomind_coupled": "run_local",
    "lmdeploy.turbomind": "TurboMind",
    "lmdeploy.tokenizer": "Tokenizer DetokenizeState",
    "lmdeploy.vl": "load_image",
    "lmdeploy.version": "__version__ version_info",
    "lmdeploy.api": "pipeline serve client",
    "lmdeploy.pytorch.engine": "Engine",
}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_names(module):
    found = importlib.import_module(module)
    for name in DOCUMENTED[module].split():
        assert getattr(found, name) is not None and name in found.__all__ and name in dir(found)
    with pytest.raises(AttributeError, match="nothing is not served"):
        found.nothing  # noqa: B018


def test_names_are_the_packages_own(lmdeploy):
    from allspark.chat_template import MODELS
    from allspark.pipeline import GenerationConfig, Pipeline

    assert lmdeploy.GenerationConfig is GenerationConfig
    assert issubclass(lmdeploy.Pipeline, Pipeline)
    assert importlib.import_module("lmdeploy.model").MODELS is MODELS
    assert lmdeploy.version_info == tuple(map(int, lmdeploy.__version__.split(".")))
    policy = importlib.import_module("lmdeploy.messages").QuantPolicy
    assert lmdeploy.TurbomindEngineConfig(quant_policy=policy.INT8).quant_policy == 8
    with pytest.raises(ValueError, match="quant_policy"):
        lmdeploy.TurbomindEngineConfig(quant_policy=policy.FP8)
    messages = importlib.import_module("lmdeploy.messages")
    roles, backends = messages.EngineRole, messages.MigrationBackend
    config = lmdeploy.PytorchEngineConfig(role=roles.Hybrid, migration_backend=backends.DLSlime)
    assert config.role == "Hybrid"
    with pytest.raises(ValueError, match="role is .*Prefill.*; only 'Hybrid' is served"):
        lmdeploy.PytorchEngineConfig(role=roles.Prefill)
    # The package lmdeploy.serve, which an import puts in the function's place, can be called.
    importlib.import_module("lmdeploy.serve.openai.api_client")
    with pytest.raises(ValueError, match="model_path"):
        lmdeploy.serve("")
    with pytest.raises(TypeError, match="not callable"):
        importlib.import_module("lmdeploy.vl")()


def test_what_is_not_served_says_what_to_use():
    for module, names in NAMES.items():
        for name, instead in names.items():
            with pytest.raises(NotImplementedError) as error:
                getattr(importlib.import_module(module), name)("x", y=1)
            assert f"{module}.{name} is not served: {instead}" == str(error.value)
    for module, names in CONSTANTS.items():
        for name in names:
            with pytest.raises(NotImplementedError, match=name):
                getattr(importlib.import_module(module), name)
    for module, instead in MODULES.items():
        with pytest.raises(ModuleNotFoundError) as error:
            importlib.import_module(f"{module}.inner.part")
        assert instead in str(error.value)
    with pytest.raises(ModuleNotFoundError, match="`allspark lite`, or allspark.quantize.lite"):
        importlib.import_module("lmdeploy.lite.apis.auto_awq")
    assert importlib.import_module("allspark.quantize.lite").auto_awq
    with pytest.raises(ModuleNotFoundError, match="lmdeploy.md"):
        importlib.import_module("lmdeploy.nothing")
    modules = [importlib.import_module(f"allspark.lmdeploy_compat.{name}")
               for name in ("api_client", "pipe", "turbomind")]  # fmt: skip
    for place in METHODS:
        cls, method = place.split(".")
        owner = next(getattr(each, cls) for each in modules if hasattr(each, cls))
        with pytest.raises(NotImplementedError, match=place):
            getattr(owner, method)(object(), 1)


# Pipelines.


def test_positions_of_both_generations(lmdeploy, demo_model):
    path, backend = str(demo_model), lmdeploy.TurbomindEngineConfig(max_batch_size=2)
    template = lmdeploy.ChatTemplateConfig("vicuna")
    speculative = lmdeploy.SpeculativeConfig("prompt_lookup", "", 2)
    calls = [
        ((backend, template, "ERROR", None, speculative), {}),
        ((None, backend, template, "ERROR"), {}),
        (("demo", backend, template), {"vision_config": lmdeploy.VisionConfig(2, True)}),
        ((None, None, template), {"backend_config": backend}),
        ((), {"backend_config": backend, "chat_template_config": template, "log_level": "ERROR",
              "max_log_len": None, "speculative_config": None, "trust_remote_code": False,
              "model_name": None, "allowed_media_domains": None}),
    ]  # fmt: skip
    for index, (args, kwargs) in enumerate(calls):
        if index == 3:
            with pytest.raises(TypeError, match="two values for 'backend_config'"):
                lmdeploy.pipeline(path, *args, **kwargs)
            continue
        with lmdeploy.Pipeline(path, *args, **kwargs) as pipe:
            assert pipe.backend_config.max_batch_size == 2
            assert pipe.chat_template.name == "vicuna" and pipe.backend == "turbomind"
    with pytest.raises(TypeError, match="after model_path"):
        lmdeploy.pipeline(path, None, None, "ERROR", None, None, 1)
    with pytest.raises(TypeError, match="VisionConfig"):
        lmdeploy.pipeline(path, vision_config=3)


def test_every_call_of_a_pipeline(pipe, lmdeploy):
    config = lmdeploy.GenerationConfig(max_new_tokens=16)
    text = "What is 12+35?"
    first = pipe(text, config, True, None, False)
    assert first.text == "12 + 35 = 47"
    named = pipe.infer(
        prompts=text, gen_config=config, do_preprocess=True, adapter_name=None, use_tqdm=False
    )
    assert named.text == first.text and pipe.batch_infer([text], [config])[0].text == first.text
    session = pipe.session(config)
    for call in (
        pipe.stream_infer([text], gen_config=config),
        pipe.stream_infer([text], [session], [config], True, None, True),
        pipe.stream_infer([text], config),
        pipe.stream_infer([text], config, True),
        pipe.stream_infer(prompts=[text], sessions=None, gen_config=config, do_preprocess=True,
                          adapter_name=None, stream_response=False),
    ):  # fmt: skip
        assert "".join(piece.text for piece in call) == first.text
    with pytest.raises(TypeError, match="two values"):
        pipe.stream_infer([text], config, config)
    session = pipe.chat(text, session=None, gen_config=config, stream_response=False)
    assert session.response.text == first.text and "USER:" in str(session)
    assert pipe.chat(text, session, config).history[1][0] == text
    ids = pipe.tokenizer.encode(text)
    assert pipe.get_ppl(ids) == pipe.get_ppl([ids])
    with pytest.raises(ValueError, match="vision-language models are not served"):
        pipe(("describe this image", object()))


def test_a_pipeline_on_an_event_loop(pipe, lmdeploy):
    import asyncio

    async def collect():
        config = lmdeploy.EngineGenerationConfig(max_new_tokens=16)
        return [p.text async for p in pipe.generate("What is 12+35?", 1, gen_config=config)]

    assert "".join(asyncio.run(collect())) == "12 + 35 = 47"


def test_engine_generation_config(pipe, lmdeploy):
    cls, tokenizer = lmdeploy.EngineGenerationConfig, pipe.tokenizer
    config = lmdeploy.GenerationConfig(stop_words=["<|im_end|>"], bad_words=["="], top_k=3)
    ids = cls.From(config, tokenizer)
    assert ids is not config and ids.top_k == 3 and cls.From(ids, tokenizer) == ids
    assert ids.stop_words == tokenizer.encode("<|im_end|>", add_bos=False)
    found = [tokenizer.decode([token]) for token in ids.bad_words]
    assert found and all("=" in text for text in found)
    assert pipe("What is 12+35?", ids).text != "12 + 35 = 47"
    stop = tokenizer.encode("12 +", add_bos=False)[-1]
    stopped = pipe("What is 12+35?", cls(max_new_tokens=16, stop_words=[stop]))
    assert stopped.text == "12" and stopped.finish_reason == "stop"
    with pytest.raises(TypeError, match="stop_words"):
        cls(stop_words=["text"])
    with pytest.raises(TypeError, match="top_k"):
        cls(top_k="many")
    with pytest.raises(TypeError, match="GenerationConfig"):
        cls.From({}, tokenizer)


def test_turbomind_forms(lmdeploy, demo_model):
    from lmdeploy.turbomind import TurboMind

    path, config = str(demo_model), lmdeploy.TurbomindEngineConfig(session_len=64)
    for engine in (
        TurboMind.from_pretrained(path, "demo", None, config),
        TurboMind.from_pretrained(pretrained_model_name_or_path=path, engine_config=config),
        TurboMind.from_pretrained(path, session_len=64),
    ):
        assert engine.session_len == 64
        scores = engine.create_instance(cuda_stream_id=0).get_ppl([[5, 6, 7], [8, 9]])
        assert isinstance(scores, np.ndarray) and scores.shape == (2,)
        engine.close()
    with pytest.raises(TypeError, match="two values"):
        TurboMind.from_pretrained(path, config, engine_config=config)
    with pytest.raises(TypeError, match="beside"):
        TurboMind.from_pretrained(path, config, session_len=64)


# The tokenizer.

TEXTS = [
    "Hello, World! 😃👨‍👩‍👧 done",
    "為什麼我還在用繁體字，這是一個測試。",
    " two  spaces\nand lines ",
    "a<|im_end|>b",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(lmdeploy, demo_model):
    return lmdeploy.Tokenizer(str(demo_model))


@pytest.fixture(scope="module")
def reference(demo_model):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(demo_model))


def test_tokenizer_is_that_of_transformers(tokenizer, reference):
    for text in TEXTS:
        ids = tokenizer.encode(text, add_bos=True, add_special_tokens=True)
        assert ids == reference.encode(text) == tokenizer.encode(text, False)
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, None, skip) == expected
            assert tokenizer.decode(np.array(ids), skip_special_tokens=skip) == expected
        assert tokenizer.decode(ids, offset=2) == reference.decode(ids[2:])
        assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
    for name in ("eos_token_id", "bos_token_id", "vocab_size", "eos_token"):
        assert getattr(tokenizer, name) == getattr(reference, name)
    assert len(tokenizer) == len(reference) and tokenizer.prefix_space_tokens == set()
    with pytest.raises(AttributeError):
        tokenizer.nothing  # noqa: B018


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_incremental_detokenisation(tokenizer, reference, text, skip, interval):
    from lmdeploy.tokenizer import DetokenizeState

    prompt = tokenizer.encode("a prompt 😃")
    ids = tokenizer.encode(text)
    for before in ([], prompt):
        state, pieces = DetokenizeState(len(before)), []
        for end in range(0, len(ids) + interval, interval):
            piece, state = tokenizer.detokenize_incrementally(
                before + ids[:end], state, skip_special_tokens=skip,
                spaces_between_special_tokens=True,
            )  # fmt: skip
            assert "\ufffd" not in piece
            pieces.append(piece)
        assert "".join(pieces) == reference.decode(ids, skip_special_tokens=skip)
        assert state.as_tuple()[0] == len(before) + len(ids)


def test_indexes_containing_token(tokenizer, reference, caplog):
    found = tokenizer.indexes_containing_token("=")
    texts = [reference.decode([index]) for index in range(len(reference))]
    containing = [index for index, text in enumerate(texts) if "=" in text]
    exact = [index for index, text in enumerate(texts) if text == "="]
    assert found == (containing if len(containing) <= 5 else exact[:5]) and found
    assert tokenizer.indexes_containing_token("<|im_end|>") == [tokenizer.eos_token_id]
    assert tokenizer.indexes_containing_token("more than one token") == []
    assert "stop_words" in caplog.text


def test_there_is_one_bos_at_most(lmdeploy, demo_model, tmp_path):
    """Of a tokenizer without a model, too."""
    data = json.loads((demo_model / "tokenizer.json").read_text())
    bos = "<|im_start|>"
    number = next(t["id"] for t in data["added_tokens"] if t["content"] == bos)
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}},
                 {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((demo_model / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": bos}))
    tokenizer = lmdeploy.Tokenizer(str(tmp_path))
    assert tokenizer.bos_token_id == number
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == tokenizer.encode(bos + "hello") == [number, *hello]
    assert tokenizer.encode("hello", add_bos=False) == hello
    assert tokenizer.encode(bos + "hello", add_bos=False) == hello


def test_tokenizers_that_are_none(lmdeploy, tmp_path):
    with pytest.raises(TypeError, match="model_path"):
        lmdeploy.Tokenizer(3)
    with pytest.raises(OSError, match="nowhere"):
        lmdeploy.Tokenizer(str(tmp_path / "nowhere"))


# The server and its client.


def test_serve_and_client(lmdeploy, demo_model, tmp_path, capfd):
    pytest.importorskip("fastapi")
    from lmdeploy.serve.openai.api_client import APIClient, get_model_list

    path = tmp_path / "template.json"
    config = lmdeploy.ChatTemplateConfig(
        "sent", user="<|im_start|>user\n", eoh="<|im_end|>\n", assistant="<|im_start|>assistant\n",
        eoa="<|im_end|>", separator="\n", stop_words=["<|im_end|>"],
    )  # fmt: skip
    config.to_json(path)
    api_client = lmdeploy.serve(
        str(demo_model), "demo", "pytorch", lmdeploy.PytorchEngineConfig(session_len=512),
        lmdeploy.ChatTemplateConfig.from_json(str(path)), "127.0.0.1", 0, "ERROR", "a key", False,
        allow_origins=["http://here"], speculative_config=None, trust_remote_code=False,
    )  # fmt: skip
    url, key = api_client.api_server_url, {"Authorization": "Bearer a key"}
    try:
        # As the documents have it.
        model_name = api_client.available_models[0]
        messages = [{"role": "user", "content": "What is 12+35?"}]
        for item in api_client.chat_completions_v1(model=model_name, messages=messages):
            assert item["choices"][0]["message"]["content"] == "12 + 35 = 47"
        for item in api_client.completions_v1(model=model_name, prompt="hi"):
            assert item["usage"]["completion_tokens"] <= 16
        # Every keyword, and by position.
        chat = ("demo", messages, 0.0, 1.0, 1, 16, None, True, 0.0, 0.0, "me", 1.0, -1, False, True)
        pieces = list(api_client.chat_completions_v1(*chat, min_p=0.0))
        assert len(pieces) > 1 and pieces[-1]["choices"][0]["finish_reason"] == "stop"
        texts = [piece["choices"][0]["delta"].get("content") or "" for piece in pieces]
        assert "".join(texts) == "12 + 35 = 47"
        text = ("demo", "hi", None, 0.0, 1, 3, True, None, 1.0, 0.0, 0.0, "me", 1.0, -1, True, True)
        assert api_client.completions_v1.__func__.__code__.co_argcount == len(text) + 1
        assert api_client.chat_completions_v1.__func__.__code__.co_argcount == len(chat) + 1
        assert [piece["choices"][0]["finish_reason"]
                for piece in api_client.completions_v1(*text)][-1] == "length"  # fmt: skip
        tokenizer = lmdeploy.Tokenizer(str(demo_model))
        assert api_client.encode("hi", do_preprocess=False, add_bos=True) == (
            tokenizer.encode("hi"), len(tokenizer.encode("hi"))
        )  # fmt: skip
        assert api_client.encode(["hi", "hi"])[1] == [1, 1]
        assert len(api_client.encode("hi", True)[0]) > 1  # the template came along
        # Errors are items.
        (error,) = api_client.chat_completions_v1(model="other", messages=messages)
        assert (error["object"], error["code"]) == ("error", 404) and "demo" in error["message"]
        (error,) = lmdeploy.client(url).completions_v1("demo", "hi", stream=True)
        assert error["code"] == 401
        with pytest.raises(RuntimeError, match="401"):
            APIClient(url, "another key").available_models  # noqa: B018
        assert lmdeploy.client(url, api_key="a key").get_model_list() == ["demo"]
        assert get_model_list(url + "/v1/models", key) == ["demo"]
        # A port that is taken: the server's last lines say so.
        port = int(url.rpartition(":")[2])
        with pytest.raises(RuntimeError, match="address already in use|Address already in use"):
            lmdeploy.serve(str(demo_model), server_name="127.0.0.1", server_port=port)
    finally:
        api_client.close()
    api_client.close()
    with pytest.raises(ConnectionError, match="no server at"):
        lmdeploy.client(url).get_model_list()


def test_a_server_ends_with_the_script(hub):
    pytest.importorskip("fastapi")
    out = run(
        """
        import os
        import lmdeploy
        client = lmdeploy.serve('internlm/internlm-chat-7b', 'internlm-chat-7b', server_port=0)
        print(client.available_models, client.api_server_url, flush=True)
        os._exit(0)  # without atexit
        """
    ).stdout.split()
    assert out[0] == "['internlm-chat-7b']"
    from lmdeploy import client

    with pytest.raises((ConnectionError, RuntimeError)):
        for _ in range(1200):
            client(out[1]).get_model_list()
            time.sleep(0.05)


PAGE = """
from lmdeploy.serve.gradio.turbomind_coupled import run_local
from lmdeploy.messages import TurbomindEngineConfig

backend_config = TurbomindEngineConfig(max_batch_size=8)
model_path = 'internlm/internlm2-chat-7b'
run_local(model_path, backend_config=backend_config, server_name="huggingface-space")
"""


def test_page_snippet(hub, monkeypatch):
    """The port of the page is taken by others, so no server is started."""
    from allspark.lmdeploy_compat import serving

    class Process:
        port = 6006

        def __init__(self, job):
            jobs.append(job)

        def wait(self):
            jobs.append("waited")

        def end(self):
            jobs.append("ended")

    jobs: list = []
    monkeypatch.setattr(serving, "ServerProcess", Process)
    exec(PAGE, {})
    job, *rest = jobs
    assert rest == ["waited", "ended"] and job["engine"]["max_batch_size"] == 8
    assert job["settings"] == {
        "server_name": "0.0.0.0", "server_port": 6006, "home_is_page": True,
    }  # fmt: skip
    serving.run_local("x", request_timeout=3)
    assert jobs[-3]["settings"]["request_timeout"] == 3
    for arguments, error, text in (
        ({"share": True}, NotImplementedError, "no tunnel is opened"),
        ({"backend": "other"}, ValueError, "backend is 'other'"),
        ({"api_open": True}, TypeError, "there is no parameter 'api_open'"),
    ):
        with pytest.raises(error, match=text):
            serving.run_local("x", **arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_page_until_its_script_ends(hub, number):
    pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    source = PAGE.replace('server_name="huggingface-space"', "server_port=0") + "print('after')\n"
    (hub / "script.py").write_text(source)
    command = [sys.executable, "-m", "allspark.lmdeploy_compat", "script.py"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        line = process.stderr.readline()
        found = re.fullmatch(r"the page is (http://0.0.0.0:\d+)/ui\n", line)
        assert found, line + process.stderr.read()
        answer = httpx.get(found[1], follow_redirects=True, timeout=60)
        assert answer.url.path == "/ui" and "<html" in answer.text
        os.killpg(process.pid, number)  # as a terminal does
        out, err = process.communicate(timeout=30)
        assert "Traceback" not in err
        assert out == ("after\n" if number == signal.SIGINT else "")
        with pytest.raises(httpx.TransportError):
            for _ in range(1200):  # a script that is killed does not wait for its server
                httpx.get(found[1])
                time.sleep(0.05)
    finally:
        process.kill()


def test_a_page_whose_model_is_not_there(lmdeploy, tmp_path):
    from lmdeploy.serve.gradio.turbomind_coupled import run_local

    with pytest.raises(RuntimeError, match="nowhere"):
        run_local(str(tmp_path / "nowhere"), server_port=0)


def test_tls(lmdeploy, demo_model, tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
               "-nodes", "-days", "2", "-subj", "/CN=here", "-keyout", key, "-out",
               certificate]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    monkeypatch.setenv("SSL_KEYFILE", str(key))
    monkeypatch.setenv("SSL_CERTFILE", str(certificate))
    client = lmdeploy.serve(str(demo_model), server_name="127.0.0.1", server_port=0, ssl=True)
    try:
        assert client.api_server_url.startswith("https://")
        assert client.available_models == ["demo_model"]
        with pytest.raises(ConnectionError, match="certificate"):
            lmdeploy.client(client.api_server_url).get_model_list()
    finally:
        client.close()


def test_what_serve_refuses(lmdeploy, demo_model, monkeypatch):
    path = str(demo_model)
    for kwargs, error, text in (
        ({"backend": "other"}, ValueError, "backend"),
        ({"backend_config": 3}, TypeError, "backend_config is a int; it must be an EngineConfig"),
        ({"log_level": "LOUD"}, ValueError, "log_level"),
        ({"nothing": 1}, TypeError, "nothing"),
        ({"qos_config_path": "x"}, NotImplementedError, "priority"),
        ({"ssl": True}, ValueError, "SSL_KEYFILE"),
    ):
        for name in ("SSL_KEYFILE", "SSL_CERTFILE"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(error, match=text):
            lmdeploy.serve(path, **kwargs)
    with pytest.raises(RuntimeError, match="nowhere"):
        lmdeploy.serve(os.path.join(path, "nowhere"))
    for value in (3, "host:1"):
        with pytest.raises(ValueError, match="api_server_url"):
            lmdeploy.client(value)
    with pytest.raises(TypeError, match="nothing"):
        lmdeploy.client("http://0.0.0.0:1", nothing=1)
    with pytest.raises(ValueError, match="the API key must be printable ASCII"):
        lmdeploy.client("http://0.0.0.0:1", "schlüssel")


def test_quantised_formats_are_checked(hub, lmdeploy):
    config = lmdeploy.TurbomindEngineConfig(model_format="awq")
    with pytest.raises(ValueError, match="is not quantised"):
        lmdeploy.pipeline("./internlm2-chat-7b-4bit", backend_config=config)
