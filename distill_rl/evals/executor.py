"""Where a model runs: in this process (`LocalExecutor`), or wherever else something keeps the promise of `Executor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Backend, BackendName, Output, Settings
from distill_rl.evals.suites.base import Item
from distill_rl.system.gpu_memory import gpu_phase

CHUNKS_PER_CALL = 4
"""batches of log-likelihoods that are handed over at once, so that work on a common prefix is seldom done again"""
VLLM_CHUNK = 512
"""requests that vllm gets at once: enough to keep its batch full, few enough to see progress"""


@dataclass(frozen=True, slots=True)
class Task:
    """What is done with the items of a suite."""

    choose: bool
    """log-likelihoods of choices; else completions"""
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ()


class Executor(Protocol):
    """One or several copies of a model."""

    device: str
    """what the loaded model runs on"""

    def load(self, folder: Path, backend: BackendName, settings: Settings) -> None:
        """Replaces the model that was loaded before."""
        ...

    def run(self, task: Task, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        """(index of the item, its output) for every item, in any order, a few at a time as they come."""
        ...


class LocalExecutor:
    """In this process. A backend is kept as long as models are asked for with its name and settings; what of the one
    model it can use for the next (vllm: a running engine) is its own affair."""

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
                self.close()  # the model before is gone, the next not there
                raise
        self.device = str(self._backend.device)

    def run(self, task: Task, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        assert self._loaded is not None
        name, settings = self._loaded
        for chunk in chunks(items, task, name, settings.batch_size):
            yield [(chunk[index], output) for index, output in self.outputs(task, [items[index] for index in chunk])]

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
        ConfigError: no such backend, or a folder that it cannot load.
    """
    if name == "hf":
        from distill_rl.evals.backends.hf import HfBackend

        return HfBackend(folder, settings)
    if name == "vllm":
        from distill_rl.evals.backends.vllm import VllmBackend

        return VllmBackend(folder, settings)
    raise ConfigError("backend", "must be hf or vllm", name)


def chunks(items: Sequence[Item], task: Task, backend: BackendName, batch_size: int) -> list[list[int]]:
    """Indices of the items, cut into what is handed over at once.

    Items of one prefix stay together and the longest of them come first: little padding, and the largest batch shows
    at once whether it fits into memory.
    """
    size = VLLM_CHUNK if backend == "vllm" else batch_size * (CHUNKS_PER_CALL if task.choose else 1)
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.prefix, []).append(index)
    ordered = [sorted(group, key=lambda index: -_length(items[index])) for group in groups.values()]
    if backend == "vllm":  # finds common prefixes itself, over any number of groups
        ordered = [[index for group in ordered for index in group]]
    return [group[start : start + size] for group in ordered for start in range(0, len(group), size)]


def _length(item: Item) -> int:
    if isinstance(item.prompt, str):
        return len(item.prompt)
    return sum(len(message["content"]) for message in item.prompt)
