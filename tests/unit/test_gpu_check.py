"""The GPU check: parts do not affect each other, every way in which one can end is reported, and the page shows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from tests.gpu import check
from tests.gpu.check import PARTS, RAY_PARTS, ROOT, Part
from tests.gpu.conftest import Figures
from tests.gpu.material import largest
from tests.gpu.page import WIDTH, headline, render

PROGRAM = """\
import sys
from tests.gpu import check
from tests.gpu.samples import PARTS
sys.exit(check.main(sys.argv[1:], PARTS))
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """All sample parts, run once: the output folder, the record, and the lines that were printed."""
    out, temporary = tmp_path_factory.mktemp("samples"), tmp_path_factory.mktemp("temporary")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PROGRAM, "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 1
    assert list(temporary.iterdir()) == [], "no temporary folder is left"
    return out, json.loads((out / "gpu_check.json").read_text()), done.stdout.splitlines()


def test_every_end_of_a_part_has_its_status_and_reason(samples) -> None:
    _, record, lines = samples
    assert {part["name"]: (part["status"], part["reason"].partition("; ")[0]) for part in record["parts"]} == {
        "well": ("ok", ""),
        "wrong": ("failed", "gradient: 0.3, more than 0.25"),
        "raises": ("failed", "KeyError: 'a setting'"),
        "skips": ("skipped", "needs two GPUs"),
        "crashes": ("failed", "killed by SIGSEGV"),
        "leaves": ("failed", "exit code 7"),
        "hangs": ("timed out", "not done after 20 s"),
        "absent": ("failed", "exit code 4"),
        "broken": ("skipped", "needs a_package_that_is_not_there, not installed here"),
    }
    assert "no match" in record["parts"][7]["reason"], "the last line of output"
    assert record["failures"] == ["wrong", "raises", "crashes", "leaves", "hangs", "absent"]
    assert [line.split("] ")[1].split()[0] for line in lines[:9]] == [part["name"] for part in record["parts"]]


def test_figures_are_kept_in_order_also_of_a_part_that_fails(samples) -> None:
    _, record, _ = samples
    figures = {part["name"]: part.get("figures") for part in record["parts"]}
    assert list(figures["well"]) == ["error", "budget", "rows"]
    assert (figures["well"]["error"], figures["well"]["rows"]) == (1e-7, [{"name": "first", "ms": "NaN"}])
    assert 0 < figures["well"]["budget"] < 120, "less than the limit of the part"
    assert figures["wrong"] == {"gradient": 0.2}, "the largest of those within the bound"


def test_the_log_has_output_tracebacks_and_stacks(samples) -> None:
    out, _, _ = samples
    log = (out / check.LOG).read_text()
    sections = {text.split(",")[0]: text for text in log.split("\n== ")[1:]}
    assert "printed by a part" in sections["well"]
    assert "raise KeyError" in sections["raises"]
    assert "in test_crashes" in sections["crashes"]
    assert "in test_hangs" in sections["hangs"]


def test_a_hanging_part_is_killed_with_its_children(samples) -> None:
    out, _, _ = samples
    child = int(re.search("child ([0-9]+)", (out / check.LOG).read_text())[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).create_time() > (out / "gpu_check.txt").stat().st_mtime


def test_the_first_line_of_the_page_is_the_verdict(samples) -> None:
    out, record, lines = samples
    page = (out / "gpu_check.txt").read_text()
    assert page.splitlines()[0] == headline(record) == lines[-2]
    assert lines[-2].startswith(
        "GPU check: 1 of 9 parts ok, 6 not ok (wrong, raises, crashes, leaves, hangs, absent), 2 skipped; "
    )
    assert page == render(record)
    assert max(map(len, page.splitlines())) <= WIDTH


def test_a_part_gets_the_budget_less_the_reserves_of_later_ones() -> None:
    parts = (Part("a", "", ()), Part("b", "", (), limit_s=290, reserve_s=60), Part("c", "", (), reserve_s=10))
    first, second, third = check._limits(parts, monotonic() - 200, budget_s=300)
    assert first == pytest.approx(30, abs=1)
    assert second == pytest.approx(90, abs=1)
    assert third == 90, "its own limit"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--only", "student,novelty"], "--only: must be among environment, "),
        (["--only", "pipeline"], "got 'pipeline'"),
        (["--budget-s", "0"], "--budget-s: must be above 0 seconds; got 0"),
        (["--out", "/proc/nobody/can"], "--out /proc/nobody/can: must be a folder that can be written to; "),
    ],
)
def test_bad_input_exits_2_with_one_line(arguments, line, capsys) -> None:
    assert check.main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("gpu_check: error: ")
    assert line in error


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--novelty"], ["--budget-s", "long"]])
def test_unknown_options_are_refused_in_one_line(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        check.main(arguments)
    assert exit.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert arguments[0] in error


def test_the_parts_are_listed_in_their_order(capsys) -> None:
    assert check.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in (*PARTS, *RAY_PARTS)]
    assert [line.endswith("; with --ray") for line in lines] == [False] * len(PARTS) + [True] * len(RAY_PARTS)


