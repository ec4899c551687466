"""Asks a model one question and prints the answer as it is generated.

usage: quickstart.py MODEL PROMPT
  MODEL  a folder, a .gguf file, a name on a hub, or smollm2
"""

import sys
import time

from allspark.pipeline import EngineConfig, GenerationConfig, pipeline


def main(model: str, question: str) -> int:
    try:
        pipe = pipeline(model, backend_config=EngineConfig(max_batch_size=1))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    with pipe:
        print(f"> {question}")
        begin, first = time.monotonic(), None
        for piece in pipe.stream_infer(question, gen_config=GenerationConfig(max_new_tokens=256)):
            first = first or time.monotonic()
            print(piece.text, end="", flush=True)
        end = time.monotonic()
        if piece.error_message is not None:
            print(f"quickstart: {piece.error_message}", file=sys.stderr)
            return 1
        count = piece.generate_token_len
        print(
            f"\n[{count} tokens, first after {1000 * (first - begin):.0f} ms, "
            f"{count / (end - begin):.0f} tokens/s, ended by {piece.finish_reason}]\n"
        )
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2]))
