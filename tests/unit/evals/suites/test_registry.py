from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.suites.base import Item, Questions, resolve_num_fewshot
from distill_rl.evals.suites.registry import MAX_PROBLEMS, SUITES, find, find_all, load, source_sha256

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from distill_rl.errors import DataError
from distill_rl.evals.suites.base import Item, Questions, Verdict

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


def write_suite(folder: Path, name: str = "own", content: str = OWN) -> str:
    path = folder / "my_suite.py"
    path.write_text(content.format(name=name) if content is OWN else content)
    return str(path)


def test_all_documented_suites_are_registered() -> None:
    names = "math math500 minerva_math mmlu mmlu_0shot mmlu_cot gsm8k gsm8k_0shot exact_match"
    assert set(SUITES) == set(names.split())
    for name, suite in SUITES.items():
        assert find(name) is suite
        assert suite.name == name
        assert suite.title
        assert 0 <= suite.num_fewshot <= suite.max_fewshot or suite.max_fewshot == suite.num_fewshot == 0


def test_a_suite_that_takes_no_examples_gets_none() -> None:
    for name, expected in (("mmlu", 3), ("mmlu_0shot", 0), ("minerva_math", 3), ("math", 0)):
        assert resolve_num_fewshot(find(name), 3) == expected


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        find("humaneval")
    assert str(caught.value) == f"suites: must be among {', '.join(SUITES)}, or the path of a .py file; got humaneval"


def test_suite_file_is_executed_once_until_it_changes(tmp_path: Path) -> None:
    path = write_suite(tmp_path)
    suite = find(path)
    assert suite.name == "own"
    assert suite.judge(Item("i", "p", "a"), "x").extracted == "x"
    assert find(path) is suite
    write_suite(tmp_path, "newer_name")
    assert find(path).name == "newer_name"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("\nSUITE = 1 / 0", r"must run; got ZeroDivisionError: division by zero; see line 2 of the file"),
        ("SUITE = (", r"must run; got SyntaxError"),
        ("raise SystemExit(3)", r"must run; got SystemExit: 3"),
        ("x = 1", r"must end with `SUITE = MySuite\(\)`"),
        ("class SUITE: pass", r"must end with `SUITE = MySuite\(\)`"),
        ("SUITE = object()", r"must have all attributes of a suite; got no name, title, num_fewshot"),
        (OWN.format(name="../x"), r"`name` must be letters.*got '\.\./x'"),
        (OWN.format(name="x" * 201), r"`name` must be letters.* 200 bytes at most.*got 'xxx"),
        (OWN.format(name="mmlu"), r"`name` must be letters.*got 'mmlu'"),
    ],
)
def test_file_without_a_suite_is_refused_in_one_line(tmp_path: Path, content: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        find(write_suite(tmp_path, content=content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "value", "rule"),
    [
        (
            "name",
            "3",
            "letters, digits, _, - and ., 200 bytes at most, and not the name of a built-in suite; got 3 (int)",
        ),
        ("title", "None", "a text; got None (NoneType)"),
        ("num_fewshot", "None", "a whole number, 0 or more; got None (NoneType)"),
        ("num_fewshot", "-1", "a whole number, 0 or more; got -1 (int)"),
        ("max_fewshot", "True", "a whole number, 0 or more; got True (bool)"),
        ("chat", "1", "True or False; got 1 (int)"),
        ("max_new_tokens", "0", "a whole number, 1 or more, or None; got 0 (int)"),
        ("max_new_tokens", "8.0", "a whole number, 1 or more, or None; got 8.0 (float)"),
        ("stop", "'x'", "a tuple of non-empty texts; got 'x' (str)"),
        ("stop", "('x', 1)", "a tuple of non-empty texts; got ('x', 1) (tuple)"),
        ("stop", "('',)", "a tuple of non-empty texts; got ('',) (tuple)"),
        ("load", "None", "a function; got None (NoneType)"),
        ("judge", "'x'", "a function; got 'x' (str)"),
    ],
)
def test_an_attribute_of_another_type_is_refused(tmp_path: Path, attribute: str, value: str, rule: str) -> None:
    path = write_suite(tmp_path, content=OWN.format(name="own") + f"SUITE.{attribute} = {value}\n")
    with pytest.raises(ConfigError) as caught:
        find(path)
    assert str(caught.value) == f"suite {path}: `{attribute}` must be {rule}"


def test_all_wrong_attributes_are_reported_at_once(tmp_path: Path) -> None:
    more = "SUITE.stop = 'x'\nSUITE.chat = 0\nSUITE.load = 1\ndel Own.title, SUITE.title\n"
    with pytest.raises(ConfigError) as caught:
        find(write_suite(tmp_path, content=OWN.format(name="own") + more))
    missing, *wrong = caught.value.problems
    assert missing.endswith("got no title")
    assert [problem.split("`")[1] for problem in wrong] == ["chat", "stop", "load"]


def test_failing_property_is_reported(tmp_path: Path) -> None:
    more = "Own.title = property(lambda self: 1 / 0)\n"
    with pytest.raises(ConfigError, match="must be readable; got ZeroDivisionError: division by zero; see line"):
        find(write_suite(tmp_path, content=OWN.format(name="own") + more))


def loaded(folder: Path, returned: str) -> Questions:
    """The questions of a suite whose `load` ends with this statement."""
    path = write_suite(folder, content=OWN.format(name="own").replace('return Questions((), (data,), "")', returned))
    return load(path, find(path), folder, 0)


ITEMS = "return Questions(({}), (data,), '')"


def test_questions_of_a_suite_file_are_unchanged(tmp_path: Path) -> None:
    chat = "({'role': 'user', 'content': 'c'},)"
    questions = loaded(tmp_path, ITEMS.format(f"Item('i', 'p', 'a'), Item('j', {chat}, 'b', 't', 'x')"))
    assert questions == Questions(
        (Item("i", "p", "a"), Item("j", ({"role": "user", "content": "c"},), "b", "t", "x")), (tmp_path,), ""
    )


def test_a_suite_of_this_package_loads_itself(tmp_path: Path) -> None:
    file = tmp_path / "exact_match.jsonl"
    file.write_text('{"prompt": "p", "answer": "a"}')
    suite = find("exact_match")
    assert load("exact_match", suite, tmp_path, 0) == suite.load(tmp_path, 0)


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return (data / 'no').read_text()", "FileNotFoundError: "),
        ("import json; json.loads('{')", "JSONDecodeError: "),
    ],
)
def test_failing_load_is_one_line_with_its_line_number(tmp_path: Path, raised: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, raised)
    (problem,) = caught.value.problems
    assert problem.startswith(f"suite {tmp_path}/my_suite.py: load() must work; got {shown}")
    assert problem.endswith("see line 18 of the file")
    assert (tmp_path / "my_suite.py").read_text().splitlines()[17].strip() == raised


