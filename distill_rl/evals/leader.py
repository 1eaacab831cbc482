"""One copy of a model on several ranks: the first rank decides what is run, and the others follow.

Only the first rank has suites, grading, results and progress. It sends every call that runs the model to the others,
because all ranks must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.evals.backends.base import BackendName, Output, Settings
from distill_rl.evals.executor import LocalExecutor, Task, chunks
from distill_rl.evals.suites.base import Item

if TYPE_CHECKING:
    from distill_rl.parallel.mesh import World


class LeadingExecutor:
    """The executor of the first rank. The other ranks must be in `follow` until `close`.

    Args:
        local: runs this rank's part of the model.
        world: the ranks of the model.
    """

    def __init__(self, local: LocalExecutor, world: World):
        self.device = ""
        self._local, self._world = local, world
        self._loaded: tuple[BackendName, int] | None = None

    def load(self, folder: Path, backend: BackendName, settings: Settings) -> None:
        """Loads every rank's part of the model in `folder`, as `LocalExecutor.load`, and sets `device`."""
        _broadcast(self._world, ("load", folder, backend, settings))
        self._local.load(folder, backend, settings)
        self._loaded = backend, settings.batch_size
        self.device = self._local.device

    def run(self, task: Task, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        """Runs items on all ranks, chunk by chunk, as `LocalExecutor.run`."""
        assert self._loaded is not None
        for chunk in chunks(items, task, *self._loaded):
            part = [items[index] for index in chunk]
            _broadcast(self._world, ("outputs", task, part))
            yield [(chunk[i], output) for i, output in self._local.outputs(task, part)]

    def close(self) -> None:
        """Frees this rank's part of the model, and makes the other ranks return from `follow`."""
        self._local.close()
        _broadcast(self._world, None)


def follow(local: LocalExecutor, world: World) -> None:
    """Makes the calls of the first rank's `LeadingExecutor` on this rank until that is closed; then frees the model.

    Raises:
        DistillError: as the call that failed.
        RuntimeError: the first rank has died, or has sent nothing for as long as the process group waits.
    """
    try:
        while (message := _broadcast(world)) is not None:
            call, *arguments = message
            if call == "load":
                local.load(*arguments)
            else:
                for _ in local.outputs(*arguments):
                    pass
    finally:
        local.close()


def _broadcast(world: World, message: object = None) -> Any:
    """`broadcast_from_first`. It needs torch, which what imports this module does without until a model is split."""
    from distill_rl.parallel.mesh import broadcast_from_first

    return broadcast_from_first(world, message)
