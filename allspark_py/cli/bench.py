"""Measures a model in this process, or a server of OpenAI's protocol."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from allspark.error_text import needs_extra

from . import engine_flags
from .argument_types import json_object, not_negative, positive, positive_real
from .bench_flags import (
    add_dataset_flags,
    add_result_flags,
    check_results,
    measure_and_report,
    requests_of,
    warm_up_of,
)
from .remote_flags import add_remote_flags, to_remote


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="KIND")
    for name, (add, function) in _KINDS.items():
        summary = (function.__doc__ or "").splitlines()[0]
        kind = kinds.add_parser(name, help=summary, description=summary)
        add(kind)
        add_result_flags(kind)
        kind.set_defaults(fail=kind.error)


def run(options: argparse.Namespace) -> int:
    check_results(options)
    return _KINDS[options.bench][1](options)


# A model in this process.


def _add_latency(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="what `allspark serve` takes")
    many = functools.partial(add, type=positive, nargs="+", metavar="N")
    many("-c", "--concurrency", default=[1, 8, 32], help="requests at a time (default: 1 8 32)")
    many("-pt", "--prompt-tokens", default=[128, 2048], help="of each prompt (default: 128 2048)")
    many("-ct", "--completion-tokens", default=[128], help="of each output (default: 128); as many "
         "as --prompt-tokens, or one for all")  # fmt: skip
    add("-tr", "--test-rounds", type=positive, default=3, metavar="N",
        help="rounds of every combination (default: 3)")  # fmt: skip
    add("-w", "--warmup-rounds", type=not_negative, default=1, metavar="N",
        help="rounds before, which are not counted (default: 1)")  # fmt: skip
    _add_model_flags(parser)


def _latency(options: argparse.Namespace) -> int:
    """Latency and throughput of prompts and outputs of fixed lengths, in this process."""
    from allspark.bench.cases import Case
    from allspark.bench.load import Load
    from allspark.bench.workload import Lengths, random_requests, vocabulary_of

    pairs = _pairs(options)
    longest = max(map(sum, pairs))
    with _OpenModel(options, max(options.concurrency), longest) as model:
        if longest > model.session_len:
            raise ValueError(
                f"a prompt and its output have {longest} tokens; the model's length is "
                f"{model.session_len}"
            )
        ids = vocabulary_of(model.tokenizer)
        cases = []
        for concurrency in options.concurrency:
            for num_prompt, num_output in pairs:
                of = {"concurrency": concurrency, "prompt": num_prompt, "output": num_output}
                sizes = (Lengths(num_prompt, num_prompt), Lengths(num_output, num_output))
                made = [
                    random_requests(concurrency * rounds, *sizes, options.seed, ids, f"{what} {of}")
                    for what, rounds in (
                        ("requests", options.test_rounds), ("warm-up", options.warmup_rounds)
                    )
                ]  # fmt: skip
                cases.append(Case(of, made[0], Load(concurrency), made[1]))
        return _measure_model(model, cases, options)


def _pairs(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Lengths of prompts with those of their outputs."""
    prompts, outputs = options.prompt_tokens, options.completion_tokens
    if len(prompts) == 1:
        prompts = prompts * len(outputs)
    if len(outputs) == 1:
        outputs = outputs * len(prompts)
    if len(prompts) != len(outputs):
        options.fail(
            f"--prompt-tokens has {len(prompts)} numbers and --completion-tokens {len(outputs)}; "
            "they must be as many, or one for all"
        )
    return list(zip(prompts, outputs, strict=True))


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="what `allspark serve` takes")
    add_dataset_flags(parser, concurrency=[64])
    _add_model_flags(parser)


