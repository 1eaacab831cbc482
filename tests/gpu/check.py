"""Shows in one call what works on a GPU and how fast: `bash launch/gpu_check.sh`; docs/gpu.md explains it.

Each part is tests of this folder, run by a pytest process of its own under a time limit, so that a part that fails, hangs
or crashes loses only its own result. The plugin in `conftest` writes what they found, `page` shows it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import IO, Any

ROOT = Path(__file__).parents[2]
REQUIRED = ("torch", "transformers", "numpy", "safetensors", "pytest", "rich")
BUDGET_S = 570.0
"""Under ten minutes, with a margin for writing the page."""
LOG = "gpu_check.log"
_LEAST_S = 5.0
"""A part is not started with less time than this."""
_MARGIN_S = 15.0
"""Seconds of its limit that are kept from a part's measurements, for starting up and writing the outcome."""
_GRACE_S = 20.0
"""For a part at its limit to stop Ray or to write its stacks, before it is killed."""
_DEATH_S = 10.0
"""For processes to disappear after SIGKILL."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the GPU check."""

    name: str
    title: str
    tests: tuple[str, ...]
    """pytest's arguments: files or tests, relative to the repository."""
    limit_s: float = 90.0
    """Seconds after which the part is killed."""
    reserve_s: float = 0.0
    """Seconds of the total budget that earlier parts must leave for this one."""
    needs: tuple[str, ...] = ()
    """The part is skipped if one of these packages is missing."""


def _part(name: str, title: str, limit_s: float = 90.0, reserve_s: float = 0.0) -> Part:
    return Part(name, title, (f"tests/gpu/test_{name}.py",), limit_s, reserve_s)


MACHINE = Part("machine", "facts about this machine", ("tests/gpu/test_environment.py::test_facts",), limit_s=120)
PARTS = (
    Part(
        "environment",
        "matrix products against fp64, and what the machine has",
        ("tests/gpu/test_environment.py", f"--deselect={MACHINE.tests[0]}"),
    ),
    Part(
        "losses",
        "losses against the fp64 oracle",
        ("tests/gpu/test_losses.py", "tests/gpu/test_cross_tokenizer.py"),
        limit_s=120,
    ),
    _part("attention", "every attention path gives the same logits and gradients"),
    _part("student", "loss and gradient of StudentEngine against fp64 on the CPU", 120),
    _part("teacher", "targets of TeacherEngine against fp64 on the CPU"),
    _part("step", "one training step: fused optimizer, gradient accumulation, no needless synchronisation"),
    _part("resume", "the same bits from run to run, and after a checkpoint", 120),
    _part("transport", "targets from one process to another"),
    Part("dp", "the dynamic programme of the alignment", ("tests/gpu/test_align_dp.py",), limit_s=120),
    _part("kernels", "kernels against the limits of bandwidth and FLOP/s", 110, 30),
    _part("comparison", "losses beside plain torch and Liger-Kernel, at the shape of Liger's figures", 150, 40),
    _part("throughput", "teacher and student with real shapes, beside the cost model", 240, 200),
)
"""In the order in which they run: correctness first, then measurements."""

_PIPELINE = "tests/gpu/test_pipeline.py"
_FILES = [test for part in PARTS for test in part.tests if test.endswith(".py")]
RAY_PARTS = (
    Part(
        "gpu-tests",
        "the other tests in tests/gpu, with CUDA IPC between processes and whole runs",
        ("tests/gpu", *(f"--ignore={file}" for file in (*_FILES, _PIPELINE))),
        limit_s=420,
        needs=("ray", "omegaconf"),
    ),
    Part(
        "pipeline",
        "`distill-rl train` with real shapes, student and teacher on one GPU",
        (_PIPELINE,),
        limit_s=300,
        needs=("ray", "omegaconf"),
    ),
)
"""Added by `--ray`."""


