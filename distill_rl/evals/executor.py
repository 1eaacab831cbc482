"""Executors load a model and run the items of a suite on it: `LocalExecutor` in this process, others in Ray actors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Backend, BackendName, Output, Settings
from distill_rl.evals.suites.base import Item
from distill_rl.system.gpu_memory import gpu_phase

BATCHES_PER_CHUNK = 4
"""Batches of log-likelihood items per chunk, so that a shared prefix is seldom computed more than once."""
VLLM_CHUNK = 512
"""Requests per chunk for vllm: enough to keep its batch full, few enough to show progress."""


@dataclass(frozen=True, slots=True)
class Task:
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
        """Loads a model in place of the current one."""
        ...

    def run(self, task: Task, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        """Yields (index of the item, its output) for every item, in any order, a few at a time as they finish."""
        ...


class LocalExecutor:
    """Runs models in this process.

    A backend is reused while name and settings stay the same; it decides itself what it can keep between two models
    (vllm keeps its running engine).
    """

    def __init__(self) -> None:
        self.device = ""
        self._backend: Backend | None = None
        self._loaded: tuple[BackendName, Settings] | None = None

    @gpu_phase("evaluation")
    def load(self, folder: Path, backend: BackendName, settings: Settings) -> None:
        if self._backend is None or self._loaded != (backend, settings):
            self.close()
            self._backend = open_backend(folder, backend, settings)
            self._loaded = (backend, settings)
        else:
            try:
                self._backend.reload(folder)
            except BaseException:
                self.close()  # the old model is gone and the new one did not load
                raise
        self.device = str(self._backend.device)

    def run(self, task: Task, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        assert self._loaded is not None
        name, settings = self._loaded
        for chunk in chunks(items, task, name, settings.batch_size):
            yield [(chunk[i], output) for i, output in self.outputs(task, [items[index] for index in chunk])]

    def outputs(self, task: Task, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        """The outputs of one chunk."""
        assert self._backend is not None
        with gpu_phase("evaluation"):
            if task.choose:
                yield from self._backend.choose(items)
            else:
                yield from self._backend.generate(items, max_new_tokens=task.max_new_tokens, stop=task.stop)

    def close(self) -> None:
        """Frees the model's memory."""
        if self._backend is not None:
            self._backend.close()
        self._backend = self._loaded = None


def open_backend(folder: Path, name: BackendName, settings: Settings) -> Backend:
    """Loads a model.

    Raises:
        ConfigError: an unknown backend, or a folder that it cannot load.
    """
    if name == "hf":
        from distill_rl.evals.backends.hf import HfBackend

        return HfBackend(folder, settings)
    if name == "vllm":
        from distill_rl.evals.backends.vllm import VllmBackend

        return VllmBackend(folder, settings)
    raise ConfigError("backend", "must be hf or vllm", name)


def chunks(items: Sequence[Item], task: Task, backend: BackendName, batch_size: int) -> list[list[int]]:
    """Indices of the items, cut into the chunks that a backend gets in one call.

    1. Group the items by prefix, so that a backend computes each prefix once.
    2. Sort each group by length, longest first: similar lengths share a batch, which keeps padding low, and the largest
       batch comes first, which shows at once whether it fits into memory.
    3. Cut each group into chunks. vllm finds shared prefixes itself, so for it the groups are joined before cutting.
    """
    if backend == "vllm":
        size = VLLM_CHUNK
    elif task.choose:
        size = batch_size * BATCHES_PER_CHUNK
    else:
        size = batch_size
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.prefix, []).append(index)
    ordered = [sorted(group, key=lambda index: -_num_characters(items[index])) for group in groups.values()]
    if backend == "vllm":
        ordered = [[index for group in ordered for index in group]]
    return [group[start : start + size] for group in ordered for start in range(0, len(group), size)]


def _num_characters(item: Item) -> int:
    if isinstance(item.prompt, str):
        return len(item.prompt)
    return sum(len(message["content"]) for message in item.prompt)
