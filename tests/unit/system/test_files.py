"""Files that are written atomically, whenever a process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill_rl.system import files
from distill_rl.system.files import append_json_lines, read_json_lines, remove_drafts, write_atomic
from tests.helpers.kill_at_call import Killer

WRITE = "import sys; from distill_rl.system.files import write_atomic; write_atomic(sys.argv[1], 'new')"


def old_file(place: Path) -> list[str | Path]:
    (place / "out.txt").write_text("old")
    return ["-c", WRITE, place / "out.txt"]


def test_a_kill_at_any_call_leaves_the_old_or_the_new_file(tmp_path):
    killer, found, left = Killer(tmp_path), set(), 0
    for place, killed in killer.every_kill(old_file):
        found.add((place / "out.txt").read_text())
        left += len(list(place.iterdir())) - 1
        assert killer.run(["-c", WRITE, place / "out.txt"]).code == 0
        assert (place / "out.txt").read_text() == "new"
        assert [path.name for path in place.iterdir()] == ["out.txt"], killed.calls[-1]
    assert found == {"old", "new"}
    assert left


def test_what_a_living_process_writes_is_left_alone(tmp_path, monkeypatch):
    seen = []

    def look(_: int) -> None:
        remove_drafts(tmp_path / "a[1].txt")
        seen.extend(path.name for path in tmp_path.iterdir())

    monkeypatch.setattr(files.os, "fsync", look)
    write_atomic(tmp_path / "a[1].txt", "text")
    assert any(name.startswith(".a[1].txt.") for name in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["a[1].txt"]


@pytest.mark.parametrize("name", [".a.txt.0123abcd", ".a.txt.0123abc", ".b.txt.0123abcd", "a.txt.0123abcd"])
def test_only_drafts_of_the_file_itself_are_removed(tmp_path, name):
    (tmp_path / name).touch()
    write_atomic(tmp_path / "a.txt", "text")
    assert (tmp_path / name).exists() == (name != ".a.txt.0123abcd")


def test_appended_lines_are_on_the_disk_and_end_a_half_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b"')
    program = f"from pathlib import Path; from distill_rl.system.files import append_json_lines as a; a(Path({str(path)!r}), [{{'c': 3}}])"
    ended = Killer(tmp_path, paths="/rows.jsonl").run(["-c", program])
    assert ended.calls == [f"fsync {path} "]
    append_json_lines(path, [])
    assert list(read_json_lines(path)) == [{"a": 1}, {"c": 3}]


def test_private_folders_are_never_shared(tmp_path, monkeypatch):
    # Two bytes name a folder: among 2,000 names some are equal, but for one time in 10^13.
    monkeypatch.setattr(files, "private_directory", lambda: tmp_path)
    assert len({files.private_folder() for _ in range(2000)}) == len(list(tmp_path.iterdir())) == 2000
