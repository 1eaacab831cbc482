"""Ray's Python processes on this machine as forks of one that has imported what they need.

Torch, Transformers and the engines take seconds to import, Ray itself half of one, and a run on this machine has about ten
Python processes. `ForkServer` imports once, while the driver still checks its input. Ray is given a launcher in place of the
interpreter, and the launcher has the server fork:

    raylet ──starts──► launcher ──command, environment, open files──► server ──forks──► worker
                          ▲  └──── waits for it; if one ends, so does the other ───────────┘
                          └─────────────── how the worker ended ─────────┘

Whoever started the launcher so has a child that runs as long as the worker does, and that ends as it does: with its exit code
or by its signal. A command that the server does not know, or
a server that is gone, makes the launcher what it stands for: the interpreter with its arguments. Nothing but time depends on
the server.

There are two servers: a small one for Ray's own services, and one that goes on to import what the actors need. Neither
initialises CUDA. This file is all three programs; the launcher runs it without site-packages, to start in milliseconds.
"""

# Without pathlib, which takes longer to import than all that the launcher does.
# ruff: noqa: PTH109, PTH110, PTH114, PTH115, PTH118, PTH119, PTH120, PTH123, PTH208, SIM115

import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

_WORKERS, _SERVICES = "workers", "services"
"""Names of the two servers' sockets."""
_WORKER = "default_worker.py"
_PROGRAMS = (_WORKER, "agent.py", "main.py", "dashboard.py", "monitor.py", "log_monitor.py")
"""Those of Ray that are forked."""
_READ_ON_IMPORT = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
"""Beginnings of variables."""
LAUNCHER = "DISTILL_RL_LAUNCHER"
"""Variable with the launcher of a server that another process has, for a command that it starts."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_OPENED_BY_CUDA = ("/dev/nvidia-uvm", "/dev/kfd")
"""Device files that are open once CUDA, or ROCm, is initialised; NVML, which counts GPUs, opens others."""
_PR_SET_PDEATHSIG = 1
# A rank sees all GPUs of its node, so that it can map their memory; it computes on the one that Ray assigned to it.
FOR_WORKERS = {"TOKENIZERS_PARALLELISM": "false", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
_PID, _STATUS = b"p", b"s"
"""First bytes of what a launcher is sent: the process id of its fork, and then how that ended, as of `waitpid`."""
_MOST_FILES = 64
_FIRST_SPARE = 300
"""Received files are numbered from here on, out of the way of the numbers that they are to have."""
_FOR_SERVICES = (
    "distill_rl.workers",
    "ray",
    "ray._private.node",
    "ray._private.log_monitor",
    "ray._private.runtime_env.setup_hook",
)
_FOR_WORKERS = (
    "distill_rl.student.engine",
    "distill_rl.teacher.engine",
    "distill_rl.evals.backends.hf",
    "transformers.models.llama.modeling_llama",
)
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
asked_by = 0
"""In a fork, the process that started its launcher."""


class ForkServer:
    """While entered, Ray that this process starts has its Python processes forked. Entering waits for no import."""

    def __enter__(self) -> None:
        import shlex
        import subprocess

        from distill_rl.system.files import private_folder
        from distill_rl.system.redact import allowed_variables
        from distill_rl.system.signals import signals_blocked

        folder = private_folder()
        listening = [_listen(folder / name) for name in (_SERVICES, _WORKERS)]
        numbers = [sock.fileno() for sock in listening]
        arguments = (f"{folder}/", os.getpid(), *numbers)
        python = os.environ.pop(LAUNCHER, sys.executable)
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**allowed_variables(os.environ), **FOR_WORKERS, **one_thread}
        with signals_blocked():
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [python, "-P", "-m", "distill_rl.system.fork_server", *map(str, arguments)],
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


def launcher() -> str:
    """What starts Python: the launcher of the server, if there is one."""
    # On a file system that is mounted with noexec nothing can be launched.
    if _servers and os.access(found := _servers[-1].launcher, os.X_OK):
        return str(found)
    return sys.executable


def launching() -> "AbstractContextManager[object]":
    """While the block runs, what starts `sys.executable` starts `launcher`."""
    from unittest import mock

    return mock.patch.object(sys, "executable", launcher())


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


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when the thread that started it ends (Linux; nothing elsewhere).

    Args:
        parent: process id of the parent. If it has ended already, this process exits at once, with 1.
        number: the signal.
    """
    import ctypes
    from contextlib import suppress

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent not in (os.getppid(), asked_by):
        os._exit(1)


# The launcher.


