"""What the benchmark of the quickstart across tokenizers sets is allowed."""

from __future__ import annotations

from distill_rl.bench.runs.quickstart_cross import CONFIG, ONLY_ONE_TO_ONE
from distill_rl.config.load import load_config
from distill_rl.config.rules.validate import problems


def test_the_settings_of_every_student_are_accepted() -> None:
    for overrides in ([], [ONLY_ONE_TO_ONE]):
        assert list(problems(load_config(CONFIG, overrides))) == []
