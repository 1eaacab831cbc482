"""Folders that are made once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from distill_rl.system.made_folder import made_once, point_at


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
