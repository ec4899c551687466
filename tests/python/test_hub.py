"""The hub loaders with the hubs' own clients, against a server on a loopback address: a download
that is interrupted, one that fails and is resumed, and missing models and files.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from support.checkpoints import CONFIG, llama_tensors, safetensors_bytes
from support.hub_server import HubServer
from support.versions import is_before

NAME = "org/tiny"
WEIGHTS = "model.safetensors"
# Clients save what they receive in pieces of up to 10 MB.
LARGE = {**CONFIG, "vocab_size": 250_000}
CUT = 12_000_000

# Loads models by the names on its input, one per line, and prints the result of each.
CHILD = """
import json, os, sys
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Clients print.
import numpy as np
from allspark import model_loader
loader_class = getattr(model_loader, sys.argv[1])
for line in sys.stdin:
    name, revision, trusted = json.loads(line)
    try:
        loader = loader_class(name, "m", trust_remote_code=trusted).load_model(revision=revision)
        paths = (os.path.relpath(os.path.join(folder, path), loader.directory)
                 for folder, _, found in os.walk(loader.directory) for path in found)
        result = {"files": sorted(paths), "sums": {}}
        for tensor, entry in loader.checkpoint_tensors().items():
            with entry.open() as array:
                result["sums"][tensor] = float(array.astype(np.float64).sum())
    except Exception as error:
        result = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(result), file=results, flush=True)
"""


class Client:
    """A process whose loader knows the server only from its environment."""

    def __init__(self, loader, server, folder):
        nowhere = "http://127.0.0.1:9"  # For all addresses but loopback.
        environment = {
            **os.environ,
            "HOME": str(folder),
            "HF_HOME": str(folder / "hf"),
            "HF_ENDPOINT": server.address,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "MODELSCOPE_CACHE": str(folder / "modelscope"),
            "MODELSCOPE_ENDPOINT": server.address,
            "MODELSCOPE_DOWNLOAD_INTRA_CLOUD": "false",
            "MODELSCOPE_DOWNLOAD_MAX_RETRIES": "1",
            "MODELSCOPE_API_MAX_RETRIES": "0",
            "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "http_proxy", "https_proxy", "no_proxy"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, loader],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def load(self, name=NAME, revision=None, trusted=False):
        self.process.stdin.write(json.dumps([name, revision, trusted]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(params=["HuggingFaceModel", "ModelScopeModel"])
def hub(request, tmp_path):
    package = {"HuggingFaceModel": "huggingface_hub", "ModelScopeModel": "modelscope"}
    if importlib.util.find_spec(package[request.param]) is None:
        pytest.skip(f"no {package[request.param]} here (scripts/setup.sh --slow installs it)")
    server = HubServer(NAME)
    client = Client(request.param, server, tmp_path)
    client.package = package[request.param]
    yield server, client
    client.stop()
    server.stop()


def model_files(config=CONFIG):
    tensors = llama_tensors(config)
    sums = {name: float(values.astype(np.float64).sum()) for name, values in tensors.items()}
    files = {
        "config.json": json.dumps(config).encode(),
        "README.md": b"not asked for",
        WEIGHTS: safetensors_bytes(tensors),
    }
    return files, sums


def weights_asked_for(server):
    """The first byte of each request for the weights."""
    return [begin for name, begin in server.ranges if name == WEIGHTS]


def assert_refused(result, client, *parts):
    """A clear error: of the not-found class, with the model's name and the client's message."""
    assert result.get("error") == "CheckpointNotFoundError", result
    start = f"{parts[0]}: no such directory, and the download through {client.package} failed: "
    assert result["message"].startswith(start)
    assert all(part in result["message"] for part in parts[1:]), result["message"]


def resumes_at_once(client):
    """Whether a download that is cut goes on in the same call, not only in the next one."""
    return client.package != "huggingface_hub" or not is_before("huggingface_hub", 1)


def test_a_download_that_is_cut(hub):
    """The client requests only the rest. The next call finds the complete files."""
    server, client = hub
    server.files, sums = model_files(LARGE)
    server.cut[WEIGHTS] = CUT
    if not resumes_at_once(client):
        assert_refused(client.load(), client, NAME)
    found = client.load()
    assert found.get("sums") == sums, found
    assert {"config.json", WEIGHTS} <= set(found["files"])
    assert "README.md" not in found["files"]
    begins = weights_asked_for(server)
    assert len(begins) == 2 and begins[0] == 0 and 0 < begins[1] <= CUT
    server.ranges.clear()
    assert client.load().get("sums") == sums
    assert server.ranges == []
    assert server.unknown == []


def test_a_download_that_fails_and_is_taken_up_again(hub):
    server, client = hub
    server.files, sums = model_files(LARGE)
    server.cut[WEIGHTS], server.breaks = CUT, True
    assert_refused(client.load(), client, NAME, "503" if resumes_at_once(client) else "broken")
    assert_refused(client.load(), client, NAME, "503")
    server.broken = False
    assert client.load().get("sums") == sums


def test_what_is_not_there(hub):
    server, client = hub
    server.files, sums = model_files()
    assert_refused(client.load("org/other"), client, "org/other", "404")
    assert_refused(client.load(revision="gone"), client, NAME)
    assert client.load(revision="main").get("sums") == sums
    server.stop()
    assert_refused(client.load("org/third"), client, "org/third")


def test_code_is_downloaded_only_if_it_is_trusted(hub):
    server, client = hub
    server.files, _ = model_files()
    templates = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
    for name in ("own.tiktoken", "tokenization_own.py", *templates):
        server.files[name] = b"something"
    files = set(client.load()["files"])
    assert {"own.tiktoken", *templates} <= files and "tokenization_own.py" not in files
    assert "tokenization_own.py" in client.load(trusted=True)["files"]


def test_weights_in_other_files(hub):
    """Without safetensors, ``.bin`` is requested; for a model without either the loader says so."""
    torch = pytest.importorskip("torch")
    server, client = hub
    server.files, sums = model_files()
    tensors = {name: torch.from_numpy(values) for name, values in llama_tensors().items()}
    torch.save(tensors, buffer := io.BytesIO())
    del server.files[WEIGHTS]
    server.files["pytorch_model.bin"] = buffer.getvalue()
    assert client.load(revision="main").get("sums") == sums
    del server.files["pytorch_model.bin"]
    server.commit = server.commit[::-1]
    result = client.load(revision="master")
    assert result["error"] == "CheckpointNotFoundError"
    assert "holds no weights; looked for model.safetensors" in result["message"]
