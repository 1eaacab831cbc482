"""What a benchmark writes down beside its figures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from distill_rl.system import environment
from tests.bench import record


def test_another_benchmarks_new_figures_do_not_make_a_tree_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, code = tmp_path / "docs/benchmarks/losses.json", tmp_path / "code.py"
    figures.parent.mkdir(parents=True)
    for path in (figures, code):
        path.write_text("{}")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    figures.write_text("{1}")
    assert not record.commit()["dirty"]
    code.write_text("{1}")
    assert record.commit()["dirty"]
