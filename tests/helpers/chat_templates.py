"""Chat templates in the wire formats of public model families, reduced to what the tests need, and chats with tools."""

from __future__ import annotations

from typing import Any

# Header and end-of-turn tokens around every turn; arguments of calls are objects, as in Llama 3.1.
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if loop.first and tools %}{% for t in tools %}{{ t | tojson }}{{ '\n' }}{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{{ \'{"name": "\' + f.name + \'", "parameters": \' }}{{ f.arguments | tojson }}{{ "}" }}'
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Instructions in brackets, the system's text in the first one, ids of calls; turns must alternate, as in Mistral.
MISTRAL = (
    "{{ '<s>' }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set chat = messages[1:] %}"
    "{% else %}{% set chat = messages %}{% endif %}"
    "{% for m in chat %}{% if m.role == 'user' %}"
    "{% if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' }}{% if loop.first and system is defined %}{{ system + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{{ ']</s>' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.tool_call_id + ' ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Role tokens and one end token; tools beside the system's text, as in Phi 4.
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'system' and m.tools %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
# Tools, calls with arguments in either form, results as a user's turn, reasoning after the last question only, as in Qwen3.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if content or not loop.first else '' }}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role in ['user', 'system'] %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def plain_chat() -> list[dict[str, Any]]:
    """Two questions and two answers."""
    return [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "four, é 中"},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "six"},
    ]


def tool_chat(arguments: Any, *, reasoning: bool = False) -> list[dict[str, Any]]:
    """A question, a call of a tool with these arguments, its result, an answer, and a second question and answer."""
    thought = {"reasoning_content": "I must look."} if reasoning else {}
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "How is Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call], **thought},
        {"role": "tool", "content": "12 degrees", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "It is cool.", **({"reasoning_content": "12 is cool."} if reasoning else {})},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome.", **({"reasoning_content": "Polite."} if reasoning else {})},
    ]