class Stopped(Exception):
    """A signal has asked the GPU check to stop."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def main(
    argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS, ray_parts: Sequence[Part] = RAY_PARTS
) -> int:
    """Runs the chosen parts, prints each result as it comes, writes the page after each, and returns the exit code.

    Returns:
        0: no part failed; 1: a part failed, timed out or was not run in time; 2: bad input, a required package is
        missing, or `--device cuda` without a GPU; 130 or 143: stopped by SIGINT or SIGTERM.

    Raises:
        SystemExit: from argparse, after `--help` (code 0) or for an option that it cannot parse (code 2).
        OSError: the page cannot be written.
    """
    options = _parser().parse_args(argv)
    if options.list:
        for part in (*parts, *ray_parts):
            print(f"{part.name:<12} {part.title}{'; with --ray' if part in ray_parts else ''}")
        return 0
    try:
        chosen = _chosen(options, (*parts, *ray_parts) if options.ray else parts)
        out = _writable(options.out)
    except ValueError as error:
        return _refuse(str(error))
    if missing := [name for name in REQUIRED if find_spec(name) is None]:
        return _refuse(
            f"{sys.executable}: must have {', '.join(REQUIRED)}; {', '.join(missing)} not found; "
            "set DISTILL_RL_PYTHON to another Python"
        )
    from tests.gpu import page

    _adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    call = {name: getattr(options, name) for name in ("device", "tiny", "ray")} | {"budget": f"{options.budget_s:g} s"}
    record: dict[str, Any] = {
        "format": 1, "state": "running", "started": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": 0.0,
        "call": call, "machine": {}, "failures": [],
        "parts": [{"name": part.name, "title": part.title, "status": "waiting"} for part in chosen],
    }  # fmt: skip
    began, before, code = monotonic(), _children(), 0
    try:
        machine = run_part(MACHINE, options, out, MACHINE.limit_s)
        record["machine"] = machine.get("figures", {})
        if machine["status"] != "ok":
            record["parts"].insert(0, {"name": MACHINE.name, "title": MACHINE.title, **machine})
            print(f"machine: {machine['status']}: {machine['reason']}", flush=True)
        elif options.device == "cuda" and not record["machine"]["gpus"]:
            (out / LOG).unlink()
            why = record["machine"]["why_no_gpu"]
            return _refuse(f"--device cuda: needs a GPU; {why}; see --device cpu --tiny")
        for part, entry, limit_s in zip(
            chosen, record["parts"][-len(chosen) :], _limits(chosen, began, options.budget_s)
        ):
            print(f"[{monotonic() - began:4.0f} s] {part.name:<12} ", end="", flush=True)
            spent = {"status": "not run", "reason": f"the budget of {options.budget_s:.0f} s is spent", "seconds": 0.0}
            entry |= spent if limit_s < _LEAST_S else run_part(part, options, out, limit_s)
            print(f"{entry['status']:<9} {entry['seconds']:6.1f} s  {entry['reason']}".rstrip(), flush=True)
            record["seconds"] = round(monotonic() - began, 1)
            page.write(out, record)
        record["state"] = "done"
    except Stopped as stopped:
        _end(before)
        record["state"], code = f"stopped by {stopped}", stopped.exit_code
    record["seconds"] = round(monotonic() - began, 1)
    page.write(out, record)
    print(f"\n{page.headline(record)}\n{out / page.TEXT}, {page.JSON} and {LOG} beside it", flush=True)
    return code or int(bool(record["failures"]))


def _limits(parts: Sequence[Part], began: float, budget_s: float) -> Iterator[float]:
    """Yields the limit of each part at the time when it is asked for.

    A part gets the smaller of its own limit and what is left of the budget after the reserves of later parts.
    """
    for i, part in enumerate(parts):
        reserved_s = sum(later.reserve_s for later in parts[i + 1 :])
        yield min(part.limit_s, began + budget_s - monotonic() - reserved_s)


def run_part(part: Part, options: argparse.Namespace, out: Path, limit_s: float) -> dict[str, Any]:
    """Runs one part under a time limit, with its output in the log, and kills everything that it has started.

    Returns:
        `status` (ok, failed, timed out or skipped), `reason` in one line, `seconds`, and what the part's process wrote:
        `figures`, `text`, which the page shows instead of them, and `peak_gib`, if it used CUDA.
    """
    if missing := [name for name in part.needs if find_spec(name) is None]:
        return {"status": "skipped", "reason": f"needs {', '.join(missing)}, not installed here", "seconds": 0.0}
    began, before = monotonic(), _children()
    with (
        tempfile.TemporaryDirectory(prefix="gpu_check-") as folder,
        (out / LOG).open("wb" if part is MACHINE else "ab") as log,
    ):
        path = Path(folder, "outcome.json")
        log.write(f"\n== {part.name}, limit {limit_s:.0f} s\n".encode())
        log.flush()
        command = [
            *(sys.executable, "-m", "pytest", "-s", "-v", "--override-ini=filterwarnings=default"),
            *(f"--device={options.device}", *["--tiny"] * options.tiny),
            *(f"--budget-s={max(limit_s - _MARGIN_S, 1)}", f"--outcome={path}", f"--parent={os.getpid()}", *part.tests),
        ]
        try:
            code = _wait(command, _environment(part, options.device, folder), log, limit_s, bool(part.needs))
        finally:
            _end(before)
        outcome: dict[str, Any] = {"status": "ok", "reason": "", "figures": {}, "text": ""}
        if path.exists():
            outcome = json.loads(path.read_text("utf-8"), parse_constant=str)
    outcome["seconds"] = round(monotonic() - began, 2)
    if code is None:
        outcome |= {"status": "timed out", "reason": f"not done after {limit_s:.0f} s; see {LOG}"}
    elif code not in (0, 1, 2, 5) or (code and outcome["status"] == "ok"):  # not one of pytest's for what it has told
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        outcome |= {"status": "failed", "reason": f"{how}; {_last_line(out / LOG)}"}
    return outcome


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-8192:].decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _environment(part: Part, device: str, folder: str) -> Mapping[str, str]:
    """The environment of a part: this process's, with defaults for a machine without a network, and overrides."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    overrides = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    overrides["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the same tests wherever they run
    if device == "cpu":
        overrides["CUDA_VISIBLE_DEVICES"] = ""
    if not part.needs:  # the paths of Ray's sockets must be short
        overrides["TMPDIR"] = folder
    return defaults | os.environ | overrides


