"""Saving beside the training: one rank's thread that writes what was copied."""

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
    """Writes snapshots of the student while it trains on, one at a time.

    All ranks call each method together. The threads talk over a group of their own: two threads on one group can
    meet in different orders on different ranks.

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
        """Copies the snapshot and returns; it is in `directory` when `marker` is there.

        The marker is JSON, written whole by the first rank when all ranks are done: `error`, one line or null, and
        `files`, the names in `directory`.

        Raises:
            CheckpointError: of the save before this one.
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
        """Waits for the save that was started last.

        Raises:
            CheckpointError: it failed; said once.
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
            if self._world.device.type == "cuda":  # of this thread; DCP would open a context on the first GPU
                torch.cuda.set_device(self._world.device)
            files = save(directory, snapshot, self._world, self._group)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a thread has nobody to raise to: `wait` does
            self._error = CheckpointError(
                f"checkpoint {directory}", "must be writable", f"{type(error).__name__}: {error}"
            )
        if self._world.rank == 0 and marker.parent.is_dir():  # else nobody waits any more
            said = None if self._error is None else str(self._error)
            with suppress(OSError):  # a full disk: `wait` tells of it
                write_json(marker, {"error": said, "files": files})
