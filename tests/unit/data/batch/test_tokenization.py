"""Documents → tokens: special tokens, ends, cuts, and what is trained on."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.errors import DataError
from tests.helpers.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


class TestTokenization:
    def test_text_ends_with_one_end_token(self, tokenizer):
        tokenization = Tokenization(tokenizer, format="text", loss_on="all", max_length=99)
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
        tokenization = Tokenization(tokenizer, format="text", loss_on="all", max_length=99)
        assert tokenizer.decode(tokenization.encode({"row": 0, "text": "kalo"}).input_ids) == "kalo"
        assert len(tokenization.encode({"row": 0, "text": ""}).input_ids) == 0

    def test_text_gets_special_tokens_and_chats_get_none_twice(self):
        from tokenizers.processors import TemplateProcessing

        tokenizer = tiny_tokenizer()
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        assert tokenizer("mi").input_ids[0] == tokenizer.bos_token_id
        text = Tokenization(tokenizer, format="text", loss_on="all", max_length=99).encode({"row": 0, "text": "mi"})
        assert tokenizer.decode(text.input_ids) == "<s>mi</s>"
        chat = {"row": 0, "messages": [{"role": "user", "content": "mi"}]}
        ids = Tokenization(tokenizer, format="messages", loss_on="all", max_length=99).encode(chat).input_ids
        assert tokenizer.decode(ids) == "<s><|turn|>user\nmi<|end|>\n"

    @pytest.mark.parametrize(("length", "truncated"), [(3, True), (8, False), (7, True)])
    def test_long_documents_are_truncated(self, tokenizer, length, truncated):
        text = "1 2 3 4"  # seven tokens and the end token
        whole = Tokenization(tokenizer, format="text", loss_on="all", max_length=99).encode({"row": 0, "text": text})
        assert len(whole.input_ids) == 8
        cut = Tokenization(tokenizer, format="text", loss_on="all", max_length=length).encode({"row": 0, "text": text})
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
            tokenizer, format="messages", loss_on="assistant", max_length=99, untaught_stops=True
        ).encode(chat)
        assert " an" in [tokenizer.decode([token]) for token in document.input_ids]
        assert tokenizer.decode(document.input_ids[document.label_mask]) == " an be<|end|>"

    def test_loss_on_the_assistant_needs_messages(self, tokenizer):
        with pytest.raises(DataError, match=r"data\.loss_on=assistant: chat messages"):
            Tokenization(tokenizer, format="text", loss_on="assistant", max_length=9)
        tokenization = Tokenization(tokenizer, format="auto", loss_on="assistant", max_length=9)
        with pytest.raises(DataError, match="row 5"):
            tokenization.encode({"row": 5, "text": "x"})

    def test_slow_tokenizers_are_refused(self):
        class Slow:
            is_fast = False

        with pytest.raises(DataError, match=r"tokenizer\.json"):
            Tokenization(Slow(), format="text", loss_on="all", max_length=9)
