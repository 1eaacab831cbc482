"""A process that has torch, Transformers and this package imported, and forks a process for each program it is asked to run.

It listens on a socket. Before a program runs in a fork, it forks such a process for its own children, so that the actors of its
Ray are its descendants. Ray starts an actor by a command that begins with `sys.executable`; that is then a script, which asks
for a fork if the program is one of Ray's, and otherwise runs Python.

The module `ray` reads environment variables when it is imported. So further processes import it for those that have the same
ones, and fork these: one for the actors of a job, and one for the services that each Ray starts (log monitor, agents and so on).

As a script this file asks for a fork, so it imports little at the top.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_IMPORTED = (
    "datasets",
    "distill_rl.cli",
    "distill_rl.commands.train",
    "distill_rl.evals.run",
    "distill_rl.observe.report.report",
    "tests.helpers.one_process",
    "torch.profiler",
    "transformers.models.llama.modeling_llama",
)
_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCH", "OMP_WAIT", "MKL_", "KMP_", "CUDA_", "LD_", "PYTHONHASH")
"""What variables begin with that count when a module is imported: a program for which one is different is refused."""
_BEFORE = dict(os.environ)
"""The environment before the imports."""
_ADDED: dict[str, str] = {}
"""What imports added to it."""
_WITH_RAY = {
    "actors": (
        "ray._private.workers.default_worker",
        "distill_rl.workers.actors.aligner",
        "distill_rl.workers.actors.evaluator",
        "distill_rl.workers.actors.student",
        "distill_rl.workers.actors.teacher",
    ),
    "services": (
        "ray._private.log_monitor",
        "ray._private.runtime_env.agent.main",
        "ray.autoscaler._private.monitor",
        "ray.dashboard.agent",
        "ray.dashboard.dashboard",
    ),
}
"""What stands in place of a program's arguments to run a process that forks such programs; and what that imports."""
ACTOR, *SERVICES = (f"/{name.replace('.', '/')}.py" for name in (_WITH_RAY["actors"][0], *_WITH_RAY["services"]))
"""How the paths of Ray's programs end."""
_OF_ONE_SERVICE = ("RAY_AUTH_TOKEN_PATH", "RAY_RAYLET_PID", "RAY_NODE_ID")
"""Variables that services read when they run, not when `ray` is imported."""
_IDLE_S = {"actors": 5.0, "services": 60.0}
_LONGEST = 1 << 20
_REFUSED = 0


def ask(
    name: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    folder: str,
    outputs: Sequence[int],
    *,
    session: bool = False,
    ending: bool = False,
) -> tuple[socket.socket, int]:
    """Asks the process that listens at `name` to run a program.

    Args:
        arguments: what follows `python` in a command: `-m` and a module, or a file, and then the program's own.
        variables: the whole environment.
        folder: the working directory.
        outputs: file descriptors of stdin, stdout and stderr.
        session: whether the program leads a session of its own.
        ending: whether it is killed when this process ends or closes the socket.

    Returns:
        A socket, on which the status as of `os.waitpid` arrives when the program has ended; and its process id, or 0 if it
        would not be what it is when Python starts it.

    Raises:
        OSError: no process listens.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
    connection.connect("\0" + name)
    request = json.dumps([list(arguments), dict(variables), folder, session, ending]).encode()
    socket.send_fds(connection, [request], list(outputs))
    return connection, int(connection.recv(100))


def listen(name: str) -> socket.socket:
    """A socket on which programs can be asked for at `name`."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("\0" + name)
    listening.listen(64)
    return listening


def write_script(folder: str, name: str, session: str) -> str:
    """Writes the script that stands for `sys.executable` in a process of which the one that listens at `name` forks the actors.

    Args:
        session: where the process listens that forks Ray's services.
    """
    path, python = Path(folder, name), Path(sys.prefix, "bin", "python")
    asks = f"exec '{python}' -IS '{__file__}' '{name}' '{session}' '{python}' \"$@\""
    path.write_text(f'#!/bin/sh\ncase " $* " in */ray/*.py\\ *) {asks};; esac\nexec \'{python}\' "$@"\n')
    path.chmod(0o700)
    return str(path)


