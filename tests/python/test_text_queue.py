"""Stop strings: what is held back, where text and ids end, on real tokenizers and in the engine."""

from __future__ import annotations

import asyncio
import random

import pytest
from allspark import (
    AsStatus,
    Detokenizer,
    GenerateRequestStatus,
    HuggingFaceModel,
    TextQueue,
)
from allspark._allspark import ByteLevelText, GenerateConfig
from allspark.detokenizer import open_decoding
from allspark.text_options import MAX_WORDS, TextOptions
from allspark.text_queue import StopStrings
from engine_fixture import start_engine, write_small_checkpoint
from support.native_queue import NativeElements
from support.vocabularies import SMALL, tokenizer_directory
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

NAMES = [*SMALL, "qwen2.5", "gpt2", "internlm2", "mistral-v3", "chatglm3"]
TEXT = (
    "The quick brown fox, naïve – 日本語のテキスト 🎉🎉! def f(x):\n\n    return x + 1\n"
    "Observation: none\nUser: 你好，世界。 <|im_end|> ÀÉÎ \t end"
)


def pieces(stops: list[str], texts: list[str], include: bool = False) -> tuple[list[str], bool]:
    matcher = StopStrings(stops, include)
    out = []
    for text in texts:
        piece, stopped = matcher.put(text)
        out.append(piece)
        if stopped:
            return out, True
    return [*out, matcher.flush()], False


def test_text_is_held_back_while_it_may_become_a_stop():
    assert pieces(["END"], ["a E", "N", "Ex", "END?"]) == (["a ", "", "ENEx"[:2] + "Ex", ""], True)
    assert pieces(["END"], ["a E", "N"]) == (["a ", "", "EN"], False)
    assert pieces(["aab"], ["aa", "ab"]) == (["", "a"], True)
    assert pieces(["\n\n"], ["x\n", "\ny"], include=True) == (["x", "\n\n"], True)
    # The stop string completed first counts, however the text was split.
    assert pieces(["abcdef", "cd"], ["abcdef"]) == (["ab"], True)
    assert pieces(["abcdef", "cd"], list("abcdef")) == (["", "", "", "ab"], True)
    assert pieces(["cd", "bcd"], ["abcd"]) == (["a"], True)
    assert pieces([], ["a", "b"]) == (["a", "b", ""], False)


class NaiveStopStrings:
    """What StopStrings does, by comparing every word at every place."""

    def __init__(self, words: list[str], include: bool):
        self.words, self.include, self.held = words, include, ""

    def put(self, text: str) -> tuple[str, bool]:
        self.held += text
        found = [(at + len(word), at) for word in self.words if (at := self.held.find(word)) >= 0]
        if found:
            end, begin = min(found)
            return self.held[: end if self.include else begin], True
        undecided = next(
            (size for size in range(len(self.held), 0, -1)
             if any(word.startswith(self.held[-size:]) for word in self.words)), 0
        )  # fmt: skip
        certain = len(self.held) - undecided
        out, self.held = self.held[:certain], self.held[certain:]
        return out, False

    def flush(self) -> str:
        out, self.held = self.held, ""
        return out


def test_stop_strings_are_those_that_comparing_every_word_finds():
    rng = random.Random(11)
    characters = ["a", "b", "c", "é", "日", "🎉", "\0", "\ud800"]
    num_stopped = 0
    for _ in range(5000):
        letters = characters[: rng.randint(1, len(characters))]
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(0, 8))]
        words = ["".join(rng.choices(letters, k=size)) for size in sizes]
        words += rng.choices(words, k=rng.randint(0, 2)) if words else []
        include = rng.random() < 0.5
        stops, naive = StopStrings(words, include), NaiveStopStrings(words, include)
        for _ in range(rng.randint(1, 15)):
            piece = "".join(rng.choices(letters, k=rng.choice([0, 1, 1, 2, 7])))
            given = stops.put(piece)
            assert given == naive.put(piece)
            assert stops.num_held == len(naive.held)
            num_stopped += given[1]
        assert stops.flush() == naive.flush()
    assert 1000 < num_stopped


def test_many_stop_strings_cost_no_more_per_token_than_few():
    # Comparing each word with each of these pieces would take hours.
    words = [f"{i:05d}" + "a" * (i % 10) for i in range(MAX_WORDS)]
    stops = StopStrings(words)
    for _ in range(300_000):
        assert not stops.put("x98")[1]
    assert stops.put("x00010") == ("98x", True)


