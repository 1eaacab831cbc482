from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.evals.registry import SUITES, find, find_all
from distill_rl.evals.suite import Item, with_fewshot

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from distill_rl.evals.suite import Questions, Verdict

@dataclass
class Own:
    name: str = {name!r}
    title: str = "mine"
    num_fewshot: int = 0
    max_fewshot: int = 0
    chat: bool = False
    max_new_tokens: int | None = 4
    stop: tuple[str, ...] = ()

    def load(self, data, num_fewshot):
        return Questions((), (data,), "")

    def judge(self, item, completion):
        return Verdict(1.0, completion)

SUITE = Own()
"""


def own(folder: Path, name: str = "own", content: str = OWN) -> str:
    path = folder / "my_suite.py"
    path.write_text(content.format(name=name) if content is OWN else content)
    return str(path)


def test_all_suites_that_there_are_to_be_are_there_under_their_names() -> None:
    names = "math math500 minerva_math mmlu mmlu_0shot mmlu_cot gsm8k gsm8k_0shot exact_match"
    assert set(SUITES) == set(names.split())
    for name, suite in SUITES.items():
        assert find(name) is suite
        assert suite.name == name
        assert suite.title
        assert 0 <= suite.num_fewshot <= suite.max_fewshot or suite.max_fewshot == suite.num_fewshot == 0


def test_a_suite_that_takes_no_examples_gets_none() -> None:
    assert [with_fewshot(find(name), 3) for name in ("mmlu", "mmlu_0shot", "minerva_math", "math")] == [3, 0, 3, 0]


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        find("humaneval")
    assert str(caught.value) == f"suites: must be among {', '.join(SUITES)}, or the path of a .py file; got humaneval"


def test_a_file_of_ones_own_is_a_suite_run_once_until_it_changes(tmp_path: Path) -> None:
    path = own(tmp_path)
    suite = find(path)
    assert suite.name == "own"
    assert suite.judge(Item("i", "p", "a"), "x").extracted == "x"
    assert find(path) is suite
    own(tmp_path, "newer_name")
    assert find(path).name == "newer_name"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("SUITE = 1 / 0", r"must run; got ZeroDivisionError: division by zero"),
        ("SUITE = (", r"must run; got SyntaxError"),
        ("raise SystemExit(3)", r"must run; got SystemExit: 3"),
        ("x = 1", r"must end with `SUITE = MySuite\(\)`"),
        ("class SUITE: pass", r"must end with `SUITE = MySuite\(\)`"),
        ("SUITE = object()", r"must have all that a suite has; got no name, title, num_fewshot"),
        (OWN.format(name="../x"), r"its name must be letters.*got \.\./x"),
        (OWN.format(name="mmlu"), r"its name must be letters.*got mmlu"),
    ],
)
def test_a_file_that_is_no_suite_is_refused_in_one_line(tmp_path: Path, content: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        find(own(tmp_path, content=content))
    assert "\n" not in str(caught.value)


def test_several_names_give_each_suite_once_in_their_order(tmp_path: Path) -> None:
    path = own(tmp_path)
    assert [suite.name for suite in find_all(["mmlu", path, "gsm8k", "mmlu"]).values()] == ["mmlu", "own", "gsm8k"]


def test_all_that_is_wrong_with_several_names_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    one, two = own(tmp_path), own(tmp_path / "sub")
    with pytest.raises(ConfigError) as caught:
        find_all(["mmlu", "nothing", one, str(tmp_path / "none.py"), "else", two])
    unknown, missing, same = caught.value.problems
    assert unknown.endswith("got nothing, else")
    assert missing == f"suite {tmp_path}/none.py: must be a Python file; got No such file or directory"
    assert same.endswith(f"got {one} and {two} are both 'own'")
    with pytest.raises(ConfigError, match="must name at least one"):
        find_all([])


def test_the_suites_are_imported_without_what_is_heavy() -> None:
    heavy = ("torch", "transformers", "datasets", "sympy", "pyarrow", "math_verify", "ray")
    code = f"import sys; import distill_rl.evals.registry; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
