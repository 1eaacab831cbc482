"""The settings of the data, a part of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Optional

from distill_rl.config.schema.fields import MISSING, NOT_EMPTY, NOT_NEGATIVE, POSITIVE
from distill_rl.errors import problem

if TYPE_CHECKING:
    from distill_rl.config.schema import Config

# ruff: noqa: UP045 (see __init__.py)


@dataclass
class ValidationConfig:
    path: Optional[str] = None
    """Separate validation data, in the format of data.path. null: no separate data; see fraction."""
    fraction: float = 0.0
    """Fraction of data.path, or of each of data.sources, that is held out for validation if validation.path is null, drawn with run.seed. 0: none."""
    max_documents: int = field(default=512, metadata=POSITIVE)
    """Maximum number of documents in a validation pass."""


DataFormat = Literal["auto", "text", "messages", "sharegpt", "alpaca"]


@dataclass
class SourceConfig:
    path: str = field(default=MISSING, metadata=NOT_EMPTY)
    """Files, folder or hub name of this source, as in data.path."""
    weight: float = field(default=1.0, metadata=POSITIVE)
    """Share of the documents that come from this source, relative to the sum of all weights. Counts are exact to one document at every step. A source that is used up begins again in a new order."""
    split: Optional[str] = None
    """Split to read. null: data.split."""
    subset: Optional[str] = None
    """Subset of a hub data set. null: data.subset."""
    revision: Optional[str] = None
    """Revision of a hub data set. null: data.revision."""
    format: Optional[DataFormat] = None
    """What a row holds. null: data.format. All sources must hold texts, or all of them chats."""
    text_key: Optional[str] = None
    """Column that holds the text. null: data.text_key."""
    messages_key: Optional[str] = None
    """Column that holds the chat. null: data.messages_key."""
    tools_key: Optional[str] = None
    """Column that holds the tools of a chat. null: data.tools_key."""


@dataclass
class DataConfig:
    path: Optional[str] = field(default=MISSING, metadata=NOT_EMPTY | {"unless": "sources"})
    """Training data: an .arrow, .parquet, .json, .jsonl, .ndjson, .csv or .txt file, all but the first two perhaps with .gz or .zst behind; a folder or a glob of such files; an Arrow folder (`save_to_disk`); or the name of a dataset on the hub. Not needed with data.sources."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources with weights, in place of data.path."""
    split: str = field(default="train", metadata=NOT_EMPTY)
    """Split to read, for data that have splits; those of a folder are found by the names of its files."""
    subset: Optional[str] = field(default=None, metadata=NOT_EMPTY)
    """Subset (configuration) of a hub data set. null: its default."""
    revision: Optional[str] = field(default=None, metadata=NOT_EMPTY)
    """Revision of a hub data set: branch, tag or commit. null: the newest."""
    format: DataFormat = "auto"
    """What a row holds. text: text, in the column data.text_key. messages: a chat, in the column data.messages_key. sharegpt: a chat of turns {from, value}, in the column data.messages_key or else `conversations`. alpaca: the columns `instruction`, `output` and, if there are any, `input`, `system` and `history`, which become a chat. auto: the first of messages, text, sharegpt and alpaca whose columns the data have; sharegpt and alpaca are said."""
    text_key: str = field(default="text", metadata=NOT_EMPTY)
    """Column that holds the text."""
    messages_key: str = field(default="messages", metadata=NOT_EMPTY)
    """Column that holds the chat, a list of {role, content}, or its JSON text. The chat template gets all further keys of a message, too."""
    tools_key: str = field(default="tools", metadata=NOT_EMPTY)
    """Column that holds the tools of a chat, a list of JSON schemas, or its JSON text. Data need not have it."""
    sample_by: Literal["line", "document"] = "line"
    """What a row of a .txt file is. line: a line that is not blank. document: the whole file."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do with a row that cannot be read (null, another type, not JSON, not UTF-8). fail: end with an error. skip: leave it out, and texts and chats without any content, too; they are listed in bad_rows.jsonl and counted."""
    max_bad_rows: int = field(default=1000, metadata=NOT_NEGATIVE)
    """Number of rows that a run may leave out with bad_rows=skip; one more ends the run."""
    loss_on: Literal["all", "assistant"] = "all"
    """Tokens that the student is trained on. all: all of them. assistant: only those of the assistant's turns in a chat, with their tool calls and end-of-turn tokens."""
    loss_roles: list[str] = field(default_factory=list)
    """Roles whose turns in a chat the student is trained on, such as [assistant, tool]. Of the assistant: as with loss_on=assistant; of other roles: the content, without what the template writes around it. Replaces loss_on. Empty: loss_on decides."""
    unrendered: Literal["fail", "warn"] = "fail"
    """What to do with a chat of which the chat template leaves something out. fail: refuse contents, tool calls, reasoning and tools that it leaves out, because the student would learn to answer without them; report other keys, such as names and ids. warn: only report. What it leaves out on purpose of earlier turns, such as their reasoning, is neither."""
    stops: Literal["required", "none"] = "required"
    """Whether a chat must teach the student to stop. required: refuse chats whose answers end in no token at which generation stops (eos_token_id of generation_config.json, or the tokenizer's eos), because a student that learnt from them would not end its answers. none: train on them all the same."""
    special_tokens_in_text: bool = False
    """What a special token's text inside a message is, such as `<|im_end|>` in a content. false: text, so that no content can end a turn. true: the token. Texts (data.format: text) always have their special tokens."""
    max_length: int = field(default=1024, metadata=POSITIVE)
    """Maximum number of tokens per row; longer documents are cut or split (data.long_documents) and counted. Rows are then padded to a multiple of 128 positions on GPUs, of 8 on CPUs."""
    long_documents: Literal["auto", "cut", "split"] = "auto"
    """What to do with a document that is longer than a row. cut: train on its beginning. split: train on all of it, in pieces that are rows of the same step; a piece ends where all tokenizers end a token, and begins with bos if the document does. The number of rows of a step then depends on its documents. auto: split texts and cut chats, whose answers need what was said before; with loss.dynamic_scale or teachers[].score, which need a whole step at once, cut texts, too."""
    concatenate: bool = False
    """Join consecutive texts of a step into longer ones before they are tokenised, with data.separator between them. Attention then crosses from one text to the next, as in published settings that do this; packing does without."""
    separator: str = "\n"
    """What is written between two texts that are joined; see data.concatenate."""
    characters_per_sample: Optional[int] = field(default=None, metadata=POSITIVE)
    """Number of characters at which no further text is joined; see data.concatenate. null: 4 * data.max_length."""
    packing: bool = True
    """Pack several documents into one row (first fit); attention never crosses from one document to another. The rows of a teacher with another tokenizer hold the same documents."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)


def data_problems(config: Config) -> Iterator[str]:
    """Yields problems of the data, one line each.

    No data, or two kinds of them; roles that contradict `data.loss_on`; long documents that cannot be split.
    """
    data = config.data
    if data.path is None and not data.sources:
        remedy = "set it in the file or add data.path=PATH; or give data.sources"
        yield problem("data.path", "missing value", None, remedy)
    if data.path not in (None, MISSING) and data.sources:
        remedy = "leave data.path out, or make it one of the sources"
        yield problem("data.path", "data.sources is given, too; a run has one or the other", data.path, remedy)
    if data.loss_roles and data.loss_on == "assistant" and "assistant" not in data.loss_roles:
        rule = "must have assistant, as data.loss_on is assistant"
        yield problem("data.loss_roles", rule, data.loss_roles, "add assistant, or leave data.loss_on out")
    if not all(role.strip() for role in data.loss_roles):
        yield problem("data.loss_roles", "must be names of roles", data.loss_roles, "[] lets data.loss_on decide")
    if data.long_documents == "split":
        if config.wants_whole_batch:
            rule = "pieces make a batch of any number of rows; loss.dynamic_scale and teachers[].score need all of a batch at once"
            yield problem("data.long_documents", rule, "split", "use data.long_documents=cut")
        if data.max_length == 1:
            yield problem("data.max_length", "a piece of a document has 2 tokens or more", 1, "raise it")
    if data.concatenate and data.format in ("messages", "sharegpt", "alpaca"):
        yield concatenation_problem(f"data.format={data.format}")


def concatenation_problem(value: str) -> str:
    """The line for chats that are to be joined.

    Args:
        value: what holds them, in words.
    """
    remedy = "leave data.concatenate out; data.packing puts several chats into a row"
    return problem("data.concatenate", "only texts can be joined, not chats", value, remedy)
