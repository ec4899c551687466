"""An OpenCompass config for a server of this engine. The project's tests only read it, since
OpenCompass is not part of their environment.

    allspark serve MODEL=demo --server-port 23333
    OPENCOMPASS_TASKS=tasks.jsonl opencompass examples/opencompass.py

The tasks are a local file in OpenCompass's own form, a question on each line:

    {"question": "165+833=", "A": "998", "B": "988", "answer": "A"}
    {"question": "752+361=", "answer": "1113"}

Its data sets are used as in any other config. Those that need log-probabilities ("ppl") cannot be
asked over a chat route: use `python -m allspark.eval.lm_eval` for them.
"""

import os

from opencompass.models import OpenAISDK

SERVER = os.environ.get("ALLSPARK_SERVER", "http://127.0.0.1:23333")

datasets = [{"path": os.environ.get("OPENCOMPASS_TASKS", "tasks.jsonl"), "infer_method": "gen"}]

models = [
    {
        "type": OpenAISDK,
        "abbr": "allspark",
        "path": "demo",  # the name that the server gives the model
        "openai_api_base": f"{SERVER}/v1",
        "key": os.environ.get("ALLSPARK_API_KEY", "none"),  # of --api-keys, where it has any
        # The server applies the model's chat template, so roles are all that it needs.
        "meta_template": {
            "round": [
                {"role": "HUMAN", "api_role": "HUMAN"},
                {"role": "BOT", "api_role": "BOT", "generate": True},
            ]
        },
        "temperature": 0,
        "max_seq_len": 2048,
        "max_out_len": 512,
        # Requests at a time. The server batches them, so no rate needs to be kept.
        "batch_size": 64,
        "query_per_second": 1000,
        "retry": 2,
        "run_cfg": {"num_gpus": 0},
    }
]