def _wait(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], limit_s: float, stops_ray: bool
) -> int | None:
    """Runs a command; its exit code, negative for a signal, or None if it was not done at its limit.

    A command at its limit gets SIGINT, if it must stop Ray, or SIGABRT, at which Python's fault handler writes all stacks.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT if stops_ray else signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        return None
    finally:
        _forget_exports(process.pid)


def _adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants, so that `_end` finds them (only on Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    """The process ids of this process's children; empty where there is no /proc."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(file.parent.name))
    return found


def _end(before: set[int]) -> None:
    """Kills all children but those from before, then the children that these leave to this process, and so on.

    A process that the kernel cannot kill, such as one stuck in a driver call, is given up after `_DEATH_S`.
    """
    deadline = monotonic() + _DEATH_S
    while (pids := _children() - before) and monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            _forget_exports(pid)
        sleep(0.01)


def _forget_exports(pid: int) -> None:
    """Removes torch's counters of GPU memory that a process shared, which stay behind if it is killed."""
    for file in Path("/dev/shm").glob(f"torch_{pid}_*"):
        file.unlink(missing_ok=True)


def _stop(number: int, _: FrameType | None) -> None:
    """Raises `Stopped` at the first signal and ignores later ones, so that the clean-up, whose time is bounded, can end."""
    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, signal.SIG_IGN)
    raise Stopped(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Shows what works on this GPU and how fast, and writes a page into a folder"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the GPU check itself")
    parser.add_argument("--ray", action="store_true", help="also run the parts that need Ray and OmegaConf")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--only", metavar="PART,…", help="run only these parts")
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S", help="for all parts together; default: %(default)g"
    )
    parser.error = lambda line: sys.exit(_refuse(line))  # type: ignore[method-assign]
    return parser


def _chosen(options: argparse.Namespace, parts: Sequence[Part]) -> Sequence[Part]:
    """The parts to run, in their order: those of `--only`, otherwise all.

    Raises:
        ValueError: a budget that is not above 0, or an unknown part; the message is one line for the user.
    """
    if not options.budget_s > 0:
        raise ValueError(f"--budget-s: must be above 0 seconds; got {options.budget_s:g}")
    known = [part.name for part in parts]
    names = known if options.only is None else [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: must be among {', '.join(known)}; got {unknown[0]!r}")
    return [part for part in parts if part.name in names]


def _writable(out: Path) -> Path:
    """The output folder as an absolute path; it is created if missing.

    Raises:
        ValueError: it cannot be created or written to; the message is one line for the user.
    """
    out = out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ValueError(f"--out {out}: must be a folder that can be written to; {error.strerror}") from None
    return out


def _refuse(line: str) -> int:
    """Prints an error in one line to stderr and returns the exit code for bad input, 2."""
    print(f"gpu_check: error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
