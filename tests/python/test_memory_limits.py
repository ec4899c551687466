"""An engine in a process with limits of its own (ulimit -v, -d) takes what they leave, and says
which limit it was where that is too little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine_fixture import write_small_checkpoint

PROGRAM = """
import resource, sys
from pathlib import Path
from allspark import AsStatus, DashInferModel, Engine, TargetDevice
from engine_fixture import GREEDY, read_all

kind, mib, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
engine = Engine()
loader = DashInferModel(model, "m").load_model()
builder = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, max_batch=8)
config = builder.update_from_dict({"num_threads": 1}).build()
if kind != "none":
    key = {"RLIMIT_AS": "VmSize:", "RLIMIT_DATA": "VmData:"}[kind]
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) for line in status if line.startswith(key)) << 10
    limit = taken + (mib << 20)
    resource.setrlimit(getattr(resource, kind), (limit, resource.RLIM_INFINITY))
    print(limit)
if engine.install_model(config) != AsStatus.ALLSPARK_SUCCESS:
    sys.exit(engine.last_error())
if engine.start_model("m") != AsStatus.ALLSPARK_SUCCESS:
    sys.exit(engine.last_error())
print(engine.get_as_engine_stat("m").total_device_memory_pool_size)
print(read_all(engine.start_request_ids("m", None, [1, 2, 3], GREEDY)[2]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from allspark import HuggingFaceModel

    directory = tmp_path_factory.mktemp("model")
    loader = HuggingFaceModel(str(write_small_checkpoint(directory / "c")), "m")
    loader.load_model().serialize_to_path(None, str(directory))
    return directory


def run(kind, mib, model):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(mib), str(model)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_the_pool_is_of_what_the_limit_leaves(model, kind):
    free = run("none", 0, model)
    assert free.returncode == 0, free.stderr
    limited = run(kind, 1024, model)
    assert (limited.returncode, limited.stderr) == (0, "")
    _, pool, tokens = limited.stdout.splitlines()
    # What the engine's threads map before it asks is less than 200 MiB; a huge page is left over.
    assert 0.9 * (1024 - 350 - 200) <= int(pool) >> 20 <= 0.9 * (1024 - 350)
    assert tokens == free.stdout.splitlines()[1]


@pytest.mark.parametrize(
    "kind, name", [("RLIMIT_AS", "address space (ulimit -v)"), ("RLIMIT_DATA", "data (ulimit -d)")]
)
def test_a_limit_that_leaves_too_little_is_named(model, kind, name):
    result = run(kind, 300, model)
    assert result.returncode == 1
    limit = result.stdout.strip()
    assert "BFC_LEFTOVER_MB 350) * BFC_MEM_RATIO 0.9 must be at least 2 MiB" in result.stderr
    assert f"the limit of {name} is {limit} bytes, of which " in result.stderr


def test_a_checkpoint_that_cannot_be_mapped_names_the_limit(tmp_path):
    program = """
import resource, sys
from pathlib import Path
from allspark.model_loader.errors import CheckpointError
from allspark.model_loader.storage import MappedFile

file = MappedFile(Path(sys.argv[1]))
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    file.map()
except CheckpointError as error:
    assert str(error) == (
        f"{file.path}: 1073741824 bytes cannot be mapped: Cannot allocate memory; the limit of "
        f"address space (ulimit -v) is {limit} bytes"
    ), error
else:
    assert False, "no exception"
"""
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
