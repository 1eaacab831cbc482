"""A user's own suite as a file, with any number of made-up questions that suit any model; data of the recipes' suites."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.eval_forms import write

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


def write_recipe_data(folder: Path) -> None:
    """Writes a question or two for each suite of the recipes, as the downloads of docs/evaluation.md lay them out."""
    question = {"question": "1 + 1 = ?", "subject": "anatomy", "choices": ["1", "2", "3", "4"], "answer": 1}
    write(folder / "mmlu" / "all" / "dev-00000-of-00001.parquet", [question] * 5)
    write(folder / "mmlu" / "all" / "test-00000-of-00001.parquet", [question])
    word_problem = {"question": "How many are 1 and 1?", "answer": "They are 2. #### 2"}
    write(folder / "gsm8k" / "main" / "test-00000-of-00001.parquet", [word_problem])
    problem = {"problem": "1 + 1 = ?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{2}$."}
    for subject in ("algebra", "geometry"):
        write(folder / "hendrycks_math" / subject / "test-00000-of-00001.parquet", [problem])
