"""The page starts with the verdict and shows every figure."""

from __future__ import annotations

from typing import Any

from tests.gpu.check.page import WIDTH, headline, render

GPU = {
    "name": "NVIDIA H200", "gib": 139.8, "free_gib": 139.1, "multiprocessors": 132, "capability": "9.0", "l2_mib": 60,
}  # fmt: skip
MACHINE = {
    "python": "3.12.3",
    "packages": {"torch": "2.11.0+cu130", "transformers": "5.17.0"},
    "optional": {"triton": "3.6.0", "flash_attn": None},
    "cpu": {"name": "a processor", "cores": 16, "threads": 8},
    "settings": {"OMP_NUM_THREADS": "8"},
    "commit": "0123456789abcdef",
    "dirty": True,
    "cuda": "13.0",
    "gpus": [GPU, GPU],
    "driver": "580.1",
    "cudnn": "9.10.2",
    "nccl": "2.28.3",
    "allocator": "native",
}


def content(*parts: dict[str, Any], state: str = "done") -> dict[str, Any]:
    filled = [{"title": f"what {part['name']} shows", "status": "ok", "seconds": 1.25, **part} for part in parts]
    failures = [part["name"] for part in filled if part["status"] in ("failed", "timed out")]
    return {
        "state": state, "started": "2026-01-02T03:04:05+00:00", "seconds": 12.6, "machine": MACHINE, "failures": failures,
        "call": {"device": "cuda", "tiny": False, "ray": True, "budget": "570 s"}, "parts": filled,
    }  # fmt: skip


def test_the_first_line_is_the_verdict():
    failed = content(
        {"name": "a"}, {"name": "b", "status": "failed", "reason": "off"}, {"name": "c", "status": "skipped"}
    )
    assert headline(failed) == "GPU check: 1 of 3 parts ok, 1 not ok (b), 1 skipped; 13 s"
    stopped = content({"name": "a"}, {"name": "b", "status": "waiting"}, state="stopped by SIGTERM")
    assert headline(stopped) == "GPU check: 1 of 2 parts ok, 1 not done; 13 s; stopped by SIGTERM"
    assert render(failed).splitlines()[0] == headline(failed)


def test_equal_gpus_are_listed_once():
    lines = render(content()).splitlines()
    assert (
        "GPU         2 × NVIDIA H200, 139.8 GiB (139.1 free), 132 multiprocessors, compute capability 9.0, L2 60 MiB"
        in lines
    )
    assert "driver      driver 580.1, CUDA 13.0, cuDNN 9.10.2, NCCL 2.28.3; allocator native" in lines
    assert "optional    triton 3.6.0; not installed: flash_attn" in lines
    assert "code        commit 0123456789ab, with changes" in lines
    assert "called      device cuda, ray, budget 570 s; 2026-01-02T03:04:05+00:00" in lines


def test_failed_parts_show_their_reason():
    page = render(content({"name": "a"}, {"name": "b", "status": "failed", "reason": "off by 1"}))
    rows = {line.split()[0]: line for line in page.splitlines() if line[:2] in ("a ", "b ")}
    assert rows["a"].split(maxsplit=3)[2:] == ["1.2", "what a shows"]
    assert rows["b"].endswith("off by 1")


def test_tables_keep_columns_with_missing_values():
    rows = [{"kernel": "first", "ms": 1.5, "of bound": 0.25}, {"kernel": "second", "ms": "out of memory", "none": None}]
    lines = render(content({"name": "a", "figures": {"copy, GB/s": 4312.7, "kernels": rows}})).splitlines()
    start = lines.index("a: what a shows")
    assert lines[start + 1 : start + 5] == [
        "  copy, GB/s  4,313",
        "  kernel  ms             of bound",
        "  first   1.5                0.25",
        "  second  out of memory         –",
    ]


def test_many_figures_are_set_in_columns():
    figures = {f"error {i}": i / 1e7 for i in range(1, 31)}
    page = render(content({"name": "a", "figures": figures}))
    assert max(map(len, page.splitlines())) <= WIDTH
    assert all(f"error {i} " in page for i in range(1, 31))
    assert sum("error" in line for line in page.splitlines()) < 10


def test_text_of_a_part_replaces_its_figures():
    page = render(content({"name": "a", "text": "two\nlines", "figures": {"x": 1}}))
    assert page.endswith("a: what a shows\n  two\n  lines\n")
