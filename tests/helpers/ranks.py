"""Run a function on several gloo ranks, in processes that stay alive between tests.

    def shards_agree(columns: int) -> float:            # module level: it travels by name
        return dist.get_rank() * columns                # a default process group is open

    values = run_ranks(2, shards_agree, 507)            # [rank 0's value, rank 1's value]

A process that imports torch costs seconds, so the workers are forks of one that has, are kept for the whole session, and
every call opens a fresh gloo group among the first `world_size` of them (about 20 ms). Batch what
belongs together into one call all the same.

A function that opens its own group (`open_world`) is called with `group=False` and finds its place by
`rank()`, `world_size()` and `store()`; the store is new for each call and needs no port.

Values go back and forth by plain pickle: return tensors, not DTensors.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_GRACE_S = 10.0
"""How long the other ranks may take to notice that one has failed."""
_MANY_THREADS = 20
"""A process group has three, a worker without one about ten."""


class RankError(RuntimeError):
    """A rank raised, died or ran out of time. `rank` says which; `cause` is what it raised, where it could be sent."""

    def __init__(self, rank: int, text: str, cause: BaseException | None = None):
        super().__init__(rank, text, cause)
        self.rank, self.text, self.cause = rank, text, cause

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


@dataclass(frozen=True)
class _Place:
    rank: int
    world_size: int
    store: dist.Store


_place: _Place | None = None


def rank() -> int:
    """This rank's number in the running call."""
    return _current().rank


def world_size() -> int:
    """The number of ranks in the running call."""
    return _current().world_size


def store() -> dist.Store:
    """A store that the ranks of the running call share and no other call sees."""
    return _current().store


def _current() -> _Place:
    if _place is None:
        raise RuntimeError("only inside a function run by run_ranks")
    return _place


@contextlib.contextmanager
def gloo_group(timeout_s: float = 120.0) -> Iterator[None]:
    """A default gloo group for the block; one that is already open is used and left open."""
    if dist.is_initialized():
        yield
        return
    here = _current()
    dist.init_process_group(
        "gloo", store=here.store, rank=here.rank, world_size=here.world_size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        dist.barrier()  # a rank that failed at once would break the others' connections while they are being made
        yield
        dist.barrier()  # leaving while another rank still reads aborts it
    finally:
        dist.destroy_process_group()


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, group: bool = True
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks at once and return their values in rank order.

    Args:
        world_size: number of ranks; at most two of them have a core of their own, so keep it small.
        function: importable by name from the test module.
        timeout: seconds for the whole call, start of missing workers included.
        group: open a default gloo group around the call.

    Raises:
        RankError: of the rank that failed first. Ranks that hang because of it are killed.
    """
    return _pool.run(world_size, function, args, timeout, group)


class _Pool:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["distill_rl.student.engine", "distill_rl.teacher.engine", "tests.helpers.engines", __name__]
        )
        self._workers: list[tuple[Any, Connection]] = []
        self._server: dist.TCPStore | None = None
        self._calls = 0
        atexit.register(self.close)

    def run(self, size: int, function: Callable, args: tuple, timeout: float, group: bool) -> list[Any]:
        deadline = time.monotonic() + timeout
        self._grow(size)
        self._calls += 1
        assert self._server is not None
        request = (sys.path, self._server.port, f"call-{self._calls}", size, group, timeout)
        payload = pickle.dumps((function, args))
        for number in range(size):
            self._workers[number][1].send_bytes(pickle.dumps((number, request, payload)))
        values, failures = self._collect(size, deadline)
        if failures:
            raise failures[0][1]
        return [values[number] for number in range(size)]

    def _grow(self, size: int) -> None:
        if any(not process.is_alive() for process, _ in self._workers):
            self.close()
        if self._server is None:
            self._server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, size: int, deadline: float) -> tuple[dict[int, Any], list[tuple[float, RankError]]]:
        values: dict[int, Any] = {}
        failures: list[tuple[float, RankError]] = []
        waiting = {self._workers[number][1]: number for number in range(size)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = sorted(waiting.values())
                self.close()
                if not failures:
                    failures.append((time.monotonic(), RankError(hung[0], f"no answer in time (ranks {hung})")))
                break
            for connection in ready:
                number = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    moment, value, error = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    moment, value = 0.0, None  # a death comes before the errors that it causes elsewhere
                    error = RankError(number, f"the process died (exit code {self._exit_code(number)})")
                values[number] = value
                if error is not None:
                    failures.append((moment, error))
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return values, sorted(failures, key=lambda failure: failure[0])

    def _exit_code(self, number: int) -> int | None:
        process = self._workers[number][0]
        process.join(5)
        return process.exitcode

    def close(self) -> None:
        """Kill the workers; the next call starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers, self._server = [], None


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            number, request, payload = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):  # the session has ended
            return
        answer = _call(number, request, payload)
        connection.send_bytes(answer)


def _call(number: int, request: tuple, payload: bytes) -> bytes:
    global _place
    path, port, name, size, group, timeout = request
    sys.path[:] = path
    moment = None
    try:
        function, args = pickle.loads(payload)
        server = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=timeout))
        _place = _Place(number, size, dist.PrefixStore(name, server))
        with gloo_group(timeout) if group else contextlib.nullcontext():
            try:
                value = function(*args)
            except BaseException:
                moment = time.monotonic()  # before the group is torn down, which makes the other ranks fail
                raise
        return pickle.dumps((time.monotonic(), value, None))
    except BaseException as raised:  # whatever it is, the caller must hear of it
        text = f"{type(raised).__name__}: {raised}\n{traceback.format_exc()}"
        return _pickled_error(moment or time.monotonic(), RankError(number, text, raised))
    finally:
        _place = None
        # DTensor takes the mesh of an earlier call for one of equal ranks and names, whose process groups are others.
        _clear_sharding_prop_cache()
        if psutil.Process().num_threads() > _MANY_THREADS:
            _end_earlier_groups()


def _end_earlier_groups() -> None:
    """Frees the process groups of earlier calls, which have threads that use the processor even when they are idle.

    What still refers to them: DTensor's caches, and reference cycles in models under FSDP.
    """
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("torch.distributed"):
            each.cache_clear()
    gc.collect()


def _pickled_error(moment: float, error: RankError) -> bytes:
    try:
        answer = pickle.dumps((moment, None, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((moment, None, RankError(error.rank, error.text)))
    return answer


_pool = _Pool()
