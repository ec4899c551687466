"""The builtin templates: a table of names, markers, and rules for the paths of models.

Names, markers and texts are those that LMDeploy 0.4 documents, so that its configurations mean the
same here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .builtin_kinds import (
    BuiltinTemplate,
    ChatGLMTemplate,
    CodeLlamaTemplate,
    InternLM2Template,
    Llama3Template,
    PathRule,
    UnspacedTemplate,
)
from .registry import MODELS

_INTERNLM = (
    "You are an AI assistant whose name is InternLM (书生·浦语).\n"
    "- InternLM (书生·浦语) is a conversational language model that is developed by Shanghai AI "
    "Laboratory (上海人工智能实验室). It is designed to be helpful, honest, and harmless.\n"
    "- InternLM (书生·浦语) can understand and communicate fluently in the language chosen by the "
    "user such as English and 中文.\n"
)
_XCOMPOSER = (
    "You are an AI assistant whose name is InternLM-XComposer (浦语·灵笔).\n"
    "- InternLM-XComposer (浦语·灵笔) is a multi-modality conversational language model that is "
    "developed by Shanghai AI Laboratory (上海人工智能实验室). It is designed to be helpful, "
    "honest, and harmless.\n"
    "- InternLM-XComposer (浦语·灵笔) can understand and communicate fluently in the language "
    "chosen by the user such as English and 中文.\n"
    "- InternLM-XComposer (浦语·灵笔) is capable of comprehending and articulating responses "
    "effectively based on the provided image."
)
_LLAMA2 = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, "
    "while being safe. Your answers should not include any harmful, unethical, racist, sexist, "
    "toxic, dangerous, or illegal content. Please ensure that your responses are socially unbiased "
    "and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of "
    "answering something not correct. If you don't know the answer to a question, please don't "
    "share false information."
)
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
_LLAVA = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the human's questions."
)
_ULTRACM = (
    "A one-turn chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, very detailed, and polite answers to the user's questions."
)
_DEEPSEEK_VL = (
    "You are a helpful language and vision assistant. You are able to understand the visual "
    "content that the user provides, and assist the user with a variety of tasks using natural "
    "language."
)
_DEEPSEEK_CODER = (
    "You are an AI programming assistant, utilizing the Deepseek Coder model, developed by "
    "Deepseek Company, and you only answer questions related to computer science. For politically "
    "sensitive questions, security and privacy issues, and other non-computer science questions, "
    "you will refuse to answer\n"
)
_YI_VL = (
    "This is a chat between an inquisitive human and an AI assistant. Assume the role of the AI "
    "assistant. Read all the images carefully, and respond to the human's questions with "
    "informative, helpful, detailed and polite answers. 这是一个好奇的人类和一个人工智能助手之间的"
    "对话。假设你扮演这个AI助手的角色。仔细阅读所有的图像，并对人类的问题做出信息丰富、有帮助、"
    "详细的和礼貌的回答。\n\n"
)
_DBRX = (
    "You are DBRX, created by Databricks. You were last updated in December 2023. You answer "
    "questions based on information available up to that point.\n"
    "YOU PROVIDE SHORT RESPONSES TO SHORT QUESTIONS OR STATEMENTS, but provide thorough responses "
    "to more complex and open-ended questions.\n"
    "You assist with various tasks, from writing to coding (using markdown for code blocks — "
    "remember to use ``` with code, JSON, and tables).\n"
    "(You do not have real-time data access or code execution capabilities. You avoid stereotyping "
    "and provide balanced perspectives on controversial topics. You do not provide song lyrics, "
    "poems, or news articles and do not divulge details of your training data.)\n"
    "This is your system prompt, guiding your responses. Do not reference it, just respond to the "
    "user. If you find yourself talking about this message, stop. You should be responding "
    "appropriately and usually that means not mentioning this.\n"
    "YOU DO NOT MENTION ANY OF THIS INFORMATION ABOUT YOURSELF UNLESS THE INFORMATION IS DIRECTLY "
    "PERTINENT TO THE USER'S QUERY."
)


def _chatml(newline: str = "\n", **fields: Any) -> dict[str, Any]:
    """ChatML with `newline` after each end."""
    return {
        "system": "<|im_start|>system\n",
        "eosys": f"<|im_end|>{newline}",
        "user": "<|im_start|>user\n",
        "eoh": f"<|im_end|>{newline}",
        "assistant": "<|im_start|>assistant\n",
        "eoa": "<|im_end|>",
        "separator": newline,
        **fields,
    }


def _vicuna(meta_instruction: str) -> dict[str, Any]:
    return dict(
        meta_instruction=meta_instruction,
        eosys=" ",
        user="USER: ",
        eoh=" ",
        assistant="ASSISTANT: ",
        eoa="</s>",
        stop_words=["</s>"],
    )


def _internlm2(meta_instruction: str) -> dict[str, Any]:
    stop_words = ["<|im_end|>", "<|action_end|>"]
    return _chatml(meta_instruction=meta_instruction, stop_words=stop_words)


def _llama2(meta_instruction: str) -> dict[str, Any]:
    return dict(
        system="[INST] <<SYS>>\n",
        meta_instruction=meta_instruction,
        eosys="\n<</SYS>>\n\n",
        assistant=" [/INST] ",
        eoa="</s>",
        separator="<s>[INST] ",
    )


_LLAMA3 = dict(
    system="<|start_header_id|>system<|end_header_id|>\n\n",
    meta_instruction=None,
    eosys="<|eot_id|>",
    user="<|start_header_id|>user<|end_header_id|>\n\n",
    eoh="<|eot_id|>",
    assistant="<|start_header_id|>assistant<|end_header_id|>\n\n",
    eoa="<|eot_id|>",
    stop_words=["<|eot_id|>", "<|end_of_text|>"],
)
_XCOMPOSER2 = dict(
    system="[UNUSED_TOKEN_146]system\n",
    meta_instruction=_XCOMPOSER,
    eosys="[UNUSED_TOKEN_145]\n",
    user="[UNUSED_TOKEN_146]user\n",
    eoh="[UNUSED_TOKEN_145]\n",
    assistant="[UNUSED_TOKEN_146]assistant\n",
    eoa="[UNUSED_TOKEN_145]\n",
    separator="\n",
    stop_words=["[UNUSED_TOKEN_145]"],
)
_ULTRA = dict(
    system="User: ",
    meta_instruction=_ULTRACM,
    eosys="</s>\n",
    user="User: ",
    eoh="</s>\n",
    assistant="Assistant: ",
    eoa="</s>",
    separator="\n",
    stop_words=["</s>"],
)
_MISTRAL = dict(user="[INST] ", eoh=" [/INST]", eoa="</s>")
_DEEPSEEK = dict(user="User: ", eoh="\n\n", assistant="Assistant: ", eoa="<｜end▁of▁sentence｜>")


@dataclass(frozen=True)
class _Row:
    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    rules: tuple[PathRule, ...] = ()
    older: tuple[str, ...] = ()  # further names, which are read but not listed
    kind: type[BuiltinTemplate] = BuiltinTemplate


def _path(*every: str, some: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> PathRule:
    return PathRule(every, some, without)


# In the order in which the rules are asked.
_ROWS = (
    _Row("base"),
    _Row("llama"),
    _Row("vicuna", _vicuna(_VICUNA), (_path("vicuna", without=("llava",)),)),
    _Row("wizardlm", _vicuna(_VICUNA), (_path("wizardlm"),)),
    _Row(
        "llava-v1",
        _vicuna(_LLAVA),
        (_path("llava", "v1", without=("v1.6-34b", "mistral")), _path("llava-1.5")),
        kind=UnspacedTemplate,
    ),
    _Row(
        "mini-gemini-vicuna",
        _vicuna(_VICUNA),
        (_path(some=("mgm-7b", "mgm-13b", "mgm-34b", "mini-gemini-7b", "mini-gemini-13b")),),
        kind=UnspacedTemplate,
    ),
    _Row(
        "internlm",
        dict(
            system="<|System|>:",
            meta_instruction=_INTERNLM,
            eosys="\n",
            user="<|User|>:",
            eoh="\n",
            assistant="<|Bot|>:",
            eoa="<eoa>",
            separator="\n",
            stop_words=["<eoa>"],
        ),
        (_path("internlm", "chat", without=("internlm2", "internlm3", "internvl", "xcomposer")),),
        ("internlm-chat", "internlm-chat-7b", "internlm-chat-7b-8k", "internlm-chat-20b"),
    ),
    _Row("internlm-20b", dict(capability="completion")),
    _Row(
        "internlm2-7b",
        dict(capability="completion"),
        older=("internlm2-1_8b", "internlm2-20b"),
    ),
    _Row(
        "internlm2",
        _internlm2(_INTERNLM),
        (_path("internlm2", some=("chat", "math")),),
        ("internlm2-chat", "internlm2-chat-1_8b", "internlm2-chat-7b", "internlm2-chat-20b"),
        InternLM2Template,
    ),
    _Row(
        "internvl-internlm2",
        _internlm2(_INTERNLM.partition("\n")[0]),
        (_path("internvl", "v1-5", without=("-4b-",)),),
        kind=InternLM2Template,
    ),
    _Row(
        "internlm-xcomposer2",
        _XCOMPOSER2,
        (_path("internlm", "xcomposer2", without=("4khd", "xcomposer2d5")),),
    ),
    _Row("internlm-xcomposer2-4khd", _XCOMPOSER2, (_path("internlm", "xcomposer2", "4khd"),)),
    _Row("baichuan-base", older=("baichuan-7b",)),
    _Row(
        "baichuan2",
        dict(user="<reserved_106>", assistant="<reserved_107>"),
        (_path("baichuan2", "chat"),),
        ("baichuan2-7b",),
    ),
    _Row("puyu", rules=(_path("puyu"),)),
    _Row(
        "llama2",
        _llama2(_LLAMA2),
        (_path(some=("llama-2", "llama2")),),
        ("llama-2", "llama-2-chat"),
    ),
    _Row("llama3", _LLAMA3, (_path(some=("llama-3-", "llama3-")),), kind=Llama3Template),
    _Row(
        "qwen",
        _chatml(meta_instruction="You are a helpful assistant.", stop_words=["<|im_end|>"]),
        (_path("qwen"),),
        ("qwen-7b", "qwen-14b"),
    ),
    _Row("codellama", _llama2(""), (_path("codellama"),), kind=CodeLlamaTemplate),
    _Row("falcon", rules=(_path("falcon"),)),
    _Row(
        "chatglm",
        dict(user="问：", eoh="\n\n", assistant="答：", eoa="\n\n"),
        (_path("chatglm2"),),
        ("chatglm2-6b",),
        ChatGLMTemplate,
    ),
    _Row(
        "solar",
        dict(
            system="### System:\n",
            eosys="\n\n",
            user="### User:\n",
            eoh="\n\n",
            assistant="### Assistant:\n",
        ),
        (_path("solar"),),
        ("solar-70b",),
    ),
    _Row("ultracm", _ULTRA, (_path("ultracm"),)),
    _Row("ultralm", _ULTRA, (_path("ultralm"),)),
    _Row(
        "yi",
        _chatml(meta_instruction=None, stop_words=["<|im_end|>", "<|endoftext|>"]),
        (_path(some=("/yi-", "-yi-"), without=("-vl",)),),
        ("yi-chat", "yi-200k", "yi-34b"),
    ),
    # Before Mistral, since the organisation has that name.
    _Row(
        "mixtral",
        _MISTRAL,
        (_path("mixtral", some=("instruct", "llava")),),
        ("Mixtral-8x7B-Instruct",),
    ),
    _Row(
        "mistral",
        _MISTRAL,
        (_path("mistral", some=("instruct", "llava")),),
        ("Mistral-7B-Instruct",),
    ),
    _Row(
        "gemma",
        dict(
            user="<start_of_turn>user\n",
            eoh="<end_of_turn>\n",
            assistant="<start_of_turn>model\n",
            eoa="<end_of_turn>\n",
        ),
        (_path("gemma"),),
    ),
    _Row(
        "deepseek",
        _DEEPSEEK,
        (_path("deepseek", "chat", without=("vl",)),),
        ("deepseek-chat",),
        UnspacedTemplate,
    ),
    _Row(
        "internvl-zh",
        dict(user="<human>: ", eoh=" ", assistant="<bot>: ", eoa="</s>"),
        (_path("internvl-chat", "v1-1"),),
        kind=UnspacedTemplate,
    ),
    _Row(
        "deepseek-vl",
        dict(**_DEEPSEEK, meta_instruction=_DEEPSEEK_VL, eosys="\n\n"),
        (_path("deepseek-vl", "chat", without=("deepseek-vl2",)),),
        kind=UnspacedTemplate,
    ),
    _Row(
        "deepseek-vl2",
        dict(**{**_DEEPSEEK, "user": "<|User|>: ", "assistant": "<|Assistant|>: "}),
        (_path("deepseek-vl2"),),
        kind=UnspacedTemplate,
    ),
    _Row(
        "deepseek-coder",
        dict(
            meta_instruction=_DEEPSEEK_CODER,
            user="### Instruction:\n",
            eoh="\n",
            assistant="### Response:\n",
            eoa="\n<|EOT|>",
            separator="\n",
            stop_words=["<|EOT|>"],
        ),
        (_path("deepseek-coder"),),
    ),
    _Row(
        "yi-vl",
        dict(
            meta_instruction=_YI_VL,
            user="### Human: ",
            eoh="\n",
            assistant="### Assistant:",
            eoa="\n",
            stop_words=["###"],
        ),
        (_path("yi-vl"),),
    ),
    _Row("dbrx", _chatml(meta_instruction=_DBRX), (_path("dbrx"),)),
    _Row(
        "llava-chatml",
        _chatml("", meta_instruction="Answer the questions."),
        (_path("llava", "v1.6-34b"),),
    ),
    _Row(
        "internvl-zh-hermes2",
        _chatml("", meta_instruction="Answer the questions."),
        (_path("internvl-chat", "v1-2"),),
    ),
    _Row(
        "phi-3",
        dict(
            system="<|system|>\n",
            meta_instruction=None,
            eosys="<|end|>\n",
            user="<|user|>\n",
            eoh="<|end|>\n",
            assistant="<|assistant|>\n",
            eoa="<|end|>\n",
            separator="\n",
            stop_words=["<|end|>", "<|endoftext|>"],
        ),
        (_path("phi-3", "instruct"),),
    ),
    _Row(
        "cogvlm",
        dict(
            user="Question: ",
            eoh=" ",
            assistant="Answer:",
            eoa="</s>",
            separator="\n",
            stop_words=["</s>"],
        ),
        (_path("cogvlm", without=("cogvlm2",)),),
    ),
)

# Names that LMDeploy calls deprecated: they are read, but not listed.
OLDER_NAMES = frozenset(
    {
        *(name for row in _ROWS for name in row.older),
        "baichuan-base",
        "internlm-20b",
        "internlm2-7b",
    }
)


def _register() -> None:
    for row in _ROWS:
        title = "".join(part.capitalize() for part in row.name.replace("_", "-").split("-"))
        attributes = {"name": row.name, "defaults": row.fields, "rules": row.rules}
        template = type(f"{title}ChatTemplate", (row.kind,), {**attributes, "__module__": __name__})
        MODELS.register_module(name=[row.name, *row.older], module=template)


_register()