def _ask_for_a_program_of_ray(name: str, session: str, python: str, *arguments: str) -> None:
    """Asks for a fork that runs one of Ray's programs; runs Python in this process if there is none."""
    with suppress(OSError):  # whom it asks has ended
        if any(word.endswith(ACTOR) for word in arguments):
            if _ask_for_an_actor(name, arguments):
                return
        elif any(word.endswith(tuple(SERVICES)) for word in arguments):
            _be_a_service(session, arguments)
    os.execv(python, [python, *arguments])


def _ask_for_an_actor(name: str, arguments: Sequence[str]) -> bool:
    """Returns whether it runs.

    Ray's command consists of a program that sets up the environment that is described in its first option, then the actor's.
    """
    first = next(i for i, word in enumerate(arguments) if word.endswith(ACTOR))
    own = [
        word for word in arguments[first:] if not word.startswith(("--serialized-runtime-env-context=", "--language="))
    ]
    described = [word.partition("=")[2] for word in arguments if word.startswith("--serialized-runtime-env-context=")]
    context = json.loads(described[0]) if described else {}
    if context.get("command_prefix"):
        return False
    variables = {**os.environ, **context.get("env_vars", {})}
    forks = _with_ray(name, "actors", variables, variables["RAY_RAYLET_PID"])
    return ask(forks, own, variables, str(Path.cwd()), [0, 1, 2])[1] != _REFUSED


def _be_a_service(session: str, arguments: Sequence[str]) -> None:
    """Ends as a fork does that runs the program, and which is killed when this process is. Returns if there is none."""
    first = next(i for i, word in enumerate(arguments) if word.endswith(tuple(SERVICES)))
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    variables.pop("LD_PRELOAD", "")  # an allocator that Ray prefers for the dashboard
    forks = _with_ray(session, "services", variables, session.rpartition("-")[2])
    connection, pid = ask(forks, arguments[first:], variables, str(Path.cwd()), [0, 1, 2], ending=True)
    if pid != _REFUSED:
        sys.exit(os.waitstatus_to_exitcode(int(connection.recv(100))) % 256)


def _with_ray(name: str, kind: str, variables: Mapping[str, str], parent: str) -> str:
    """Where a process listens that has imported `ray` with these variables. It is started if there is none."""
    left_out = _OF_ONE_SERVICE if kind == "services" else ()
    of_ray = sorted(each for each in variables.items() if each[0].startswith("RAY_") and each[0] not in left_out)
    forks = f"{name}-{kind}-{hashlib.sha256(repr(of_ray).encode()).hexdigest()[:16]}"
    with suppress(OSError), listen(forks) as listening, open(os.devnull, "w") as nothing:  # noqa: PTH123
        outputs = [listening.fileno(), nothing.fileno(), nothing.fileno()]
        ask(name, [kind, parent], variables, str(Path.cwd()), outputs)
    return forks


class _Program(NamedTuple):
    arguments: list[str]
    variables: dict[str, str]
    folder: str
    session: bool
    ending: bool
    outputs: list[int]


