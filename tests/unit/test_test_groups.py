"""Every folder of tests is run by the default suite or by a test group of launch/test.sh."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_folder_is_in_the_default_suite_or_a_group():
    default = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"])
    script = (ROOT / "launch" / "test.sh").read_text()
    names = set(re.search(r'^groups="(.+)"$', script, re.MULTILINE)[1].split())
    groups = {f"tests/{name}" for name in names - {"default", "oldest"}}  # oldest: the default suite, other packages
    folders = {
        f"tests/{file.parent.name}"
        for file in (ROOT / "tests").glob("*/**/test_*.py")
        if file.parents[1].name == "tests"
    }
    assert folders <= default | groups
    assert default & groups == {"tests/gpu", "tests/vllm"}, "these two skip themselves where they cannot run"