def test_user_errors_of_a_suite_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^capitals: must be there$"):
        loaded(tmp_path, "raise DataError('capitals', 'must be there')")


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("return None", ": load() must return Questions; got None (NoneType)"),
        ("return [Item('i', 'p', 'a')]", ": load() must return Questions; got [Item("),
        ("return Questions([], (data,), '')", ", questions: `items` must be a tuple of Item; got [] (list)"),
        ("return Questions(('i',), (data,), '')", ", questions: `items` must be a tuple of Item; got ('i',) (tuple)"),
        ("return Questions((), ('x',), '')", ", questions: `files` must be a tuple of Path; got ('x',) (tuple)"),
        ("return Questions((), data, '')", ", questions: `files` must be a tuple of Path; got "),
        ("return Questions((), (), b'')", ", questions: `content_sha256` must be a text; got b'' (bytes)"),
        ("return Questions((), (), '', 'x')", ", questions: `warnings` must be a tuple of texts; got 'x' (str)"),
        (ITEMS.format("Item(1, 'p', 'a'),"), ", item 1: `id` must be a text; got 1 (int)"),
        (ITEMS.format("Item('i', 'p', 4),"), ", item 1: `answer` must be a text; got 4 (int)"),
        (ITEMS.format("Item('i', None, 'a'),"), ", item 1: `prompt` must be a text, or a tuple of messages"),
        (ITEMS.format("Item('i', (), 'a'),"), ", item 1: `prompt` must be a text, or a tuple of messages"),
        (ITEMS.format("Item('i', ({'role': 'user'},), 'a'),"), ", item 1: `prompt` must be a text, or a tuple of mess"),
        (ITEMS.format("Item('i', 'p', 'a', None),"), ", item 1: `task` must be a text; got None (NoneType)"),
        (ITEMS.format("Item('i', 'p', 'a', choices='AB'),"), ", item 1: `choices` must be a tuple of texts; got 'AB'"),
    ],
)
def test_questions_of_another_type_are_refused(tmp_path: Path, returned: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, returned)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"suite {tmp_path}/my_suite.py{problem}")


def test_invalid_questions_are_reported_up_to_a_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "return Questions([], data, 0)")
    assert [problem.split("`")[1] for problem in caught.value.problems] == ["items", "files", "content_sha256"]
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, ITEMS.format("*(Item(n, 'p', None) for n in range(1000)),"))
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert "item 10: `answer`" in caught.value.problems[MAX_PROBLEMS - 1]


def test_a_suite_either_gives_choices_or_none(tmp_path: Path) -> None:
    chosen, free = "Item('c', 'p', 'A', choices=(' A', ' B')),", "Item('f', 'p', 'a'),"
    assert len(loaded(tmp_path, ITEMS.format(chosen * 2)).items) == 2
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, ITEMS.format(chosen * 2 + free))
    assert str(caught.value) == (
        f"suite {tmp_path}/my_suite.py: all items must have choices, or none; "
        "got 1 of 3 without, such as f; make it two suites"
    )


def test_suite_files_are_hashed(tmp_path: Path) -> None:
    path = write_suite(tmp_path)
    known = source_sha256(path)
    assert known == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    write_suite(tmp_path, "newer_name")
    assert source_sha256(path) not in (None, known)
    assert source_sha256("mmlu") is None
    with pytest.raises(ConfigError, match="must be a Python file; got No such file"):
        source_sha256(str(tmp_path / "none.py"))


def test_repeated_names_give_each_suite_once_in_order(tmp_path: Path) -> None:
    path = write_suite(tmp_path)
    assert [suite.name for suite in find_all(["mmlu", path, "gsm8k", "mmlu"]).values()] == ["mmlu", "own", "gsm8k"]


def test_problems_of_several_names_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    one, two = write_suite(tmp_path), write_suite(tmp_path / "sub")
    with pytest.raises(ConfigError) as caught:
        find_all(["mmlu", "nothing", one, str(tmp_path / "none.py"), "else", two])
    unknown, missing, same = caught.value.problems
    assert unknown.endswith("got nothing, else")
    assert missing == f"suite {tmp_path}/none.py: must be a Python file; got No such file or directory"
    assert same.endswith(f"got {one} and {two} are both 'own'")
    with pytest.raises(ConfigError, match="must name at least one"):
        find_all([])


def test_importing_suites_loads_no_heavy_packages() -> None:
    heavy = ("torch", "transformers", "datasets", "sympy", "pyarrow", "latex2sympy2_extended", "ray")
    code = (
        f"import sys; import distill_rl.evals.suites.registry; print([name for name in {heavy} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
