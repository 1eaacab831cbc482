"""A process that has torch, Transformers and this package imported, and forks a process for each program it is asked to run.

It listens on a socket. Before a program runs in a fork, it forks such a process for its own children, so that the actors of its
Ray are its descendants. Ray starts an actor by a command that begins with `sys.executable`; that is then a script, which asks
for a fork if the program is the one of Ray's actors, and otherwise runs Python.

The module `ray` is not imported before a fork, because it reads environment variables when it is imported.

As a script this file asks for a fork, so it imports little at the top.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ACTOR = "/ray/_private/workers/default_worker.py"
_IMPORTED = (
    "datasets",
    "distill_rl.cli",
    "distill_rl.evals.run",
    "tests.helpers.one_process",
    "torch.profiler",
    "transformers.models.llama.modeling_llama",
)
_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCH", "OMP_WAIT", "MKL_", "KMP_", "CUDA_", "LD_", "PYTHONHASH")
"""What variables begin with that count when a module is imported: a program for which one is different is refused."""
_BEFORE = dict(os.environ)
"""The environment before the imports, which add to it."""
_LONGEST = 1 << 20
_REFUSED = 0


def ask(
    name: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    folder: str,
    outputs: Sequence[int],
    session: bool,
) -> tuple[socket.socket, int]:
    """Asks the process that listens at `name` to run a program.

    Args:
        arguments: what follows `python` in a command: `-m` and a module, or a file, and then the program's own.
        variables: the whole environment.
        folder: the working directory.
        outputs: file descriptors of stdin, stdout and stderr.
        session: whether the program leads a session of its own.

    Returns:
        A socket, on which the status as of `os.waitpid` arrives when the program has ended; and its process id, or 0 if it
        would not be what it is when Python starts it.

    Raises:
        OSError: no process listens.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
    connection.connect("\0" + name)
    request = json.dumps([list(arguments), dict(variables), folder, session]).encode()
    socket.send_fds(connection, [request], list(outputs))
    return connection, int(connection.recv(100))


def listen(name: str) -> socket.socket:
    """A socket on which programs can be asked for at `name`."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("\0" + name)
    listening.listen(64)
    return listening


def write_script(folder: str, name: str) -> str:
    """Writes the script that stands for `sys.executable` in a process whose actors are forked by the one that listens at `name`."""
    path, python = Path(folder, name), Path(sys.prefix, "bin", "python")
    asks = f"exec '{python}' -IS '{__file__}' '{name}' '{python}' \"$@\""
    path.write_text(f'#!/bin/sh\ncase " $* " in *{ACTOR}\\ *) {asks};; esac\nexec \'{python}\' "$@"\n')
    path.chmod(0o700)
    return str(path)


def _ask_for_an_actor(name: str, python: str, *arguments: str) -> None:
    """Asks for a fork that runs an actor's program; runs Python in this process if there is none.

    Ray's command consists of a program that sets up the environment that is described in its first option, then the actor's.
    """
    first = next(i for i, word in enumerate(arguments) if word.endswith(ACTOR))
    own = [
        word for word in arguments[first:] if not word.startswith(("--serialized-runtime-env-context=", "--language="))
    ]
    described = [word.partition("=")[2] for word in arguments if word.startswith("--serialized-runtime-env-context=")]
    context = json.loads(described[0]) if described else {}
    if not context.get("command_prefix"):
        variables = {**os.environ, **context.get("env_vars", {})}
        try:
            if ask(name, own, variables, str(Path.cwd()), [0, 1, 2], False)[1] != _REFUSED:
                return
        except OSError:
            pass  # its parent has ended
    os.execv(python, [python, *arguments])


class _Program(NamedTuple):
    arguments: list[str]
    variables: dict[str, str]
    folder: str
    session: bool
    outputs: list[int]


def _serve(listening: socket.socket, parent: int) -> _Program | None:
    """Forks a process for each program that is asked for, until the process `parent` and all that was forked have ended.

    Returns:
        None then; in a process that was forked, at once, the program that it has to run.
    """
    ended = os.pidfd_open(parent)
    running: dict[int, tuple[int, socket.socket]] = {}  # by file descriptor: the process, and who asked for it
    parent_runs = True
    while parent_runs or running:
        for ready in select.select([*running, *([listening, ended] if parent_runs else [])], [], [])[0]:
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
            elif ready == ended:
                parent_runs = False
                listening.close()
            else:
                os.close(ready)
                pid, connection = running.pop(ready)
                with suppress(OSError), connection:  # perhaps nobody waits for it
                    connection.send(str(os.waitpid(pid, 0)[1]).encode())
    return None


def _may_fork(variables: Mapping[str, str]) -> bool:
    names = {name for name in {*variables, *_BEFORE} if name.startswith(_AT_IMPORT)}
    return all(variables.get(name) in (_BEFORE.get(name), os.environ.get(name)) for name in names)


def _run(program: _Program, scripts: str) -> None:
    """Runs a program in this process, which was forked for it."""
    arguments = program.arguments
    if program.session:
        os.setsid()
    for number, descriptor in enumerate(program.outputs):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(program.folder)
    added = {name: value for name, value in os.environ.items() if name not in _BEFORE}
    os.environ.clear()
    os.environ.update(added | program.variables)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads != "1":
        import torch

        torch.set_num_threads(int(threads))
    import runpy

    if arguments[0] != "-m":
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv, sys.path[0] = arguments[1:], program.folder
    _fork_for_children(scripts)
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


def _fork_for_children(scripts: str) -> None:
    """Forks the process that forks the actors of this one, and makes Ray ask it."""
    pid = os.getpid()
    name = f"forks-{pid}"
    listening, script = listen(name), write_script(scripts, name)
    if os.fork():
        listening.close()
        sys.executable = script
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    if program := _serve(listening, pid):
        _run(program, scripts)
        sys.exit()
    Path(script).unlink(missing_ok=True)
    os._exit(0)


def main(listening: int, parent: int, scripts: str) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.freeze()
    if program := _serve(socket.socket(fileno=listening), parent):
        _run(program, scripts)


if __name__ == "__main__":
    if sys.flags.isolated:
        _ask_for_an_actor(*sys.argv[1:])
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
