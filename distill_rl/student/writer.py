"""Saving in the background: a thread of one rank writes what was copied."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from distill_rl.errors import CheckpointError
from distill_rl.parallel.mesh import World, open_group_beside
from distill_rl.student.checkpoint import Snapshot, save
from distill_rl.student.staging import Staging
from distill_rl.system.files import write_json


class Writer:
    """Writes snapshots of the student while training continues, one at a time.

    All ranks call each method together. The threads communicate over a process group of their own, because two threads on
    one group can meet in different orders on different ranks.

    Args:
        timeout_s: seconds that a rank's thread waits for the others.
    """

    def __init__(self, world: World, timeout_s: float):
        self._world, self._timeout_s = world, timeout_s
        self._group: dist.ProcessGroup | None = None
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, snapshot: Snapshot, directory: Path, marker: Path) -> None:
        """Copies the snapshot and returns. It is in `directory` when `marker` exists.

        The first rank writes the marker atomically when all ranks are done. It is JSON: `error`, one line or null, and
        `files`, the names in `directory`.

        Raises:
            CheckpointError: the previous save failed.
        """
        self.wait()
        if self._group is None:
            self._group = open_group_beside(self._world, self._timeout_s)
        if self._staging is None and self._world.device.type == "cuda":
            self._staging = Staging(self._world.device)
        arguments = (snapshot.copied(self._staging), Path(directory), Path(marker))
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the save in progress, if there is one.

        Raises:
            CheckpointError: it failed. Raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, snapshot: Snapshot, directory: Path, marker: Path) -> None:
        files: list[str] = []
        try:
            if self._world.device.type == "cuda":  # per thread; otherwise DCP would open a context on GPU 0
                torch.cuda.set_device(self._world.device)
            files = save(directory, snapshot, self._world, self._group)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # `wait` raises it in the caller's thread
            reason = f"{type(error).__name__}: {error}"
            self._error = CheckpointError(f"checkpoint {directory}", "must be writable", reason)
        if self._world.rank == 0 and marker.parent.is_dir():  # otherwise nobody waits any more
            message = None if self._error is None else str(self._error)
            with suppress(OSError):  # if the disk is full, `wait` raises the error
                write_json(marker, {"error": message, "files": files})
