"""The command ``allspark``: serves, measures, evaluates, converts and quantises models, talks with
them and answers files of prompts (docs/cli.md)."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from . import interrupt

# Errors that are the user's to mend; others are faults of the program, and keep their traceback.
_SAID = (ValueError, TypeError, RuntimeError, OSError, MemoryError)
# The modules by the names of their commands. They are imported in `main`, where Ctrl-C is awaited.
_COMMANDS = {
    "serve": "serve",
    "chat": "chat",
    "client": "client",
    "bench": "bench",
    "batch": "batch",
    "eval": "evaluate",
    "convert": "convert",
    "quantize": "quantize",
    "lite": "lite",
    "inspect": "inspect",
    "list": "formats",
    "check_env": "check_env",
}
_DESCRIPTION = (
    "Serves, measures, evaluates, converts and quantises models, talks with them and answers files "
    "of prompts. `allspark COMMAND --help` says more."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 after an error message; 2 for wrong arguments; 130 where the
    user ended it."""
    given = [_dashed(each) for each in (sys.argv[1:] if arguments is None else arguments)]
    name = next((each for each in given if not each.startswith("-")), None)
    program = f"allspark {name}" if name in _COMMANDS else "allspark"
    with interrupt.watched():
        try:
            with warnings.catch_warnings():
                warnings.showwarning = functools.partial(_show_warning, program)
                return _run(given, name)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) or interrupt.is_pending():
                print(f"{program}: ended by the user", file=sys.stderr)
                return 130
            if not isinstance(error, _SAID):
                raise
            print(f"{program}: {_line(error)}", file=sys.stderr)
            return 1


def _dashed(argument: str) -> str:
    """A flag with dashes in its name: those with underscores, as --server_name, are known, too."""
    if not argument.startswith("--"):
        return argument
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value


def _show_warning(program: str, message: Warning | str, *_: object) -> None:
    """A warning without the place in the program."""
    print(f"{program}: {_line(message)}", file=sys.stderr)


def _line(message: object) -> str:
    return " ".join(str(message).split())


def _run(given: list[str], name: str | None) -> int:
    parser = argparse.ArgumentParser(prog="allspark", description=_DESCRIPTION)
    parser.add_argument("-v", "--version", action=_Version, help="print the version, and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {}
    for command, module_name in _COMMANDS.items():
        modules[command] = module = importlib.import_module(f".{module_name}", __name__)
        summary = (module.__doc__ or "").splitlines()[0]
        own = commands.add_parser(command, help=summary, description=summary)
        own.set_defaults(fail=own.error)
        if command == name:  # the flags of others would take time
            module.add_arguments(own)
    options = _parse(parser, given)
    if (path := getattr(options, "config", None)) is not None:
        from . import config_file

        config_file.set_defaults(options.parser, path)
        options = _parse(parser, given)
    interrupt.check()
    status: int = modules[options.command].run(options)
    return status


def _parse(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    options, unknown = parser.parse_known_args(given)
    if unknown:
        options.fail(f"unrecognized arguments: {' '.join(unknown)}")
    return options


class _Version(argparse.Action):
    """Prints the version of the engine."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None):
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from allspark._allspark import NativeEngine

        print(f"allspark {NativeEngine.version()}")
        parser.exit()
