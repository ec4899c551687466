"""Runs llama.cpp's own converter: `convert_gguf.py LLAMA_CPP_SOURCE`, then a JSON list
[checkpoint, file to write, type, whether it has a vocabulary] per line of the standard input. The
answer to each is one line, empty or with an error message.

Everything is the converter's own, with three exceptions. Random models have no tokenizer, so their
files say that they have none, which llama.cpp allows. The configuration is that of the checkpoint,
which is what the converter uses if transformers does not know the model: newer versions of
transformers rename fields that it looks for. And the converter of this release recurses forever on
those of Baichuan's tensors that need no change.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from pathlib import Path


def set_no_vocabulary(model):
    import gguf

    model._set_vocab_none()
    key = gguf.Keys.LLM.VOCAB_SIZE.format(arch=model.gguf_writer.arch)
    if not any(key in part for part in model.gguf_writer.kv_data):
        size = model.hparams.get("padded_vocab_size") or model.hparams["vocab_size"]
        model.gguf_writer.add_vocab_size(size)


def mend_baichuan():
    from conversion.baichuan import BaichuanModel, TextModel

    theirs = BaichuanModel.modify_tensors

    def modify_tensors(model, tensor, name, layer):
        if name.endswith("W_pack.weight"):
            return theirs(model, tensor, name, layer)
        return TextModel.modify_tensors(model, tensor, name, layer)

    BaichuanModel.modify_tensors = modify_tensors


def read_plain_configurations():
    from conversion import base

    def from_pretrained(*arguments, **options):
        raise NotImplementedError("config.json is read as it is")

    base.AutoConfig = type("AutoConfig", (), {"from_pretrained": staticmethod(from_pretrained)})


def convert(checkpoint, out, kind, vocabulary):
    import conversion
    import convert_hf_to_gguf as converter

    def get_model_class(name, mmproj=False):
        model_class = conversion.get_model_class(name, mmproj)
        if vocabulary:
            return model_class
        return type(model_class.__name__, (model_class,), {
            "model_arch": model_class.model_arch, "set_vocab": set_no_vocabulary,
        })  # fmt: skip

    converter.get_model_class = get_model_class
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", kind]
    try:
        converter.main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"the converter ends with {end.code}") from end


def main():
    source = sys.argv[1]
    sys.path[:0] = [str(Path(source) / "gguf-py"), source]
    mend_baichuan()
    read_plain_configurations()
    for line in sys.stdin:
        answer = ""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                convert(*json.loads(line))
        except Exception:
            traceback.print_exc()
            answer = traceback.format_exc().splitlines()[-1]
        print(answer, flush=True)


if __name__ == "__main__":
    main()
