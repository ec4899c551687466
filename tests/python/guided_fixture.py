"""A running engine with random weights and a tokenizer, for tests of guided decoding."""

from __future__ import annotations

import shutil

from allspark import AsStatus, Engine
from allspark.grammar_compiler import Compiler
from allspark.model_loader.tokenizer import load_tokenizer
from engine_fixture import read_all, start_engine
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.vocabularies import tokenizer_directory

OK = AsStatus.ALLSPARK_SUCCESS
PROMPT = "Give me one."


class Guided:
    """A running engine with random weights and a tokenizer."""

    def __init__(self, directory):
        self.engine, self.loader = start_engine(directory)
        self.tokenizer = self.loader.get_tokenizer()
        self.eos = self.tokenizer.eos_token_id
        self.compiler = Compiler.of(self.tokenizer)

    def start(self, response_format, **settings):
        config = {
            "temperature": 2.0, "top_k": 0, "max_new_tokens": 80, "eos_token_id": self.eos,
            "seed": 3, "response_format": response_format, **settings,
        }  # fmt: skip
        return self.engine.start_request_text("m", self.loader, PROMPT, config)

    def run(self, response_format, **settings) -> tuple[list[int], str, str]:
        """Ids, the text without EOS, and the finish reason."""
        status, handle, queue = self.start(response_format, **settings)
        assert status == OK, self.engine.last_error()
        ids = read_all(queue)
        self.engine.release_request("m", handle)
        return ids, self.tokenizer.decode(ids, skip_special_tokens=True), queue.finish_reason

    def refusal(self, response_format, **settings) -> str:
        """The message with which the request is refused."""
        status, handle, queue = self.start(response_format, **settings)
        assert (status, handle, queue) == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
        return self.engine.last_error()

    def accepts(self, matcher, text: str) -> bool:
        """Whether the matcher accepts the complete text; the matcher's state does not change."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        matcher = matcher.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def start_guided(directory, name: str) -> Guided:
    """An engine with the tokenizer of that name."""
    for path in tokenizer_directory(name).glob("tokenizer*"):
        shutil.copy(path, directory)
    tokenizer = load_tokenizer(directory)
    # As in real models: somewhat more than the tokenizer.
    vocab_size = -(-len(tokenizer) // 64) * 64 + 64
    config = {**CONFIG, "vocab_size": vocab_size, "max_position_embeddings": 512}
    tensors = llama_tensors(config)
    # Tokens of one or two characters and EOS are the likely ones, so that texts come to an end.
    head = tensors["lm_head.weight"]
    likely = [i for i in range(min(600, len(tokenizer))) if len(tokenizer.decode([i])) <= 2]
    likely.append(tokenizer.eos_token_id)
    rows = 3 * head[likely]
    head[:] = 0
    head[likely] = rows
    write_checkpoint(directory, config=config, tensors=tensors)
    return Guided(directory)


def second_engine(guided: Guided) -> Engine:
    """Another engine with the fixture's model and its own thread for masks."""
    engine, _ = start_engine(guided.loader.directory)
    return engine
