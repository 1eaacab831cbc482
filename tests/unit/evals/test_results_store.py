"""What is on disk after every kind of end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.evals.results import ResultStore, locked
from tests.helpers.kill_at_call import Killer

KEY = {"suite": "own", "model_sha256": "ab", "limit": None}


def row(name: str) -> dict[str, object]:
    return {"id": name, "outcome": "right", "score": 1.0}


def names(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def stopped(folder: Path, *rows: str) -> None:
    """A store that a process left without a word."""
    store = ResultStore(folder, "own", KEY)
    store.append([row(name) for name in rows])


def test_rows_are_on_disk_once_added(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "own", KEY)
    store.append([row("a"), row("b")])
    header, *rows = (tmp_path / ".own.partial.jsonl").read_text().splitlines()
    assert json.loads(header) == KEY | {"device": None}
    assert [json.loads(line)["id"] for line in rows] == ["a", "b"]
    assert not (tmp_path / "own.json").exists()


def test_finished_suite_leaves_ordered_items_and_no_partial(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "own", KEY)
    store.append([row("b"), row("a")])
    result = store.finish(["a", "b"], {"score": 1.0, "num_items": 2})
    assert result == {**KEY, "score": 1.0, "num_items": 2} == json.loads((tmp_path / "own.json").read_text())
    assert names(tmp_path / "own.items.jsonl") == ["a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.items.jsonl", "own.json"]


def test_later_run_reads_a_finished_result(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "own", KEY)
    store.append([row("a")])
    result = store.finish(["a"], {"score": 1.0, "num_items": 1})
    again = ResultStore(tmp_path, "own", KEY)
    assert again.result == result
    assert list(again.rows) == ["a"]


@pytest.mark.parametrize("torn", [b"", b'{"id": "c", "sc', b'{"id": "c", "score": 1.0}', b"\x00\xff"])
def test_run_continues_after_the_last_complete_line(tmp_path: Path, torn: bytes) -> None:
    stopped(tmp_path, "a", "b")
    with (tmp_path / ".own.partial.jsonl").open("ab") as file:
        file.write(torn)
    store = ResultStore(tmp_path, "own", KEY)
    assert list(store.rows) == ["a", "b"]
    store.append([row("b"), row("c")])
    store.append([row("d")])
    store.finish("abcd", {})
    assert names(tmp_path / "own.items.jsonl") == ["a", "b", "c", "d"]


def test_run_killed_between_its_last_two_files_finishes(tmp_path: Path) -> None:
    stopped(tmp_path, "a")
    (tmp_path / "own.items.jsonl").write_text(json.dumps(row("a")) + "\n")
    store = ResultStore(tmp_path, "own", KEY)
    assert store.result is None
    store.finish(["a"], {"score": 1.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.items.jsonl", "own.json"]


EVALUATE = """\
import sys
from pathlib import Path
from distill_rl.evals.results import ResultStore, locked
from tests.helpers.kill_at_call import Killer
folder = Path(sys.argv[1])
with locked(folder):
    store = ResultStore(folder, "suite", {"model": sys.argv[2]}, replace_others=True)
    store.set_device("cpu")
    for i in range(3):
        store.append([{"id": str(i), "outcome": sys.argv[2]}])
    if store.result is None:
        store.finish("012", {"num_items": 3})
    store.close()
"""


def test_an_evaluation_that_is_killed_at_any_call_is_completed_by_the_next(tmp_path: Path) -> None:
    """It replaces the results of another model."""
    killer = Killer(tmp_path)

    def earlier(place: Path) -> list[str | Path]:
        assert killer.run(["-c", EVALUATE, place / "evals", "old"]).code == 0
        return ["-c", EVALUATE, place / "evals", "new"]

    for place, killed in killer.every_kill(earlier):
        result = place / "evals" / "suite.json"
        if result.exists():
            model = json.loads(result.read_text())["model"]
            rows = [json.loads(line) for line in (place / "evals" / "suite.items.jsonl").read_text().splitlines()]
            assert [row["outcome"] for row in rows] == [model] * 3, killed.calls[-1]
        assert killer.run(["-c", EVALUATE, place / "evals", "new"]).code == 0
        assert json.loads(result.read_text()) == {"model": "new", "num_items": 3}
        assert sorted(path.name for path in (place / "evals").iterdir()) == [".lock", "suite.items.jsonl", "suite.json"]


@pytest.mark.parametrize("lost", ["all", "a row"])
def test_result_without_its_items_is_not_finished(tmp_path: Path, lost: str) -> None:
    store = ResultStore(tmp_path, "own", KEY)
    store.append([row("a"), row("b")])
    store.finish(["a", "b"], {"num_items": 2})
    items = tmp_path / "own.items.jsonl"
    if lost == "all":
        items.unlink()
    else:
        items.write_text(items.read_text().splitlines()[0] + "\n{}\n")
    again = ResultStore(tmp_path, "own", KEY)
    assert (again.rows, again.result) == ({}, None)


def test_rows_of_two_device_kinds_are_not_mixed(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "own", KEY)
    store.set_device("cpu")
    store.append([row("a")])
    ResultStore(tmp_path, "own", KEY).set_device("cpu")
    with pytest.raises(ConfigError, match=r"started on another kind of device, .*; got cpu; now cuda; .* --dtype"):
        ResultStore(tmp_path, "own", KEY).set_device("cuda")


@pytest.mark.parametrize("finished", [False, True])
def test_results_of_another_key_are_refused(tmp_path: Path, finished: bool) -> None:
    stopped(tmp_path, "a")
    if finished:
        ResultStore(tmp_path, "own", KEY).finish(["a"], {"num_items": 1})
    with pytest.raises(ConfigError, match=r"another evaluation; got model_sha256 ab; now model_sha256 cd; .* --clean"):
        ResultStore(tmp_path, "own", KEY | {"model_sha256": "cd"})
    assert ResultStore(tmp_path, "own", KEY).rows.keys() == {"a"}


@pytest.mark.parametrize("finished", [False, True])
def test_results_of_another_key_are_replaced_on_request(tmp_path: Path, finished: bool) -> None:
    stopped(tmp_path, "a")
    if finished:
        ResultStore(tmp_path, "own", KEY).finish(["a"], {"num_items": 1})
    assert ResultStore(tmp_path, "own", KEY, replace_others=True).rows.keys() == {"a"}
    store = ResultStore(tmp_path, "own", KEY | {"limit": 3}, replace_others=True)
    assert (store.rows, store.result) == ({}, None)
    assert list(tmp_path.iterdir()) == []


def test_clean_deletes_existing_results(tmp_path: Path) -> None:
    stopped(tmp_path, "a")
    store = ResultStore(tmp_path, "own", KEY | {"limit": 3}, clean=True)
    assert (store.rows, store.result) == ({}, None)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_rows_are_kept_in_memory(tmp_path: Path) -> None:
    store = ResultStore(None, "own", KEY)
    store.append([row("a")])
    assert store.finish(["a"], {"score": 1.0}) == {**KEY, "score": 1.0}
    assert list(store.rows) == ["a"]


def test_invalid_unicode_and_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "own", KEY)
    store.append([row("a") | {"completion": "x\ud800y"}, row("b") | {"completion": "\u2028\x85\r\n"}])
    rows = ResultStore(tmp_path, "own", KEY).rows.values()
    assert [stored["completion"] for stored in rows] == ["x?y", "\u2028\x85\r\n"]


def test_a_folder_is_used_by_one_evaluation_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match="in use by another evaluation"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_uncreatable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="must be a folder that can be written"),
        locked(tmp_path / "file" / "out"),
    ):
        pass
