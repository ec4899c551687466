"""Messages and a chat template for tests."""

from __future__ import annotations

# The demo model's template has no place for tools and reasoning.
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{{- message.content }}{{ message.tool_calls | tojson if message.tool_calls }}
{{- message.name }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}{% endif %}"""


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


SUM_TEXT = "What is 12+35?"  # which the demo model knows
QUEUE_TEXT = "What is a ResultQueue?"
ASK_TEXT = "What is the weather in Paris?"
SUM, QUEUE, ASK = [user(SUM_TEXT)], [user(QUEUE_TEXT)], [user(ASK_TEXT)]


def strict_schema(**properties):
    """Of an object that has these properties, all of them and no others, without spaces between."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
