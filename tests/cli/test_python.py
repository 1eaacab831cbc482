"""`distill_rl.distill` in scripts of their own, without a `__main__` guard, and the page that shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import DEADLINE_S, environment, run_python, series, temporary
from tests.unit.test_docs import DOCS, snippets

pytestmark = pytest.mark.cli

SCRIPT = """
import asyncio, os, signal, threading, time
from pathlib import Path
import distill_rl, psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
before = [signal.getsignal(number) for number in SIGNALS]
RUN = Path("runs/tiny")

def records():
    return (RUN / "metrics.jsonl").read_text().count("\\n")

def send(number, after):
    while records() <= after:
        time.sleep(0.02)
    os.kill(os.getpid(), number)

async def in_a_loop():
    return distill_rl.distill("tiny.yaml", train={"steps": 2})

first = asyncio.run(in_a_loop())
print("first", first.export == RUN.absolute() / "export", first.student().num_parameters() > 0, "train/loss" in first.metrics)

threading.Thread(target=send, args=(signal.SIGTERM, records())).start()
try:
    distill_rl.distill("tiny.yaml", resume=True, train={"steps": 100_000}, observe={"every": 1})
except distill_rl.Preempted as stopped:
    print("preempted", stopped)

threading.Thread(target=send, args=(signal.SIGINT, records())).start()
try:
    distill_rl.distill("tiny.yaml", resume="auto", train={"steps": 100_000}, observe={"every": 1})
except KeyboardInterrupt:
    print("interrupted")

print("handlers", [signal.getsignal(number) for number in SIGNALS] == before)
results = []
config = distill_rl.check("tiny.yaml", train={"steps": 1}).config
thread = threading.Thread(target=lambda: results.append(distill_rl.distill(config, clean=True)))
thread.start()
while not (RUN / "logs" / "latest" / "driver.log").exists() or thread.ident is None:
    time.sleep(0.02)
try:
    distill_rl.distill("tiny.yaml", run={"name": "other"})
except distill_rl.ConfigError as error:
    print(error)
thread.join()
print("thread", results[0].run_dir == RUN.absolute(), psutil.Process().children(recursive=True))
"""


def ended(script: str, folder: Path) -> tuple[int, str]:
    """Runs a script in a folder; returns its process id, which no longer runs, and what it printed."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-u", "script.py"]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=-1, stderr=-1, text=True)
    try:
        out, err = process.communicate(timeout=3 * DEADLINE_S)  # up to four runs, each with a Ray of its own
    finally:
        process.kill()  # Ray ends with the process that started it
    assert process.returncode == 0, err
    return process.pid, out


@pytest.mark.long_run
def test_runs_in_one_process_end_resume_and_stop(material, tmp_path: Path):
    """In an asyncio loop, in a thread, stopped by SIGTERM and by Ctrl-C; nothing is left of any."""
    config = material.config(tmp_path)
    config.write_text(config.read_text().replace(f"dir: {tmp_path / 'runs'}", "dir: runs"))
    pid, out = ended(SCRIPT, tmp_path)
    lines = out.splitlines()
    assert "first True True True" in lines
    assert next(line for line in lines if line.startswith("preempted the run in ")).endswith('resume="auto"'), out
    assert "interrupted" in lines
    assert "handlers True" in lines
    assert "distill: runs once at a time in a process; wait for the other call" in lines
    assert "thread True []" in lines
    assert [step for step, _ in series(tmp_path / "runs" / "tiny", "train/loss")] == [1]
    assert not (tmp_path / "runs" / "other").exists()
    assert temporary(pid) == []


def test_the_page_runs_and_prints_what_it_shows(cluster, tmp_path: Path):
    """The first run starts Ray; the later ones join a cluster, as the page says that they can."""
    blocks = snippets((DOCS / "python.md").read_text("utf-8"))
    assert len(blocks) == 7
    first = next(i for i, block in enumerate(blocks) if "distill_rl.distill(**settings)" in block.code)
    joins = f"settings['ray'] = {{'address': {cluster.address!r}}}\n"
    script = "".join(f"{block.code}print('=====')\n{joins if i == first else ''}" for i, block in enumerate(blocks))
    (tmp_path / "page.py").write_text(script)
    ended = run_python(["-m", "page"], environment() | cluster.variables, tmp_path, 2 * DEADLINE_S)
    assert ended.code == 0, ended.err
    printed = ended.out.split("=====\n")
    for block, text in zip(blocks, printed, strict=False):
        if block.printed is not None:
            assert text.rstrip() == block.printed.rstrip(), f"python.md:{block.line}"
