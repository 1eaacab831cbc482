"""The process of a job on the cluster: `distill-rl train`, with its exit code as the last line of the log.

- Ray keeps no exit code of a job that it stopped (by SIGTERM), so the code is logged.
- A SIGTERM before `train` has installed its handlers would end the process without an exit code of ours, so it is
  handled here.
- SIGINT may be blocked by Ray's processes, the parents of this one, or ignored if a shell started Ray in the
  background, so it is restored.
"""

from __future__ import annotations

import runpy
import signal
import sys
from types import FrameType

from distill_rl.service.runs import ENDED
from distill_rl.system.signals import EXIT_PREEMPTED


def main(config: str) -> int:
    """Runs `distill-rl train` with a configuration file in this process.

    Changes the process's signal handling and `sys.argv`. Returns 0 only if `train` ends without `SystemExit`.

    Args:
        config: path of the file.

    Raises:
        SystemExit: with the exit code of `train`; the normal end.
    """
    signal.signal(signal.SIGTERM, _stop_before_the_run)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.argv[:] = ["distill-rl", "train", "-c", config]
    runpy.run_module("distill_rl", run_name="__main__")
    return 0


def _stop_before_the_run(signal_number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM outside the run: prints a line and exits with 85, like a run that was stopped and saved."""
    print("stopped outside of the run", flush=True)
    raise SystemExit(EXIT_PREEMPTED)


if __name__ == "__main__":
    code = 1
    try:
        code = main(*sys.argv[1:])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"{ENDED}{code}", flush=True)
    sys.exit(code)
