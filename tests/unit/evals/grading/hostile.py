"""A suite whose judge executes the completion: a command of `DEEDS`, with the rest as its argument."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distill_rl.evals.suites.base import Item, Questions, Verdict

KEPT: list[bytearray] = []
MIB = 1 << 20


def _echo(text: str) -> str:
    return text


def _hang(mark: str) -> str:
    _mark(mark)
    while True:
        pass


def _sleep(mark: str) -> str:
    _mark(mark)
    while True:
        time.sleep(3600)


def _starve(seconds: str) -> str:
    """Computes for that long, a tenth of the time, as a process among many does."""
    end = time.process_time() + float(seconds)
    while (begin := time.process_time()) < end:
        while time.process_time() < begin + 0.01:
            pass
        time.sleep(0.1)
    return "computed"


def _stay(mark: str) -> str:
    """Leaves a mark until a file `go` lies beside it."""
    _mark(mark)
    while not Path(mark).with_name("go").exists():
        time.sleep(0.01)
    Path(mark).unlink()
    return "gone"


def _late(folder: str) -> str:
    """Hangs at the first attempt; returns which marks there are at the second one."""
    tried = Path(f"{folder}-tried")
    if not tried.exists():
        _hang(str(tried))
    return " ".join(mark.name for mark in Path(folder).iterdir() if mark.name != "go")


def _mark(path: str) -> None:
    if path:
        Path(path).write_text(str(os.getpid()))


def _allocate(mebibytes: str) -> str:
    return str(len(bytearray(int(mebibytes) * MIB)))


def _keep(mebibytes: str) -> str:
    KEPT.append(bytearray(int(mebibytes) * MIB))
    return _pid("")


def _pid(text: str) -> str:
    return str(os.getpid())


def _group(text: str) -> str:
    return str(os.getpgid(0))


def _crash(text: str) -> str:
    return ctypes.string_at(0).decode()


def _abort(text: str) -> str:
    os.abort()


def _exit(code: str) -> str:
    os._exit(int(code))


def _leave(code: str) -> str:
    sys.exit(int(code))


def _raise(text: str) -> str:
    raise ValueError(text)


def _interrupt(text: str) -> str:
    raise KeyboardInterrupt


def _print(text: str) -> str:
    print(text, flush=True)
    print(text, file=sys.stderr)
    os.write(1, text.encode())
    return str(len(text))


def _input(text: str) -> str:
    return sys.stdin.read()


def _garbage(text: str) -> str:
    """Writes into every open stream, which no library does."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, text.encode() + b"\n")
        except OSError:
            continue
    return text


def _environment(text: str) -> str:
    return " ".join(sorted(os.environ))


def _modules(text: str) -> str:
    return " ".join(sorted(sys.modules))


def _thread(text: str) -> str:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # raises in any thread but the main one
    return "main"


def _item(text: str) -> str:
    item = _seen[-1]
    return json.dumps([item.id, item.prompt, item.answer, item.task, item.prefix, item.choices])


def _grandchild(mark: str) -> str:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(mark).write_text(str(child.pid))
    return _sleep("")


_seen: list[Item] = []
DEEDS = {name.removeprefix("_"): deed for name, deed in list(globals().items()) if callable(deed) and name[0] == "_"}


class Hostile:
    name = "hostile"
    title = "executes the completion"
    num_fewshot = 0
    max_fewshot = 0
    chat = False
    max_new_tokens = None
    stop = ()

    def load(self, data: Path, num_fewshot: int) -> Questions:
        raise NotImplementedError

    def judge(self, item: Item, completion: str) -> Verdict:
        _seen.append(item)
        deed, _, argument = completion.partition(" ")
        if deed == "score":
            return Verdict(float(argument), None)
        if deed == "odd":
            return Verdict(1.0, 5)  # type: ignore[arg-type]
        return Verdict(1.0, DEEDS[deed](argument))


SUITE = Hostile()
