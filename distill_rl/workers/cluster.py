"""The Ray cluster of a run: joined, or started here and ended with everything it started."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import ray

from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError, WorkerError

_FORWARDED = (
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_HUB_CACHE",
    "TMPDIR",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "DISTILL_RL_LOG",
)
"""The only variables of the driver that its actors see, besides those Ray itself sets."""

_OBJECT_STORE_BYTES = 512 * 2**20
_SMALLEST_OBJECT_STORE_BYTES = 80 * 2**20

_CONNECT_TIMEOUT_S = 5.0
_START_ONE = "start one (`ray start --head`), or leave ray.address out"

log = logging.getLogger(__name__)


def namespace() -> str:
    """A Ray namespace of one run, so that actor names of two runs on one cluster never meet."""
    return f"distill_rl-{secrets.token_hex(4)}"


@contextmanager
def ray_session(settings: RayConfig, *, num_cpus: int) -> Iterator[None]:
    """Joins `ray.address`, or starts Ray here for `num_cpus` logical CPUs; ends what it started.

    Raises:
        ConfigError: no cluster at the address, or too little room in /dev/shm.
        WorkerError: Ray did not start.
    """
    if settings.address is None:
        with _local_ray(settings, num_cpus):
            yield
    else:
        with _joined_ray(settings.address):
            yield


@contextmanager
def _local_ray(settings: RayConfig, num_cpus: int) -> Iterator[None]:
    directory = _private_directory() / secrets.token_hex(2)
    if os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_token_file()))
    others = set(psutil.Process().children())
    roots: set[psutil.Process] = set()
    try:
        try:
            ray.init(
                num_cpus=settings.num_cpus or max(num_cpus, os.cpu_count() or 1),
                object_store_memory=_object_store_bytes(),
                include_dashboard=settings.dashboard,
                dashboard_host="127.0.0.1",
                logging_level=logging.ERROR,
                log_to_driver=False,
                namespace=namespace(),
                runtime_env={"env_vars": _worker_environment()},
                _temp_dir=str(directory),
            )
        except Exception as error:
            raise WorkerError(
                "Ray",
                "must start on this machine",
                f"{type(error).__name__}: {error}",
                "see ray.* in the configuration",
            ) from error
        finally:
            roots = set(psutil.Process().children()) - others
        yield
    finally:
        started = _with_descendants(roots)
        ray.shutdown()
        _end(started)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _joined_ray(address: str) -> Iterator[None]:
    _require_answer(address)
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            namespace=namespace(),
            runtime_env={"env_vars": _worker_environment()},
        )
    except Exception as error:
        raise ConfigError(
            "ray.address",
            "must name a running Ray cluster",
            f"{address} ({type(error).__name__})",
            _START_ONE,
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Ray itself tries for minutes to reach a cluster that is not there."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise ConfigError("ray.address", "must be host:port, or auto for the cluster of this machine", address)
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            "ray.address", "must name a running Ray cluster", f"{address} ({error})", _START_ONE
        ) from None


@cache
def _private_directory() -> Path:
    """This process's directory for Ray's files and token; only this user can enter it. Removed at exit.

    Its name begins with the process id, so that a later process can sweep up after one that was killed. It
    lies in /tmp whatever TMPDIR says, because Ray's socket paths must stay under 107 bytes.
    """
    _sweep()
    directory = Path(tempfile.mkdtemp(prefix=f"drl-{os.getpid()}-", dir="/tmp"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def _token_file() -> Path:
    """A token that only this user can read; one per process, because Ray reads it once."""
    path = _private_directory() / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    return path


def _sweep() -> None:
    """Removes what processes of this user that are gone could not remove themselves."""
    for directory in Path("/tmp").glob("drl-*-*"):
        pid = directory.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and directory.stat().st_uid == os.getuid():
            shutil.rmtree(directory, ignore_errors=True)


def _worker_environment() -> dict[str, str]:
    forwarded = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    return forwarded | {"TOKENIZERS_PARALLELISM": "false"}


def _object_store_bytes() -> int:
    free = shutil.disk_usage("/dev/shm").free
    if free < _SMALLEST_OBJECT_STORE_BYTES:
        raise ConfigError(
            "/dev/shm",
            f"Ray's object store needs {_SMALLEST_OBJECT_STORE_BYTES // 2**20} MiB of it",
            f"{free // 2**20} MiB free",
            "free some, enlarge it (mount -o remount,size=2G /dev/shm), or give the container a larger --shm-size",
        )
    return min(_OBJECT_STORE_BYTES, int(free * 0.8))


def _with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = list(roots)
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            found += root.children(recursive=True)
    return found


def _end(processes: list[psutil.Process], patience_s: float = 5.0) -> None:
    """Waits for processes to be gone; kills those that stay."""
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        log.warning("killing %s, left over by Ray", process.pid)
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=patience_s)
