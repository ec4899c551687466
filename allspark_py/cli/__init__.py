"""The command ``allspark``: serves, measures and converts models, talks with them and answers files
of prompts (docs/cli.md)."""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Sequence

from . import (
    batch,
    bench,
    chat,
    check_env,
    client,
    config_file,
    convert,
    formats,
    inspect,
    serve,
)

_COMMANDS = {
    "serve": serve,
    "chat": chat,
    "client": client,
    "bench": bench,
    "batch": batch,
    "convert": convert,
    "inspect": inspect,
    "list": formats,
    "check_env": check_env,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 after an error message; 2 for wrong arguments; 130 where the
    user ended it."""
    parser = argparse.ArgumentParser(prog="allspark", description=(__doc__ or "").split("\n(")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    arguments = [_dashed(each) for each in (sys.argv[1:] if arguments is None else arguments)]
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = functools.partial(_show_warning, options.command)
        return _run(parser, options, arguments)


def _dashed(argument: str) -> str:
    """A flag with dashes in its name: those with underscores, as --server_name, are known, too."""
    if not argument.startswith("--"):
        return argument
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value


def _show_warning(command: str, message: Warning | str, *_: object) -> None:
    """A warning as one line, without the place in the program."""
    print(f"allspark {command}: {' '.join(str(message).split())}", file=sys.stderr)


def _run(
    parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str]
) -> int:
    try:
        if (path := getattr(options, "config", None)) is not None:
            config_file.set_defaults(options.parser, path)
            options = parser.parse_args(arguments)
        return _COMMANDS[options.command].run(options)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, OSError) as error:
        print(f"allspark {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"allspark {options.command}: ended by the user", file=sys.stderr)
        return 130