def _throughput(options: argparse.Namespace) -> int:
    """Throughput of prompts of a file or of random lengths, in this process."""
    from allspark.bench.cases import Case
    from allspark.bench.engine_target import encoded
    from allspark.bench.load import Load

    with _OpenModel(options, max(options.concurrency)) as model:
        warm_up = encoded(warm_up_of(options, model.tokenizer), model)
        parts = requests_of(options, len(options.concurrency), model.tokenizer)
        cases = [
            Case({"concurrency": concurrency}, encoded(part, model), Load(concurrency), warm_up)
            for concurrency, part in zip(options.concurrency, parts, strict=True)
        ]
        return _measure_model(model, cases, options)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them; _OpenModel reads them."""
    parser.add_argument("--adapter-name", metavar="NAME",
        help="one of --adapters to measure (default: the only one)")  # fmt: skip
    engine_flags.add_engine_flags(parser)


class _OpenModel:
    """The model of the command line, while a `with` block runs."""

    def __init__(
        self, options: argparse.Namespace, concurrency: int, session_len: int | None = None
    ):
        self._options = options
        self._config = engine_flags.to_engine_config(options)
        engine_flags.choose_adapter(options, self._config)
        # Unless a flag says otherwise, all that are sent at a time run at a time.
        self._config.max_batch_size = self._config.max_batch_size or concurrency
        self._config.session_len = self._config.session_len or session_len

    def __enter__(self) -> Any:
        from allspark.pipeline.served_model import ServedModel

        template = engine_flags.to_chat_template(self._options)
        self._model = ServedModel.open(self._options.model, self._config, chat_template=template)
        return self._model

    def __exit__(self, *_: object) -> None:
        self._model.close()


def _measure_model(model: Any, cases: Sequence[Any], options: argparse.Namespace) -> int:
    from allspark.bench.cases import peak_rss
    from allspark.bench.engine_target import EngineTarget

    target = EngineTarget(model, options.adapter_name)
    return measure_and_report(target, cases, options, peak_rss)


# A server.


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", required=True, metavar="URL",
        help="of the server, as http://127.0.0.1:23333 or https://HOST/v1")  # fmt: skip
    add_remote_flags(parser)
    add("--endpoint", choices=("chat", "completions"), default="chat")
    add_dataset_flags(parser, concurrency=None)
    add("--request-rate", type=positive_real, nargs="+", metavar="R",
        help="requests a second, with Poisson arrivals (default: as soon as one has ended); "
        "--concurrency then bounds how many run")  # fmt: skip
    add("--tokenizer", metavar="DIR",
        help="of the model: random prompts get exact lengths, and outputs those of the answers "
        "in conversations")  # fmt: skip
    add("--no-stream", action="store_true", help="ask for whole answers: there is no TTFT then")
    add("--ignore-eos", action="store_true",
        help="outputs of full length, where the server knows the field ignore_eos")  # fmt: skip
    add("--extra-body", type=json_object, default={}, metavar="JSON",
        help='fields of the requests; null removes one, as in {"max_tokens": null}')  # fmt: skip
    add("--timeout", type=positive_real, default=600.0, metavar="S",
        help="seconds until a request has failed (default: 600)")  # fmt: skip


def _serve(options: argparse.Namespace) -> int:
    """Latency and throughput of any server of OpenAI's protocol."""
    try:
        from allspark.bench.openai_target import Asking, OpenAITarget
    except ImportError as error:
        raise RuntimeError(f"{needs_extra('bench serve', 'serve')}: {error}") from None
    from allspark.bench.cases import allow_connections

    remote = to_remote(options.base_url, options)
    options.model = remote.model  # results name the one that the server lists
    cases = _serve_cases(options)
    bound = max((case.load.concurrency or 0 for case in cases), default=0)
    allow_connections(bound or len(cases[0].requests), is_bound=bound > 0)
    extra = {**({"ignore_eos": True} if options.ignore_eos else {}), **options.extra_body}
    asking = Asking(remote.model, options.endpoint, not options.no_stream, extra, options.timeout)
    target = OpenAITarget(remote.address, remote.headers, asking)
    return measure_and_report(target, cases, options)


def _serve_cases(options: argparse.Namespace) -> list[Any]:
    """Every rate with every concurrency."""
    from allspark.bench.cases import Case
    from allspark.bench.load import Load
    from allspark.bench.workload import poisson_arrivals

    tokenizer = None
    if options.tokenizer is not None:
        from allspark.pipeline.model_source import open_tokenizer

        tokenizer = open_tokenizer(options.tokenizer)
    concurrencies = options.concurrency or ([None] if options.request_rate else [1])
    warm_up = _as_sent(warm_up_of(options, tokenizer), options, tokenizer)
    loads = list(itertools.product(options.request_rate or [None], concurrencies))
    parts = requests_of(options, len(loads), tokenizer)
    cases: list[Any] = []
    for (rate, concurrency), part in zip(loads, parts, strict=True):
        requests = _as_sent(part, options, tokenizer)
        due = rate and poisson_arrivals(len(requests), rate, options.seed)
        of = {"rate": rate, "concurrency": concurrency}
        cases.append(Case(of, requests, Load(concurrency, due), warm_up))
    return cases


def _as_sent(requests: list[Any], options: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """The requests in the form that the endpoint takes."""
    from allspark.bench.workload import Request

    sent = []
    for request in requests:
        prompt = request.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            if options.endpoint == "completions":
                raise ValueError(
                    "the dataset has conversations; --endpoint completions takes texts"
                )
        elif isinstance(prompt, list) and options.endpoint == "chat":
            prompt = tokenizer.decode(prompt)
        sent.append(Request(prompt, request.num_output))
    return sent


_KINDS = {
    "latency": (_add_latency, _latency),
    "throughput": (_add_throughput, _throughput),
    "serve": (_add_serve, _serve),
}
