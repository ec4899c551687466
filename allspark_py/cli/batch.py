"""Answers a file of prompts or requests, and goes on where it was interrupted."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

from allspark.error_text import needs_extra

from . import engine_flags, generation_flags, interrupt

_STOPPED = "stopped; the same command goes on from here"
# Settings of the engine on which no output depends: a run may go on with others.
_FREE = {
    "adapters", "download_dir", "draft_model", "kv_cache_blocks", "kv_cache_memory",
    "max_batch_size", "max_waiting_requests", "num_draft_tokens", "numa", "prefill_chunk",
    "prefill_policy", "prompt_lookup_num_tokens", "session_len", "threads",
}  # fmt: skip
_MAX_SEED = (1 << 63) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a path, a name on a hub, or smollm2")
    parser.add_argument(
        "input",
        type=Path,
        help="JSON lines: each a string, an object with prompt or messages, or a request in "
        "OpenAI's form",
    )
    parser.add_argument("output", type=Path, help="gets a line for each; continued if it is there")
    group = parser.add_argument_group("batch")
    group.add_argument("--overwrite", action="store_true", help="begin anew")
    group.add_argument(
        "--seed", type=int, default=0, help="lines without a seed get theirs from it (default: 0)"
    )
    group.add_argument("--model-name", dest="served_name", help="the name that requests may use")
    group.add_argument("--adapter-name", help="the adapter of lines that name none")
    group.add_argument(
        "--no-preprocess", action="store_true", help="texts get no chat template"
    )
    generation_flags.add_generation_flags(parser)
    engine_flags.add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    from allspark.batch.lines import scan
    from allspark.batch.output import OutputFile
    from allspark.batch.run_file import run_file_of

    _check(options)
    config = engine_flags.to_engine_config(options)
    engine_flags.check_adapter_name(options, config)
    config.max_waiting_requests = 0  # the window is the bound
    generation = generation_flags.to_generation_config(options)
    template = engine_flags.to_chat_template(options)
    facts = scan(options.input)
    is_new = not options.output.exists()
    output = OutputFile(options.output)
    try:
        return _Run(options, config, generation, template, facts, output).run()
    except KeyboardInterrupt:  # before the first line runs
        print(_STOPPED, file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        output.close()
        if is_new and not run_file_of(options.output).exists():  # the run did not begin
            options.output.unlink(missing_ok=True)


def _check(options: argparse.Namespace) -> None:
    for name in ("input", "output"):
        path = getattr(options, name)
        if str(path) == "-":
            raise ValueError(f"{name} is '-'; it must be a file, so that a run can be continued")
    if not options.input.is_file():
        raise OSError(f"{options.input}: no such file")
    if options.output.exists() and not options.output.is_file():
        raise OSError(f"{options.output} is no file")
    if options.output.exists() and options.output.samefile(options.input):
        raise ValueError(f"{options.output} is the input, too; give another output")
    if not 0 <= options.seed <= _MAX_SEED:
        raise ValueError(f"--seed is {options.seed}; it must be an integer in [0, {_MAX_SEED}]")


class _Run:
    """One run of the command."""

    def __init__(
        self,
        options: argparse.Namespace,
        config: Any,
        generation: Any,
        template: Any,
        facts: Any,
        output: Any,
    ):
        self._options = options
        self._config = config
        self._generation = generation
        self._template = template
        self._facts = facts
        self._output = output
        self._signal = 0
        self._created = int(options.input.stat().st_mtime)
        self._requests: Any = None  # answers lines in OpenAI's form

    def run(self) -> int:
        from allspark.batch.prompts import PromptLines
        from allspark.batch.run_file import begin, settings_before
        from allspark.batch.runner import Totals
        from allspark.pipeline import pipeline

        options = self._options
        if self._config.session_len is None and not options.overwrite:
            # What memory has room for may be another length than when the run began.
            self._config.session_len = settings_before(self._output).get("session_len")
        with pipeline(
            options.model,
            model_name=options.served_name,
            backend_config=self._config,
            chat_template_config=self._template,
            log_level="ERROR",
        ) as pipe:
            settings = self._settings(pipe.model)
            num_before, self._created = begin(
                self._output, settings, self._created, options.overwrite
            )
            if num_before >= self._facts.num_lines:
                print(f"{options.output} is complete: {num_before} lines", file=sys.stderr)
                return 0
            interrupt.check()
            self._pipe = pipe
            self._run_name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
            self._prompts = PromptLines(
                pipe,
                self._generation,
                not options.no_preprocess,
                options.adapter_name,
                options.seed,
            )
            self._totals = Totals(num_before=num_before)
            asyncio.run(self._answer_lines())
        return self._end()

    def _end(self) -> int:
        print(f"{self._options.output}: {self._totals}", file=sys.stderr)
        if not self._signal:
            return 0
        print(_STOPPED, file=sys.stderr)
        return 128 + self._signal

    def _settings(self, model: Any) -> dict[str, Any]:
        """All that the bytes of an answer depend on, by the names that a user knows."""
        from allspark.batch.digests import folder_digest, model_digest

        options = self._options
        engine = dataclasses.asdict(self._config)
        adapters = engine["adapters"] or {}
        return {
            "input": self._facts.sha256,
            "model": model_digest(model.loader),
            "model_name": model.name,
            "chat_template": _shown_template(self._template),
            "allspark": model.engine.get_version_full(),
            "kernels": model.engine.get_as_engine_stat(model.name).kernel_table,
            "session_len": model.session_len,
            "adapters": {name: folder_digest(Path(path)) for name, path in adapters.items()},
            "seed": options.seed,
            "adapter_name": options.adapter_name,
            "no_preprocess": options.no_preprocess,
            **{name: value for name, value in engine.items() if name not in _FREE},
            **dataclasses.asdict(self._generation),
        }

    async def _answer_lines(self) -> None:
        from allspark.batch.runner import run_file

        work = asyncio.ensure_future(self._run_file(run_file))
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            self._signal = number
            work.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            await work
        except asyncio.CancelledError:
            if not self._signal:
                raise

    async def _run_file(self, run_file: Any) -> None:
        from tqdm import tqdm

        with tqdm(
            total=self._facts.num_lines,
            initial=self._totals.num_before,
            unit="line",
            disable=not sys.stderr.isatty(),
        ) as progress:
            # Twice what fits in a step: the next ones are there when some end.
            room = 2 * self._pipe.model.max_batch_size
            source = self._options.input
            await run_file(
                source, self._facts, self._output, self._totals, self._answer, room, progress.update
            )
        self._output.finish()

    async def _answer(self, line: Any) -> Any:
        from allspark.batch.lines import LineError
        from allspark.batch.prompts import error_line

        try:
            value = line.parse()
        except LineError as error:
            return error_line({"line": line.number}, error.code, str(error))
        if isinstance(value, dict) and not value.keys().isdisjoint(("method", "url", "body")):
            return await self._request_lines().answer(line.number, value)
        return await self._prompts.answer(line.number, value)

    def _request_lines(self) -> Any:
        """What answers lines in OpenAI's form; made for the first of them."""
        if self._requests is None:
            try:
                from allspark.serve.batches.requests import RequestLines
                from allspark.serve.catalog import Catalog
                from allspark.serve.state import ServerState
            except ImportError as error:
                problem = needs_extra("a line in OpenAI's form", "serve")
                raise RuntimeError(f"{problem}: {error}") from None
            state = ServerState(Catalog([self._pipe.model]))
            self._requests = RequestLines(
                state, self._run_name, self._created, self._options.seed
            )
        return self._requests


def _shown_template(template: Any) -> Any:
    """The chat template's argument as JSON; of a file its content."""
    if dataclasses.is_dataclass(template):
        template = dataclasses.asdict(template)  # type: ignore[arg-type]
    name = template["model_name"] if isinstance(template, dict) else template
    try:
        content = Path(name).read_text() if name is not None and Path(name).is_file() else None
    except OSError:  # a JSON text that is too long for a name
        content = None
    return template if content is None else [template, content]