class FakeQueue:
    """A native queue that returns ids in chunks."""

    request_id = 7

    def __init__(self, chunks: list[list[int]]):
        self.chunks = chunks
        self.given = 0

    def generated_length(self):
        return self.given + sum(map(len, self.chunks))

    def status(self):
        status = GenerateRequestStatus
        return status.Generating if self.chunks else status.GenerateFinished

    @property
    def is_terminal(self):
        return not self.chunks

    def finish_reason(self):
        return "" if self.chunks else "length"

    def error(self):
        return ""

    def get(self, timeout_ms):
        if not self.chunks:
            return None
        ids = self.chunks.pop(0)
        self.given += len(ids)
        return NativeElements(ids_from_generate=ids, token_logprobs_list=[float(i) for i in ids])

    def get_nowait(self):
        return self.get(0)


def load_tokenizer(name: str):
    directory = tokenizer_directory(name)
    transformers = pytest.importorskip("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # a format that transformers cannot build on its own
        pytest.skip(f"transformers does not load {name}: {error}")


def read(ids, tokenizer, options, rng, **settings):
    """(text, ids, queue, how often it was stopped) of a TextQueue fed in random chunks."""
    chunks, begin = [], 0
    while begin < len(ids):
        end = begin + rng.choice([1, 1, 2, 5, 40])
        chunks.append(ids[begin:end])
        begin = end
    stops = []
    queue = TextQueue(
        FakeQueue(chunks), tokenizer, options, stop=lambda: stops.append(1), **settings
    )
    elements = list(queue)
    assert all(len(e.token_logprobs_list) == len(e.ids_from_generate) for e in elements)
    text = "".join(e.text for e in elements)
    return text, [i for e in elements for i in e.ids_from_generate], queue, len(stops)


@pytest.mark.parametrize("name", NAMES)
def test_text_ends_where_the_whole_decoding_says(name):
    tokenizer = load_tokenizer(name)
    rng = random.Random(5)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    text, kept, queue, num_stops = read(ids, tokenizer, TextOptions(), rng)
    assert (text, kept, num_stops, queue.finish_reason) == (whole, ids, 0, "length")
    for _ in range(200):
        # Cut out of the text, so that stop strings span and split tokens; and some that never
        # occur.
        words = []
        for _ in range(rng.choice([1, 1, 2, 4])):
            begin = rng.randrange(len(whole))
            words.append(whole[begin : begin + rng.randint(1, 9)])
        words += ["no such text"] * rng.randint(0, 1)
        include = rng.random() < 0.5
        options = TextOptions(tuple(words), include)
        text, kept, queue, num_stops = read(ids, tokenizer, options, rng)
        end, begin = min((whole.find(w) + len(w), whole.find(w)) for w in words if w in whole)
        assert text == whole[: end if include else begin]
        assert kept == ids[: len(kept)] and queue.GeneratedLength() == len(kept)
        assert queue.finish_reason == "stop" and queue.finished
        assert queue.Get() is None and queue.GetNoWait() is None
        decoded = tokenizer.decode(kept, skip_special_tokens=True)
        assert any(w in decoded for w in words) or kept == ids
        shorter = tokenizer.decode(kept[:-1], skip_special_tokens=True)
        # A token whose last character is incomplete may delay the stop by one token.
        if "\N{REPLACEMENT CHARACTER}" not in shorter and kept != ids:
            assert not any(w in shorter for w in words)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_special_tokens_within_a_text_change_nothing_around_them(name, skip_special_tokens):
    tokenizer = load_tokenizer(name)
    rng = random.Random(3)
    words = ["request", " a", "engine ", " blocks ", "two  of", "été", "."]
    for count in (1, 2, 31, 32, 33, 100):  # in a row; longer rows are not kept
        ids = tokenizer.encode("   a", add_special_tokens=False)  # blanks that a decoder drops
        for _ in range(40):
            ids += tokenizer.encode(rng.choice(words), add_special_tokens=False)
            ids += [tokenizer.eos_token_id] * rng.choice([0, 0, count])
        stream = Detokenizer(tokenizer, skip_special_tokens)
        text = "".join([*(stream.put([token]) for token in ids), stream.flush()])
        assert text == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_fast_decoding_gives_the_same_pieces(name, skip_special_tokens):
    tokenizer = load_tokenizer(name)
    rng = random.Random(5)
    texts = ["日本語 🎉!", "naïve", " a  b", "\n\n", "plain words"]
    vocab_size = len(tokenizer)
    for _ in range(100):
        ids = []
        for _ in range(30):
            ids += rng.choice([
                [rng.randrange(vocab_size)],  # often a part of a character
                [tokenizer.eos_token_id or 0] * rng.choice([1, 2, 31, 32, 33, 70]),
                tokenizer.encode(rng.choice(texts), add_special_tokens=False),
            ])  # fmt: skip
        fastest = open_decoding(tokenizer, skip_special_tokens)
        fast = Detokenizer(tokenizer, skip_special_tokens)
        assert fast._stream is not None
        own = Detokenizer(tokenizer, skip_special_tokens)
        own._stream = None
        decodings = fastest, fast, own
        for token in ids:
            assert len({each.put([token]) for each in decodings}) == 1, ids
        assert len({each.flush() for each in decodings}) == 1, ids


BYTE_LEVEL = ["byte_level", "qwen2.5", "gpt2"]


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_bytes_of_any_order_are_decoded_as_by_the_tokenizer(name, skip_special_tokens):
    tokenizer = load_tokenizer(name)
    rng = random.Random(7)
    assert isinstance(open_decoding(tokenizer), ByteLevelText)
    # One token for each byte, and the special ones.
    texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    ids = [index for index, text in enumerate(texts) if len(text) == 1]
    ids += tokenizer.all_special_ids + [len(tokenizer) + 7]
    for length in [1, 2, 3, 4, 5, 8] * 300:
        drawn = rng.choices(ids, k=length)
        text = open_decoding(tokenizer, skip_special_tokens)
        decoded = text.put(drawn) + text.flush()
        assert decoded == tokenizer.decode(drawn, skip_special_tokens=skip_special_tokens), drawn


def test_added_tokens_are_decoded_too():
    tokenizer = load_tokenizer(BYTE_LEVEL[0])
    before = open_decoding(tokenizer)
    tokenizer.add_tokens(["<a b>", "\N{GREEK SMALL LETTER ALPHA}"])
    ids = tokenizer.encode("x<a b>\N{GREEK SMALL LETTER ALPHA}y", add_special_tokens=False)
    assert open_decoding(tokenizer).put(ids) == "x<a b>\N{GREEK SMALL LETTER ALPHA}y"
    assert before.put(ids) == "xy"


class Watched:
    """An object of the package 'tokenizers'; notes which of its methods are called."""

    def __init__(self, inner):
        self.inner, self.called = inner, set()

    def __getattr__(self, name):
        self.called.add(name)
        return getattr(self.inner, name)


def test_a_request_copies_no_vocabulary(monkeypatch):
    """tokenizers 0.22 makes a dict of all tokens even to say how many there are."""
    tokenizer = load_tokenizer(BYTE_LEVEL[0])
    watched = Watched(tokenizer.backend_tokenizer)
    monkeypatch.setattr("allspark.detokenizer._plain_backend", lambda tokenizer: watched)
    assert isinstance(open_decoding(tokenizer), ByteLevelText)
    assert "get_vocab" in watched.called
    watched.called.clear()
    assert isinstance(open_decoding(tokenizer), ByteLevelText)
    assert watched.called == {"id_to_token"}


def test_a_token_that_fills_a_gap_is_decoded_too():
    letters = {chr(ord("a") + i): i + 4 * (i > 2) for i in range(5)}  # 0, 1, 2, 7, 8
    backend = Tokenizer(BPE(letters, []))
    backend.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert open_decoding(tokenizer).put([0, 8]) == "ae"
    tokenizer.add_tokens(["new"])
    (id,) = tokenizer.encode("new", add_special_tokens=False)
    assert open_decoding(tokenizer).put([0, id, 8]) == "anewe"


def test_a_token_id_is_not_negative():
    with pytest.raises(ValueError, match="token id is -1"):
        open_decoding(load_tokenizer(BYTE_LEVEL[0])).put([-1])


def test_a_decoder_of_its_own_is_not_bypassed():
    assert Detokenizer(Letters())._stream is None


def test_no_text_is_lost_to_a_clean_up_of_spaces():
    tokenizer = load_tokenizer("byte_level")
    tokenizer.clean_up_tokenization_spaces = True
    # Without it, transformers from 5 on cleans up for no BPE.
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tokenizer.encode("print 's' , it 's .", add_special_tokens=False)
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert len(tokenizer.decode(ids)) < len(whole)
    for text in (open_decoding(tokenizer), Detokenizer(tokenizer)):
        assert "".join([*(text.put([token]) for token in ids), text.flush()]) == whole


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("first", ["<0xFF>", "<0xE6>"])
def test_a_long_run_without_text_costs_in_proportion(monkeypatch, first, is_fast):
    tokenizer = load_tokenizer("sentencepiece")
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("a b", "c d"))
    # Bytes of no character, or the first byte of one and tokens without text.
    run = tokenizer.convert_tokens_to_ids([first, *[{"<0xE6>": "</s>"}.get(first, first)] * 3000])
    ids = [*before, *run, *after]
    decode, sizes = Detokenizer._decode, []

    def note(self, begin, end):
        sizes.append(end - begin)
        return decode(self, begin, end)

    monkeypatch.setattr(Detokenizer, "_decode", note)
    text = Detokenizer(tokenizer)
    if not is_fast:
        text._stream = None
    pieces = [text.put([token]) for token in ids]
    assert text._stream is None, "a stream decodes all again at each token"
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert pieces[-len(after)] and not text.flush()
    assert sum(sizes) < 8 * len(ids)


