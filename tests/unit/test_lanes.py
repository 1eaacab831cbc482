"""No folder of tests is forgotten: the default suite runs it, or a lane of launch/test.sh."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_folder_of_tests_is_run_by_the_default_suite_or_by_a_lane():
    default = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"])
    script = (ROOT / "launch" / "test.sh").read_text()
    names = set(re.search(r"the lanes are: ([\w, ]+)\.", script)[1].split(", "))
    lanes = {f"tests/{name}" for name in names - {"oldest"}}  # the default suite once more, with other packages
    folders = {
        f"tests/{file.parent.name}"
        for file in (ROOT / "tests").glob("*/**/test_*.py")
        if file.parents[1].name == "tests"
    }
    assert folders <= default | lanes
    assert default & lanes == {"tests/gpu", "tests/vllm"}, "these two skip themselves where they cannot run"
