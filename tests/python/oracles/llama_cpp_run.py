"""Runs llama.cpp for the tests, in the Python that has llama-cpp-python.

  logits MODEL IDS OUT      IDS: a JSON list; OUT: .npy, float32 [tokens, vocabulary]
  quantize MODEL OUT TYPE pure|mixed   TYPE: llama-quantize's name of it; pure: for every matrix
  tokenize MODEL TEXTS OUT  TEXTS: a JSON list; OUT: .json, lists of ids

Computes in float32 wherever llama.cpp can: cache, accumulation, no flash attention, weights in the
file's order.
"""

from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp.llama_cpp as llama
import numpy as np

F32 = 0


def opened(path):
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    model = llama.llama_model_load_from_file(path.encode(), params)
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    return model


def logits(path, ids_path, out):
    with open(ids_path) as file:
        ids = json.load(file)
    model = opened(path)
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(256, len(ids))
    params.n_threads = params.n_threads_batch = 2
    params.type_k = params.type_v = F32
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.offload_kqv = params.op_offload = False
    params.swa_full = True
    context = llama.llama_init_from_model(model, params)
    if not context:
        sys.exit(f"llama.cpp cannot run {path}")
    batch = llama.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i] = token, i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
    status = llama.llama_decode(context, batch)
    if status != 0:
        sys.exit(f"llama_decode of {path} returns {status}")
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    rows = [np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (size,)).copy()
            for i in range(len(ids))]  # fmt: skip
    np.save(out, np.stack(rows))


def importances(path):
    """Equal importance for all columns, which types of fewer than 3 bits require."""
    import gguf

    entries, kept = [], []
    for tensor in gguf.GGUFReader(path).tensors:
        columns = int(tensor.shape[0])
        values = np.ones(columns, np.float32)
        kept.append(values)
        entry = llama.llama_model_imatrix_data()
        entry.name = tensor.name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = columns
        entries.append(entry)
    entries.append(llama.llama_model_imatrix_data())  # its null name ends the list
    return (llama.llama_model_imatrix_data * len(entries))(*entries), kept


def quantize(path, out, kind, mixed):
    params = llama.llama_model_quantize_default_params()
    (name,) = (f"LLAMA_FTYPE_{group}_{kind}" for group in ("ALL", "MOSTLY")
               if hasattr(llama, f"LLAMA_FTYPE_{group}_{kind}"))  # fmt: skip
    params.ftype = getattr(llama, name)
    params.nthread = 2
    params.allow_requantize = True
    params.pure = mixed == "pure"
    if kind != "F32":
        matrix, _kept = importances(path)
        params.imatrix = matrix
    status = llama.llama_model_quantize(path.encode(), out.encode(), ctypes.byref(params))
    if status != 0:
        sys.exit(f"llama_model_quantize of {path} to {kind} returns {status}")


def tokenize(path, texts_path, out):
    with open(texts_path) as file:
        texts = json.load(file)
    vocab = llama.llama_model_get_vocab(opened(path))
    found = []
    for text in texts:
        raw = text.encode()
        ids = (llama.llama_token * (len(raw) + 8))()
        count = llama.llama_tokenize(vocab, raw, len(raw), ids, len(ids), True, True)
        found.append(list(ids[:count]))
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    {"logits": logits, "quantize": quantize, "tokenize": tokenize}[sys.argv[1]](*sys.argv[2:])
