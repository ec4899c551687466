"""Evaluation: how well a model predicts text, how far it is from a reference, and multiple choice.

docs/evaluation.md says what each figure means. Each name is imported when first used.
`python -m allspark.eval.lm_eval` is lm-eval's command line with these models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allspark.lazy_names import lazy_names

if TYPE_CHECKING:
    from allspark.eval.accuracy import write_accuracy
    from allspark.eval.continuations import Likelihood, likelihoods
    from allspark.eval.divergence import Comparison, compare, compare_all
    from allspark.eval.facts import ModelFacts
    from allspark.eval.files import Text
    from allspark.eval.multiple_choice import Choices, TaskResult, choices
    from allspark.eval.statistics import Estimate, Spread
    from allspark.eval.tasks import Task, read_tasks
    from allspark.eval.text_perplexity import Perplexity, perplexity

# Public name -> the module it lives in.
_HOMES = {
    "Choices": "allspark.eval.multiple_choice",
    "Comparison": "allspark.eval.divergence",
    "Estimate": "allspark.eval.statistics",
    "Likelihood": "allspark.eval.continuations",
    "ModelFacts": "allspark.eval.facts",
    "Perplexity": "allspark.eval.text_perplexity",
    "Spread": "allspark.eval.statistics",
    "Task": "allspark.eval.tasks",
    "TaskResult": "allspark.eval.multiple_choice",
    "Text": "allspark.eval.files",
    "choices": "allspark.eval.multiple_choice",
    "compare": "allspark.eval.divergence",
    "compare_all": "allspark.eval.divergence",
    "likelihoods": "allspark.eval.continuations",
    "perplexity": "allspark.eval.text_perplexity",
    "read_tasks": "allspark.eval.tasks",
    "write_accuracy": "allspark.eval.accuracy",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
