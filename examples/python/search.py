"""Sorts the lines of a file by their likeness to a question, with the perplexity of each.

usage: search.py MODEL_DIR LINES.txt QUESTION
"""

import json
import sys
from pathlib import Path

from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice


def main(model_dir: str, lines_file: str, question: str) -> None:
    lines = [line for line in Path(lines_file).read_text().splitlines() if line.strip()]
    engine = Engine()
    loader = HuggingFaceModel(model_dir, "search").load_model().serialize_to_memory(engine)
    runtime_config = loader.create_reference_runtime_config_builder(
        "search", TargetDevice.CPU, max_batch=16, max_context_length=512
    ).build()
    engine.install_model(runtime_config)
    if engine.start_model("search") != AsStatus.ALLSPARK_SUCCESS:
        sys.exit(f"search: {engine.last_error()}")

    # Vectors of length 1, so their products are cosines. These requests generate nothing and
    # compute no logits.
    vectors = engine.embed("search", loader, [question, *lines], pooling="mean")
    similarity = vectors[1:] @ vectors[0]
    scores = engine.score("search", loader, lines)
    for i in similarity.argsort()[::-1]:
        found = {"line": lines[i], "similarity": round(float(similarity[i]), 4)}
        print(json.dumps({**found, "perplexity": round(scores[i].perplexity, 2)}))
    engine.stop_model("search")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
