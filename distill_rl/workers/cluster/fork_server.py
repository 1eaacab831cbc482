"""Ray's Python processes on this machine as forks of one that has imported what they need.

Torch, Transformers and the engines take seconds to import, Ray itself half of one, and a run on this machine has about ten
Python processes. `ForkServer` imports once, while the driver still checks its input. Ray is given a launcher in place of the
interpreter, and the launcher has the server fork:

    raylet ──starts──► launcher ──command, environment, open files──► server ──forks──► worker
                          └──── waits for it; if one ends, so does the other ───────────────┘

Whoever started the launcher so has a child that runs as long as the worker does. A command that the server does not know, or
a server that is gone, makes the launcher what it stands for: the interpreter with its arguments. Nothing but time depends on
the server.

There are two servers: a small one for Ray's own services, and one that goes on to import what the actors need. Neither
initialises CUDA. This file is all three programs; the launcher runs it without site-packages, to start in milliseconds.
"""

import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from contextlib import AbstractContextManager
    from pathlib import Path

_WORKERS, _SERVICES = "workers", "services"
"""Names of the two servers' sockets."""
_WORKER = "default_worker.py"
_PROGRAMS = (_WORKER, "agent.py", "main.py", "dashboard.py", "monitor.py", "log_monitor.py")
"""Those of Ray that are forked."""
_ACCEPTED = b"\1"
_MOST_FILES = 64
_FIRST_SPARE = 300
"""Received files are numbered from here on, out of the way of the numbers that they are to have."""
_FOR_SERVICES = ("ray", "ray._private.node", "ray._private.log_monitor", "ray._private.runtime_env.setup_hook")
_FOR_WORKERS = ("distill_rl.student.engine", "distill_rl.teacher.engine", "transformers.models.llama.modeling_llama")
_WITH_RAY = (
    "distill_rl.workers.actors.aligner",
    "distill_rl.workers.actors.evaluator",
    "distill_rl.workers.actors.student",
    "distill_rl.workers.actors.teacher",
)
"""What workers need that imports Ray."""


# The driver's side.

_servers: "list[ForkServer]" = []
"""That of this process, if there is one."""


class ForkServer:
    """While entered, Ray that this process starts has its Python processes forked. Entering waits for no import."""

    def __enter__(self) -> None:
        import secrets
        import shlex
        import subprocess

        from distill_rl.system.signals import signals_blocked
        from distill_rl.workers.cluster.access import FOR_WORKERS, allowed_variables, private_directory

        folder = private_directory() / secrets.token_hex(2)
        folder.mkdir()
        listening = [_listen(folder / name) for name in (_SERVICES, _WORKERS)]
        numbers = [sock.fileno() for sock in listening]
        arguments = (f"{folder}/", os.getpid(), *numbers)
        environment = {"OMP_NUM_THREADS": "1", **allowed_variables(os.environ), **FOR_WORKERS}
        with signals_blocked():
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", "-m", "distill_rl.workers.cluster.fork_server", *map(str, arguments)],
                pass_fds=numbers,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )
        for sock in listening:
            sock.close()
        words = (sys.executable, "-IS", __file__, str(folder), sys.executable)
        self.launcher = folder / "python"
        self.launcher.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.launcher.chmod(0o700)
        _servers.append(self)

    def __exit__(self, *exc: object) -> None:
        _servers.remove(self)
        self.end()

    def end(self) -> None:
        """Ends the server, and with it all its forks."""
        self.process.kill()
        self.process.communicate()


def launching() -> "AbstractContextManager[object]":
    """While the block runs, what starts `sys.executable` starts the launcher of the server, if there is one."""
    from contextlib import nullcontext
    from unittest import mock

    # On a file system that is mounted with noexec nothing can be launched.
    if _servers and os.access(launcher := _servers[-1].launcher, os.X_OK):
        return mock.patch.object(sys, "executable", str(launcher))
    return nullcontext()


def process_ids() -> list[int]:
    """Of the servers of this process."""
    return [server.process.pid for server in _servers]


def end() -> None:
    """Ends the servers of this process, and with them all their forks."""
    for server in _servers:
        server.end()


def _listen(path: "Path") -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(512)
    return sock


# The launcher.


def _launch(folder: str, python: str, arguments: list[str]) -> None:
    """Has a server run `python ARGUMENTS` and waits for its end; or becomes it."""
    script = next((word for word in arguments if not word.startswith("-")), "")
    name = os.path.basename(script)
    if "/ray/" in script and name in _PROGRAMS:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(os.path.join(folder, _WORKERS if name == _WORKER else _SERVICES))
            _send(server, arguments)
            accepted = server.recv(1) == _ACCEPTED
        except OSError:
            accepted = False
        if accepted:
            for number in _inherited(server):  # whoever reads them must not wait for this process
                os.close(number)
            server.recv(1)
            os._exit(1)
        server.close()
    os.execv(python, [python, *arguments])


