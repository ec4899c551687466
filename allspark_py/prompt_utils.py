"""Prompt helpers for models without a chat template."""

from __future__ import annotations


class PromptTemplate:
    """Fixed templates; prefer the tokenizer's own `apply_chat_template`."""

    @staticmethod
    def apply_chatml_template(
        question: str, system_content: str = "You are a helpful assistant."
    ) -> str:
        """The ChatML form of one question, ending where the assistant's answer begins."""
        return (
            f"<|im_start|>system\n{system_content}<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
