"""Flags of `allspark serve`: LMDeploy's have a meaning here or a reason why not; keys are keys."""

from __future__ import annotations

import argparse
import json

import pytest

pytest.importorskip("fastapi")

from allspark.cli import engine_flags, main, serve, server_flags  # noqa: E402
from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.serve.settings import ServerSettings  # noqa: E402

# `lmdeploy serve api_server` of 0.4 and of today; those without effect, and those that are mapped.
TAKEN = """
--server-name 0.0.0.0 --server-port 23333 --allow-origins * --allow-credentials --allow-methods *
--allow-headers * --max-concurrent-requests 8 --allowed-media-domains a b --backend turbomind
--log-level ERROR --api-keys k --model-name m --max-log-len 10 --disable-fastapi-docs
--enable-abort-handling --trust-remote-code --chat-template llama2 --tool-call-parser qwen
--reasoning-parser default --revision r --download-dir d --generation-config auto --adapters a=b
--device cuda --eager-mode --logprobs-mode raw_logits --distributed-executor-backend uni
--kernel-block-size 64 --prefix-cache-state-budget 0 --prefix-cache-decode-state-interval 0
--language-model-only --dtype auto --tp 1 --session-len 64 --max-batch-size 4
--cache-max-entry-count 0.5 --cache-block-seq-len 64 --enable-prefix-caching
--max-prefill-token-num 4096 --quant-policy 8 --model-format hf --disable-metrics --dp 1 --ep 1
--enable-microbatch --enable-eplb --role Hybrid --migration-backend DLSlime
--cudagraph-capture-batch-sizes 1 2 --node-rank 0 --nnodes 1 --cp 1 --rope-scaling-factor 0
--num-tokens-per-iter 0 --max-prefill-iters 1 --async 1 --communicator nccl
--vision-max-batch-size 1 --use-logn-attn --cap chat --meta-instruction x --qos-config-path=
"""
REFUSED = {
    "--proxy-url http://x": "the server registers nowhere",
    "--allow-terminate-by-client": "SIGTERM ends the server",
    "--qos-config-path x.json": "requests have a priority of their own",
    "--share": "no tunnel is opened",
    "--hf-overrides {}": "config.json is read as it is",
    "--dist-init-addr x:1": "one process serves a model",
    "--enable-return-routed-experts": "the experts of a token are not returned",
    "--dllm-block-length 4": "diffusion models are not served",
    "--dp 2": "one process serves a model",
    "--role Prefill": "one engine computes prompts and outputs",
    "--speculative-algorithm eagle3": "'draft_model': layers that draft are not read",
    "--outer-dp-size 2": "one process serves a model",
    "--speculative-num-draft-tokens 4": "need --speculative-algorithm",
    "api_client http://x": "`allspark client URL` talks with a server",
    "proxy": "nginx or another proxy",
}


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args([*arguments])


def settings_of(*arguments):
    return server_flags.to_server_settings(parsed("m", *arguments))


def test_flags_of_lmdeploy_are_taken():
    options = parsed("m", *TAKEN.split())
    settings = server_flags.to_server_settings(options)
    assert (settings.max_concurrent_requests, settings.disable_docs) == (8, True)
    config = engine_flags.to_engine_config(options)
    assert (config.session_len, config.kv_cache_bits, config.adapters) == (64, 8, {"a": "b"})


@pytest.mark.parametrize("arguments", REFUSED)
def test_refused_flags_say_why(arguments, demo_model, capsys):
    given = arguments.split()
    model = [] if given[0] in ("api_client", "proxy") else [str(demo_model)]
    assert main(["serve", *model, *given]) == 1
    assert REFUSED[arguments] in capsys.readouterr().err


def test_bounds_have_flags():
    for name in (
        "max_body_bytes", "max_header_bytes", "max_stops", "max_tools", "max_schema_bytes",
        "schema_timeout", "max_concurrent_requests", "request_timeout",
    ):  # fmt: skip
        flag = "--" + name.replace("_", "-")
        assert getattr(settings_of(flag, "7"), name) == 7


def test_other_origins_have_flags():
    settings = settings_of("--allow-origins", "a", "b", "--allow-methods", "GET", "--allow-headers",
                           "x", "--allow-credentials")  # fmt: skip
    assert (settings.allow_origins, settings.allow_methods) == (("a", "b"), ("GET",))
    assert (settings.allow_headers, settings.allow_credentials) == (("x",), True)
    assert settings_of().allow_origins == ("*",) and not settings_of().allow_credentials


