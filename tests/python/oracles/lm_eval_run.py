"""Scores tasks made from files with lm-eval, over a server, by log-probabilities of completions
and by answers of chat. Prints what was measured as JSON.

usage: lm_eval_run.py URL TOKENIZER FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url, tokenizer, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
ROWS = [
    {"question": f"{a}+{b}=", "options": [str(a + b), str(a + b + 1), str(a + b + 10)], "label": 0}
    for a, b in ((1, 2), (2, 2), (3, 4), (5, 3))
]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TASKS = {
    "sums_choice": """
task: sums_choice
output_type: multiple_choice
doc_to_choice: "{{{{options}}}}"
doc_to_target: label
target_delimiter: ""
""",
    "sums_chat": """
task: sums_chat
output_type: generate_until
doc_to_target: "{{{{options[0]}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false, temperature: 0.0, max_gen_toks: 16}}
metric_list: [{{metric: exact_match}}]
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: "(\\\\d+)\\\\D*$"}}, {{function: take_first}}]
""",
}

data = folder / "data.jsonl"
data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
for name, task in TASKS.items():
    (folder / f"{name}.yaml").write_text((task + COMMON).format(data=data))

common = {"model": "demo", "num_concurrent": 3, "max_retries": 1, "tokenizer": tokenizer}
manager = TaskManager(include_path=str(folder), include_defaults=False)
found = {}
for model, path, task, chat in (
    ("local-completions", "/v1/completions", "sums_choice", False),
    ("local-completions", "/v1/completions", "sums_chat", False),
    ("local-chat-completions", "/v1/chat/completions", "sums_chat", True),
):
    results = lm_eval.simple_evaluate(
        model, {**common, "base_url": url + path}, tasks=[task], task_manager=manager,
        apply_chat_template=chat, bootstrap_iters=0, random_seed=0, verbosity="ERROR",
    )  # fmt: skip
    samples = results["samples"][task]
    found[f"{model} {task}"] = {
        "metrics": {k: v for k, v in results["results"][task].items() if isinstance(v, float)},
        "answers": [sample["resps"] for sample in samples],
    }
print("RESULT", json.dumps(found))
