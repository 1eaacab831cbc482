"""Documents are tokenised and aligned one by one: a batch gives the same in parts, and a teacher changes no label."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distill_rl.config.schema import AlignerConfig, DataConfig
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, DocumentAligner
from distill_rl.data.batch.tokenization import Encoded, Tokenization
from distill_rl.errors import DataError
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer


@pytest.mark.parametrize("messages", [False, True])
def test_parts_of_a_batch_give_what_the_whole_gives(messages):
    student, teacher = tiny_tokenizer(), tiny_tokenizer(600, seed=7)
    tokenization = Tokenization(
        student, DataConfig(loss_on="assistant" if messages else "all", max_length=160, stops="none"), format="auto"
    )
    teachers = {1: CrossTokenizerTeacher.of("t", student, teacher, AlignerConfig())}
    aligner = DocumentAligner(tokenization, teachers, {1: 160})
    documents = [{"row": i, **row} for i, row in enumerate(corpus_rows(9, 4, messages))]
    whole = aligner.align(documents, skip=(2, 7))
    parts = [aligner.align(documents[:5], skip=(2, 7)), aligner.align(documents[5:], skip=(2, 7))]
    pieces = [piece for part in parts for document in part for piece in document.pieces]
    expected = [piece for document in whole for piece in document.pieces]
    assert sum(piece.alignments[1].num_chunks for piece in pieces) > 50
    for piece, same in zip(pieces, expected, strict=True):
        for name in ("input_ids", "label_mask"):
            assert np.array_equal(getattr(piece.encoded, name), getattr(same.encoded, name))
        for name in ("student_ids", "teacher_ids", "student_chunk", "teacher_chunk"):
            assert np.array_equal(getattr(piece.alignments[1], name), getattr(same.alignments[1], name))
    assert [document.is_kept for part in parts for document in part] == [i not in (2, 7) for i in range(9)]


PLAIN = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}{{ m.thinking or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ '</s>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
# Ends a turn by the next role's token.
NEXT_ROLE = "{% for m in messages %}{{ '<|end|>' if m.role == 'user' else '<|turn|>' }}{{ m.content }}{% endfor %}"
NEXT_ROLE += "{% if add_generation_prompt %}{{ '<|turn|>' }}{% endif %}"
# Rewrites earlier turns.
SHORTENED = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content[:1] }}")
QUESTION, ANSWER = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so it is"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "x</s>y"}}}
QUOTING: list[dict[str, Any]] = [
    {"role": "assistant", "content": "one</s>two<|end|>"},
    ANSWER | {"thinking": "hm</s>hm"},
    ANSWER | {"tool_calls": [CALL]},
]


def beside(
    template: str, chat: list[dict[str, Any]], *, student: str = PLAIN, **settings: Any
) -> tuple[Encoded, Encoded]:
    """A chat's tokens beside a teacher with another tokenizer and this template, and without one."""
    learner, other = tiny_tokenizer(), tiny_tokenizer(600, seed=7)
    learner.chat_template, other.chat_template = student, template
    ends = learner.convert_tokens_to_ids(["<|end|>"])
    data = DataConfig(**{"loss_on": "assistant", "max_length": 999, **settings})
    tokenization = Tokenization(learner, data, format="messages", stops=ends)
    teachers = {0: CrossTokenizerTeacher.of("t", learner, other, AlignerConfig(), student_stops=ends, stops=ends)}
    document = {"row": 0, "messages": chat}
    ((piece,),) = (each.pieces for each in DocumentAligner(tokenization, teachers, {0: 999}).align([document]))
    assert piece.alignments[0].num_chunks > 0
    return piece.encoded, tokenization.encode_all(document)


@pytest.mark.parametrize("turn", QUOTING)
@pytest.mark.parametrize("as_tokens", [False, True])
def test_special_tokens_in_texts_are_read_as_without_a_teacher(turn: dict[str, Any], as_tokens: bool) -> None:
    tokens, alone = beside(PLAIN, [QUESTION, turn, QUESTION, ANSWER], special_tokens_in_text=as_tokens)
    assert (tokens.input_ids == 1).sum() == 4 + as_tokens  # `</s>`, behind each message and perhaps in the text
    assert np.array_equal(tokens.input_ids, alone.input_ids)
    assert np.array_equal(tokens.label_mask, alone.label_mask)


@pytest.mark.parametrize("text", ["one two</s>three four", "<|turn|>one two<|end|>\n<|turn|>three</s>", "one two"])
def test_a_rendered_corpus_keeps_its_special_tokens(text: str) -> None:
    """Each is compared with the same token of the other side, and so is what lies between them."""
    learner, other = tiny_tokenizer(), tiny_tokenizer(600, seed=7)
    tokenization = Tokenization(learner, DataConfig(max_length=999), format="text")
    teachers = {0: CrossTokenizerTeacher.of("t", learner, other, AlignerConfig())}
    document = {"row": 0, "text": text}
    ((piece,),) = (each.pieces for each in DocumentAligner(tokenization, teachers, {0: 999}).align([document]))
    assert np.array_equal(piece.encoded.input_ids, tokenization.encode_all(document).input_ids)
    pair = piece.alignments[0]
    ends = [] if text.endswith("</s>") else [other.eos_token_id]
    assert pair.teacher_ids.tolist() == [*other(text)["input_ids"], *ends]
    compared = [
        (
            learner.decode(pair.student_ids[pair.student_chunk == i]),
            other.decode(pair.teacher_ids[pair.teacher_chunk == i]),
        )
        for i in range(pair.num_chunks)
    ]
    assert all(one == same for one, same in compared)
    found = "".join(one for one, _ in compared)
    whole = text if text.endswith("</s>") else f"{text}</s>"
    assert whole.endswith(found)
    assert len(whole) - len(found) <= len("<|turn|>")  # nothing predicts the first token


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_the_next_role_ends_the_last_turn_on_both_sides(loss_on: str) -> None:
    """Words of the texts also stand in what the templates write."""
    chat = [QUESTION | {"content": "assistant"}, ANSWER | {"content": "user"}, QUESTION, ANSWER]
    for student, teacher in ((NEXT_ROLE, PLAIN), (PLAIN, NEXT_ROLE), (NEXT_ROLE, NEXT_ROLE)):
        tokens, alone = beside(teacher, chat, student=student, loss_on=loss_on)
        assert np.array_equal(tokens.input_ids, alone.input_ids)
        assert np.array_equal(tokens.label_mask, alone.label_mask)
        spelt = tiny_tokenizer().decode(tokens.input_ids[tokens.label_mask])
        if loss_on == "assistant":
            assert spelt == ("user<|end|>so it is<|end|>" if student == NEXT_ROLE else "user</s>so it is</s>")
        else:
            assert spelt.endswith("so it is<|end|>" if student == NEXT_ROLE else "so it is</s>\n")


def test_the_turns_of_a_teacher_need_not_be_found() -> None:
    chat = [QUESTION, ANSWER | {"weight": 0}, QUESTION, ANSWER | {"content": "end"}]
    for loss_on in ("all", "assistant"):
        tokens, alone = beside(SHORTENED, chat, loss_on=loss_on, unrendered="warn")
        assert np.array_equal(tokens.label_mask, alone.label_mask)
        with pytest.raises(DataError, match="rewrites earlier turns"):
            beside(PLAIN, chat, student=SHORTENED, loss_on=loss_on, unrendered="warn")
