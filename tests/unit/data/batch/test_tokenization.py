"""Documents → tokens: special tokens, ends, cuts, and what is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from distill_rl.config.schema import DataConfig
from distill_rl.data.batch.tokenization import Encoded, Tokenization, holding
from distill_rl.errors import DataError
from tests.helpers.align import family
from tests.helpers.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


class TestTokenization:
    def test_text_ends_with_one_end_token(self, tokenizer):
        tokenization = Tokenization(tokenizer, DataConfig(max_length=99), format="text")
        plain = tokenization.encode({"row": 0, "text": "kalo mi"})
        assert tokenizer.decode(plain.input_ids) == "kalo mi</s>"
        assert tokenizer.decode(tokenization.encode({"row": 0, "text": "kalo mi</s>"}).input_ids) == "kalo mi</s>"
        assert plain.input_ids.dtype == np.int32
        assert plain.label_mask.dtype == bool
        assert plain.label_mask.all()
        assert not plain.truncated

    def test_a_tokenizer_without_an_end_token_adds_none(self):
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = None
        tokenization = Tokenization(tokenizer, DataConfig(max_length=99), format="text")
        assert tokenizer.decode(tokenization.encode({"row": 0, "text": "kalo"}).input_ids) == "kalo"
        assert len(tokenization.encode({"row": 0, "text": ""}).input_ids) == 0

    def test_text_gets_special_tokens_and_chats_get_none_twice(self):
        from tokenizers.processors import TemplateProcessing

        tokenizer = tiny_tokenizer()
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        assert tokenizer("mi").input_ids[0] == tokenizer.bos_token_id
        text = Tokenization(tokenizer, DataConfig(max_length=99), format="text").encode({"row": 0, "text": "mi"})
        assert tokenizer.decode(text.input_ids) == "<s>mi</s>"
        chat = {"row": 0, "messages": [{"role": "user", "content": "mi"}]}
        ids = Tokenization(tokenizer, DataConfig(max_length=99), format="messages").encode(chat).input_ids
        assert tokenizer.decode(ids) == "<s><|turn|>user\nmi<|end|>\n"

    @pytest.mark.parametrize(("length", "truncated"), [(3, True), (8, False), (7, True)])
    def test_long_documents_are_truncated(self, tokenizer, length, truncated):
        text = "1 2 3 4"  # seven tokens and the end token
        whole = Tokenization(tokenizer, DataConfig(max_length=99), format="text").encode({"row": 0, "text": text})
        assert len(whole.input_ids) == 8
        cut = Tokenization(tokenizer, DataConfig(max_length=length), format="text").encode({"row": 0, "text": text})
        assert cut.input_ids.tolist() == whole.input_ids[:length].tolist()
        assert len(cut.label_mask) == length
        assert cut.truncated is truncated

    def test_a_token_across_the_start_of_a_turn_is_in_it(self):
        """The template ends the header with a space, which the tokenizer joins to the first word of the turn."""
        tokenizer = tiny_tokenizer(400)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        )
        chat = {"row": 0, "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "an be"}]}
        document = Tokenization(
            tokenizer, DataConfig(loss_on="assistant", max_length=99, stops="none"), format="messages"
        ).encode(chat)
        assert " an" in [tokenizer.decode([token]) for token in document.input_ids]
        assert tokenizer.decode(document.input_ids[document.label_mask]) == " an be<|end|>"

    def test_loss_on_the_assistant_needs_messages(self, tokenizer):
        with pytest.raises(DataError, match=r"data\.loss_on=assistant: chat messages"):
            Tokenization(tokenizer, DataConfig(loss_on="assistant", max_length=9), format="text")
        tokenization = Tokenization(tokenizer, DataConfig(loss_on="assistant", max_length=9), format="auto")
        with pytest.raises(DataError, match="row 5"):
            tokenization.encode({"row": 5, "text": "x"})

    def test_slow_tokenizers_are_refused(self):
        class Slow:
            is_fast = False

        with pytest.raises(DataError, match=r"tokenizer\.json"):
            Tokenization(Slow(), DataConfig(max_length=9), format="text")


def asked(*answers: str, **more: Any) -> list[dict[str, Any]]:
    """A question before each answer, whose keys the last one has as well."""
    turns = [
        turn
        for said in answers
        for turn in ({"role": "user", "content": "why"}, {"role": "assistant", "content": said})
    ]
    return [*turns[:-1], turns[-1] | more]


def encoded(tokenizer: Any, messages: list[dict[str, Any]], ends: Sequence[int] = (), **settings: Any) -> Encoded:
    data = DataConfig(**{"loss_on": "assistant", "unrendered": "warn", "max_length": 999, **settings})
    tokenization = Tokenization(tokenizer, data, format="messages", stops=ends)
    return tokenization.encode({"row": 5, "messages": messages})


def learnt(tokenizer: Any, tokens: Encoded) -> str:
    return tokenizer.decode(tokens.input_ids[tokens.label_mask])


@pytest.mark.parametrize(
    ("spans", "mask"),
    [
        ([], "00000"),
        ([(0, 2)], "10000"),
        ([(1, 2)], "10000"),  # its second character
        ([(1, 3)], "11100"),  # across a border, and a token without characters between the two
        ([(2, 4)], "01100"),
        ([(4, 9)], "00011"),
        ([(0, 1), (8, 9)], "10001"),
        ([(3, 3)], "00000"),
    ],
)
def test_a_token_is_labelled_if_it_holds_a_character_of_a_span(spans: list[tuple[int, int]], mask: str) -> None:
    offsets = np.array([(0, 2), (2, 2), (2, 4), (4, 7), (7, 9)])
    assert "".join(map(str, holding(spans, offsets).astype(int))) == mask


HEADERS = "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content }}"
NO_STOP = HEADERS + "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
CUT = NO_STOP.replace("{{ '\n' }}", "{{ '\n' if m.cut else '</s>\n' }}")
GLM = (
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def with_template(template: str, *added: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)} if added else {})
    tokenizer.chat_template = template
    return tokenizer


class TestStops:
    def test_the_next_role_ends_a_turn(self) -> None:
        made = with_template(GLM, "<|user|>", "<|assistant|>", "<|observation|>")
        stops = made.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
        call = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
        said = 'f{"a": 1}<|observation|>'
        for chat, labels in (
            (asked("one", "two"), "one<|user|>two<|user|>"),
            (asked("", tool_calls=call), said),
            ([*asked("", tool_calls=call), {"role": "tool", "content": "r"}, *asked("so")[1:]], said + "so<|user|>"),
            (asked("one", "two")[:-1], "one<|user|>"),
        ):
            assert learnt(made, encoded(made, chat, stops)) == labels
        # Where all is trained on, so is the stop behind the last turn.
        assert learnt(made, encoded(made, asked("one"), stops, loss_on="all")).endswith("one<|user|>")
        with pytest.raises(DataError, match=r"data\.stops=none"):
            encoded(made, asked("one", "two"))

    def test_a_template_without_stops_is_refused_in_one_line(self) -> None:
        made = with_template(NO_STOP)
        with pytest.raises(DataError) as refused:
            encoded(made, asked("one", "two"))
        line = str(refused.value)
        assert line.startswith("row 5: ")
        assert "'</s>'" in line
        assert "data.stops=none" in line
        assert "\n" not in line
        assert learnt(made, encoded(made, asked("one"), stops="none")) == "one\n"
        assert encoded(made, asked("one"), loss_on="all").label_mask.all()
        assert learnt(made, encoded(made, asked("one"), loss_roles=["user"])) == "why"

    def test_a_row_whose_last_turn_was_cut_is_read_if_the_template_writes_stops(self) -> None:
        made = with_template(CUT)
        assert learnt(made, encoded(made, asked("one", cut=True))) == "one\n"
        assert learnt(made, encoded(made, asked("one", "two", cut=True))) == "one</s>two\n"
        with pytest.raises(DataError, match=r"data\.stops=none"):
            encoded(with_template(NO_STOP), asked("one", cut=True))

    def test_another_stop_counts_besides_eos(self) -> None:
        made = with_template(CUT.replace("</s>", "<|end|>"))
        with pytest.raises(DataError, match=r"turns that end in '<\|end\|>'"):
            encoded(made, asked("one"))
        tokens = encoded(made, asked("one"), made.convert_tokens_to_ids(["<|end|>"]))
        assert learnt(made, tokens) == "one<|end|>"


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}"
    "{% else %}{{ '<|turn|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "name", ["byte_level", "wordpiece", "unigram", "unigram_fallback", "spm_always", "spm_prepend"]
)
@pytest.mark.parametrize("said", [["lo ka"], ["lo ka", "ru be"], ["", "lo ka"], ["", ""]])
@pytest.mark.parametrize("begins", [False, True])
def test_generation_blocks_label_no_word_of_the_user(name: str, said: list[str], begins: bool) -> None:
    made = deepcopy(family(name))
    made.chat_template = MARKED
    question = {"role": "user", "content": "mi ter an"}
    turns = [turn for text in said for turn in ({"role": "assistant", "content": text}, question)]
    tokens = encoded(made, turns if begins else [question, *turns[:-1]])
    spelt = "".join(made.convert_ids_to_tokens(tokens.input_ids[tokens.label_mask]))
    for mark in ("▁", "##", "Ġ"):
        spelt = spelt.replace(mark, "")
    assert spelt == "".join(text.replace(" ", "") + "</s>" for text in said)


class TestSpecialTokensInTexts:
    QUOTING = (
        asked("one</s>two<|end|>"),
        [{"role": "user", "content": "why</s>"}, {"role": "assistant", "content": "so"}],
        asked("so", reasoning_content="hm</s>hm"),
        asked("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"a": "x</s>y"}}}]),
    )
    TEMPLATE = (
        "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}{{ m.reasoning_content or '' }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ '</s>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    )

    @pytest.mark.parametrize("chat", QUOTING)
    def test_they_are_text_unless_they_are_to_be_tokens(self, chat: list[dict[str, Any]]) -> None:
        made = with_template(self.TEMPLATE)
        text = made.apply_chat_template(chat, tokenize=False)
        special = made.convert_tokens_to_ids(["<|turn|>", "</s>", "<|end|>"])
        tokens = encoded(made, chat)
        assert made.decode(tokens.input_ids) == text
        assert [token for token in tokens.input_ids.tolist() if token in special] == special[:2] * 2
        turn = text.rpartition("<|turn|>assistant\n")[2].removesuffix("\n")
        assert learnt(made, tokens) == turn
        as_tokens = encoded(made, chat, special_tokens_in_text=True)
        assert as_tokens.input_ids.tolist() == made(text).input_ids
        assert learnt(made, as_tokens) == turn
        assert len(as_tokens.input_ids) < len(tokens.input_ids)

    def test_other_added_tokens_stay_tokens(self) -> None:
        made = with_template(self.TEMPLATE)
        made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
        tokens = encoded(made, asked("<tool_call>one</s>two")).input_ids.tolist()
        assert tokens.count(made.convert_tokens_to_ids("<tool_call>")) == 1
        assert tokens.count(made.eos_token_id) == 2

    def test_texts_keep_them(self) -> None:
        made = tiny_tokenizer()
        ids = Tokenization(made, DataConfig(max_length=99), format="text").encode({"row": 0, "text": "one</s>two"})
        assert ids.input_ids.tolist().count(made.eos_token_id) == 2
