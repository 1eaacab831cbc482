"""How a correction is listed: a frozen file that it concerns is refused, or read with a note, in its one line."""

from __future__ import annotations

import pytest

from distill_rl.errors import CheckpointError
from tests.frozen import past
from tests.frozen.past import Correction, Past, reads


def run(monkeypatch: pytest.MonkeyPatch, action, *, listed: bool, file: str = "runs/old") -> None:
    correction = Correction("labels of chats", "abc", file, "step-4: was saved with wrong labels")
    monkeypatch.setattr(past, "CORRECTIONS", (correction,) if listed else ())
    reads("runs/{name}")(lambda past, name: action())(past=Past("abc", past.FOLDER), name="old")


def refused() -> None:
    raise CheckpointError("step-4", "was saved with wrong labels")


def noted() -> None:
    print("note: step-4: was saved with wrong labels")


@pytest.mark.parametrize("action", [refused, noted])
def test_a_listed_correction_is_said_in_one_line(monkeypatch, action):
    run(monkeypatch, action, listed=True)


@pytest.mark.parametrize("action", [lambda: None, lambda: [noted(), noted()], lambda: pytest.fail("another reason")])
def test_a_listed_correction_must_be_said_once(monkeypatch, action):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(monkeypatch, action, listed=True)


def test_an_error_that_is_not_listed_fails(monkeypatch):
    for listed, file in ((False, "runs/old"), (True, "runs/other")):
        with pytest.raises(CheckpointError, match="wrong labels"):
            run(monkeypatch, refused, listed=listed, file=file)
