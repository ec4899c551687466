"""Pipeline: prompts in, responses out."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, overload

from allspark._allspark import RequestHandle
from allspark.chat_template import MODELS, ChatTemplate, ChatTemplateConfig
from allspark.error_text import wrong_type
from allspark.pipeline import fields as f
from allspark.pipeline.abort import Abort
from allspark.pipeline.arguments import bind
from allspark.pipeline.configs import (
    BackendConfig,
    GenerationConfig,
    SpeculativeConfig,
    to_engine_config,
)
from allspark.pipeline.generation import to_fields
from allspark.pipeline.inputs import Prompt, to_prompts
from allspark.pipeline.log import logger, set_log_level
from allspark.pipeline.model_source import check_source, model_name_of
from allspark.pipeline.response import Response
from allspark.pipeline.runs import Job, run
from allspark.pipeline.served_model import ServedModel
from allspark.pipeline.session import Session


@overload
def pipeline(
    model_path: str,
    model_name: str | None = None,
    backend_config: BackendConfig | None = None,
    chat_template_config: ChatTemplateConfig | str | None = None,
    log_level: str = "WARNING",
    max_log_len: int | None = None,
    speculative_config: SpeculativeConfig | None = None,
    *,
    trust_remote_code: bool = False,
) -> Pipeline: ...


@overload
def pipeline(
    model_path: str,
    backend_config: BackendConfig | None = None,
    chat_template_config: ChatTemplateConfig | str | None = None,
    log_level: str = "WARNING",
    max_log_len: int | None = None,
    speculative_config: SpeculativeConfig | None = None,
    *,
    model_name: str | None = None,
    trust_remote_code: bool = False,
) -> Pipeline: ...


def pipeline(model_path: str, *args: Any, **kwargs: Any) -> Pipeline:
    """Opens a model and returns its pipeline; see Pipeline.

    By position the arguments are those of Pipeline, or without model_name, as in LMDeploy's later
    releases.
    """
    return Pipeline(model_path, **bind(args, kwargs))


class Pipeline:
    """A model that answers prompts, alone or many at once. Thread-safe.

    Args:
        model_path: a directory in Hugging Face layout or of native files, a .gguf file, "org/name"
            on a hub, "modelscope:org/name", or "smollm2".
        model_name: what the model is called. The name of a chat template also chooses that
            template, as in LMDeploy's older releases.
        backend_config: what the engine may take.
        chat_template_config: another chat template.
        log_level: of the logger "allspark", from "DEBUG" to "CRITICAL".
        max_log_len: how many characters of each prompt are logged at INFO. None: prompts are not
            logged.
        speculative_config: how tokens are drafted; it changes no output.
        trust_remote_code: True runs the Python files of a checkpoint's tokenizer.

    Raises:
        ValueError, TypeError: a setting is wrong. OSError: there is no such model.
        OutOfMemoryError, AllSparkError: the engine cannot run it.
    """

    def __init__(
        self,
        model_path: str,
        model_name: str | None = None,
        backend_config: BackendConfig | None = None,
        chat_template_config: ChatTemplateConfig | str | None = None,
        log_level: str = "WARNING",
        max_log_len: int | None = None,
        speculative_config: SpeculativeConfig | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ):
        if kwargs:
            raise TypeError(f"pipeline has no parameter {sorted(kwargs)[0]!r}")
        check_source(model_path)
        f.text("model_name", model_name)
        f.whole(0, none=True)("max_log_len", max_log_len)
        config = to_engine_config(backend_config)
        config.trust_remote_code = config.trust_remote_code or trust_remote_code
        if speculative_config is not None:
            _speculation(speculative_config).apply(config)
        set_log_level(log_level)
        self._max_log_len = max_log_len
        self.model_name = model_name or model_name_of(model_path)
        self.backend_config = config
        template = chat_template_config
        if template is None and model_name in MODELS:
            template = model_name  # as in LMDeploy's older releases
        self._model = ServedModel.open(
            model_path, config, self.model_name, chat_template=template
        )
        # Of the requests of `generate`, by their session's id.
        self._aborts: dict[int, Abort] = {}
        self._lock = threading.Lock()

    # What is served.

    @property
    def model(self) -> ServedModel:
        """The engine with the model, the tokenizer and the chat template."""
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self._model.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """What renders conversations."""
        return self._model.template

    @property
    def session_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._model.session_len

    # Prompts.

    def infer(
        self,
        prompts: Any,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        use_tqdm: bool = False,
        **kwargs: Any,
    ) -> Response | list[Response]:
        """Answers prompts; all run at once, as far as there is room.

        Args:
            prompts: a text, a conversation (a list of OpenAI's messages), token ids, or a list of
                these.
            gen_config: for all of them, or a list with one for each.
            do_preprocess: False gives texts to the model as they are, without a chat template.
            adapter_name: an adapter that is loaded.
            use_tqdm: shows the progress on stderr.
            kwargs: request_output_len, top_k, top_p, temperature, repetition_penalty and ignore_eos
                of LMDeploy 0.2, where gen_config is None.

        Returns:
            A Response for one prompt, a list in the order of the prompts for many. A prompt that
            fails has its error in its own Response.
        """
        items, is_one = to_prompts(prompts)
        jobs = self._jobs(items, _older(gen_config, kwargs), do_preprocess, adapter_name)
        responses: list[Any] = [None] * len(items)
        with _progress(len(items), use_tqdm) as progress:
            for response in run(self._model, jobs, stream=False):
                responses[response.index] = response
                progress.update()
        return responses[0] if is_one else responses

    __call__ = infer

    def stream_infer(
        self,
        prompts: Any,
        sessions: Session | Sequence[Session] | None = None,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        stream_response: bool = True,
        **kwargs: Any,
    ) -> Iterator[Response]:
        """Yields pieces of the responses as they come; `index` says of which prompt. The last piece
        of a prompt has a finish_reason. Ending the iteration stops what still runs.

        Args are those of infer; `sessions` can abort their prompts; without `stream_response` each
        response comes whole.
        """
        items, _ = to_prompts(prompts)
        jobs = self._jobs(items, _older(gen_config, kwargs), do_preprocess, adapter_name)
        if sessions is not None:
            many = _sessions(sessions, len(jobs))
            for job, session in zip(jobs, many, strict=True):
                session._abort = Abort()
                job.started = functools.partial(self._started, session._abort)
        return run(self._model, jobs, bool(stream_response))

    def batch_infer(self, *args: Any, **kwargs: Any) -> Any:
        """infer, by its older name."""
        return self.infer(*args, **kwargs)

    # Conversations.

    def session(self, gen_config: GenerationConfig | None = None) -> Session:
        """A new, empty conversation."""
        return Session(gen_config)

    def chat(
        self,
        prompt: str,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        adapter_name: str | None = None,
        do_preprocess: bool = True,
    ) -> Session | Iterator[Response]:
        """Continues a conversation; a turn computes only what it adds.

        Returns:
            The session with its new turn in `response` and `history`; with `stream_response` the
            pieces of the answer, after which the session has the turn.
        """
        if not isinstance(prompt, str):
            to_prompts(prompt)  # says what is wrong with it
            raise wrong_type("prompt", prompt, "a str")
        if session is None:
            session = self.session()
        elif not isinstance(session, Session):
            raise wrong_type("session", session, "a Session")
        given = gen_config if gen_config is not None else session.gen_config
        (config,) = _configs(given, 1)
        session._abort = abort = Abort()
        pieces = self._turn(prompt, session, abort, config, adapter_name, do_preprocess)
        if stream_response:
            return pieces
        for _ in pieces:
            pass
        return session

    def _turn(
        self,
        prompt: str,
        session: Session,
        abort: Abort,
        config: GenerationConfig,
        adapter_name: str | None,
        do_preprocess: bool,
    ) -> Iterator[Response]:
        model, conversation = self._model, session.conversation
        message = {"role": "user", "content": prompt}
        asked: tuple[str, list[int]] = ("", [])

        def prepare() -> tuple[list[int], dict[str, Any]]:
            nonlocal asked
            template = model.template if do_preprocess else _raw_template()
            asked = conversation.ask(template, model.tokenizer, message)
            self._log_prompt(asked[0])
            return asked[1], to_fields(config, model, adapter_name)

        whole = Response()
        session.prompt = prompt
        job = Job(0, prepare, functools.partial(self._started, abort))
        try:
            for piece in run(model, [job], stream=True):
                whole.extend(piece)
                yield piece
        except Exception as error:
            whole.finish_reason, whole.error_code = "error", "internal_error"
            whole.error_message = str(error)
            raise
        finally:
            if session._abort is abort:  # else a later turn has begun
                session._abort = None
            session.response = whole
            if whole.finish_reason != "error" and whole.error_code is None:
                session.history.append((prompt, whole.text))
                conversation.answered(message, *asked, whole.text, whole.token_ids)

    async def generate(
        self,
        messages: Prompt,
        session_id: int = 0,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = True,
        sequence_start: bool = True,
        sequence_end: bool = True,
        step: int = 0,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
    ) -> AsyncIterator[Response]:
        """stream_infer of one prompt for asyncio; `stop_session` ends it.

        A call is a whole prompt: sequence_start and sequence_end must be True, step 0.
        """
        if not (sequence_start and sequence_end and step == 0):
            raise ValueError(
                f"sequence_start is {sequence_start}, sequence_end {sequence_end}, step {step}; "
                "they must be True, True and 0: Pipeline.chat continues a conversation"
            )
        from allspark.pipeline.async_runs import run_async

        (item,), _ = to_prompts([messages])
        (job,) = self._jobs([item], gen_config, do_preprocess, adapter_name)
        abort = Abort()
        job.started = functools.partial(self._started, abort)
        with self._lock:
            self._aborts[session_id] = abort
        try:
            async for piece in run_async(self._model, job, stream_response):
                yield piece
        finally:
            with self._lock:
                if self._aborts.get(session_id) is abort:
                    del self._aborts[session_id]

    def stop_session(self, session_id: int) -> None:
        """Ends what `generate` runs under this id; no effect if nothing does."""
        with self._lock:
            abort = self._aborts.get(session_id)
        if abort is not None:
            abort.ask()

    end_session = stop_session

    # Scores.

    def get_ppl(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[float]:
        """The mean cross entropy of each sequence of token ids; its exp is the perplexity. They may
        differ in length."""
        return self._model.engine.get_ppl(self._model.name, self._model.loader, input_ids)

    # The end.

    def close(self) -> None:
        """Ends all requests and frees the model; a second call has no effect."""
        self._model.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Parts of the above.

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None,
        do_preprocess: bool,
        adapter: str | None,
    ) -> list[Job]:
        configs = _configs(gen_config, len(prompts))
        return [
            Job(index, functools.partial(self._prepare, prompt, config, do_preprocess, adapter))
            for index, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
        ]

    def _prepare(
        self, prompt: Prompt, config: GenerationConfig, do_preprocess: bool, adapter: str | None
    ) -> tuple[list[int], dict[str, Any]]:
        model = self._model
        fields = to_fields(config, model, adapter)
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            self._log_prompt(prompt)
            return prompt, fields  # type: ignore[return-value]
        template = model.template if do_preprocess else _raw_template()
        text = template.messages2prompt(prompt)
        self._log_prompt(text)
        return template.encode(model.tokenizer, text, sequence_start=True), fields

    def _started(self, abort: Abort, handle: RequestHandle) -> None:
        model = self._model
        abort.started(functools.partial(model.engine.stop_request, model.name, handle))

    def _log_prompt(self, prompt: Any) -> None:
        if self._max_log_len is not None:
            logger.info("prompt: %r", prompt[: self._max_log_len])


def _speculation(config: Any) -> SpeculativeConfig:
    if not isinstance(config, SpeculativeConfig):
        raise wrong_type("speculative_config", config, "a SpeculativeConfig")
    return config


def _sessions(sessions: Any, count: int) -> list[Session]:
    many = [sessions] if isinstance(sessions, Session) else sessions
    if not isinstance(many, Sequence) or not all(isinstance(each, Session) for each in many):
        raise wrong_type("sessions", sessions, "a Session or a list of them")
    if len(many) != count:
        raise ValueError(f"there are {len(many)} sessions for {count} prompts")
    return list(many)


def _configs(
    config: GenerationConfig | Sequence[GenerationConfig] | None, count: int
) -> list[GenerationConfig]:
    """A config for each prompt. They are checked again: a field may have been set since."""
    if config is None or isinstance(config, GenerationConfig):
        config = GenerationConfig() if config is None else config
        f.check_fields(config)
        return [config] * count
    if not isinstance(config, Sequence) or isinstance(config, str):
        raise wrong_type("gen_config", config, "a GenerationConfig or a list of them")
    configs = list(config)
    for index, each in enumerate(configs):
        if not isinstance(each, GenerationConfig):
            raise wrong_type(f"gen_config[{index}]", each, "a GenerationConfig")
        f.check_fields(each)
    if len(configs) != count:
        raise ValueError(f"gen_config has {len(configs)} configs for {count} prompts")
    return configs


# LMDeploy 0.2's sampling arguments, with their names in GenerationConfig, and its defaults where
# they are others.
_OLDER = {
    "request_output_len": "max_new_tokens",
    "top_k": "top_k",
    "top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
}

_OLDER_DEFAULTS = {"top_k": 40, "top_p": 0.8}


def _older(config: Any, kwargs: dict[str, Any]) -> Any:
    """The GenerationConfig of the sampling arguments of LMDeploy 0.2."""
    unknown = sorted(set(kwargs) - set(_OLDER))
    if unknown:
        raise TypeError(f"there is no parameter {unknown[0]!r}")
    if not kwargs:
        return config
    if config is not None:
        raise TypeError(f"{sorted(kwargs)[0]} is given beside gen_config, which has it")
    warnings.warn("sampling arguments are deprecated; use gen_config", stacklevel=3)
    given = {_OLDER[key]: value for key, value in kwargs.items()}
    return GenerationConfig(do_sample=True, **{**_OLDER_DEFAULTS, **given})


@functools.cache
def _raw_template() -> ChatTemplate:
    """The template that leaves text as it is."""
    return ChatTemplateConfig("base").chat_template


def _progress(total: int, show: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not show)
