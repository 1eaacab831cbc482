"""The Ray cluster of a run: joined, or started here and ended together with every process that it started."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import ray

from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError, WorkerError
from distill_rl.models.files import visible_gpus
from distill_rl.observe.log import say
from distill_rl.system import fork_server
from distill_rl.system.files import private_directory, private_folder
from distill_rl.system.fork_server import FOR_WORKERS
from distill_rl.system.memory import object_store_room, object_store_size
from distill_rl.system.redact import allowed_variables
from distill_rl.system.signals import signals_blocked
from distill_rl.workers.cluster import access
from distill_rl.workers.cluster.hosts import Hosts
from distill_rl.workers.cluster.placement import Node
from distill_rl.workers.cluster.reaper import end, reaper, with_descendants

_SLOW = re.compile("timed out", re.IGNORECASE)
"""In Ray's words for a part of it that does not answer in time."""
_CONNECT_TIMEOUT_S = 5.0
_END_S = 5.0
"""How long Ray's processes may take to end before they are killed, and after it."""
_MUST_RUN = "must name a running Ray cluster"
_START_ONE = "start one (`ray start --head`), or leave ray.address out"

log = logging.getLogger(__name__)


def namespace() -> str:
    """A unique Ray namespace, so that actor names of two runs on one cluster cannot collide."""
    return f"distill_rl-{secrets.token_hex(4)}"


def nodes() -> list[Node]:
    """The machines of the cluster that this process has joined, those with most GPUs, then most CPUs, first."""
    alive = [Node(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: [-node.resources.get(kind, 0) for kind in ("GPU", "CPU")])


def capacity() -> tuple[float, float]:
    """GPUs and CPUs of the cluster that this process has joined."""
    resources = ray.cluster_resources()
    return resources.get("GPU", 0.0), resources.get("CPU", 0.0)


def describe(node: Node) -> str:
    """What a machine offers, such as `8 GPUs (H100), 96 CPUs`, for a record of the run."""
    kinds = [name.partition(":")[2] for name in node.resources if name.startswith("accelerator_type:")]
    gpus, cpus = (round(node.resources.get(kind, 0)) for kind in ("GPU", "CPU"))
    accelerators = f"{gpus} GPUs" + (f" ({', '.join(kinds)}), " if kinds else ", ") if gpus else ""
    return f"{accelerators}{cpus} CPUs"


@contextmanager
def ray_session(
    settings: RayConfig,
    *,
    num_cpus: int,
    target_bytes: int = 0,
    started: Callable[[], None] = lambda: None,
    interrupted: Callable[[], None] = lambda: None,
) -> Iterator[Hosts]:
    """Joins the Ray cluster at `ray.address`, or starts Ray on this machine, for as long as the block runs.

    At its end the cluster is left, or the Ray that was started here is ended with every process that it started. At its
    start, prints whether Ray is joined or started, and sets RAY_IGNORE_UNHANDLED_ERRORS unless it is set. Yields what watches
    its daemons.

    Args:
        num_cpus: least number of logical CPUs of a Ray started here, unless `ray.num_cpus` gives one.
        target_bytes: size of the teachers' targets that the object store of a Ray started here must hold at once.
        started: called as soon as Ray runs, to install signal handlers again, which Ray replaces; if Ray is started
            here, also when that fails, and before a pending signal is delivered.
        interrupted: called before Ray is started again, because it was too slow; may raise.

    Raises:
        ConfigError: this process uses Ray already, no cluster answers at the address, it refuses this user or asks for
            no token although tokens are in use, this user has no usable token, or /dev/shm or /tmp has too little room.
        WorkerError: Ray did not start.
    """
    if ray.is_initialized():
        remedy = "call ray.shutdown() first; ray.address makes a run join a cluster"
        raise ConfigError("Ray", "is connected in this process already", remedy=remedy)
    # The driver handles every error of an actor's call. Ray would also print those of calls that are dropped because
    # their actor is replaced, with hundreds of lines of traceback.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    hosts = Hosts()
    if settings.address is not None:
        say(f"joining   Ray at {settings.address}")
        with _joined_ray(settings.address):
            started()
            hosts.watch_cluster()
            yield hosts
    else:
        say("starting  Ray on this machine")
        store, spilled = object_store_size(target_bytes, object_store_room())
        if spilled:
            text = "targets of %d MiB in flight do not fit into /dev/shm: Ray will spill to disk"
            log.warning(text, target_bytes >> 20)
        with (
            reaper(private_directory(), lambda: hosts.lost) as ray_runs,
            _local_ray(settings, num_cpus, store, started, interrupted, hosts),
        ):
            ray_runs()
            yield hosts


@contextmanager
def _local_ray(
    settings: RayConfig,
    num_cpus: int,
    store: int,
    started: Callable[[], None],
    interrupted: Callable[[], None],
    hosts: Hosts,
) -> Iterator[None]:
    """Starts Ray on this machine, in a directory of its own, and ends it with all its processes when the block ends."""
    # A Ray that was too slow to start is started again, for as long as `settings.start_timeout_s`.
    # If this process is killed meanwhile, a guard process ends them. Sets RAY_AUTH_TOKEN_PATH for the rest of this process if tokens are in
    # use.
    directory = private_folder()
    if access.required():
        # Ray's processes get the token as a file, because environments are easily printed.
        if os.environ.get("RAY_AUTH_TOKEN"):
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token_file())
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_token_file()))
        access.require_token()
    others = set(psutil.Process().children())
    roots: set[psutil.Process] = set()
    try:
        deadline = time.monotonic() + settings.start_timeout_s
        while True:
            with signals_blocked(), _allowed_environment(), fork_server.launching():
                try:
                    context = ray.init(
                        address="local",  # overrides RAY_ADDRESS
                        num_cpus=settings.num_cpus or max(num_cpus, os.cpu_count() or 1),
                        num_gpus=visible_gpus(),  # counted as in `check`; Ray would include GPUs that torch cannot use
                        object_store_memory=store,
                        include_dashboard=settings.dashboard,
                        dashboard_host="127.0.0.1",
                        logging_level=logging.ERROR,
                        log_to_driver=False,
                        namespace=namespace(),
                        _temp_dir=str(directory),
                    )
                    break
                except Exception as error:
                    cause, remedy = f"{type(error).__name__}: {error}", "see ray.* in the configuration"
                    if _SLOW.search(cause):  # after 30 s, which Ray lets nobody set
                        remedy = "start again when the machine is less busy, or raise ray.start_timeout_s"
                    if not _SLOW.search(cause) or time.monotonic() > deadline:
                        raise WorkerError("Ray", "must start on this machine", cause, remedy) from error
                finally:
                    roots = set(psutil.Process().children()) - others
                    started()
            say("starting  Ray again: the machine was too busy for it to start within 30 s")
            ray.shutdown()
            end(roots, _END_S)
            shutil.rmtree(directory, ignore_errors=True)
            interrupted()
            directory = private_folder()
        hosts.watch(roots)
        if address := context.dashboard_url:
            port = address.rpartition(":")[2]
            token = f"; its token is in {os.environ['RAY_AUTH_TOKEN_PATH']}" if access.required() else ""
            say(f"dashboard http://{address}{token}; elsewhere: ssh -N -L {port}:{address} {socket.gethostname()}")
        yield
    finally:
        family = with_descendants(roots | {psutil.Process(pid) for pid in fork_server.process_ids()})
        if hosts.lost:
            end(family, _END_S)
        with _kill_on_sigterm(roots):
            ray.shutdown()
        fork_server.end()
        if left := end(family, _END_S, kill=False):
            log.info("killing %s, left over by Ray", ", ".join(str(process.pid) for process in left))
        end(left, _END_S)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _joined_ray(address: str) -> Iterator[None]:
    """Joins the Ray cluster at `address` with a namespace of its own, and leaves it when the block ends."""
    # The address is host:port or `auto`.
    fork_server.end()  # the cluster has its own workers
    access.require_token()
    _require_answer(address)
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            namespace=namespace(),
            runtime_env={"env_vars": worker_environment()},
        )
    except Exception as error:
        raise ConfigError("ray.address", _MUST_RUN, f"{address} ({type(error).__name__})", _START_ONE) from error
    try:
        if address == "auto":
            access.require_entry(ray.get_runtime_context().gcs_address)
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Checks within seconds that a cluster answers at `address` and accepts this user's token; `auto` is not checked."""
    # Ray itself tries for minutes to reach a cluster that is not there or does not accept its token.
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ConfigError("ray.address", "must be host:port, or auto for the cluster of this machine", address)
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError("ray.address", _MUST_RUN, f"{address} ({error})", _START_ONE) from None
    access.require_entry(address)


