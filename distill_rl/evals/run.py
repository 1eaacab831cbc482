"""Runs suites on a model: `evaluate`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl import __version__
from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.exact_match import ExactMatch
from distill_rl.evals.suite import Item, Suite
from distill_rl.files import sha256, write_atomic, write_json

if TYPE_CHECKING:
    from distill_rl.evals.generate import Completion, Generator

SUITES: Mapping[str, Suite] = {"exact_match": ExactMatch()}

ANSWER_MARGIN = 8
"""tokens that a completion may be longer than the longest right answer before it is cut off"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A suite with its questions in hand."""

    suite: Suite
    items: tuple[Item, ...]
    file: Path
    sha256: str


def evaluate(
    model_dir: str | os.PathLike[str],
    suites: Sequence[str],
    data: str | os.PathLike[str],
    *,
    out_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Scores a model folder on local data by greedy generation; reaches no network.

    Args:
        suites: names in SUITES.
        data: the file of a suite, or a folder that holds the files of all.
        out_dir: gets `<suite>.json`, the result, and `<suite>.items.jsonl`, one line per item with the
            completion; `<run>/evals/<model>` is where the report looks. None: nothing is written.
        limit: at most so many items per suite, drawn by `seed`, in the order of the file.
        batch_size: prompts that are generated together.

    Returns:
        Per suite: `score` (mean over items, 0 to 1), `interval` (95 %, Wilson), `num_items`, `truncated` (completions
        that hit the token limit), `per_task` (the same by task), the sha256 of data and model, `seconds`, `tokens_per_second`.

    Raises:
        ConfigError: an unknown suite, or a folder that is no model; found before anything is generated.
        DataError: missing file or bad rows; one line each.
    """
    for name, number in (("limit", limit), ("batch_size", batch_size)):
        if number is not None and number < 1:
            raise ConfigError(name, "must be 1 or more", number)
    loaded = load_suites(suites, Path(data), limit, seed)
    # torch and transformers are needed only from here on, and bad input should be told at once.
    from distill_rl.evals.generate import Generator

    generator = Generator(Path(model_dir))
    facts = {"model": str(model_dir), "model_sha256": _hash_model(generator.folder), "version": __version__}
    results = {}
    for one in loaded:
        result, rows = _run(one, generator, batch_size)
        results[one.suite.name] = result | facts | {"limit": limit, "seed": seed, "batch_size": batch_size}
        if out_dir is not None:
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_atomic(Path(out_dir) / f"{one.suite.name}.items.jsonl", lines.encode("utf-8", errors="replace"))
            write_json(Path(out_dir) / f"{one.suite.name}.json", results[one.suite.name])
    return results


def load_suites(names: Sequence[str], data: Path, limit: int | None, seed: int) -> list[Loaded]:
    """The suites with their items.

    Raises:
        ConfigError: unknown names, all of them, with the list of suites; or none given.
        DataError: the bad rows of all suites.
    """
    if not names:
        raise ConfigError("suites", "must name at least one", "none", f"choose from {', '.join(SUITES)}")
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise ConfigError("suites", f"must be among {', '.join(SUITES)}", ", ".join(unknown))
    loaded: list[Loaded] = []
    problems: list[str] = []
    for name in dict.fromkeys(names):
        suite = SUITES[name]
        file = suite.file(data)
        try:
            items = suite.load(file)
        except DataError as error:
            problems += error.problems
            continue
        loaded.append(Loaded(suite, _draw(items, limit, seed), file, sha256(file)))
    if problems:
        raise DataError.many(problems)
    return loaded


def wilson(score: float, count: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson 1927, JASA 22, eq. for p); (0, 1) without observations."""
    if count == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    scale = 1 + z * z / count
    center = (score + z * z / (2 * count)) / scale
    half = z * math.sqrt(score * (1 - score) / count + z * z / (4 * count * count)) / scale
    # At the ends the exact bounds are 0 and 1, which rounding misses.
    return (center - half if score > 0 else 0.0), (center + half if score < 1 else 1.0)


def _draw(items: Sequence[Item], limit: int | None, seed: int) -> tuple[Item, ...]:
    if limit is None or limit >= len(items):
        return tuple(items)
    chosen = sorted(random.Random(seed).sample(range(len(items)), limit))
    return tuple(items[index] for index in chosen)


def _run(loaded: Loaded, generator: Generator, batch_size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of a suite and one row per item, in the order of the items."""
    items, start = loaded.items, time.perf_counter()
    max_new_tokens = max(generator.count_tokens(item.answer) for item in items) + ANSWER_MARGIN
    completions: dict[int, Completion] = {}
    for index, completion in generator.generate(items, max_new_tokens=max_new_tokens, batch_size=batch_size):
        completions[index] = completion
    seconds = time.perf_counter() - start
    rows = [_row(loaded.suite, item, completions[index]) for index, item in enumerate(items)]
    tasks: dict[str, list[dict[str, Any]]] = {}
    for item, row in zip(items, rows):
        if item.task:
            tasks.setdefault(item.task, []).append(row)
    result = {"suite": loaded.suite.name} | _summary(rows)
    result |= {"per_task": {task: _summary(members) for task, members in tasks.items()}}
    result |= {"data": str(loaded.file), "data_sha256": loaded.sha256, "max_new_tokens": max_new_tokens}
    result |= {"device": str(generator.device), "seconds": round(seconds, 3)}
    result["tokens_per_second"] = round(sum(row["num_tokens"] for row in rows) / max(seconds, 1e-9), 1)
    return result, rows


def _row(suite: Suite, item: Item, completion: Completion) -> dict[str, Any]:
    prompt = item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt]
    judged = {"score": suite.score(item, completion.text), "completion": completion.text, "answer": item.answer}
    counts = {"truncated": completion.truncated, "num_tokens": completion.num_tokens}
    return {"id": item.id, "task": item.task} | judged | counts | {"prompt": prompt}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    score = math.fsum(row["score"] for row in rows) / len(rows)
    return {
        "score": score,
        "interval": list(wilson(score, len(rows))),
        "num_items": len(rows),
        "truncated": sum(row["truncated"] for row in rows),
    }


def _hash_model(folder: Path) -> str:
    """sha256 over config and weights, names included."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()