def _launch(folder: str, python: str, arguments: list[str]) -> None:
    """Has a server run `python ARGUMENTS`, passes signals on, and ends as that does; or becomes it."""
    if name := _server_for(arguments):
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(os.path.join(folder, name))
            _send(server, arguments)
            kind, pid = _message(server)
        except OSError:
            kind, pid = b"", 0
        if kind == _PID:
            for number in _heard():
                signal.signal(number, lambda number, _: os.kill(pid, number))
            for number in _inherited(server):  # whoever reads them must not wait for this process
                os.close(number)
            kind, status = _message(server)
            _end_as(status if kind == _STATUS else signal.SIGKILL)  # otherwise the server was killed
        server.close()
    os.execv(python, [python, *arguments])


def _message(server: socket.socket) -> tuple[bytes, int]:
    """What a launcher is sent; an empty kind if there is nobody left to send it."""
    message = server.recv(5, socket.MSG_WAITALL)
    return message[:1], int.from_bytes(message[1:], "big")


def _end_as(status: int) -> None:
    """Ends this process as another one ended."""
    import resource

    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the other one has left its own
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _heard() -> list[int]:
    """The signals that are not ignored."""
    return [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]


def _server_for(arguments: list[str]) -> str:
    """The server that forks for a command; empty if there is none."""
    first = _first(arguments)
    option, word = arguments[first : first + 1], "".join(arguments[first + 1 : first + 2])
    if option == ["-m"] and word.startswith("distill_rl"):
        return _WORKERS
    if option == ["-c"] and _spawned(word):
        return _WORKERS
    script = "".join(option)
    if "/ray/" not in script or os.path.basename(script) not in _PROGRAMS:
        return ""
    return _WORKERS if script.endswith(_WORKER) else _SERVICES


def _spawned(code: str) -> dict[str, int]:
    """The arguments of `spawn_main` in the code by which `multiprocessing` starts a process; empty if it is another one."""
    beginning, _, arguments = code.partition("spawn_main(")
    numbers = {name: number for name, _, number in (each.partition("=") for each in arguments[:-1].split(", "))}
    if beginning != "from multiprocessing.spawn import spawn_main; " or not all(map(str.isdecimal, numbers.values())):
        return {}
    return {name: int(number) for name, number in numbers.items()}


def _first(arguments: list[str]) -> int:
    """The place of `-m`, `-c` or the script among Python's arguments."""
    named = (place for place, word in enumerate(arguments) if word in ("-m", "-c") or not word.startswith("-"))
    return next(named, len(arguments))


def _inherited(server: socket.socket) -> list[int]:
    """The files that this process was started with."""
    numbers = (int(name) for name in os.listdir("/proc/self/fd"))
    return [number for number in numbers if number != server.fileno() and os.path.exists(f"/proc/self/fd/{number}")]


def _send(server: socket.socket, arguments: list[str]) -> None:
    import resource

    with open("/proc/self/oom_score_adj") as file:
        oom_score = file.read()
    files = _inherited(server)
    if len(files) > _MOST_FILES:
        raise OSError("more files than a message can have")
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "files": files,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [int(number) for number in {*_PASSED_ON} - {*_heard()}],
        "group": os.getpgrp(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score": oom_score,
    }
    body = json.dumps(request).encode()
    message = len(body).to_bytes(4, "big") + body
    sent = socket.send_fds(server, [message], files)
    server.sendall(message[sent:])


# The servers.


def _serve(listening: socket.socket) -> None:
    """Forks for every launcher until the driver ends; returns only in a fork.

    Forks are to end with this process, but for commands, which end with their launcher, and may save before: whoever started it
    chose the signal.

    Libraries read variables when they are imported, and a launcher with others gets no fork. Ray reads all of its own: what
    needs it is imported with those of the first worker. The job's id does not count, which those have not that Ray starts in
    advance.
    """
    import gc
    import select
    import time
    from contextlib import suppress

    forks: dict[int, socket.socket] = {}  # process id → its launcher
    ended, wake = socket.socketpair()  # receives a byte when a fork ends
    ended.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server, variables = os.getpid(), _chosen(dict(os.environ), _READ_ON_IMPORT)
    ray_variables: dict[str, str] | None = None
    while True:
        ready = select.select([listening.fileno(), 0, ended.fileno()], (), ())[0]
        if 0 in ready:
            os._exit(0)
        if ended.fileno() in ready:
            ended.recv(1 << 12)
            _report(forks)
        if listening.fileno() not in ready:
            continue
        try:
            launcher, _ = listening.accept()
        except OSError:
            time.sleep(0.1)  # too many open files, for now
            continue
        request, files = _receive(launcher)
        is_worker = any(word.endswith(_WORKER) for word in request.get("arguments", ()))
        kinds = (*_READ_ON_IMPORT, "RAY_") if is_worker else _READ_ON_IMPORT
        own = _chosen(request.get("environment", {}), kinds)
        if is_worker and ray_variables is None:
            ray_variables = variables | _chosen(request["environment"], ("RAY_",))
            _take_environment(request)
            _import(_WITH_RAY)
        gc.freeze()  # or the collector would write to the memory that the forks share
        pid = -1
        if request and _can_fork() and own == (ray_variables if is_worker else variables):
            with suppress(OSError):  # too many processes, or too little memory
                pid = os.fork()
        if pid == 0:
            arguments = request["arguments"]
            if arguments[_first(arguments)] != "-m":
                end_with(server)
            signal.set_wakeup_fd(-1)
            for mine in (listening, ended, wake, *forks.values()):
                mine.close()
            _become(launcher, request, files)
            return
        if pid > 0:
            forks[pid] = launcher
        else:
            launcher.close()
        for file in files:
            os.close(file)


