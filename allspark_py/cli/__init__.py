"""The command ``allspark``: serves models, talks with one, answers files of prompts, converts
checkpoints (docs/cli.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import batch, chat, check_env, convert, formats, inspect, serve

_COMMANDS = {
    "serve": serve,
    "chat": chat,
    "batch": batch,
    "convert": convert,
    "inspect": inspect,
    "list": formats,
    "check_env": check_env,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 after an error message; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="allspark", description=__doc__.split(" (")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    options = parser.parse_args(arguments)
    try:
        return _COMMANDS[options.command].run(options)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, OSError) as error:
        print(f"allspark {options.command}: {error}", file=sys.stderr)
        return 1