@cache
def _token_file() -> Path:
    """Returns a file with a token, RAY_AUTH_TOKEN or a new random one, that only this user can read."""
    # It is written at the first call.
    # There is one per process, because Ray reads it once.
    path = private_directory() / "token"
    path.touch(0o600, exist_ok=False)
    path.write_text(os.environ.get("RAY_AUTH_TOKEN") or secrets.token_urlsafe(32))
    return path


@contextmanager
def _allowed_environment() -> Iterator[None]:
    """Reduces this process's environment, while the block runs, to what Ray's processes may inherit; then restores it."""
    # Variables that were set in the block remain. A runtime environment would do the same, but Ray would discard the workers that it had
    # started in advance.
    original = dict(os.environ)
    os.environ.clear()
    os.environ.update(allowed_variables(original) | FOR_WORKERS)
    try:
        yield
    finally:
        for name in FOR_WORKERS:
            del os.environ[name]
        os.environ.update({name: value for name, value in original.items() if name not in os.environ})


def worker_environment() -> dict[str, str]:
    """Returns the variables on which all nodes of a joined cluster must agree, with this process's values.

    They are for Ray's runtime environment, because workers of a joined cluster do not inherit them from the driver.
    """
    shared = re.compile(r"HF_.*|GLOO_.*|NCCL_.*|DISTILL_RL_.*|OMP_.*|VLLM_.*|SSL_CERT_.*")
    variables = {name: value for name, value in allowed_variables(os.environ).items() if shared.fullmatch(name)}
    return variables | FOR_WORKERS


@contextmanager
def _kill_on_sigterm(processes: Collection[psutil.Process]) -> Iterator[None]:
    """While the block runs, kills (SIGKILL) each of the processes as soon as it has been sent SIGTERM and blocks it."""
    # Ray's processes do not react to SIGTERM here (`signals_blocked`), and Ray would wait a second for each before killing it. They must
    # not be killed any earlier, because the driver has to leave the cluster first.
    done = threading.Event()

    def kill_terminated() -> None:
        while not done.wait(0.02):
            for process in processes:
                if _has_pending(process.pid, signal.SIGTERM):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    thread = threading.Thread(target=kill_terminated, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _has_pending(pid: int, number: signal.Signals) -> bool:
    """Returns whether a process was sent signal `number`, which it blocks; False if that cannot be determined."""
    try:
        match = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return bool(match and int(match.group(1), 16) >> (number - 1) & 1)
