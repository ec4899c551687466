"""ASGenerationConfigBuilder: builds the generation config of a request."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allspark._allspark import GenerateConfig
from allspark.bad_words import take_bad_words
from allspark.error_text import shown, wrong_type
from allspark.text_options import TextOptions

if TYPE_CHECKING:
    import numpy as np

# Upper bound of the sequences of one prompt.
MAX_N = 128

# Fields of other engines' generation configs that this one does not serve, with the value that
# changes nothing. That value is dropped. Another value is refused, or gives a warning where it
# comes from a checkpoint's file.
_NOT_SERVED = {"typical_p": 1.0}
# Fields that mean the same in a Hugging Face generation config.
_COPIED = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "min_length",
    "min_new_tokens",
    "max_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "prompt_lookup_num_tokens",
    "num_beams",
    "num_return_sequences",
    "length_penalty",
)


def _is_above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    raise wrong_type("hf_gen_config", config, "a dict or have to_dict()")


class ASGenerationConfigBuilder:
    """Fluent builder; every method returns the builder, `build()` a dict for start_request_*.

    Args:
        hf_gen_config: a Hugging Face GenerationConfig (object or dict) to start from. Its
            `early_stopping` is about beam search and becomes beam_early_stopping. As in
            transformers, sampling is off unless it says otherwise. Without a config the engine's
            defaults hold (sampling on).
        seed: 64-bit seed; None draws one for each request.
        eos_token_id: replaces that of `hf_gen_config`, or all where that has several.
    """

    def __init__(
        self,
        hf_gen_config: Any = None,
        seed: int | None = None,
        eos_token_id: int | None = None,
    ):
        self._fields: dict[str, Any] = {}
        hf = _as_dict(hf_gen_config)
        if hf:
            self._fields["do_sample"] = False
        for name in _COPIED:
            if hf.get(name) is not None:
                self._fields[name] = hf[name]
        not_served = dict(_NOT_SERVED)
        if _is_above_one(hf.get("num_beams")):
            if hf.get("early_stopping") is not None:
                self._fields["beam_early_stopping"] = hf["early_stopping"]
            if hf.get("do_sample"):
                not_served["num_beams"] = 1
                del self._fields["num_beams"]
        for name, neutral in not_served.items():
            if hf.get(name) not in (None, neutral):
                warnings.warn(
                    f"the generation config's {name}={hf[name]!r} is not served and is left out",
                    stacklevel=2,
                )
        if hf.get("eos_token_id") is not None:
            self.process_eos_tokens(hf["eos_token_id"], self._fields)
        # The stop words that are EOS tokens of the config, beside those that the caller sets.
        self._eos_words: list[list[int]] = self._fields.pop("stop_words_ids", [])
        if hf.get("stop_strings"):
            self.stop_words(hf["stop_strings"])
        if eos_token_id is not None:
            self._set("eos_token_id", eos_token_id)
        if seed is not None:
            self._fields["seed"] = seed

    @staticmethod
    def process_eos_tokens(eos: int | Sequence[int], out: dict[str, Any]) -> None:
        """Writes one or several EOS ids into `out`: the first as eos_token_id, and where there are
        several all of them also as stop words."""
        ids = [eos] if isinstance(eos, int) else list(eos)
        if not ids:
            return
        out["eos_token_id"] = ids[0]
        if len(ids) > 1:
            out["stop_words_ids"] = [[token] for token in ids]

    def update(
        self, fields: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> ASGenerationConfigBuilder:
        """Sets several fields; unknown names and bad values are refused when the request starts."""
        for name, value in {**(fields or {}), **kwargs}.items():
            self._set(name, value)
        return self

    def _set(self, name: str, value: Any) -> ASGenerationConfigBuilder:
        self._fields[name] = value
        if name == "eos_token_id":
            self._eos_words = []
        return self

    def do_sample(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True draws from the distribution, False takes the likeliest token. Default True."""
        return self._set("do_sample", flag)

    def early_stopping(self, flag: bool | str = True) -> ASGenerationConfigBuilder:
        """True ends at the EOS token. Default True. With num_beams above 1 it is
        beam_early_stopping, as in transformers."""
        return self._set("early_stopping", flag)

    def ignore_eos(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True goes on after the EOS token, and after the other EOS tokens that came with a Hugging
        Face config. Default False."""
        return self._set("ignore_eos", flag)

    def max_length(self, num_tokens: int) -> ASGenerationConfigBuilder:
        """Limit of prompt and output tokens together. Default 0: engine_max_length."""
        return self._set("max_length", num_tokens)

    def min_length(self, num_tokens: int) -> ASGenerationConfigBuilder:
        """Prompt and output tokens before EOS or a stop word may end the output. Default 0."""
        return self._set("min_length", num_tokens)

    def min_new_tokens(self, num_tokens: int) -> ASGenerationConfigBuilder:
        """Output tokens before EOS or a stop word may end the output. Default 0."""
        return self._set("min_new_tokens", num_tokens)

    def max_new_tokens(self, num_tokens: int) -> ASGenerationConfigBuilder:
        """Limit of output tokens. Default 0: only max_length limits them."""
        return self._set("max_new_tokens", num_tokens)

    def num_generated_in_prompt(self, num_tokens: int) -> ASGenerationConfigBuilder:
        """This many of the prompt's last tokens were generated by a request that ended early. With
        the same config, this request generates what that one would have. Default 0."""
        return self._set("num_generated_in_prompt", num_tokens)

    def temperature(self, value: float) -> ASGenerationConfigBuilder:
        """Divides the logits, >= 0; below 1e-5 is greedy. Default 1."""
        return self._set("temperature", value)

    def top_k(self, k: int) -> ASGenerationConfigBuilder:
        """Keeps the k likeliest tokens; 0 keeps all. Default 50."""
        return self._set("top_k", k)

    def top_p(self, p: float) -> ASGenerationConfigBuilder:
        """Keeps the likeliest tokens that together reach probability p, in [0, 1]. Default 1."""
        return self._set("top_p", p)

    def min_p(self, p: float) -> ASGenerationConfigBuilder:
        """Keeps tokens at least p times as likely as the likeliest, in [0, 1]. Default 0."""
        return self._set("min_p", p)

    def repetition_penalty(self, value: float) -> ASGenerationConfigBuilder:
        """Above 1 makes tokens of prompt and output less likely, in [0.01, 100]. Default 1."""
        return self._set("repetition_penalty", value)

    def suppress_repetition_in_generation(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True applies repetition_penalty only to tokens of the output. Default False."""
        return self._set("suppress_repetition_in_generation", flag)

    def presence_penalty(self, value: float) -> ASGenerationConfigBuilder:
        """Subtracted from the logits of tokens in the output, in [-2, 2]. Default 0."""
        return self._set("presence_penalty", value)

    def frequency_penalty(self, value: float) -> ASGenerationConfigBuilder:
        """As presence_penalty, times the number of occurrences, in [-2, 2]. Default 0."""
        return self._set("frequency_penalty", value)

    def no_repeat_ngram_size(self, size: int) -> ASGenerationConfigBuilder:
        """No n-gram of this size occurs twice in prompt and output. Default 0: off."""
        return self._set("no_repeat_ngram_size", size)

    def repetition_ngram(self, size: int, threshold: int) -> ASGenerationConfigBuilder:
        """Ends generation when the last `size` tokens have occurred `threshold` times in the
        output. Default 0, 0: off."""
        return self._set("repetition_ngram_size", size)._set(
            "repetition_ngram_threshold", threshold
        )

    def prompt_lookup_num_tokens(self, num_tokens: int) -> ASGenerationConfigBuilder:
        """Speculative decoding by prompt lookup: the maximum of draft tokens per step, in [0, 64].
        It changes only the speed, where texts repeat, never the output. Default 0: off."""
        return self._set("prompt_lookup_num_tokens", num_tokens)

    def use_draft_model(self, enable: bool = True) -> ASGenerationConfigBuilder:
        """False: do not use the model's draft model, if it has one. Default True."""
        return self._set("use_draft_model", enable)

    def logit_bias(self, biases: Mapping[int, float]) -> ASGenerationConfigBuilder:
        """Added to the logits of these tokens, each in [-100, 100]. Default {}."""
        return self._set("logit_bias", dict(biases))

    def bad_words_ids(self, words: Sequence[Sequence[int]]) -> ASGenerationConfigBuilder:
        """Id sequences that are never generated. Default []."""
        return self._set("bad_words_ids", [list(word) for word in words])

    def seed(self, value: int) -> ASGenerationConfigBuilder:
        """The same seed, prompt and config give the same tokens under any load. Default -1: a
        random seed."""
        return self._set("seed", value)

    def eos_token_id(self, token: int) -> ASGenerationConfigBuilder:
        """The token that ends generation, instead of all EOS tokens that came with a Hugging Face
        config. Default -1: none."""
        return self._set("eos_token_id", token)

    def stop_token_ids(self, tokens: Sequence[int]) -> ASGenerationConfigBuilder:
        """Tokens after any of which generation ends; they stay in the output. Default []."""
        return self._set("stop_token_ids", list(tokens))

    def stop_words_ids(self, words: Sequence[Sequence[int]]) -> ASGenerationConfigBuilder:
        """Id sequences after any of which generation ends, beside the EOS tokens; they stay in the
        output. Default []."""
        return self._set("stop_words_ids", [list(word) for word in words])

    def response_format(self, form: Mapping[str, Any] | None) -> ASGenerationConfigBuilder:
        """Keeps the output in a format, e.g. {"type": "json_object"}; needs the loader when the
        request starts. docs/guided_decoding.md has the forms. Default None: any text."""
        return self._set("response_format", form)

    def n(self, count: int) -> ASGenerationConfigBuilder:
        """Sequences of one prompt, which share its KV blocks: one queue each. Default 1."""
        return self._set("n", count)

    def num_beams(self, count: int) -> ASGenerationConfigBuilder:
        """Above 1: a beam search with this many beams; needs do_sample False. Default 1."""
        return self._set("num_beams", count)

    def best_of(self, count: int) -> ASGenerationConfigBuilder:
        """Above 1: draws this many samples and returns the best n. Default 1."""
        return self._set("best_of", count)

    def num_return_sequences(self, count: int) -> ASGenerationConfigBuilder:
        """Number of sequences returned, each with its queue: the best of num_beams or of best_of;
        with neither, this many samples, as `n`. Default 1."""
        return self._set("num_return_sequences", count)

    def length_penalty(self, exponent: float) -> ASGenerationConfigBuilder:
        """Sequences are ranked by the sum of their log-probabilities / length ** exponent;
        exponents above 0 favour longer sequences, in [-10, 10]. Default 1, the mean."""
        return self._set("length_penalty", exponent)

    def beam_early_stopping(self, rule: bool | str) -> ASGenerationConfigBuilder:
        """When a beam search ends, as transformers' early_stopping: False, True or "never".
        Default False."""
        return self._set("beam_early_stopping", rule)

    def stop_words(self, words: str | Sequence[str]) -> ASGenerationConfigBuilder:
        """The output's text ends before any of these strings; needs the loader's tokenizer."""
        return self._set("stop_words", [words] if isinstance(words, str) else list(words))

    def include_stop_str_in_output(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True keeps the stop string, or the token at which the output ended, in the text. Default
        False."""
        return self._set("include_stop_str_in_output", flag)

    def bad_words(self, words: Sequence[str]) -> ASGenerationConfigBuilder:
        """Strings whose usual tokens are never generated; default none. Needs the loader's
        tokenizer; bad_words_ids takes token ids instead."""
        return self._set("bad_words", list(words) if not isinstance(words, str) else [words])

    def skip_special_tokens(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """False keeps special tokens in the text; the one that ends the output, such as
        end-of-sequence, needs include_stop_str_in_output, too. Default True."""
        return self._set("skip_special_tokens", flag)

    def logprobs(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True returns the log-probability of each output token. Default False."""
        return self._set("logprobs", flag)

    def top_logprobs(self, count: int) -> ASGenerationConfigBuilder:
        """With logprobs: also return this many of the likeliest tokens, in [0, 20]. Default 0."""
        return self._set("top_logprobs", count)

    def logprobs_mode(self, mode: str) -> ASGenerationConfigBuilder:
        """'processed': of the logits from which the token was chosen, before temperature. 'raw': of
        the model's own logits. Default 'processed'."""
        return self._set("logprobs_mode", mode)

    def prompt_logprobs(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True returns the log-probability of each prompt token but the first. Default False."""
        return self._set("prompt_logprobs", flag)

    def prompt_logprobs_start(self, token: int) -> ASGenerationConfigBuilder:
        """The first prompt token with a log-probability; those before it may come from the prefix
        cache. Default 0: as 1, all but the first token."""
        return self._set("prompt_logprobs_start", token)

    def lora_name(self, name: str) -> ASGenerationConfigBuilder:
        """The adapter that `Engine.load_lora` loaded under this name. Default "": none."""
        return self._set("lora_name", name)

    def prompt_only(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True generates nothing: the request returns only what else was asked for of its prompt.
        Default False."""
        return self._set("prompt_only", flag)

    def output_logits(self, which: str) -> ASGenerationConfigBuilder:
        """Which logits are returned in tensors_from_model_inference: "all" of prompt and output,
        "generation" one row for each output token. Default "": none."""
        return self._set("output_logits", which)

    def output_last_hidden_state(self, which: str) -> ASGenerationConfigBuilder:
        """Which last hidden states are returned; values as for output_logits. Default "": none."""
        return self._set("output_last_hidden_state", which)

    def enable_tensors_from_model_inference(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True returns hidden states and input embeddings of prompt and output. Default False."""
        return self._set("enable_tensors_from_model_inference", flag)

    def pooling(self, kind: str) -> ASGenerationConfigBuilder:
        """Returns an embedding of the prompt: the "mean" of its last hidden states, or the "last"
        of them. Default "": none."""
        return self._set("pooling", kind)

    def normalize(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """True divides the embedding by its length. Default True."""
        return self._set("normalize", flag)

    def log_probs(self, enable_logprobs: bool, top_logprobs: int) -> ASGenerationConfigBuilder:
        """The name of `logprobs` and `top_logprobs` in DashInfer's builder."""
        return self.logprobs(enable_logprobs).top_logprobs(top_logprobs)

    def priority(self, value: int) -> ASGenerationConfigBuilder:
        """Larger runs earlier; FIFO within one priority. Default 0."""
        return self._set("priority", value)

    def timeout_ms(self, milliseconds: int) -> ASGenerationConfigBuilder:
        """Time limit from the start of the request. A request that reaches it ends with the tokens
        it has and the finish_reason 'deadline'. Default 0: no limit."""
        return self._set("timeout_ms", milliseconds)

    def build(self) -> dict[str, Any]:
        """A new dict of the fields that were set."""
        fields = dict(self._fields)
        words = fields.get("stop_words_ids", [])
        if self._eos_words and isinstance(words, (list, tuple)):
            own = [word for word in words if word not in self._eos_words]
            fields["stop_words_ids"] = own if fields.get("ignore_eos") else self._eos_words + own
        return fields

    def __repr__(self) -> str:
        return f"ASGenerationConfigBuilder({self.build()})"


@dataclass(frozen=True)
class RequestConfig:
    """A generation config split up: the engine's part, and what this package does itself."""

    native: GenerateConfig
    text: TextOptions | None = None  # None: the config says nothing about text
    n: int = 1
    response_format: Any = None
    bad_words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, config: Any) -> RequestConfig:
        """Accepts a builder, a dict, a GenerateConfig, or None for the defaults.

        Raises:
            ValueError: unknown key. TypeError: wrong type, of a field or of `config`.
        """
        if isinstance(config, GenerateConfig):
            return cls(config)
        if isinstance(config, ASGenerationConfigBuilder):
            config = config.build()
        if config is None:
            config = {}
        if not isinstance(config, Mapping):
            expected = "an ASGenerationConfigBuilder or a dict"
            raise wrong_type("the generation config", config, expected)
        fields = dict(config)
        for name, neutral in _NOT_SERVED.items():
            value = fields.pop(name, neutral)
            if value not in (None, neutral):
                raise ValueError(f"{name} is {shown(value)}; only {neutral!r} is served")
        text = TextOptions.take(fields)
        bad_words = take_bad_words(fields)
        n = _take_n(fields)
        response_format = fields.pop("response_format", None)
        _rename_early_stopping(fields)
        native = GenerateConfig.from_dict(fields)
        n = _settle_sequences(n, native)
        _check_group(native, text, response_format)
        return cls(native, text, n, response_format, bad_words)

    def sequences(self) -> list[GenerateConfig]:
        """The engine's part for each of the n sequences, with consecutive seeds."""
        if self.n == 1 or self.native.seed < 0:
            return [self.native] * self.n
        sequences = [copy(self.native) for _ in range(self.n)]
        for index, sequence in enumerate(sequences):
            # Beyond what the engine takes, it says so.
            sequence.seed = min(sequence.seed + index, (1 << 63) - 1)
        return sequences

    def generated(self, ids: np.ndarray) -> list[int]:
        """The last tokens of a prompt that are output of an earlier request."""
        count = self.native.num_generated_in_prompt
        return ids[len(ids) - count :].tolist() if 0 < count < len(ids) else []

    def end_ids(self) -> list[int]:
        """The single tokens that end a request."""
        ids = [
            *self.native.stop_token_ids,
            *(word[0] for word in self.native.stop_words_ids if len(word) == 1),
        ]
        if self.native.early_stopping and not self.native.ignore_eos:
            ids.append(self.native.eos_token_id)
        return ids


def _take_n(fields: dict[str, Any]) -> int:
    n = fields.pop("n", 1)
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"n is {shown(n)} ({type(n).__name__}); it must be an integer")
    if not 1 <= n <= MAX_N:
        raise ValueError(f"n is {shown(n)}; it must be in [1, {MAX_N}]")
    return n


def _rename_early_stopping(fields: dict[str, Any]) -> None:
    """Stores each early-stopping rule under the engine's name and with the engine's values."""
    if _is_above_one(fields.get("num_beams")) and "early_stopping" in fields:
        fields.setdefault("beam_early_stopping", fields.pop("early_stopping"))
    if isinstance(rule := fields.get("beam_early_stopping"), bool):
        fields["beam_early_stopping"] = "true" if rule else "false"


def _settle_sequences(n: int, native: GenerateConfig) -> int:
    """Unifies `n` and num_return_sequences; returns how many requests to start."""
    ranked = "num_beams" if native.num_beams > 1 else "best_of" if native.best_of > 1 else None
    asked = native.num_return_sequences
    if not 1 <= asked <= MAX_N:
        return n  # the engine refuses it
    if n > 1 and (native.num_beams > 1 or asked not in (1, n)):
        raise ValueError(
            f"n is {n}; it must be 1 where num_beams is {native.num_beams} and "
            f"num_return_sequences is {asked}"
        )
    if ranked:
        native.num_return_sequences = max(n, asked)
        return 1
    name, count = ("n", n) if n > 1 else ("num_return_sequences", asked)
    if count > 1 and not native.do_sample:
        raise ValueError(
            f"{name} is {count}; it must be 1 where do_sample is False: all would be the same"
        )
    native.num_return_sequences = 1
    return count


def _check_group(native: GenerateConfig, text: TextOptions | None, response_format: Any) -> None:
    """Refuses what is done token by token in Python, for sequences that are ranked at the end."""
    name, count = max(
        ("best_of", native.best_of), ("num_beams", native.num_beams), key=lambda pair: pair[1]
    )
    if count > 1 and text is not None and text.stop_words:
        words = shown(list(text.stop_words))
        raise ValueError(
            f"stop_words is {words}; it must be empty where {name} is {count}: "
            "reading finds stop strings, which is after the ranking (stop_words_ids end a sequence)"
        )
    if count > 1 and response_format is not None:
        raise ValueError(f"response_format is given; it must not be where {name} is {count}")