def _inherited(server: socket.socket) -> list[int]:
    """The files that this process was started with."""
    numbers = (int(name) for name in os.listdir("/proc/self/fd"))
    return [number for number in numbers if number != server.fileno() and os.path.exists(f"/proc/self/fd/{number}")]


def _send(server: socket.socket, arguments: list[str]) -> None:
    import resource

    with open("/proc/self/oom_score_adj") as file:
        oom_score = file.read()
    files = _inherited(server)
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "group": os.getpgrp(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score": oom_score,
    }
    body = json.dumps(request).encode()
    message = len(body).to_bytes(4, "big") + body
    sent = socket.send_fds(server, [message], files)
    server.sendall(message[sent:])


# The servers.


def _serve(listening: socket.socket, with_ray: tuple[str, ...]) -> None:
    """Forks for every launcher until the driver ends; returns only in a fork, which is to end with this process.

    Ray's library reads its variables when it is imported. So what needs it is imported with those of the first launcher, and
    a launcher with others gets no fork. The job's id does not count: workers that Ray starts in advance have none yet.
    """
    import gc
    import select

    from distill_rl.system.processes import end_with

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    server, variables = os.getpid(), None
    while True:
        if 0 in select.select([listening, 0], (), ())[0]:
            os._exit(0)
        launcher, _ = listening.accept()
        request, files = _receive(launcher)
        if variables is None and request and with_ray:
            _take_environment(request)
            _import(with_ray)
        own = _of_ray(request)
        if variables is None:
            variables = own
            gc.collect()
            gc.freeze()  # or the collector would write to the memory that the forks share
        is_alone = len(os.listdir("/proc/self/task")) == 1  # a fork has no other threads, but their locks
        if request and is_alone and (own == variables or not with_ray) and not os.fork():
            end_with(server)
            listening.close()
            _become(launcher, request, files)
            return
        launcher.close()
        for file in files:
            os.close(file)


def _of_ray(request: dict) -> dict[str, str]:
    """Ray's variables of a launcher."""
    variables = request.get("environment", {})
    return {name: value for name, value in variables.items() if name.startswith("RAY_") and name != "RAY_JOB_ID"}


def _take_environment(request: dict) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])


def _import(names: tuple[str, ...]) -> None:
    """Imports modules; what cannot be imported is left to the forks."""
    from contextlib import suppress
    from importlib import import_module

    for name in names:
        with suppress(Exception):
            import_module(name)


def _receive(launcher: socket.socket) -> tuple[dict, list[int]]:
    """A launcher's request and its open files; empty if it has ended."""
    files: list[int] = []
    try:
        message, files, _, _ = socket.recv_fds(launcher, 1 << 16, _MOST_FILES)
        size = 4 + int.from_bytes(message[:4], "big")
        while len(message) < size and (more := launcher.recv(1 << 16)):
            message += more
        return json.loads(message[4:]), list(files)
    except (OSError, ValueError):
        return {}, list(files)


def _become(launcher: socket.socket, request: dict, files: list[int]) -> None:
    """Makes this process what the launcher was started as."""
    import fcntl
    import resource
    from contextlib import suppress

    # Its open files, under their numbers; but those of this process that are in the way are not needed.
    launcher_file = fcntl.fcntl(launcher.detach(), fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE)
    spare = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(spare, request["files"]):
        os.dup2(file, number)
        os.close(file)
    # SIGIO ends this process when the launcher ends, which closes its end of the connection.
    os.write(launcher_file, _ACCEPTED)
    fcntl.fcntl(launcher_file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(launcher_file, fcntl.F_SETFL, fcntl.fcntl(launcher_file, fcntl.F_GETFL) | os.O_ASYNC)
    # Everything else that a process inherits.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["folder"])
    _take_environment(request)
    with suppress(OSError):
        os.setpgid(0, request["group"])
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _run(request["arguments"])


def _run(arguments: list[str]) -> None:
    """Runs a script like `python ARGUMENTS` does."""
    import runpy

    first = next(place for place, word in enumerate(arguments) if not word.startswith("-"))
    if "-u" in arguments[:first]:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv = arguments[first:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _import_and_serve(driver: int, services: int, workers: int) -> None:
    """Imports and serves: Ray's services in a process of its own, the workers in this one."""
    from distill_rl.system.processes import end_with

    end_with(driver)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C reaches the whole foreground group
    server = os.getpid()
    if os.fork():
        os.close(services)
        _import(_FOR_WORKERS)
        return _serve(socket.socket(fileno=workers), _WITH_RAY)
    end_with(server)
    os.close(workers)
    _import(_FOR_SERVICES)
    return _serve(socket.socket(fileno=services), ())


if __name__ == "__main__":
    if sys.flags.isolated:
        _launch(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        _import_and_serve(*map(int, sys.argv[2:]))