def test_many_tokens_at_once_hold_nothing_back():
    tokenizer = load_tokenizer("sentencepiece")
    text = Detokenizer(tokenizer)
    text._stream = None
    before = tokenizer.encode("a b " * 20, add_special_tokens=False)
    emoji = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "🙂".encode()])
    first = text.put([*before, *emoji, *emoji[:2]])
    whole = tokenizer.decode([*before, *emoji, *emoji], skip_special_tokens=True)
    assert first + text.put(emoji[2:]) == whole


class Letters:
    """Token i is the i-th letter; 26 is '</s>', a special token."""

    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def decode(self, ids, skip_special_tokens=True):
        end = "" if skip_special_tokens else "</s>"
        return "".join(end if i == 26 else chr(97 + i) for i in ids)


def test_end_tokens_minimum_and_special_tokens():
    ids = [0, 1, 2, 0, 1, 26]
    rng = random.Random(1)
    assert read(ids, Letters(), TextOptions(), rng)[0] == "abcab"
    shown = TextOptions(skip_special_tokens=False)
    assert read(ids, Letters(), shown, rng)[0] == "abcab</s>"
    assert read(ids, Letters(), shown, rng, end_ids=[26])[0] == "abcab"
    with_stop = TextOptions(include_stop_str_in_output=True, skip_special_tokens=False)
    assert read(ids, Letters(), with_stop, rng, end_ids=[26])[0] == "abcab</s>"
    stop = TextOptions(("ab",))
    assert read(ids, Letters(), stop, rng)[:2] == ("", [0, 1])
    assert read(ids, Letters(), stop, rng, min_tokens=3)[:2] == ("abc", [0, 1, 2, 0, 1])


