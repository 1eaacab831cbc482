"""The quickstart from the command line, with one tokenizer and half as long as a user's, and the first day after it."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.command import environment
from tests.helpers.quickstart_contract import SEED, QuickstartContract, finish
from tests.helpers.walkthrough import commands, run

pytestmark = pytest.mark.cli

ROOT = Path(__file__).parents[2]
STEPS = 300
"""The quickstart itself takes 600 steps. After 300 the gap between the two students is as wide: 0.75 against 0.47."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish("quickstart", tmp_path_factory.mktemp("quickstart"), STEPS)


class TestQuickstart(QuickstartContract):
    def test_the_summary_names_no_chunks(self, finished):
        assert "one_to_one_share" not in finished.summary


def test_the_first_day_prints_what_its_page_shows(finished, tmp_path):
    """docs/first-day.md, in a folder with the quickstart's material. Its seed is another, which no line depends on."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / ".cache" / "quickstart").mkdir(parents=True)
    (tmp_path / ".cache" / "quickstart" / "seed-0").symlink_to(finished.material / f"seed-{SEED}")
    programs = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])
    for command in commands((ROOT / "docs" / "first-day.md").read_text("utf-8")):
        run(command, tmp_path, environment() | {"PATH": programs, "COLUMNS": "160"})