def test_selected_parts_keep_the_order_of_the_table() -> None:
    options = check._parser().parse_args(["--only", "kernels, student"])
    assert [part.name for part in check._chosen(options, PARTS)] == ["student", "kernels"]


def test_every_file_of_the_folder_is_in_one_part() -> None:
    files = [test for part in (*PARTS, *RAY_PARTS) for test in part.tests if test.endswith(".py") and test[0] != "-"]
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert len(set(files)) == len(files)
    rest = next(part for part in RAY_PARTS if part.name == "gpu-tests")
    assert sorted(rest.tests) == sorted(["tests/gpu", *(f"--ignore={file}" for file in files)])


def test_the_reserve_leaves_time_for_other_parts() -> None:
    assert sum(part.reserve_s for part in PARTS) < check.BUDGET_S / 2
    assert all(part.reserve_s <= part.limit_s for part in PARTS)


GPU = {
    "name": "NVIDIA H200", "gib": 139.8, "free_gib": 139.1, "multiprocessors": 132, "capability": "9.0", "l2_mib": 60,
}  # fmt: skip
MACHINE = {
    "python": "3.12.3", "packages": {"torch": "2.11.0+cu130"}, "optional": {"triton": "3.6.0", "flash_attn": None},
    "cpu": {"name": "a processor", "cores": 16, "threads": 8}, "settings": {"OMP_NUM_THREADS": "8"},
    "commit": "0123456789abcdef", "dirty": True, "cuda": "13.0", "gpus": [GPU, GPU], "driver": "580.1",
    "cudnn": "9.10.2", "nccl": "2.28.3", "allocator": "native",
}  # fmt: skip


def record_of(figures: dict[str, Any], **more: Any) -> dict[str, Any]:
    part = {"name": "a", "title": "what a shows", "status": "ok", "seconds": 1.25, "figures": figures, **more}
    return {
        "state": "stopped by SIGTERM", "started": "2026-01-02", "seconds": 12.6, "machine": MACHINE, "failures": [],
        "call": {"device": "cuda", "tiny": False, "ray": True, "budget": "570 s"},
        "parts": [part, {"name": "b", "title": "", "status": "waiting"}],
    }  # fmt: skip


def test_the_head_shows_the_machine_with_equal_gpus_once() -> None:
    page = render(record_of({}, peak_gib=2.34))
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert lines[0] == "GPU check: 1 of 2 parts ok, 1 not done; 13 s; stopped by SIGTERM"
    for line in (
        "GPU 2 × NVIDIA H200, 139.8 GiB (139.1 free), 132 multiprocessors, compute capability 9.0, L2 60 MiB",
        "driver driver 580.1, CUDA 13.0, cuDNN 9.10.2, NCCL 2.28.3; allocator native",
        "optional triton 3.6.0; not installed: flash_attn",
        "code commit 0123456789ab, with changes",
        "called device cuda, ray, budget 570 s; 2026-01-02",
        "a ok 1.2 2.3 what a shows",
    ):
        assert line in lines


def test_tables_keep_columns_with_missing_values() -> None:
    rows = [{"kernel": "first", "ms": 1.5, "of bound": 0.25}, {"kernel": "second", "ms": "out of memory", "none": None}]
    lines = render(record_of({"copy, GB/s": 4312.7, "kernels": rows})).splitlines()
    start = lines.index("a: what a shows")
    assert lines[start + 1 : start + 5] == [
        "  copy, GB/s  4,313",
        "  kernel  ms             of bound",
        "  first   1.5                0.25",
        "  second  out of memory         –",
    ]


def test_text_of_a_part_replaces_its_figures() -> None:
    assert render(record_of({"x": 1}, text="two\nlines")).endswith("a: what a shows\n  two\n  lines\n")


@pytest.mark.parametrize("error", [0.3, float("nan")])
def test_an_error_above_its_bound_fails_and_is_not_kept(error: float) -> None:
    figures = Figures()
    figures.within("gradient", 0.1, 0.25)
    with pytest.raises(AssertionError, match="gradient: "):
        figures.within("gradient", error, 0.25)
    assert figures == {"gradient": 0.1}


@pytest.mark.parametrize("errors", [[float("nan"), 1.0], [1.0, float("nan")]])
def test_the_largest_of_several_errors_is_nan_if_any_is(errors: list[float]) -> None:
    assert largest([*errors, 2.0]) != largest([*errors, 2.0])
    assert largest(iter([1e-3, 0.1, 2e-9])) == 0.1
