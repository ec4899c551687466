"""The model ``allspark`` of lm-eval: its requests, answered by a model of this process.

Importing this module registers the model; it needs the package ``lm-eval``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import lm_eval.models  # noqa: F401  # lm-eval's own, which a first registration would hide
from allspark.error_text import shown
from allspark.eval.continuations import likelihoods
from allspark.eval.facts import facts_of
from allspark.eval.generation import Generation, generate
from allspark.eval.windows import ids_of
from allspark.pipeline.engine_config import EngineConfig
from allspark.pipeline.served_model import ServedModel
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

# What lm-eval gives every model, and what other models call a field of EngineConfig.
_IGNORED = ("batch_size", "device")
_OTHER_NAMES = {"dtype": "data_type", "max_length": "session_len"}
# Longer common prefixes than blocks of 32 would give.
_DEFAULTS = {"block_size": 16}


@register_model("allspark")
class AllSparkLM(TemplateLM):
    """Model arguments: `pretrained`, the keywords below, and every field of EngineConfig."""

    def __init__(
        self,
        pretrained: str,
        adapter: str | None = None,
        chat_template: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        think_end_token: str | None = None,
        **settings: Any,
    ) -> None:
        """Opens the model.

        Args:
            pretrained: what `allspark serve` takes.
            adapter: the name of one of `adapters`.
            chat_template: a name or a file, where the tokenizer's own is not meant.
            add_bos_token: whether texts begin with the special tokens that the tokenizer puts
                before them; None: as the tokenizer does.
            prefix_token_id: what is before the first token of a text; None: BOS, else EOS.
            max_gen_toks: most tokens of an answer, where a task does not say it.
            think_end_token: what ends reasoning; answers are what comes after it.
            settings: fields of EngineConfig, or `dtype` and `max_length` for two of them.

        Raises:
            TypeError, ValueError, OSError: the model or a setting is refused.
        """
        super().__init__()
        self.model = ServedModel.open(
            pretrained, _to_config(settings), chat_template=chat_template or None
        )
        self.tokenizer = self.model.tokenizer
        self.add_bos_token = add_bos_token
        self.max_gen_toks = int(max_gen_toks)
        self.think_end_token = think_end_token
        self._source = pretrained
        self._adapter = adapter
        self._prefix_token_id = prefix_token_id

    # Tokens.

    @property
    def max_length(self) -> int:
        """Most tokens of a context with its continuation."""
        return self.model.session_len

    @property
    def eot_token_id(self) -> int:
        token = self.tokenizer.eos_token_id
        if token is None and self.model.end_ids:
            token = self.model.end_ids[0]
        if token is None:
            raise ValueError("the tokenizer has no EOS; prefix_token_id must be given")
        return int(token)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_token_id is not None:
            return int(self._prefix_token_id)
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which lm-eval keeps requests."""
        return self._source.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids of a text. A text that begins with BOS, as those of chat templates do, gets no
        second one."""
        del kwargs
        adds = self.add_bos_token if add_special_tokens is None else add_special_tokens
        bos = getattr(self.tokenizer, "bos_token", None)
        if adds is False or (bos and string.startswith(bos)):
            return list(self.tokenizer.encode(string, add_special_tokens=False, verbose=False))
        return [int(token) for token in ids_of(self.tokenizer, string)]

    # Chat templates.

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without a generation prompt its last message goes on."""
        return self.model.template.render(
            chat_history, continue_final_message=not add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """What identifies the template. One of several is chosen by the argument
        `chat_template` of the model."""
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            raise ValueError(
                f"--apply_chat_template is {chat_template!r}; it must be without a name: the model "
                "argument chat_template says which"
            )
        text = self.model.template.settings().get("chat_template")
        return text if isinstance(text, str) else repr(self.model.template)

    # Requests.

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in windows of the model's length."""
        texts = [str(request.args[0]) for request in requests]
        windows = [list(self._windows(text)) for text in texts]
        flat = [(None, *window) for of_text in windows for window in of_text]
        scores = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        totals = []
        for text, of_text in zip(texts, windows, strict=True):
            total = sum(next(scores)[0] for _ in of_text)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(float(total))
        return totals

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        pairs = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length - 1,
            context_len=1,
        )
        return map(make_disjoint_window, pairs)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, continuation in requests:
            room = self.max_length - len(continuation)
            if room < 1:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens; it must have at most "
                    f"{self.max_length - 1}, with one before it"
                )
            pairs.append((context[-room:], continuation))
        with tqdm(
            total=len(pairs), desc="loglikelihood", disable=bool(kwargs.get("disable_tqdm"))
        ) as progress:
            scores = likelihoods(self.model, pairs, self._adapter, progress.update)
        answers = [(score.total, score.is_greedy) for score in scores]
        for (key, *_), answer in zip(requests, answers, strict=True):
            if key is not None:  # of a whole text it is kept as one
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers of the model, up to one of the stop strings of each request."""
        generations = []
        for request in requests:
            context, given = request.args
            generations.append(Generation.of(self.tok_encode(context), given, self.max_gen_toks))
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as progress:
            answers = generate(
                self.model, generations, self._adapter, self.think_end_token, progress.update
            )
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside the results."""
        facts = dataclasses.asdict(facts_of(self.model, self._adapter))
        return {f"model_{name}": value for name, value in facts.items()}


def _to_config(settings: dict[str, Any]) -> EngineConfig:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    found: dict[str, Any] = dict(_DEFAULTS)
    for given, value in settings.items():
        name = _OTHER_NAMES.get(given, given)
        if given in _IGNORED or value is None:
            continue
        if name not in names:
            raise ValueError(
                f"model_args has {given}={shown(value)}; a setting must be one of "
                f"{', '.join([*names, *_OTHER_NAMES])}"
            )
        found[name] = value
    return EngineConfig(**found)
