"""A user's own suite as a file, with any number of made-up questions that suit any model."""

from __future__ import annotations

from pathlib import Path

SOURCE = """\
from pathlib import Path

from distill_rl.evals.suites.base import Item, Questions, Verdict


class Own:
    name = "own"
    title = "does the completion have an even number of characters?"
    num_fewshot = 0
    max_fewshot = 0
    chat = False
    max_new_tokens = {max_new_tokens}
    stop = ()

    def load(self, data: Path, num_fewshot: int) -> Questions:
        items = tuple(Item(f"q{{n}}", f"question {{n * 7919 % 1000}} is", "even", task=f"t{{n % 2}}") for n in range({count}))
        return Questions(items, (data,), "0" * 64, {warnings})

    def judge(self, item: Item, completion: str) -> Verdict:
        return Verdict(float(len(completion) % 2 == 0), str(len(completion)))


SUITE = Own()
"""


def write_suite(
    folder: Path, *, count: int = 24, max_new_tokens: int = 12, warnings: tuple[str, ...] = (), name: str = "own.py"
) -> Path:
    """Writes a suite called `own` with `count` items."""
    path = folder / name
    path.write_text(SOURCE.format(count=count, max_new_tokens=max_new_tokens, warnings=repr(warnings)))
    return path
