"""What runs on the cluster: `distill-rl train`, whose exit code goes to the log, too.

Ray stops a job by SIGTERM and remembers no exit code of it; a SIGTERM before `train` listens would be no answer; and Ray's
processes, of which this is a child, block SIGINT, or a shell that started Ray in the background has it ignored.
"""

from __future__ import annotations

import runpy
import signal
import sys
from types import FrameType

from distill_rl.service.runs import ENDED
from distill_rl.system.signals import EXIT_PREEMPTED


def main(config: str) -> int:
    signal.signal(signal.SIGTERM, _outside_of_the_run)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.argv[:] = ["distill-rl", "train", "-c", config]
    runpy.run_module("distill_rl", run_name="__main__")
    return 0


def _outside_of_the_run(number: int, frame: FrameType | None) -> None:
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
