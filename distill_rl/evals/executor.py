"""Executors load a model and run the items of a suite on it: `LocalExecutor` in this process, others in Ray actors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Backend, BackendName, Output, Settings
from distill_rl.evals.suites.base import Item
from distill_rl.system.gpu_memory import gpu_phase

if TYPE_CHECKING:
    from distill_rl.parallel.mesh import World


BATCHES_PER_CHUNK = 4
"""Batches of log-likelihood items per chunk, so that a shared prefix is seldom computed more than once."""
VLLM_CHUNK = 512
"""Requests per chunk for vllm: enough to keep its batch full, few enough to show progress."""


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """How the items of a suite are run."""

    choose: bool
    """Compare the log-likelihoods of choices; otherwise generate completions."""
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ()


class Executor(Protocol):
    """One or several copies of a model."""

    device: str
    """The device of the loaded model."""

    def load(self, folder: Path, backend: BackendName, settings: Settings) -> None:
        """Loads the model of `folder` in place of the current one and sets `device`; returns once it is ready to run.

        `run` may only be called afterwards. Implementations may keep a running engine when only the folder differs.

        Raises:
            ConfigError: an unknown backend, or a folder that it cannot load.
            GpuMemoryError: a GPU has too little memory.
        """

    def run(self, task: SuiteTask, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        """Runs items on the loaded model, lazily, while the caller iterates.

        Yields lists of (index into `items`, output), as they finish: every item exactly once, in any order.
        """


class LocalExecutor:
    """Runs models in this process.

    A backend is reused while name and settings stay the same; it decides itself what it can keep between two models
    (vllm keeps its running engine).

    One copy of a model may be on several ranks. Every rank then has an executor, and all of them must make the same calls
    in the same order. Either their callers see to that, or the first rank leads (`lead`) and the others `follow`: only
    the first one has suites, grading, results and progress, and it sends every call that runs the model to the others.

    Args:
        world: the ranks over which the backend hf splits models. None: models are whole.
    """

    def __init__(self, world: World | None = None) -> None:
        self.device = ""
        self._world = world
        self._leads = False
        self._backend: Backend | None = None
        self._loaded: tuple[BackendName, Settings] | None = None

    def lead(self) -> LocalExecutor:
        """Makes the other ranks, which must be in `follow`, make all calls of this one until `close`; returns this executor."""
        self._leads = True
        return self

    def follow(self) -> None:
        """Makes the calls of the first rank, which leads, until it closes its executor; then frees the model.

        Raises:
            DistillError: as the call that failed.
            RuntimeError: the first rank has died, or has sent nothing for as long as the process group waits.
        """
        try:
            while (message := self._broadcast()) is not None:
                call, *arguments = message
                if call == "load":
                    self.load(*arguments)
                else:
                    for _ in self.outputs(*arguments):
                        pass
        finally:
            self.close()

    @gpu_phase("evaluation")
    def load(self, folder: Path, backend: BackendName, settings: Settings) -> None:
        """Loads the model of `folder` into this process and sets `device`.

        If `backend` and `settings` are those of the previous call, the open backend only exchanges its model; otherwise
        it is closed and a new one is opened. After an error no model is loaded.

        Raises:
            ConfigError: an unknown backend, one that is not installed, or a folder that it cannot load.
            GpuMemoryError: the GPU has too little memory.
        """
        if self._leads:
            self._broadcast(("load", folder, backend, settings))
        try:
            if self._backend is not None and self._loaded == (backend, settings):
                self._backend.reload(folder)
            else:
                self._free()
                self._backend = open_backend(folder, backend, settings, self._world)
                self._loaded = (backend, settings)
        except BaseException:
            self._free()  # the old model is gone and the new one did not load
            raise
        self.device = str(self._backend.device)

    def run(self, task: SuiteTask, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        """Runs items on the loaded model, in the chunks of `chunks`, while the caller iterates; yields per chunk the
        list of (index into `items`, output). Needs an earlier `load`."""
        assert self._loaded is not None
        name, settings = self._loaded
        for chunk in chunks(items, task, name, settings.batch_size):
            yield [(chunk[i], output) for i, output in self.outputs(task, [items[index] for index in chunk])]

    def outputs(self, task: SuiteTask, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        """Yields (index into `items`, output) for the items of one chunk, in any order.

        The output holds the log-likelihoods of the choices if `task.choose`, and a greedy completion otherwise. Needs
        an earlier `load`.

        Raises:
            DataError: as the backend, an item that cannot be encoded.
            GpuMemoryError: the chunk does not fit into the GPU's memory.
        """
        assert self._backend is not None
        if self._leads:
            self._broadcast(("outputs", task, items))
        with gpu_phase("evaluation"):
            if task.choose:
                yield from self._backend.choose(items)
            else:
                yield from self._backend.generate(items, max_new_tokens=task.max_new_tokens, stop=task.stop)

    def close(self) -> None:
        """Closes the backend, which frees its model's memory; does nothing if none is open. The other ranks return from
        `follow`. `load` may be called again."""
        self._free()
        if self._leads:
            self._leads = False
            self._broadcast(None)

    def _free(self) -> None:
        if self._backend is not None:
            self._backend.close()
        self._backend = self._loaded = None

    def _broadcast(self, message: object = None) -> Any:
        """`broadcast_from_first`. It needs torch, which what imports this module does without until a model is split."""
        from distill_rl.parallel.mesh import broadcast_from_first

        assert self._world is not None
        return broadcast_from_first(self._world, message)


def open_backend(folder: Path, name: BackendName, settings: Settings, world: World | None) -> Backend:
    """Opens the backend of that name with the model of `folder` loaded; its library is imported only then.

    Args:
        world: the ranks over which hf splits the model; None: it is whole. vllm starts ranks of its own.

    Raises:
        ConfigError: an unknown backend, one that is not installed, or a folder that it cannot load.
        GpuMemoryError: vllm finds too little free memory.
    """
    if name == "hf":
        from distill_rl.evals.backends.hf import HfBackend

        return HfBackend(folder, settings, world)
    if name == "vllm":
        from distill_rl.evals.backends.vllm import VllmBackend

        return VllmBackend(folder, settings)
    raise ConfigError("backend", "must be hf or vllm", name)


def chunks(items: Sequence[Item], task: SuiteTask, backend: BackendName, batch_size: int) -> list[list[int]]:
    """Divides the items into the chunks that a backend gets in one call; returns one list of indices into `items` per
    chunk.

    1. Group the items by prefix, so that a backend computes each prefix once.
    2. Sort each group by length, longest first: similar lengths share a batch, which keeps padding low, and the largest
       batch comes first, which shows at once whether it fits into memory.
    3. Cut each group into chunks of `batch_size` prompts, or of BATCHES_PER_CHUNK batches where choices are compared.
       vllm finds shared prefixes itself, so for it the groups are joined and cut into chunks of VLLM_CHUNK;
       `batch_size` is ignored.
    """
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.prefix, []).append(index)
    ordered = [sorted(group, key=lambda index: -_num_characters(items[index])) for group in groups.values()]
    size = batch_size * BATCHES_PER_CHUNK if task.choose else batch_size
    if backend == "vllm":
        size, ordered = VLLM_CHUNK, [[index for group in ordered for index in group]]
    return [group[start : start + size] for group in ordered for start in range(0, len(group), size)]


def _num_characters(item: Item) -> int:
    """Characters of an item's prompt, over all messages of a chat; the prefix is not counted."""
    if isinstance(item.prompt, str):
        return len(item.prompt)
    return sum(len(message["content"]) for message in item.prompt)
