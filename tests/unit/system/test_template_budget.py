"""Chat templates that never end or build what no memory holds: refused by name, at once and on a later chat, in any thread."""

from __future__ import annotations

import resource
import threading

import pytest

from distill_rl.align.chats import render
from distill_rl.data.batch.chat import render_document
from distill_rl.errors import DataError
from distill_rl.system import template_budget
from tests.helpers.tokenizers import tiny_tokenizer

PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
HOSTILE = {
    "empty loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "branching macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a power": "{% set n = 9 %}{{ (n ** (n ** n)) % 7 }}",
    "a folded power": "{{ (9 ** (9 ** 9)) % 7 }}",
    "doubled text": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a repeated text": "{% set n = 10 ** 10 %}{{ 'a' * n }}",
    "a wide format": "{{ '%9999999999d' | format(1) }}",
    "a wide centre": "{{ 'a' | center(9999999999) }}",
    "replacements": "{% set a = 'a' * 100000 %}{{ a | replace('a', a) | length }}",
    "nested lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "filler": "{{ lipsum(n=100000000) }}",
}
LATER = (
    "empty loops",
    "branching macros",
    "doubled text",
    "doubled lists",
    "a repeated text",
    "a wide centre",
    "replacements",
)
"""Those of which no single operation of Python computes for ever in little memory."""
BEFORE = resource.getrlimit(resource.RLIMIT_DATA)
CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(template_budget, "LIMIT_S", 0.5)
    monkeypatch.setattr(template_budget, "LIMIT_BYTES", 256 << 20)
    template_budget._TRIAL.end()
    yield
    template_budget._TRIAL.end()


def made(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = template, "models/foreign"
    return tokenizer


def wrapped(template):
    return render_document(made(template), {"row": 0, "messages": CHAT}, roles=("user",))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_without_end_is_refused_by_name(kind):
    with pytest.raises(DataError, match=r"the chat template of models/foreign \(.*more (processor time|memory)"):
        wrapped(HOSTILE[kind] + PLAIN)


@pytest.mark.parametrize("kind", LATER)
def test_one_that_was_harmless_so_far_is_refused_too_in_any_thread(kind, monkeypatch):
    monkeypatch.setattr(template_budget, "TRIED", 0)
    tokenizer = made(f"{{% if messages[0]['content'] == 'b' %}}{HOSTILE[kind]}{{% endif %}}" + PLAIN)
    found = []

    def in_thread():
        for content in ("a", "b", "a"):
            try:
                found.append(render(tokenizer, [{"role": "user", "content": content}]))
            except DataError as error:
                found.append("more" in str(error))

    for _ in range(2):
        found.clear()
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join(60)
        assert found[-2:] == [True, True]
    assert resource.getrlimit(resource.RLIMIT_DATA) == BEFORE
    assert render(made(PLAIN), CHAT) == "a"


def test_a_template_that_refuses_a_chat_or_recurses_too_deep_is_another_matter():
    for template in ("{{ raise_exception('no') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"):
        with pytest.raises(DataError, match="a chat that the template of the student's tokenizer accepts"):
            wrapped(template)


def test_the_trial_renders_as_transformers_does():
    """What the template writes only where something is as in Transformers' sandbox; otherwise it never ends."""
    template = (
        "{% set ok = [tools is none or tools is sequence, documents is none, not add_generation_prompt, bos_token is defined or true, "
        "strftime_now('%Y') | length == 4, {'a': '<é'} | tojson == '{\"a\": \"<é\"}'] %}"
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
        "{% if false in ok %}" + HOSTILE["empty loops"] + "{% endif %}"
    )
    assert wrapped(template).text == "a"
