"""The grader with real processes and a suite that does its worst."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from distill_rl.errors import WorkerError
from distill_rl.evals.grading import grader as grader_module
from distill_rl.evals.grading.grader import Graded, Grader
from distill_rl.evals.suites.base import Item, Verdict
from distill_rl.system import processes
from tests.helpers.command import runs, until

HOSTILE = str(Path(__file__).with_name("hostile.py"))
ITEM = Item("an id", "a prompt", "42")
DEADLINE_S = 0.3
HANG_S = 1.2
MIB = 1 << 20


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    """One child, so that every test also checks the next item."""
    with Grader(workers=1, deadline_s=DEADLINE_S, memory_bytes=256 * MIB, hang_s=HANG_S) as pool:
        yield pool


def judged(pool: Grader, completion: str, item: Item = ITEM) -> Graded:
    return pool.submit(HOSTILE, item, completion).result(timeout=120)


def extracted(pool: Grader, completion: str) -> str:
    graded = judged(pool, completion)
    assert graded.outcome == "judged", graded
    assert graded.verdict is not None
    assert graded.verdict.extracted is not None
    return graded.verdict.extracted


@pytest.mark.parametrize(
    ("completion", "outcome", "detail"),
    [
        ("hang", "grader_timeout", "more than 0.3 s of processor time"),
        ("sleep", "grader_timeout", "no sign of life for 1.2 s"),
        ("allocate 300", "grader_failed", "MemoryError: "),
        ("crash", "grader_failed", "its process was ended by SIGSEGV"),
        ("abort", "grader_failed", "its process was ended by SIGABRT"),
        ("exit 0", "grader_failed", "its process ended with code 0"),
        ("exit 7", "grader_failed", "its process ended with code 7"),
        ("leave 7", "grader_failed", "SystemExit: 7"),
        ("interrupt", "grader_failed", "KeyboardInterrupt: "),
        ("raise two\nlines", "grader_failed", "ValueError: two lines"),
        ("garbage x", "grader_failed", "no valid reply"),
        ("garbage {}", "grader_failed", "no valid reply"),
        ('garbage {"done": 0, "score": 1.0, "extracted": "x"}', "grader_failed", "no valid reply"),
        ("score 2", "grader_failed", "ValueError: a score must be from 0 to 1; got 2.0"),
        ("score nan", "grader_failed", "ValueError: a score must be from 0 to 1; got nan"),
        ("odd", "grader_failed", "TypeError: `extracted` must be a text or None; got int"),
    ],
)
def test_failing_judge_costs_only_its_item(grader: Grader, completion: str, outcome: str, detail: str) -> None:
    before, bad, after = [
        grader.submit(HOSTILE, ITEM, text) for text in ("echo before", completion, "echo after")
    ]  # all at once, so that the next one waits behind the bad one
    assert bad.result(timeout=120).outcome == outcome
    assert bad.result().detail.strip() == detail.strip()
    assert bad.result().verdict is None
    assert before.result() == Graded("judged", Verdict(1.0, "before"))
    assert after.result(timeout=120) == Graded("judged", Verdict(1.0, "after"))


def test_printed_output_does_not_mix_with_replies(grader: Grader) -> None:
    assert extracted(grader, 'print {"done": 1, "score": 0.0, "extracted": null}\n' + "x" * MIB).isdigit()
    assert extracted(grader, "echo still there") == "still there"


def test_stdin_is_empty_for_the_judge(grader: Grader) -> None:
    assert extracted(grader, "input") == ""


def test_an_item_arrives_whole(grader: Grader) -> None:
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "¿\u2028\ud800?"})
    item = Item("id", messages, "A", "a task", "a prefix", (" A", " B"))
    graded = judged(grader, "item", item)
    assert graded.verdict is not None
    assert json.loads(graded.verdict.extracted or "") == ["id", list(messages), "A", "a task", "a prefix", [" A", " B"]]


@pytest.mark.parametrize("text", ["", "\x00\x1b[31m", "\ud800 lone", "a\nb\r\nc\u2028d", "é" * (3 * MIB)])
def test_texts_survive_both_ways(text: str) -> None:
    with Grader(workers=1) as pool:
        assert extracted(pool, f"echo {text}") == text


def test_children_see_no_secrets_and_hash_alike(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with Grader(workers=1) as pool:
        names = set(extracted(pool, "environment").split())
    assert {"PATH", "PYTHONHASHSEED", "HF_HUB_OFFLINE"} <= names
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HOME"} & names


def test_children_load_no_heavy_packages(grader: Grader) -> None:
    heavy = {"torch", "transformers", "datasets", "sympy", "ray", "numpy", "pyarrow"}
    assert not heavy & set(extracted(grader, "modules").split())


def test_judge_runs_in_main_thread_of_its_own_group(grader: Grader) -> None:
    assert extracted(grader, "thread") == "main"
    assert extracted(grader, "group") == extracted(grader, "pid")


def test_child_is_reused_until_items_leak_memory(grader: Grader) -> None:
    pids = [extracted(grader, deed) for deed in ("pid", "pid", "keep 100", "pid", "pid")]
    assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4]


def test_several_suites_share_a_child(grader: Grader) -> None:
    gsm8k = grader.submit("gsm8k", Item("1", "q", "18"), "so it is 18.00").result(timeout=120)
    assert gsm8k == Graded("judged", Verdict(1.0, "18.00"))
    assert extracted(grader, "echo x") == "x"


def test_every_item_of_many_is_judged_once(tmp_path: Path) -> None:
    with Grader(workers=3, deadline_s=DEADLINE_S, hang_s=HANG_S) as pool:
        deeds = [f"echo {n}" if n % 10 else ("exit 1", "hang", "raise x")[n // 10 % 3] for n in range(60)]
        futures = [pool.submit(HOSTILE, ITEM, deed) for deed in deeds]
        outcomes = [future.result(timeout=120) for future in futures]
    assert [graded.verdict.extracted if graded.verdict else graded.outcome for graded in outcomes] == [
        str(n) if n % 10 else ("grader_failed", "grader_timeout", "grader_failed")[n // 10 % 3] for n in range(60)
    ]


def test_an_item_that_has_to_wait_for_a_processor_is_judged(grader: Grader) -> None:
    assert extracted(grader, "starve 0.25") == "computed"


def test_an_item_that_was_late_is_graded_again_alone(tmp_path: Path) -> None:
    folder = tmp_path / "judges"
    folder.mkdir()
    with Grader(workers=3, deadline_s=DEADLINE_S, hang_s=600) as pool:
        others = [pool.submit(HOSTILE, ITEM, f"stay {folder / name}") for name in "ab"]
        until(lambda: len(list(folder.iterdir())) == 2, "two judges have begun")
        late = pool.submit(HOSTILE, ITEM, f"late {folder}")
        until(lambda: pool._late, "the item is late")
        assert not late.done()
        (folder / "go").touch()
        assert late.result(timeout=120) == Graded("judged", Verdict(1.0, ""))
        assert all(other.result(timeout=120).outcome == "judged" for other in others)


def test_a_late_item_is_cancelled_by_closing(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    pool = Grader(workers=2, deadline_s=DEADLINE_S, hang_s=600.0)
    busy, late = pool.submit(HOSTILE, ITEM, f"sleep {mark}"), pool.submit(HOSTILE, ITEM, "hang")
    until(lambda: mark.exists() and pool._late, "one item is late, and another one runs")
    pool.close()
    for future in (busy, late):
        with pytest.raises(CancelledError):
            future.result(timeout=0)


def test_unloadable_suite_is_reported(grader: Grader, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('of the user')")
    with pytest.raises(WorkerError, match=r"must be able to load the suite .*broken\.py.*of the user"):
        grader.submit(str(file), ITEM, "x").result(timeout=120)
    assert extracted(grader, "echo after") == "after"


def test_children_that_never_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Grader(workers=1) as pool, pytest.raises(WorkerError, match=r"must start.*ended with code 1"):
        pool.submit(HOSTILE, ITEM, "x").result(timeout=120)


def test_closing_kills_running_and_cancels_waiting_items(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    pool = Grader(workers=1, deadline_s=600)
    running, waiting = pool.submit(HOSTILE, ITEM, f"grandchild {mark}"), pool.submit(HOSTILE, ITEM, "echo x")
    until(lambda: mark.exists() and mark.read_text(), "the judge has begun")
    grandchild = psutil.Process(int(mark.read_text()))
    child = grandchild.parent()
    assert child is not None
    assert child.ppid() == psutil.Process().pid
    pool.close()
    pool.close()
    with pytest.raises(CancelledError):
        running.result(timeout=0)
    assert waiting.cancelled()
    assert not child.is_running()
    until(lambda: not runs(grandchild), "the grandchild has ended")
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(HOSTILE, ITEM, "echo x")


def test_close_may_come_from_another_thread_than_submit(tmp_path: Path) -> None:
    mark, futures = tmp_path / "pid", list[Future[Graded]]()
    pool = Grader(workers=2, deadline_s=600)
    thread = threading.Thread(target=lambda: futures.append(pool.submit(HOSTILE, ITEM, f"hang {mark}")))
    thread.start()
    thread.join()
    until(lambda: mark.exists() and mark.read_text(), "the judge has begun")
    child = psutil.Process(int(mark.read_text()))
    pool.close()
    assert not runs(child)
    assert futures[0].done()


@dataclass
class Held:
    """Drops signals to the processes whose ids are in `marks`, as if the kernel held them."""

    marks: Path
    lost: list[int] = field(default_factory=list)

    def pids(self) -> list[int]:
        return [int(text) for mark in sorted(self.marks.iterdir()) if (text := mark.read_text())]


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    there, kill = Held(tmp_path / "marks"), os.killpg
    there.marks.mkdir()

    def killpg(pid: int, number: int) -> None:
        if pid in there.pids():
            there.lost.append(pid)
        else:
            kill(pid, number)

    monkeypatch.setattr(os, "killpg", killpg)
    yield there
    for pid in there.pids():
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def test_unkillable_child_does_not_block_others(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "REAP_S", 600.0)
    with Grader(workers=2, deadline_s=DEADLINE_S, hang_s=HANG_S) as pool:
        stuck = pool.submit(HOSTILE, ITEM, f"sleep {held.marks / '1'}")
        until(lambda: held.lost, "the pool has tried to end it")
        assert [extracted(pool, deed) for deed in ("echo a", "echo b")] == ["a", "b"]
        assert judged(pool, "exit 1").outcome == "grader_failed"
        assert extracted(pool, "echo another child") == "another child"
        assert not stuck.done()
        for attempt in range(2):
            until(lambda attempt=attempt: len(held.lost) > attempt, "the pool has tried to end it")
            os.kill(held.lost[attempt], signal.SIGKILL)
        assert stuck.result(timeout=120).outcome == "grader_timeout"


def test_unkillable_child_is_abandoned(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "REAP_S", 0.01)
    with Grader(workers=1, deadline_s=DEADLINE_S, hang_s=HANG_S) as pool:
        stuck = judged(pool, f"sleep {held.marks / '1'}")
        assert stuck.outcome == "grader_timeout"
        assert len(held.lost) == 2
        assert all(runs(psutil.Process(pid)) for pid in held.lost)
        assert extracted(pool, "echo next") == "next"
        for pid in held.lost:
            os.kill(pid, signal.SIGKILL)


def test_closing_abandons_an_unkillable_child(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader_module, "REAP_S", 0.01)
    pool = Grader(workers=1, deadline_s=600)
    stuck = pool.submit(HOSTILE, ITEM, f"sleep {held.marks / '1'}")
    until(held.pids, "the judge has begun")
    pool.close()
    assert not stuck.done()
    os.kill(held.lost[0], signal.SIGKILL)
    with pytest.raises(CancelledError):
        stuck.result(timeout=120)


@pytest.mark.parametrize("deed", ["sleep", "hang"])
def test_children_die_with_a_parent_that_is_killed(deed: str, tmp_path: Path) -> None:
    busy, idle = tmp_path / "busy", tmp_path / "idle"
    script = (
        "import sys; from pathlib import Path; from distill_rl.evals.grading.grader import Grader\n"
        "from distill_rl.evals.suites.base import Item\n"
        "pool = Grader(workers=2, deadline_s=600); item = Item('a', 'b', 'c'); suite, busy, idle, deed = sys.argv[1:]\n"
        "running = pool.submit(suite, item, f'{deed} {busy}')\n"
        "pid = pool.submit(suite, item, 'pid').result().verdict.extracted\n"
        "Path(idle).write_text(pid); running.result()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, HOSTILE, str(busy), str(idle), deed])
    children: list[psutil.Process] = []
    try:
        until(lambda: all(mark.exists() and mark.read_text() for mark in (busy, idle)), "both children have judged")
        children = [psutil.Process(int(mark.read_text())) for mark in (busy, idle)]
        assert len({child.pid for child in children}) == 2
        assert all(runs(child) for child in children)
    finally:
        parent.kill()
        parent.wait()
    try:
        until(lambda: not any(runs(child) for child in children), "the children have ended", deadline_s=20)
    finally:
        for child in filter(runs, children):
            child.kill()


def test_process_exit_without_close_leaves_no_child(tmp_path: Path) -> None:
    script = (
        "import sys; from distill_rl.evals.grading.grader import Grader; from distill_rl.evals.suites.base import Item\n"
        "pool = Grader(workers=1)\n"
        "print(pool.submit(sys.argv[1], Item('a', 'b', 'c'), 'pid').result().verdict.extracted)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, HOSTILE], capture_output=True, text=True, timeout=120, check=True
    )
    until(lambda: not psutil.pid_exists(int(done.stdout)), "the child has ended", deadline_s=20)
