"""``python -m allspark.eval.lm_eval``: lm-eval's own command line, with the model ``allspark``.

python -m allspark.eval.lm_eval --model allspark --model_args pretrained=DIR --tasks NAME
"""

from __future__ import annotations

import sys

from allspark.error_text import needs_extra


def main() -> int:
    """Registers the model, and runs the command line with the arguments of the process."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print(f"{needs_extra('allspark.eval.lm_eval', 'eval')}: {error}", file=sys.stderr)
        return 1
    import allspark.eval.lm_eval_model  # noqa: F401  # registers it

    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
