"""The engines that compare.py knows. To add one, add a file in this folder and a line here."""

from __future__ import annotations

from peers.base import Engine
from peers.llama_cpp import LlamaCpp
from peers.onnxruntime_genai import OnnxRuntimeGenai
from peers.openvino import OpenVino
from peers.transformers import Transformers
from peers.vllm import Vllm
from peers.vllm_serve import VllmServe

PEERS: tuple[type[Engine], ...] = (
    OpenVino, LlamaCpp, Vllm, VllmServe, OnnxRuntimeGenai, Transformers,
)  # fmt: skip
