"""README blocks, documentation blocks and examples are run, and links are checked."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "csrc/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def python_blocks() -> list:
    blocks = []
    for path in DOCUMENTS:
        for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S)):
            blocks.append(pytest.param(code, id=f"{path.relative_to(ROOT)}-{i}"))
    return blocks


def run(arguments: list[str], **kwargs) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        arguments, capture_output=True, text=True, timeout=300, cwd=ROOT, **kwargs
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


SERVER = "127.0.0.1:23333"  # of `allspark serve examples/demo_model=demo` in the documents


@pytest.fixture(scope="module")
def address(demo_model):
    from support.server_process import ServerProcess

    with ServerProcess(demo_model) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("code", python_blocks())
def test_python_blocks_run(code, demo_model, request):
    if SERVER in code:
        code = code.replace(SERVER, request.getfixturevalue("address"))
    run([sys.executable, "-c", code])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def anchors_of(path: Path) -> set[str]:
    """The fragments of a page: its own, and those that GitHub makes of headings."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    own = re.findall(r'<a id="([^"]+)">', text)
    return {*own, *(title.strip().replace(" ", "-") for title in plain)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_fragments_are_headings(path):
    for target, fragment in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", path.read_text()):
        if not target.startswith(("http:", "https:")):
            page = path.parent / target if target else path
            assert fragment in anchors_of(page), f"{path.name} links to {target}#{fragment}"


ALL_TEXT = "".join(path.read_text() for path in DOCUMENTS if path.name != "CHANGELOG.md")


def test_nobody_is_told_to_install_the_package_by_its_name():
    """It is another project's on the public index."""
    folders = ("allspark_py", "model_loaders")
    sources = [path.read_text() for name in folders for path in (ROOT / name).rglob("*.py")]
    assert re.findall(r"install '?allspark\b.*", "\n".join([ALL_TEXT, *sources])) == []


def test_exported_names_stand_somewhere():
    import allspark

    words = set(re.findall(r"\w+", ALL_TEXT))
    assert set(allspark.__all__) - words == set()


def test_statuses_are_the_exceptions_that_the_page_says():
    from allspark import AsStatus
    from allspark.statuses import to_exception

    table = read("docs/python_api.md").partition("## Errors")[2]
    rows = re.findall(r"^\| `([A-Z_]+)` \| .+ \| `(\w+)`", table, re.MULTILINE)
    assert len(rows) == 7
    for name, exception in rows:
        status = getattr(AsStatus, f"ALLSPARK_{name}")
        assert type(to_exception(status, "")).__name__ == exception


def test_environment_variables_stand_somewhere():
    named = re.compile(r'(?:getenv\(|environ\[|environ\.get\(|_KEY = )"([A-Z_]+)"')
    sources = [
        path
        for pattern in ("allspark_py/**/*.py", "model_loaders/**/*.py", "csrc/**/*.cc")
        for path in ROOT.glob(pattern)
        if ROOT / "csrc" / "bench" not in path.parents
    ]
    found = {name for path in sources for name in named.findall(path.read_text())}
    assert {"ALLSPARK_API_KEY", "ALLSPARK_CACHE", "ALLSPARK_CPU_ISA"} <= found
    # AS_PROFILE is DashInfer's.
    assert {name for name in found if f"`{name}`" not in read("docs/configuration.md")} == {
        "AS_PROFILE"
    }


def flags_of(parser: argparse.ArgumentParser) -> list[list[str]]:
    """The names of each flag."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [flag for own in action.choices.values() for flag in flags_of(own)]
        elif action.help is not argparse.SUPPRESS:
            found.append([name for name in action.option_strings if name.startswith("--")])
    return [names for names in found if names]


def test_flags_stand_somewhere():
    """By themselves, or as the field that they set."""
    from allspark import cli

    words = set(re.findall(r"[\w-]+", ALL_TEXT))
    for command, module in cli._COMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        parser.set_defaults(fail=parser.error)
        importlib.import_module(f"allspark.cli.{module}").add_arguments(parser)
        for names in flags_of(parser):
            spelt = {*names, *(name[2:].replace("-", "_") for name in names)}
            assert spelt & words, f"no document has {names[0]} of allspark {command}"


def test_the_signature_of_the_pipeline_is_its_own():
    from allspark.pipeline import Pipeline

    parameters = re.search(r"`pipeline\((.*)\)` opens", read("docs/pipeline.md"))[1]
    namespace = {}
    exec(f"def pipeline(self, {parameters}): ...", namespace)
    told, own = (
        [(name, each.default) for name, each in inspect.signature(call).parameters.items()]
        for call in (namespace["pipeline"], Pipeline.__init__)
    )
    assert told == own[:-1]  # without **kwargs, all of which are refused


def test_the_page_of_the_file_format_is_about_the_newest_version():
    newest = re.search(r"kFormatVersion = (\d+);", read("csrc/weights/format.h"))[1]
    assert f"versions 1 to {newest}." in read("csrc/weights/README.md")


def test_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for script in set(re.findall(r"scripts/\w+\.sh", text)):
        assert os.access(ROOT / script, os.X_OK), script


def test_the_commands_of_the_readme_run(tmp_path):
    """Chat, batch, server and bench, as the README has them but for the port."""
    pytest.importorskip("fastapi")
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```bash\npip install '\.\[serve\]'\n(.*?)```", text, re.DOTALL)[1]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [line[:2] for line in lines] == [
        ["allspark", name] for name in ("chat", "batch", "serve", "bench")
    ]
    command = [sys.executable, "-m", "allspark.cli"]
    chat, batch, serve, bench = ([*command, *each[1:]] for each in lines)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    question = {"role": "user", "content": "What is 12+35?"}
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": [question]}) + "\n")
    settings = {"cwd": tmp_path, "text": True, "timeout": 120, "check": True}
    typed = "What is 12+35?\n\nexit\n"
    talk = subprocess.run(chat, input=typed, stdout=subprocess.PIPE, **settings)
    assert "12 + 35 = 47" in talk.stdout
    subprocess.run(batch, stderr=subprocess.PIPE, **settings)
    assert "12 + 35 = 47" in (tmp_path / "out.jsonl").read_text()
    local = ["--server-name", "127.0.0.1", "--server-port", "0"]
    with subprocess.Popen(
        [*serve, *local], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as server:
        port = next(found[1] for line in server.stderr if (found := re.search(r":(\d+)$", line)))
        bench = [each.replace("23333", port) for each in bench]
        measured = subprocess.run(bench, stdout=subprocess.PIPE, **settings)
        server.terminate()
    assert "TTFT" in measured.stdout and server.returncode == 0


def test_quickstart_example(demo_model):
    result = run([sys.executable, "examples/python/quickstart.py", str(demo_model), "12+35"])
    assert "47" in result.stdout.split("\n", 1)[1]


def test_quickstart_example_names_what_is_wrong(tmp_path):
    result = subprocess.run(
        [sys.executable, "examples/python/quickstart.py", str(tmp_path), "hi"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode != 0
    assert str(tmp_path) in result.stderr


def test_batch_example(demo_model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is 1+1?\n2+3\nwhat is a resultqueue\n")
    result = run([sys.executable, "examples/python/batch.py", str(demo_model), str(prompts)])
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts.read_text().splitlines()
    assert "2" in answers[0]["answer"] and "5" in answers[1]["answer"]
    assert all(answer["finish"] == "stop" for answer in answers)


def test_search_example(demo_model, tmp_path):
    lines = ["What is a ResultQueue?", "How are you?", "zzq qqz zqz"]
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(lines))
    arguments = ["examples/python/search.py", str(demo_model), str(path), lines[1]]
    found = [json.loads(line) for line in run([sys.executable, *arguments]).stdout.splitlines()]
    assert found[0]["line"] == lines[1] and found[0]["similarity"] > 0.999
    assert all(line["perplexity"] > 1 for line in found)


def test_guided_example(demo_model):
    result = run([sys.executable, "examples/python/guided.py", str(demo_model)])
    number, choice, animal = (json.loads(line)["answer"] for line in result.stdout.splitlines())
    assert number.endswith("47")
    assert choice in ("yes", "no")
    assert set(json.loads(animal)) == {"name", "legs"}


def test_lora_example(demo_model):
    """The demo adapter reads every 2 as a 3, and matches its README."""
    example = ["examples/python/lora.py", str(demo_model), "12+35", "examples/demo_adapter"]
    base, adapter = run([sys.executable, *example]).stdout.splitlines()
    assert base.startswith("without an adapter: ") and "47" in base
    assert adapter.startswith("demo_adapter: ") and "48" in adapter

    from allspark.model_loader import HuggingFaceModel, LoraAdapter

    loader = HuggingFaceModel(str(demo_model), "demo")
    (pair,) = LoraAdapter(ROOT / "examples" / "demo_adapter", loader).pairs
    a, b = pair.read()
    two, three = (loader.get_tokenizer().encode(digit)[-1] for digit in "23")
    assert a.shape == (len(a), 1) and a[two] == 1 and abs(a).sum() == 1
    with loader.checkpoint_tensors()["model.embed_tokens.weight"].open() as bits:
        rows = (bits[[two, three]].astype("<u4") << 16).view("<f4")
    assert (b[:, 0] == rows[1] - rows[0]).all()


def test_conversation_example(demo_model):
    questions = ["12+35", "what is a resultqueue", "How does the prefix cache work?"]
    example = [sys.executable, "examples/python/conversation.py", str(demo_model), *questions]
    turns = [json.loads(line) for line in run(example).stdout.splitlines()]
    assert [turn["question"] for turn in turns] == questions and "47" in turns[0]["answer"]
    # All of the previous turn, except for its last block and the token that was not computed.
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn["from_cache"] >= before["prompt_tokens"] - 16


def test_async_example(demo_model):
    result = run([sys.executable, "examples/python/async_streams.py", str(demo_model), "40"])
    assert "40 answers" in result.stdout


def test_cpp_example_against_the_installed_package(demo_model, tmp_path, cmake):
    """The installed library, its CMake package, and a model that Python serialised."""
    from allspark import Engine, HuggingFaceModel

    source = ROOT / "examples" / "cpp" / "stream_three.cc"
    assert len(source.read_text().splitlines()) < 60
    build = Path(os.environ.get("ALLSPARK_BUILD_DIR", ROOT / "build" / "release"))
    if not list(build.glob("liballspark.so*")):
        pytest.skip(f"no built library in {build} (cmake --preset release builds one)")
    prefix = tmp_path / "prefix"
    run([cmake, "--install", str(build), "--prefix", str(prefix)])
    run([cmake, "-S", "examples/cpp", "-B", str(tmp_path / "b"), f"-DCMAKE_PREFIX_PATH={prefix}",
         "-DCMAKE_BUILD_TYPE=Release"])  # fmt: skip
    run([cmake, "--build", str(tmp_path / "b")])
    HuggingFaceModel(str(demo_model), "demo").load_model().serialize_to_path(
        Engine(), str(tmp_path / "native")
    )
    program = str(tmp_path / "b" / "stream_three")
    result = run([program, str(tmp_path / "native" / "demo.asgraph")])
    requests = {line.split(":")[0] for line in result.stdout.splitlines()}
    assert len(requests) == 3
    assert len(result.stdout.splitlines()) == 3 * 16
    broken = subprocess.run([program, "/nonexistent.asgraph"], capture_output=True, text=True)
    assert broken.returncode == 1 and "/nonexistent" in broken.stderr


# Figures. Speeds and sizes in these three documents come from the records in benchmarks/results,
# and are between markers.
QUOTING = ("README.md", "benchmarks/README.md", "docs/performance.md")
RESULTS = sorted((BENCHMARKS / "results").glob("*/*.json"))
EARLIER = sorted((BENCHMARKS / "history").glob("*.json"))


@pytest.mark.parametrize("name", QUOTING)
def test_figures_are_those_of_the_results(load, name):
    """Byte for byte; `python benchmarks/compare.py --report` writes them."""
    figures = load("figures")
    text = (ROOT / name).read_text()
    results = figures.Results(BENCHMARKS / "results")
    assert figures.render(text, results, (ROOT / name).parent) == text


def test_every_figure_stands_somewhere(load):
    text = "".join((ROOT / name).read_text() for name in QUOTING)
    assert set(re.findall(r"<!-- figures: (\S+) -->", text)) == set(load("figures").BLOCKS)
    assert text.count("<!-- figures: ") == text.count("<!-- end -->")
    assert tuple(load("record").DOCUMENTS) == QUOTING


UNITS = (
    "tokens/s", "tok/s", "ns", "us", "µs", "ms", "s", "seconds?", "min", "minutes?", "h", "hours?",
    "[KMGT]i?B(?:/s)?", "[KMG]bit/s", "[GT]FLOP(?:/s|S)?", "[GT]OP/s", "megabytes?", "gigabytes?",
    "times", "x",
)  # fmt: skip
# A number with a unit, a percentage, or a factor.
NUMBER = r"\d(?:[\d,.]*\d)?"
FIGURE = re.compile(
    rf"(?<![\w.]){NUMBER}(?: ?%|×|[ \u00a0](?:{'|'.join(UNITS)})(?![\w/]))|× ?{NUMBER}"
)
# Numbers that do not measure this engine's speed or size, and why they may be outside the markers.
CONSTANTS = {
    "benchmarks/README.md": {
        "8 %": "the bound of what others may take: machine.MOST_OTHERS",
        "1.5 times": "how far behind a peer is left out: rules.FAR_BEHIND",
        "10 minutes": "the bound of --quick: compare.QUICK",
        "9 GB": "disk space of the peers' environments, so that nobody fills a disk",
        "5 GB": "disk space of converted models, likewise",
    },
}


def figures_outside(text: str) -> list[str]:
    text = re.sub(r"<!-- figures: .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    return [match[0].strip() for match in FIGURE.finditer(text)]


@pytest.mark.parametrize("name", QUOTING)
def test_no_figure_stands_outside_the_marks(name):
    allowed = CONSTANTS.get(name, {})
    found = set(figures_outside((ROOT / name).read_text()))
    assert found - set(allowed) == set(), "not from the results: see CONSTANTS for what may stand"
    assert set(allowed) - found == set(), "allowed, and no longer there"


def test_constants_are_what_they_say(load):
    assert load("machine").MOST_OTHERS == 0.08
    rules = load("rules")
    assert (rules.FAR_BEHIND, rules.TIMES_OURS, rules.LEAST_OURS_S) == (1.5, 3, 60)
    assert load("compare").QUICK["minutes"] < 10


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("45.4 tokens/s (× 1.12; 94 % of the rate)", ["45.4 tokens/s", "× 1.12", "94 %"]),
        ("TTFT 112 ms, 1,174 GFLOP/s at 50 GB/s", ["112 ms", "1,174 GFLOP/s", "50 GB/s"]),
        ("×1.35, 1.7 times, 3 x faster, 0.3 s", ["×1.35", "1.7 times", "3 x", "0.3 s"]),
        ("3.7× as fast, 1,050 MB, 30 us a step", ["3.7×", "1,050 MB", "30 us"]),
        ("groups of 64, 8 bits, Llama-3.2-1B, int8, 32 requests of 128 + 128 tokens", []),
        ("`8 %` in code, a chunk of 512 tokens, 14 query heads × layers", []),
        ("<!-- figures: x -->\n12 ms\n<!-- end -->\n13 ms", ["13 ms"]),
    ],
)
def test_figures_are_found(text, figures):
    assert figures_outside(text) == figures


def test_blocks_are_made_of_records(load, tmp_path):
    """Made from a fake result; an unknown marker is refused by name."""
    figures, record = load("figures"), load("record")
    about = {"kind": "zen9-avx2", "cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "version": "1/x",
             "isa": "avx2"}  # fmt: skip
    values = {"prompts_s": 1.0, "output_s": 3.0}
    lora = {
        "benchmark": "lora", "date": "2025-01-01", "machine": about, "commit": "01234567",
        "modified": False, "complete": True, "command": "python benchmarks/lora.py",
        "settings": {"rounds": 1, "shape": "tiny", "precision": "bf16", "requests": 4,
                     "prompt": 8, "output": 16, "adapters": 2, "rank": 16},
        "measurements": [
            {"round": 1, "of": {"adapters": "none"}, "values": values},
            {"round": 1, "of": {"adapters": "all"}, "values": {**values, "output_s": 4.0}},
        ],
    }  # fmt: skip
    record.write(tmp_path / "results" / "zen9-avx2" / "lora.json", lora)
    text = "a\n<!-- figures: lora -->\nold 99 %\n<!-- end -->\nb\n"
    results = figures.Results(tmp_path / "results")
    new = figures.render(text, results, tmp_path / "docs")
    assert "| all | 1.000 | 4.000 | 13 | 0.800 |\n\n<!-- end -->\nb\n" in new
    assert "commit 01234567" in new and "(../results/zen9-avx2/lora.json)" in new
    assert "99 %" not in new and figures.render(new, results, tmp_path / "docs") == new
    with pytest.raises(figures.UnknownBlock, match="figures: 'lore'; it must be one of headline"):
        figures.render(text.replace("lora", "lore"), results, tmp_path)


def git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


@pytest.fixture(scope="module")
def whole_history():
    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow is None:
        pytest.skip("this is no git checkout: whether results are of its history is not checked")
    if shallow == "true":
        pytest.skip("a shallow clone: whether results are of the history is not checked")


def commit_of(path: Path) -> str:
    record = json.loads(path.read_text())
    version = re.search(r"GitSha1:([0-9a-f]+)", record["machine"]["version"])
    assert version is not None, f"{path} names no commit"
    return version[1]


@pytest.mark.parametrize("path", [*RESULTS, *EARLIER], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_results_are_of_commits_of_the_history(path, whole_history):
    commit = commit_of(path)
    assert git("merge-base", "--is-ancestor", commit, "HEAD") is not None, (
        f"{path.name} is of commit {commit}, which is not in the history"
    )


def test_results_are_one_set_for_each_kind_of_machine():
    """From one commit without changes, from the machine of the folder's name, and undisturbed."""
    commits: dict[str, set[str]] = {}
    for path in RESULTS:
        record = json.loads(path.read_text())
        commits.setdefault(path.parent.name, set()).add(commit_of(path))
        assert record["machine"]["kind"] == path.parent.name, path
        assert record["commit"] == commit_of(path) and record["modified"] is False, path
        assert record["settings"]["most_others"] <= 0.08, path
        for measurement in record["measurements"]:
            share = measurement.get("values", {}).get("others_share", 0)
            assert share <= 0.08, (path, measurement["of"])
    assert all(len(found) == 1 for found in commits.values()), commits


def test_recorded_commands_measure_what_is_recorded(load):
    """The same engines, rows and rounds."""
    compare = load("compare")
    for path in RESULTS:
        record = json.loads(path.read_text())
        if record["benchmark"] == "engines":
            python, script, *arguments = shlex.split(record["command"])
            options = compare.parse_arguments(arguments)
            assert (python, script) == ("python", "benchmarks/compare.py"), path
            for name in ("engines", "shapes", "workloads", "rounds", "divisor"):
                assert getattr(options, name) == record["settings"][name], (path, name)


def test_recorded_fractions_are_those_of_the_limits_beside_them(load):
    bench, machine = load("bench"), load("machine")
    engines = {engine.name: engine for engine in bench.ENGINES.values()}
    for path in RESULTS:
        record = json.loads(path.read_text())
        for measurement in record["measurements"]:
            if "limits" not in measurement:
                continue
            of, values = measurement["of"], measurement["values"]
            shape = bench.SHAPES[of["shape"]]
            name, _, precision = of["engine"].partition(" ")
            divisor = record["settings"]["divisor"]
            work = bench.make_workload(of["workload"], shape.vocab_size, divisor)
            found = bench.fractions(
                shape, engines[name].precisions[precision], work, values,
                machine.combine([measurement["limits"]], max),
            )  # fmt: skip
            recorded = {key: value for key, value in values.items() if key.endswith("_limit")}
            assert recorded == pytest.approx(found), (path, of)


def test_reports_are_those_of_the_results(load):
    for path in RESULTS:
        record = json.loads(path.read_text())
        if record["benchmark"] == "engines":
            assert path.with_suffix(".md").read_text() == load("report").markdown(record), path
        else:
            assert record["benchmark"] in load("tables").TABLES, path
