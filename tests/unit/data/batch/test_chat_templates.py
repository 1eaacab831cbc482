"""Chats in the wire formats of five public families: the ids and masks of `apply_chat_template`, tools included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from distill_rl.align import TokenAligner
from distill_rl.config.schema import AlignerConfig, DataConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.errors import DataError
from distill_rl.types import IGNORE_INDEX, Cursor, DocumentBatch
from tests.helpers.chat_templates import (
    CHATML,
    CHATML_MARKED,
    LLAMA3,
    MISTRAL,
    PHI,
    QWEN3,
    TOOLS,
    plain_chat,
    tool_chat,
)
from tests.helpers.tokenizers import tiny_tokenizer

QWEN3_FOLDER = Path(__file__).parents[5] / "shared" / "data" / "tokenizers" / "qwen3"
TEMPLATES = {"qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "chatml": CHATML, "phi": PHI}
ARGUMENTS = {"city": 'Paris "é"'}


def tokenizer(template: str):
    made = tiny_tokenizer()
    made.chat_template = TEMPLATES.get(template, template)
    return made


def encode(tokenizer, messages, *, tools=None, **settings):
    settings = {"loss_on": "assistant", "unrendered": "fail", "stops": "none", **settings}
    document = {"row": 5, "messages": messages, **({"tools": tools} if tools else {})}
    return Tokenization(tokenizer, DataConfig(max_length=10_000, **settings), format="messages").encode(document)


def turns(tokenizer, encoded) -> list[str]:
    """The text of every stretch of tokens that are trained on."""
    edges = np.flatnonzero(np.diff(np.r_[False, encoded.label_mask, False].astype(int)))
    return [tokenizer.decode(encoded.input_ids[a:b]) for a, b in zip(edges[::2], edges[1::2])]


@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_are_those_of_apply_chat_template(template):
    made = tokenizer(template)
    encoded = encode(made, plain_chat())
    assert encoded.input_ids.tolist() == made.apply_chat_template(plain_chat(), return_dict=True)["input_ids"]
    spoken = turns(made, encoded)
    assert len(spoken) == 2
    assert "four, é 中" in spoken[0]
    assert "six" in spoken[1]


@pytest.mark.parametrize("template", ["qwen3", "llama3", "mistral"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_and_tools_reach_the_template(template, as_text):
    """Arguments as JSON text give the bytes that upstream gives for the object, where the template needs the object."""
    made = tokenizer(template)
    chat = tool_chat(json.dumps(ARGUMENTS, ensure_ascii=False) if as_text else ARGUMENTS)
    encoded = encode(made, chat, tools=TOOLS)
    expected = made.apply_chat_template(tool_chat(ARGUMENTS), tools=TOOLS, return_dict=True)["input_ids"]
    assert encoded.input_ids.tolist() == expected
    spoken = turns(made, encoded)
    assert len(spoken) == 3
    assert json.dumps(ARGUMENTS, ensure_ascii=False) in spoken[0]
    assert "weather" in spoken[0]
    assert not any("12 degrees" in turn for turn in spoken)


def test_reasoning_is_trained_on_where_the_template_writes_it():
    made = tokenizer("qwen3")
    chat = tool_chat(ARGUMENTS, reasoning=True)
    last = turns(made, encode(made, chat[:4], tools=TOOLS))
    assert last[0].startswith("<think>\nI must look.\n</think>\n\n<tool_call>")
    assert last[1] == "<think>\n12 is cool.\n</think>\n\nIt is cool.<|im_end|>"
    # A later question makes the template drop the reasoning before it, which is no loss, and no turn is missed for it.
    whole = turns(made, encode(made, chat, tools=TOOLS))
    assert whole[0].startswith("<tool_call>")
    assert whole[1:] == ["It is cool.<|im_end|>", "<think>\nPolite.\n</think>\n\nWelcome.<|im_end|>"]


def test_generation_marks_decide_where_a_template_has_them():
    made = tokenizer(CHATML_MARKED)
    upstream = made.apply_chat_template(plain_chat(), return_dict=True, return_assistant_tokens_mask=True)
    encoded = encode(made, plain_chat())
    assert encoded.input_ids.tolist() == upstream["input_ids"]
    assert encoded.label_mask.astype(int).tolist() == upstream["assistant_masks"]
    assert 0 < encoded.label_mask.sum() < len(encoded.label_mask)


@pytest.mark.skipif(not QWEN3_FOLDER.is_dir(), reason="needs the shared tokenizer of Qwen3")
def test_the_real_qwen3_template():
    made = AutoTokenizer.from_pretrained(QWEN3_FOLDER)
    for chat in (plain_chat(), tool_chat(ARGUMENTS), tool_chat(ARGUMENTS, reasoning=True)):
        encoded = encode(made, chat, tools=TOOLS)
        assert encoded.input_ids.tolist() == made.apply_chat_template(chat, tools=TOOLS, return_dict=True)["input_ids"]
    spoken = turns(made, encoded)
    assert spoken[0].startswith("<tool_call>\n")
    assert spoken[1:] == ["It is cool.<|im_end|>", "<think>\nPolite.\n</think>\n\nWelcome.<|im_end|>"]


def test_other_roles_are_trained_on_by_their_content():
    made = tokenizer("qwen3")
    encoded = encode(made, tool_chat(ARGUMENTS), tools=TOOLS, loss_roles=["assistant", "tool"])
    spoken = turns(made, encoded)
    assert spoken[1] == "12 degrees"
    assert len(spoken) == 4
    assert turns(made, encode(made, plain_chat(), loss_roles=["user"])) == ["2 + 2?", "And 3 + 3?"]


def test_what_a_template_leaves_out_is_refused_or_reported():
    made = tokenizer("chatml")
    with pytest.raises(
        DataError, match=r"row 5: .*writes all of a chat; got .*`tool_calls` of assistant messages, the tools"
    ):
        encode(made, tool_chat(ARGUMENTS), tools=TOOLS)
    encoded = encode(made, tool_chat(ARGUMENTS), tools=TOOLS, unrendered="warn")
    assert [text.partition(",")[0] for text in encoded.left_out] == [
        "`tool_calls` of assistant messages",
        "`tool_call_id` of tool messages",
        "the tools",
    ]
    # Names and ids alone are reported, and are no reason to refuse a chat.
    named = [{**message, "name": "x"} for message in plain_chat()]
    assert len(encode(made, named).left_out) == 2
    assert encode(made, plain_chat()).left_out == ()


@pytest.mark.parametrize(("role", "usual"), [("developer", "system"), ("human", "user"), ("narrator", None)])
def test_a_role_that_the_template_drops_is_refused(role, usual):
    remedy = (
        f"most templates call this role {usual}: rename it" if usual else "use a tokenizer whose template writes it"
    )
    with pytest.raises(DataError, match=f"`content` of {role} messages.*{remedy}"):
        encode(tokenizer("qwen3"), [{"role": role, "content": "Be brief."}, *plain_chat()])


def test_another_key_for_reasoning_is_named_with_its_remedy():
    chat = [*plain_chat()[:3], {"role": "assistant", "content": "six", "reasoning": "3 + 3"}]
    with pytest.raises(DataError, match="the template reads `reasoning_content`: rename the key"):
        encode(tokenizer("qwen3"), chat)


@pytest.mark.parametrize("template", ["qwen3", "chatml"])
def test_text_parts_are_joined_for_templates_that_read_no_lists(template):
    made = tokenizer(template)
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    chat = [{"role": "user", "content": parts}, *plain_chat()[1:]]
    assert encode(made, chat).input_ids.tolist() == encode(made, plain_chat()).input_ids.tolist()


def test_variables_of_a_row_reach_the_template():
    made = tokenizer("{{ mood or '' }}" + CHATML)
    document = {"row": 0, "messages": plain_chat(), "chat_template_kwargs": {"mood": "calm"}}
    encoded = Tokenization(made, DataConfig(max_length=999), format="messages").encode(document)
    assert made.decode(encoded.input_ids).startswith("calm<|im_start|>")


def test_tool_calls_across_tokenizers():
    """The teacher has another tokenizer and another wire format; calls are compared and trained on."""
    student, teacher = tokenizer("qwen3"), tiny_tokenizer(600, seed=7)
    teacher.chat_template = LLAMA3
    aligner = TokenAligner(student, teacher)
    aligned = aligner.align_messages(tool_chat(ARGUMENTS), options={"tools": TOOLS})
    compared = student.decode(aligned.student_ids[aligned.student_chunk >= 0])
    for text in ("weather", json.dumps(ARGUMENTS, ensure_ascii=False), "12 degrees", "Welcome."):
        assert text in compared

    tokenization = Tokenization(
        student, DataConfig(loss_on="assistant", max_length=4096, stops="none"), format="messages"
    )
    plan = BatchPlan(BatchSharding(1, 1), (BatchSharding(1, 1),), 4096, packing=False, pad_id=0)
    pair = CrossTokenizerTeacher.of("big", student, teacher, AlignerConfig())
    document = {"row": 0, "messages": tool_chat(ARGUMENTS), "tools": TOOLS}
    info, (part,), _ = BatchBuilder(tokenization, plan, [pair]).build(DocumentBatch(0, (document,), Cursor()))
    assert [left.what.partition(",")[0] for left in info.left_out] == ["`tool_call_id` of tool messages"] * 2
    alone = encode(student, tool_chat(ARGUMENTS), tools=TOOLS)
    labels = part.rows.labels[part.rows.labels != IGNORE_INDEX]
    assert student.decode(labels) == student.decode(alone.input_ids[alone.label_mask])
    assert (part.teachers[0].chunks.student >= 0).sum() > 20