def _report(forks: dict[int, socket.socket]) -> None:
    """Tells the launchers of the forks that have ended how they did."""
    from contextlib import suppress

    while forks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if launcher := forks.pop(pid, None):
            with suppress(OSError):  # it has ended, too
                launcher.sendall(_STATUS + status.to_bytes(4, "big"))
            launcher.close()


def _can_fork() -> bool:
    """Whether a fork of this process would work: it has neither its other threads, whose locks it would have, nor its CUDA."""
    files = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    opened = {os.readlink(file) for file in files if os.path.islink(file)}
    return len(os.listdir("/proc/self/task")) == 1 and opened.isdisjoint(_OPENED_BY_CUDA)


def _chosen(environment: dict[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables whose names begin so, without secrets, which are not read on import."""
    from distill_rl.system.redact import SECRET

    names = (name for name in environment if name.startswith(prefixes) and not SECRET.fullmatch(name))
    return {name: environment[name] for name in names if name != "RAY_JOB_ID"}


def _take_environment(request: dict) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])


def _import(names: tuple[str, ...]) -> None:
    """Imports modules; what cannot be imported is left to the forks."""
    import gc
    from contextlib import suppress
    from importlib import import_module

    gc.disable()  # it would go through all modules again and again, a fifth of the time, and they stay
    for name in names:
        with suppress(Exception):
            import_module(name)
    gc.enable()


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
    launcher_file = fcntl.fcntl(launcher, fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE)
    launcher.close()
    spare = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(spare, request["files"]):
        os.dup2(file, number)
        os.close(file)
    # SIGIO ends this process when the launcher ends, which closes its end of the connection.
    fcntl.fcntl(launcher_file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(launcher_file, fcntl.F_SETFL, fcntl.fcntl(launcher_file, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        os.write(launcher_file, _PID + os.getpid().to_bytes(4, "big"))
    except OSError:  # it has ended before
        os._exit(1)
    # Everything else that a process inherits.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["folder"])
    _take_environment(request)
    try:
        os.setpgid(0, request["group"])
    except OSError:
        os.setpgid(0, 0)  # not the server's, all of which would end with this worker: Ray kills its group
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(request["oom_score"])
    for number in _PASSED_ON:
        heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else heard)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.exit(_run(request["arguments"], request["parent"]))


def _run(arguments: list[str], parent: int) -> int:
    """Runs what `python ARGUMENTS` does, and returns its exit code."""
    import runpy
    from multiprocessing import spawn
    from types import ModuleType

    from distill_rl.system import fork_server

    fork_server.asked_by = parent
    first = _first(arguments)
    _open_streams(unbuffered="-u" in arguments[:first] or bool(os.environ.get("PYTHONUNBUFFERED")))
    _use_all_threads()
    option, rest = arguments[first], arguments[first + 1 :]
    try:
        if option == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif option == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = ModuleType("__main__")
            spawn.spawn_main(**_spawned(rest[0]))
        else:
            sys.argv = arguments[first:]
            sys.path.insert(0, os.path.dirname(option))
            runpy.run_path(option, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _open_streams(*, unbuffered: bool) -> None:
    """Makes Python's standard streams those of the files that this process has now."""
    import io

    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else None
        stream = open(number, mode, errors=errors, closefd=False)
        if mode == "w":
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(line_buffering=name == "stderr" or stream.isatty(), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _use_all_threads() -> None:
    """Gives torch the threads that it takes by itself; the server has one, because more threads cannot be forked."""
    torch = sys.modules.get("torch")
    if torch is not None:
        asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        torch.set_num_threads((int(asked) if asked.isdecimal() else 0) or len(os.sched_getaffinity(0)))


def _import_and_serve(driver: int, services: int, workers: int) -> None:
    """Imports and serves: Ray's services in a process of its own, the workers in this one."""
    from distill_rl.system.without_torch import remember_families

    if os.getppid() == driver:  # otherwise this is itself a fork
        end_with(driver)
    remember_families()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C reaches the whole foreground group
    server = os.getpid()
    if os.fork():
        os.close(services)
        _import(_FOR_WORKERS)
        return _serve(socket.socket(fileno=workers))
    end_with(server)
    os.close(workers)
    _import(_FOR_SERVICES)
    return _serve(socket.socket(fileno=services))


if __name__ == "__main__":
    if sys.flags.isolated:
        _launch(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        _import_and_serve(*map(int, sys.argv[2:]))
