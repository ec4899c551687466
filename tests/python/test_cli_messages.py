"""What the command ``allspark`` says: help that explains, and errors of one line."""

from __future__ import annotations

import argparse
import importlib
import logging
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("allspark._allspark")
pytest.importorskip("fastapi")

from allspark import OutOfMemoryError  # noqa: E402
from allspark.cli import _COMMANDS, engine_flags, formats, generation_flags, main  # noqa: E402
from allspark.remote.errors import RemoteError  # noqa: E402
from allspark.serve.server import bind  # noqa: E402
from allspark.serve.settings import ServerSettings  # noqa: E402


def test_the_version(capsys):
    for flag in ("-v", "--version"):
        with pytest.raises(SystemExit) as caught:
            main([flag])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith("allspark 0.")


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_flag_says_what_it_does(command):
    module = importlib.import_module(f"allspark.cli.{_COMMANDS[command]}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    parsers = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    for each in parsers:
        for action in each._actions:
            if action.option_strings and action.help is not argparse.SUPPRESS:
                known = (action.dest, action.dest.replace("_", "-"))
                assert action.choices or (action.help and action.help not in known), action
        assert "``" not in each.format_help()


def test_flags_that_stand_for_others_name_them():
    parser = argparse.ArgumentParser()
    engine_flags.add_engine_flags(parser)
    text = " ".join(parser.format_help().split())
    assert "--cache-block-seq-len N as --block-size" in text
    assert "--cache-max-entry-count X as --kv-cache-memory, an integer --kv-cache-blocks" in text
    assert set(generation_flags._HELP) <= set(generation_flags._fields())


@pytest.mark.parametrize("arguments", [["chat", "m"], ["bench", "serve", "--base-url", "u"]])
def test_an_unknown_flag_is_refused_by_its_command(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--nothing", "1"])
    last = capsys.readouterr().err.splitlines()[-1]
    command = " ".join(arguments[: 2 if arguments[0] == "bench" else 1])
    assert caught.value.code == 2
    assert last == f"allspark {command}: error: unrecognized arguments: --nothing 1"


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("no room\n  for it"), OSError("no room\n\tfor it")]
)
def test_an_error_is_one_line(error, monkeypatch, capsys):
    def fail(options):
        raise error

    monkeypatch.setattr(formats, "run", fail)
    assert main(["list"]) == 1
    assert capsys.readouterr().err == "allspark list: no room for it\n"


def test_ctrl_c_while_a_command_is_read(monkeypatch, capsys):
    """Before it runs: what its flags need is imported then."""

    def interrupt(parser):
        raise KeyboardInterrupt

    monkeypatch.setattr(formats, "add_arguments", interrupt)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "allspark list: ended by the user\n"


@pytest.mark.parametrize("error", [None, LookupError, ValueError])
def test_ctrl_c_that_a_package_swallows(monkeypatch, capsys, error):
    """Or makes another error of."""

    def swallow(parser):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if error is not None:
                raise error("within") from None

    monkeypatch.setattr(formats, "add_arguments", swallow)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "allspark list: ended by the user\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_faults_of_the_program_keep_their_traceback(monkeypatch):
    def fail(parser):
        raise LookupError("a fault")

    monkeypatch.setattr(formats, "add_arguments", fail)
    with pytest.raises(LookupError, match="a fault"):
        main(["list"])


# Says when Ctrl-C is the command's to answer: the interpreter itself has no such manners.
_SAYS_UP = """
import sys
from allspark import cli

run = cli._run

def run_and_say(*given):
    print("up", flush=True)
    return run(*given)

cli._run = run_and_say
sys.exit(cli.main())
"""


@pytest.mark.parametrize("delay", [0, 0.2, 0.8])
def test_ctrl_c_while_a_model_is_opened(demo_model, delay):
    command = [sys.executable, "-c", _SAYS_UP, "serve", str(demo_model), "--server-port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    if process.returncode == 0:  # where this process was late, it serves by then: ends in order
        assert "serving " in said
        return
    assert process.returncode == 130, said
    assert said.endswith("allspark serve: ended by the user\n")


def test_a_page_in_place_of_an_error_is_one_line():
    error = RemoteError.of(404, b"<html>\n  <body>gone</body>\n</html>", "Not Found")
    assert error.message == "<html> <body>gone</body> </html>"
    assert RemoteError.of(502, b" \n", "Bad Gateway").message == "Bad Gateway"


# The command `serve`, before it opens a model.


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--server-port", "99999"), "server_port is 99999; it must be in [0, 65535]"),
        (("--server-name", "192.0.2.1"), "cannot listen on 192.0.2.1:23333: Cannot assign"),
        (("--tool-call-parser", "x"), "there is no tool-call parser 'x'; the names are deepseek"),
        (("--reasoning-parser", "x"), "there is no reasoning parser 'x'; the names are deepseek"),
    ],
)
def test_serve_refuses_a_flag_before_it_opens_a_model(arguments, message, capsys):
    assert main(["serve", "/no/such/model", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"allspark serve: {message}")


@pytest.mark.parametrize("source", [["/no/such/model"], ["gradio", "http://127.0.0.1:1"]])
def test_a_port_that_is_taken_is_found_before_a_model_is_opened(source, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--server-name", "127.0.0.1", "--server-port", str(port)]
        assert main(["serve", *source, *flags]) == 1
    expected = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert capsys.readouterr().err == f"allspark serve: {expected}\n"


def test_files_of_a_certificate_are_looked_for(monkeypatch, tmp_path, capsys):
    key = tmp_path / "key.pem"
    key.touch()
    monkeypatch.setenv("SSL_KEYFILE", str(key))
    monkeypatch.setenv("SSL_CERTFILE", "/no/such.pem")
    assert main(["serve", "/no/such/model", "--ssl"]) == 1
    assert "SSL_CERTFILE is '/no/such.pem'; there is no such file" in capsys.readouterr().err


def test_the_log_level_is_that_of_the_logger(capsys):
    logger = logging.getLogger("allspark")
    before = logger.level
    try:
        assert main(["serve", "/no/such/model", "--server-port", "0", "--log-level", "error"]) == 1
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)
    with pytest.raises(SystemExit):
        main(["serve", "/no/such/model", "--log-level", "loud"])
    assert "argument --log-level: invalid choice: 'LOUD'" in capsys.readouterr().err


def test_a_name_with_several_addresses_has_one_port(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 0)) for last in (1, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    sockets = bind(ServerSettings(server_name="here", server_port=0))
    addresses = [each.getsockname() for each in sockets]
    for each in sockets:
        each.close()
    assert [host for host, _ in addresses] == ["127.0.0.1", "127.0.0.2"]
    assert addresses[0][1] == addresses[1][1] > 0
