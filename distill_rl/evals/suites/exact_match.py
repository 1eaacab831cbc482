"""The suite `exact_match`: the completion must equal the answer, except for white space at both ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from distill_rl.errors import DataError
from distill_rl.evals.data import Row, content_sha256, convert_rows, read_rows, require_unicode, required_text
from distill_rl.evals.suites.base import Item, Prompt, Questions, Suite, Verdict


@dataclass(slots=True)
class ExactMatch(Suite):
    """Reads jsonl: `{"messages": [… the user's turn], "answer": "…"}` or `{"prompt": "…", "answer": "…"}`,
    each with an optional `"task"` for the breakdown of the score. The encoder reports a chat without a chat template."""

    name: str = "exact_match"
    title: str = "your own questions: the completion must equal the answer"

    def load(self, data: Path, num_fewshot: int = 0) -> Questions:
        """Reads the questions from a file that `data.read_rows` can read, or from `exact_match.jsonl` in a folder.

        Each row has an `answer`, either a `prompt` (text) or `messages` (a chat that ends with a user turn), and maybe
        a `task`. An item's id is `<file name>:<line>`. The content hash counts every character, white space included.

        Args:
            num_fewshot: ignored; the suite takes no worked examples.

        Raises:
            DataError: no such file, or bad rows, one line each.
        """
        file = data / "exact_match.jsonl" if data.is_dir() else data
        if not file.is_file():
            remedy = "give a .jsonl file, or a folder that holds exact_match.jsonl"
            raise DataError(str(file), "cannot be read", "no such file", remedy)
        items = convert_rows(read_rows(file), _item)
        # The hash is exact because blanks may be part of the question. It includes the ids, because they depend on the
        # order of the rows: results are compared item by item only if their ids mean the same questions.
        content = content_sha256(((item.id, json.dumps(item.prompt), item.answer) for item in items), exact=True)
        return Questions(tuple(items), (file,), content)

    def judge(self, item: Item, completion: str) -> Verdict:
        """Scores 1 if completion and answer are equal without white space at their ends, otherwise 0.

        The completion without that white space counts as the extracted answer; None if nothing is left.
        """
        answer = completion.strip()
        return Verdict(float(answer == item.answer.strip()), answer or None)


def _item(row: Row) -> Item:
    """The item of a row, with `<file name>:<position>` as its id."""
    answer, task = required_text(row, ["answer"]), row.values.get("task")
    if task is not None and not isinstance(task, str):
        raise ValueError("`task` must be a text")
    return Item(f"{row.file.name}:{row.position}", _prompt(row), answer, task or "")


def _prompt(row: Row) -> Prompt:
    """The prompt of a row: the text in `prompt`, or the messages in `messages`, reduced to `role` and `content`."""
    messages = row.values.get("messages")
    if (row.values.get("prompt") is None) == (messages is None):
        raise ValueError("needs either `prompt` or `messages`")
    if messages is None:
        return required_text(row, ["prompt"])
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise ValueError("`messages` must be a list of {role, content}")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("`messages` must end with a user turn")
    return tuple({key: require_unicode(message[key], key) for key in ("role", "content")} for message in messages)