def _serve(listening: socket.socket, parent: int, idle_s: float | None = None) -> _Program | None:
    """Forks a process for each program that is asked for, until the process `parent` and all that was forked have ended.

    Args:
        idle_s: it also ends when nothing that was forked runs and nothing was asked for so long.

    Returns:
        None then; in a process that was forked, at once, the program that it has to run.
    """
    ended = os.pidfd_open(parent)
    running: dict[int, tuple[int, socket.socket]] = {}  # by file descriptor: the process, and who asked for it
    ending: dict[socket.socket, int] = {}  # who asked for a process that is killed when the connection ends
    parent_runs = True
    while parent_runs or running:
        waits = [*running, *ending, *([listening, ended] if parent_runs else [])]
        happened = select.select(waits, [], [], None if running else idle_s)[0]
        if not happened:
            return None
        for ready in happened:
            if ready is listening:
                connection = listening.accept()[0]
                message, outputs, _, _ = socket.recv_fds(connection, _LONGEST, 3)
                program = _Program(*json.loads(message), outputs)
                pid = os.fork() if _may_fork(program.variables) else _REFUSED
                if pid == 0 and _may_fork(program.variables):
                    for each in (listening, connection, *(other for _, other in running.values())):
                        each.close()
                    for descriptor in (ended, *running):
                        os.close(descriptor)
                    return program
                for descriptor in outputs:
                    os.close(descriptor)
                connection.send(str(pid).encode())
                if pid != _REFUSED:
                    running[os.pidfd_open(pid)] = pid, connection
                    if program.ending:
                        ending[connection] = pid
            elif ready in ending:
                os.kill(ending.pop(ready), signal.SIGKILL)
            elif ready == ended:
                parent_runs = False
                listening.close()
            else:
                os.close(ready)
                pid, connection = running.pop(ready)
                ending.pop(connection, None)
                with suppress(OSError), connection:  # perhaps nobody waits for it
                    connection.send(str(os.waitpid(pid, 0)[1]).encode())
    return None


def _may_fork(variables: Mapping[str, str]) -> bool:
    names = {name for name in {*variables, *_BEFORE} if name.startswith(_AT_IMPORT)}
    return all(variables.get(name) in (_BEFORE.get(name), os.environ.get(name)) for name in names)


class _Session(NamedTuple):
    pid: int
    scripts: str
    """The folder of scripts that stand for `sys.executable`."""

    @property
    def name(self) -> str:
        return f"forks-{self.pid}"


def _run(program: _Program, session: _Session) -> None:
    """Runs a program in this process, which was forked for it."""
    arguments = program.arguments
    if program.session:
        os.setsid()
    else:
        os.setpgid(0, 0)  # Ray kills the process group of an actor that has ended
    for number, descriptor in enumerate(program.outputs):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(_ADDED | program.variables)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads != "1":
        import torch

        torch.set_num_threads(int(threads))
    import runpy

    if arguments[0] in _WITH_RAY:
        listening = socket.socket(fileno=os.dup(0))
        os.dup2(1, 0)
        _import(_WITH_RAY[arguments[0]])
        if asked := _serve(listening, int(arguments[1]), _IDLE_S[arguments[0]]):
            _run(asked, session)
        return
    if arguments[0] != "-m":
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv, sys.path[0] = arguments[1:], program.folder
    _fork_for_children(session)
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


def _fork_for_children(session: _Session) -> None:
    """Forks the process that forks the actors of this one, and makes Ray ask it."""
    pid = os.getpid()
    name = f"forks-{pid}"
    listening, script = listen(name), write_script(session.scripts, name, session.name)
    if os.fork():
        listening.close()
        sys.executable = script
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    if program := _serve(listening, pid):
        _run(program, session)
        sys.exit()
    Path(script).unlink(missing_ok=True)
    os._exit(0)


def _import(names: Sequence[str]) -> None:
    before = set(os.environ)
    for name in names:
        importlib.import_module(name)
    _ADDED.update((name, value) for name, value in os.environ.items() if name not in before)
    gc.freeze()


def main(listening: int, pid: int, scripts: str) -> None:
    session = _Session(pid, scripts)
    _import(_IMPORTED)
    assert "ray" not in sys.modules
    if program := _serve(socket.socket(fileno=listening), pid):
        _run(program, session)


if __name__ == "__main__":
    if sys.flags.isolated:
        _ask_for_a_program_of_ray(*sys.argv[1:])
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
