"""docs/first-day.md: every command prints what the page shows."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.command import environment
from tests.helpers.quickstart_contract import SEED, finish
from tests.helpers.walkthrough import commands, run

pytestmark = pytest.mark.cli

ROOT = Path(__file__).parents[2]
STEPS = 100
"""No line of the page depends on how long the quickstart has trained."""


def test_the_first_day_prints_what_its_page_shows(tmp_path):
    """In a folder with the quickstart's material. Its seed is another, which no line depends on."""
    finished = finish("quickstart", tmp_path / "quickstart", STEPS)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / ".cache" / "quickstart").mkdir(parents=True)
    (tmp_path / ".cache" / "quickstart" / "seed-0").symlink_to(finished.material / f"seed-{SEED}")
    programs = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])
    for command in commands((ROOT / "docs" / "first-day.md").read_text("utf-8")):
        run(command, tmp_path, environment() | {"PATH": programs, "COLUMNS": "160"})