def test_speculative_flags_are_those_of_the_engine():
    def config(*arguments):
        return engine_flags.to_engine_config(parsed("m", *arguments))

    found = config("--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "7")
    assert found == EngineConfig(prompt_lookup_num_tokens=7)
    names = ("--speculative-algorithm", "draft_model", "--speculative-draft-model", "d")
    assert config(*names) == EngineConfig(draft_model="d", num_draft_tokens=1)


def test_names_with_underscores(monkeypatch):
    found = []
    monkeypatch.setattr(serve, "run", lambda options: found.append(options) or 0)
    assert main(["serve", "a_b", "--server_port", "7", "--model_name=c_d"]) == 0
    (options,) = found
    assert (options.models, options.server_port, options.model_name) == (["a_b"], 7, "c_d")


def test_where_the_defaults_of_sampling_come_from(tmp_path):
    assert settings_of().sampling_defaults == {}
    own = {"temperature": 0.7, "top_p": 1.0, "top_k": 40, "repetition_penalty": 1.0}
    assert settings_of("--generation-config", "lmdeploy").sampling_defaults == own
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.1, "top_k": 3, "eos_token_id": 1}))
    for given in (path, tmp_path):
        found = settings_of("--generation-config", str(given)).sampling_defaults
        assert found == {**own, "temperature": 0.1, "top_k": 3}
    for text, problem in (
        ("{", "it is no JSON"),
        ("[]", "it is a list; it must be an object"),
        ('{"top_p": "x"}', "top_p is 'x'; it must be a number of at least 0"),
        ('{"top_p": NaN}', "top_p is nan; it must be a number of at least 0"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            settings_of("--generation-config", str(path))


def test_no_source_of_keys_is_empty(tmp_path, monkeypatch):
    """A server that was meant to be closed is not open."""
    monkeypatch.setenv("ALLSPARK_API_KEYS", "e1, e2,")
    path = tmp_path / "keys"
    path.write_text("f1\n\n f2 \n")
    given = ("--api-keys", "k", "--api-key-file", str(path))
    assert set(settings_of(*given).api_keys) == {"e1", "e2", "k", "f1", "f2"}
    path.write_text("\ufefff1\r\nf2", encoding="utf-8")
    assert set(settings_of("--api-key-file", str(path)).api_keys) == {"e1", "e2", "f1", "f2"}
    path.write_bytes(b"f1\n\xff")
    with pytest.raises(ValueError, match="keys: byte 3 is 0xff .*; the file must be a text"):
        settings_of("--api-key-file", str(path))
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="keys has no key"):
        settings_of("--api-key-file", str(path))
    with pytest.raises(ValueError, match="--api-keys has no key"):
        settings_of("--api-keys", " ")
    for nothing in ("", " , "):
        monkeypatch.setenv("ALLSPARK_API_KEYS", nothing)
        with pytest.raises(ValueError, match="ALLSPARK_API_KEYS has no key"):
            settings_of("--api-keys", "k")
    monkeypatch.delenv("ALLSPARK_API_KEYS")
    assert settings_of().api_keys == ()
    with pytest.raises(ValueError, match="api_keys has an empty key"):
        ServerSettings(api_keys=("k", ""))


def test_a_path_may_have_an_equals_sign(tmp_path):
    folder = tmp_path / "lr=0.1" / "ckpt"
    folder.mkdir(parents=True)

    def sources(*given):
        return serve._sources(parsed(*given), list(given))

    assert sources(f"{folder}") == [(f"{folder}", None)]
    assert sources(f"{folder}=m", "a=b") == [(f"{folder}", "m"), ("a", "b")]
    assert sources("a=", "b") == [("a", None), ("b", None)]
    config = engine_flags.to_engine_config(parsed("--adapters", f"{folder}", f"x={folder}"))
    assert config.adapters == {"ckpt": f"{folder}", "x": f"{folder}"}


def test_adapters_of_several_models():
    def adapters(*given):
        return serve._adapters_of(["a", "b"], dict(given))

    assert adapters(("a:x", "p"), ("b:y", "q"), ("b:z", "r")) == {
        "a": {"x": "p"}, "b": {"y": "q", "z": "r"}
    }  # fmt: skip
    with pytest.raises(ValueError, match="say MODEL:x=p with one of a, b"):
        adapters(("x", "p"))
    assert serve._adapters_of(["a"], {"x": "p", "a:y": "q"}) == {"a": {"x": "p", "y": "q"}}
    with pytest.raises(ValueError, match="two models have the name 'a'"):
        serve._adapters_of(["a", "a"], {})
