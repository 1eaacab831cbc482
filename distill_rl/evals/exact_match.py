"""The suite `exact_match`: the completion must be the answer, white space at both ends aside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill_rl.errors import DataError
from distill_rl.evals.suite import Item, Prompt

MAX_PROBLEMS = 20


class ExactMatch:
    """Reads jsonl: `{"messages": [… the user's turn], "answer": "…"}` or `{"prompt": "…", "answer": "…"}`,
    each with an optional `"task"` for the break-down of the score."""

    name = "exact_match"

    def file(self, data: Path) -> Path:
        return data / "exact_match.jsonl" if data.is_dir() else data

    def load(self, file: Path) -> list[Item]:
        items, problems = [], []
        with _open(file) as lines:
            for row, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    items.append(_item(f"{file.name}:{row}", _parse(line)))
                except ValueError as error:
                    problems.append(str(DataError(f"{file}, row {row}", str(error))))
                    if len(problems) == MAX_PROBLEMS:
                        problems.append(f"{file}: stopped after {MAX_PROBLEMS} bad rows")
                        break
        if problems:
            raise DataError.many(problems)
        if not items:
            raise DataError(str(file), "must hold at least one row")
        return items

    def score(self, item: Item, completion: str) -> float:
        return float(completion.strip() == item.answer.strip())


def _open(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        remedy = "give a .jsonl file, or a folder that holds exact_match.jsonl"
        raise DataError(str(file), "cannot be read", error.strerror, remedy) from error


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError("must be UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("must be one JSON object per line") from error
    if not isinstance(row, dict):
        raise ValueError("must be one JSON object per line")
    return row


def _item(name: str, row: Mapping[str, Any]) -> Item:
    answer, task = row.get("answer"), row.get("task", "")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("needs an `answer`, a text that is not empty")
    if not isinstance(task, str):
        raise ValueError("`task` must be a text")
    return Item(name, _prompt(row), answer, task)


def _prompt(row: Mapping[str, Any]) -> Prompt:
    if ("prompt" in row) == ("messages" in row):
        raise ValueError("needs either `prompt` or `messages`")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError("`prompt` must be a text that is not empty")
        return row["prompt"]
    messages = row["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise ValueError("`messages` must be a list of {role, content}")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("`messages` must end with the user's turn")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
