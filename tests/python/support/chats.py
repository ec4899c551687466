"""Chat templates for tests."""

# The demo model's template has no place for tools and reasoning.
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{{- message.content }}{{ message.tool_calls | tojson if message.tool_calls }}
{{- message.name }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}{% endif %}"""
