"""Every folder of tests is run by the default suite or by a test group of launch/test.sh, and the groups have a table."""

import importlib.util
import io
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[2]


def test_every_test_folder_is_in_the_default_suite_or_a_group():
    default = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"])
    script = (ROOT / "launch" / "test.sh").read_text()
    names = set(re.search(r'^groups="(.+)"$', script, re.MULTILINE)[1].split())
    # oldest: the default suite with other packages; layouts: a part of tests/distributed
    groups = {f"tests/{name}" for name in names - {"default", "oldest", "layouts"}}
    folders = {
        f"tests/{file.parent.name}"
        for file in (ROOT / "tests").glob("*/**/test_*.py")
        if file.parents[1].name == "tests"
    }
    assert folders <= default | groups
    assert default & groups == {"tests/gpu", "tests/vllm"}, "these two skip themselves where they cannot run"


MODULE = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.parametrize("i", range(3))
def test_skips(i): pytest.skip("no [GPU] here")
@pytest.fixture
def broken(): raise OSError
def test_has_an_error(broken): pass
"""


def test_the_table_counts_what_pytest_reports(tmp_path):
    (tmp_path / "test_module.py").write_text(MODULE)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run([*command, f"--junitxml={report}", str(tmp_path)], capture_output=True, cwd=tmp_path)
    assert done.returncode == 1
    spec = importlib.util.spec_from_file_location("test_all", ROOT / "launch" / "test_all.py")
    groups = sys.modules["test_all"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(groups)
    counts, reasons = groups.read_report(report)
    assert counts == {"passed": 1, "failed": 2, "skipped": 3}
    results = [
        groups.Result("faults", 1, 61.0, counts, reasons),
        groups.Result("slurm", 2, 1.0, Counter(), Counter()),
    ]
    console = Console(width=160, file=io.StringIO())
    console.print(groups.table(results, Path("logs")))
    rows = [line.split(maxsplit=5) for line in console.file.getvalue().splitlines() if line.strip()][2:]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["faults", "1", "2", "3", "61", "3 × no [GPU] here"],
        ["slurm", "0", "0", "0", "1", "exit code 2: see logs/slurm.log"],
    ]
