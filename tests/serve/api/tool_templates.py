"""Chat templates that know tools, in the notations that checkpoints use."""

_TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ opened }}{% endif %}"
_SHOWN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}"
)
HERMES = (
    "{% set opened = '' %}" + _SHOWN + "{% for message in messages %}" + _TURN +
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}" + _END
)  # fmt: skip
NANBEIGE = (
    "{% set opened = '' %}" + _SHOWN + "{% for message in messages %}" + _TURN +
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}" + _END
)  # fmt: skip
THINKS = HERMES.replace("{% set opened = '' %}", "{% set opened = '<think>\n' %}")
UNKNOWN = HERMES.replace("<tool_call>", "[call]").replace("</tool_call>", "[/call]")
TEMPLATES = {"hermes": HERMES, "nanbeige": NANBEIGE}
