"""Folders that are made once or replaced, whenever a process is killed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from distill_rl.system.files import made_once, point_at, put_in_place, remove_leftovers, replacing, restore
from tests.helpers.kill_at_call import NO_EXCHANGE, NO_LOCKS, Killer


def write(text: str):
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "text").write_text(text)

    return make


def test_a_folder_is_made_once(tmp_path):
    first = made_once(tmp_path / "root", "a", write("one"))
    assert first == tmp_path / "root" / "a"
    assert made_once(tmp_path / "root", "a", write("two")) == first
    assert (first / "text").read_text() == "one"


def test_what_fails_leaves_no_folder_and_is_tried_again(tmp_path):
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        made_once(tmp_path, "a", fail)
    assert not (tmp_path / "a").exists()
    assert (made_once(tmp_path, "a", write("whole")) / "text").read_text() == "whole"


def test_who_comes_second_waits_for_the_first(tmp_path):
    begun, go_on, found = threading.Event(), threading.Event(), []

    def slow(folder: Path) -> None:
        folder.mkdir()
        begun.set()
        assert go_on.wait(60)
        (folder / "text").write_text("first")

    first = threading.Thread(target=made_once, args=(tmp_path, "a", slow))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(
        target=lambda: found.append((made_once(tmp_path, "a", write("second")) / "text").read_text())
    )
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert found == ["first"]


def test_a_link_is_pointed_elsewhere(tmp_path):
    for name in ("a", "b"):
        made_once(tmp_path, name, write(name))
        point_at(tmp_path / "newest", name)
        assert (tmp_path / "newest" / "text").read_text() == name
        assert (tmp_path / "newest").is_symlink()


def test_a_folder_in_place_of_a_link_is_kept_under_another_name(tmp_path):
    """A copy that followed links has made it."""
    write("copied")(tmp_path / "newest")
    made_once(tmp_path, "a", write("a"))
    point_at(tmp_path / "newest", "a")
    assert (tmp_path / "newest").readlink() == Path("a")
    (kept,) = tmp_path.glob("copied-newest-*")
    assert (kept / "text").read_text() == "copied"


# ------------------------------------------------------------------ replacing

REPLACE = """\
import sys
from pathlib import Path
from distill_rl.system.files import replacing
with replacing(Path(sys.argv[1])) as new:
    (new / "deep").mkdir()
    for name in ("text", "deep/text"):
        (new / name).write_text("new")
"""
RESTORE = (
    "import sys; from pathlib import Path; from distill_rl.system.files import restore; restore(Path(sys.argv[1]))"
)
OLD, NEW = {"text": "old", "only-old": "old"}, {"text": "new", "deep/text": "new"}


def contents(folder: Path) -> dict[str, str] | None:
    """The files of a folder with their texts; None if there is none."""
    if not folder.exists():
        return None
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def old_target(place: Path, program: str = REPLACE) -> list[str | Path]:
    (place / "out").mkdir()
    for name, text in OLD.items():
        (place / "out" / name).write_text(text)
    return ["-c", program, place / "out"]


@pytest.mark.parametrize("refuse", [None, NO_EXCHANGE, NO_LOCKS])
def test_a_kill_at_any_call_leaves_the_old_or_the_new_folder(tmp_path, refuse):
    killer, found = Killer(tmp_path, refuse), []
    for place, killed in killer.every_kill(old_target):
        target, call = place / "out", killed.calls[-1]
        found.append(contents(target))
        assert found[-1] in (OLD, NEW) or (refuse and found[-1] is None), call
        assert killer.run(["-c", RESTORE, target]).code == 0
        assert contents(target) == (OLD if found[-1] is None else found[-1]), call
        assert [path.name for path in place.iterdir()] == ["out"], call
        assert killer.run(["-c", REPLACE, target]).code == 0
        assert contents(target) == NEW
    assert OLD in found
    assert NEW in found
    assert (None in found) == bool(refuse), "only between two renames there is neither"


@pytest.mark.parametrize("refuse", [None, NO_EXCHANGE])
def test_a_second_kill_while_the_next_folder_is_made_loses_nothing(tmp_path, refuse):
    killer = Killer(tmp_path, refuse)
    killed_inside = f"{REPLACE}    import os; os.kill(os.getpid(), 9)\n"
    for place, killed in killer.every_kill(old_target):
        assert killer.run(["-c", killed_inside, place / "out"]).code == -9
        assert contents(place / "out") in (OLD, NEW), killed.calls[-1]
        assert killer.run(["-c", REPLACE, place / "out"]).code == 0
        assert contents(place / "out") == NEW, killed.calls[-1]
        assert [path.name for path in place.iterdir()] == ["out"]


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path):
    found = []
    for place, _ in Killer(tmp_path).every_kill(lambda place: ["-c", REPLACE, place / "out"]):
        found.append(contents(place / "out"))
    assert {str(state) for state in found} == {str(None), str(NEW)}


def test_an_error_keeps_the_old_folder_and_leaves_nothing_else(tmp_path):
    old_target(tmp_path)
    with pytest.raises(IsADirectoryError), replacing(tmp_path / "out") as new:
        new.write_text("a file in place of a folder")
    assert contents(tmp_path / "out") == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_new_folder_that_cannot_take_the_name_leaves_the_old_one(tmp_path):
    """It is on another file system, so it can neither be exchanged nor renamed."""
    old_target(tmp_path)
    elsewhere = Path("/dev/shm")
    if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    new = elsewhere / f"test-put-in-place-{os.getpid()}"
    new.mkdir()
    try:
        with pytest.raises(OSError, match="cross-device"):
            put_in_place(new, tmp_path / "out", tmp_path / "aside")
    finally:
        new.rmdir()
    assert contents(tmp_path / "out") == OLD
    assert not (tmp_path / "aside").exists()


def test_a_replacement_of_a_living_process_is_left_alone(tmp_path):
    with replacing(tmp_path / "out") as new:
        (new / "text").write_text("new")
        restore(tmp_path / "out")
        remove_leftovers(tmp_path)
        assert (new / "text").exists()
    assert contents(tmp_path / "out") == {"text": "new"}


def test_a_link_is_replaced_and_what_it_led_to_is_kept(tmp_path):
    old_target(tmp_path)
    (tmp_path / "link").symlink_to("out")
    with replacing(tmp_path / "link") as new:
        (new / "text").write_text("new")
    assert contents(tmp_path / "link") == {"text": "new"}
    assert not (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "out") == OLD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


def test_hidden_folders_of_others_are_no_leftovers(tmp_path):
    mine = tmp_path / ".out.0123abcd"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    remove_leftovers(tmp_path)
    assert (mine / "thesis.tex").exists()
