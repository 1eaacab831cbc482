"""The command that adds an extra is one that works where the package is installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from distill_rl.system import environment
from distill_rl.system.environment import PACKAGE, clone, install_extra

ROOT = PACKAGE.parent

TEXTS = ("README.md", "docs/*.md", "configs/**/*.yaml", "launch/*", "distill_rl/**/*.py")


def test_clone_is_installed_again_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/pip")
    monkeypatch.setattr(environment.sys, "executable", "/my venv/bin/python")
    assert install_extra("liger") == f"'/my venv/bin/python' -m pip install -e '{ROOT}[liger]'"
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/my venv/bin/pip")
    assert install_extra("liger") == f"pip install -e '{ROOT}[liger]'"


def test_elsewhere_the_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "PACKAGE", tmp_path / "distill_rl")
    assert clone() is None
    assert re.search(r" install 'liger-kernel[<>=.,0-9]+'$", install_extra("liger"))
    assert re.search(r" install vllm==[.0-9]+$", install_extra("vllm")), "without its marker"


def test_no_text_names_a_package_that_is_not_published() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in (file for pattern in TEXTS for file in ROOT.glob(pattern) if file.is_file()):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip install ['\"]?distill[_-]rl", text), file
        named = re.findall(r"pip install -e '\.\[(\w+)\]'|install_extra\([\"'](\w+)[\"']\)", text)
        assert {name for pair in named for name in pair if name} <= set(extras), file