@pytest.mark.parametrize(
    "words, min_tokens, expected",
    [
        (("bc",), 3, ("a", 3)),  # begins before the minimum, and ends with it
        (("bc",), 4, ("abcab", 6)),
        (("ab", "bca"), 3, ("a", 4)),  # one that was passed by is the other's beginning
        (("bca",), 6, ("abcab", 6)),
    ],
)
def test_a_stop_string_counts_where_it_ends(words, min_tokens, expected):
    ids, options, rng = [0, 1, 2, 0, 1, 26], TextOptions(words), random.Random(1)
    text, read_ids, *_ = read(ids, Letters(), options, rng, min_tokens=min_tokens)
    assert (text, len(read_ids)) == expected


@pytest.fixture(scope="module")
def running(checkpoint):
    engine, loader = start_engine(checkpoint)
    loader._tokenizer = Letters27()
    return engine, loader


class Letters27(Letters):
    """Every id of the vocabulary is a letter."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i % 26) for i in ids)


CONFIG = {"do_sample": False, "max_new_tokens": 200}


def run(engine, loader, config):
    status, handle, queue = engine.start_request_text("m", loader, "abc", config)
    assert status == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
    return handle, queue


def test_a_stop_string_ends_the_request(running):
    engine, loader = running
    _, plain = run(engine, loader, CONFIG)
    ids = [i for elements in plain for i in elements.ids_from_generate]
    whole = loader.get_tokenizer().decode(ids)
    word = whole[20:24]
    expected = whole[: whole.find(word)]
    handle, queue = run(engine, loader, {**CONFIG, "stop_words": [word], "logprobs": True})
    assert isinstance(queue, TextQueue)
    elements = list(queue)
    assert "".join(e.text for e in elements) == expected
    kept = [i for e in elements for i in e.ids_from_generate]
    assert kept == ids[: len(expected) + 4] and queue.finish_reason == "stop"
    assert sum(len(e.token_logprobs_list) for e in elements) == len(kept)
    assert engine.sync_request("m", handle, timeout_ms=10000) == AsStatus.ALLSPARK_SUCCESS

    # Read late, or on an event loop: the same result.
    tensors = {"output_logits": "generation", "output_last_hidden_state": "all", "pooling": "last"}
    handle, queue = run(engine, loader, {**CONFIG, "stop_words": word, **tensors})
    engine.sync_request("m", handle)
    [element] = queue
    assert element.text == expected
    [tensors] = element.tensors_from_model_inference
    assert tensors["logits"].argmax(axis=1).tolist() == kept
    assert len(tensors["hidden_states"]) == len("abc") + len(kept) - 1
    assert tensors["embedding"].ndim == 1

    async def stream():
        _, async_queue = run(engine, loader, {**CONFIG, "stop_words": [word]})
        return "".join([e.text async for e in async_queue])

    assert asyncio.run(stream()) == expected
    # Text without stops, by ids and with a loader.
    _, _, queue = engine.start_request_ids("m", loader, [0, 1, 2], {**CONFIG, "stop_words": []})
    assert "".join(e.text for e in queue) == whole and queue.finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop_words", 5, ["stop_words is 5", "list of str"]),
        ("stop_words", ["a", 5], ["stop_words[1] is 5", "str"]),
        ("stop_words", ["a", ""], ["stop_words[1] is empty"]),
        ("stop_words", ["a"] * 100_001, ["stop_words has 100001 entries", "100000"]),
        ("stop_words", ["a" * 1_000_000, "b"], ["stop_words has 1000001 characters", "1000000"]),
        ("include_stop_str_in_output", 1, ["include_stop_str_in_output is 1", "bool"]),
        ("skip_special_tokens", "no", ["skip_special_tokens is 'no'", "bool"]),
    ],
)
def test_bad_values_are_refused(running, field, value, words):
    engine, loader = running
    status, handle, queue = engine.start_request_text("m", loader, "a", {field: value})
    assert status == AsStatus.ALLSPARK_PARAM_ERROR and handle is None and queue is None
    assert all(word in engine.last_error() for word in words), engine.last_error()


@pytest.fixture
def unloaded(running):
    """Requests wait meanwhile."""
    engine, loader = running
    engine.unload_device_mem("m")
    yield engine, loader
    engine.load_device_mem("m")


def start_by_ids(engine, how, loader, config):
    arguments = "m", loader, [1], config
    if how == "asynchronous":
        return asyncio.run(engine.start_request_ids_async(*arguments))
    return engine.start_request_ids(*arguments)


@pytest.mark.parametrize("how", ["synchronous", "asynchronous"])
def test_no_request_runs_where_the_loader_has_no_tokenizer(unloaded, tmp_path, how):
    engine, _ = unloaded
    loader = HuggingFaceModel(str(write_small_checkpoint(tmp_path)), "m")
    started = start_by_ids(engine, how, loader, {"skip_special_tokens": True})
    assert started == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
    assert "holds no tokenizer" in engine.last_error()
    stat = engine.get_as_engine_stat("m")
    assert stat.running_request == stat.pending_request == 0


@pytest.mark.parametrize("how", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("n", [1, 3])
def test_no_request_is_left_where_a_queue_cannot_be_made(unloaded, monkeypatch, how, n):
    engine, loader = unloaded
    num_made = 0

    class Failing(TextQueue):
        def __init__(self, *arguments, **options):
            nonlocal num_made
            num_made += 1
            if num_made == n:
                raise MemoryError
            super().__init__(*arguments, **options)

    monkeypatch.setattr(engine._requests, "_text_queue_type", Failing)
    with pytest.raises(MemoryError):
        start_by_ids(engine, how, loader, {"skip_special_tokens": True, "n": n})
    # Nothing waits any more once those that were released have ended.
    assert engine.sync_request("m", timeout_ms=10_000) == AsStatus.ALLSPARK_SUCCESS


def test_text_needs_a_tokenizer(running):
    engine, _ = running
    status, _, _ = engine.start_request_ids("m", None, [1], {"stop_words": ["a"]})
    assert status == AsStatus.ALLSPARK_PARAM_ERROR and "tokenizer" in engine.last_error()
    status, _, queue = engine.start_request_ids("m", None, [1], GenerateConfig(max_new_tokens=1))
    assert status == AsStatus.ALLSPARK_SUCCESS and queue.Get().ids_from_generate


def test_what_goes_wrong_after_a_stop_string_is_no_error(demo_model):
    tokenizer = HuggingFaceModel(str(demo_model), "m").get_tokenizer()
    for word, reason, error in (("END", "stop", None), ("zzz", "length", "a step failed")):
        native = FakeQueue([tokenizer.encode("abc END and more")])
        native.error = lambda: "a step failed"
        queue = TextQueue(native, tokenizer, TextOptions((word,)), stop=lambda: None)
        text = "".join(elements.text for elements in queue)
        assert ("more" in text) == (error is not None)
        assert (queue.finish_reason, queue.error) == (reason, error)
