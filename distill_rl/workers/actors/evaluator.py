"""The evaluation actor: a model of its own, on a share of a GPU or on the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from distill_rl.evals.backends.base import BackendName, Output, Settings
from distill_rl.evals.executor import LocalExecutor, Task
from distill_rl.evals.options import LoadedSuite, Options
from distill_rl.evals.suites.base import Item
from distill_rl.workers.actors.rank import Process, identify
from distill_rl.workers.cluster.gauges import Gauges

if TYPE_CHECKING:
    from distill_rl.evals.run import Model


class EvalWorker:
    """One copy of a model. It sees no GPU but those that Ray gave it."""

    def __init__(self, rank: int, threads: int, run: str = ""):
        gpus = ",".join(map(str, ray.get_gpu_ids()))
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        self._share = min(1.0, ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0))
        self._threads = threads
        self._gauges = Gauges(run)
        self._executor = LocalExecutor()
        self._loaded: tuple[object, list[LoadedSuite]] | None = None

    def identify(self) -> Process:
        return identify()

    def start(self) -> None:
        """Nothing to do before a model is named."""

    def stop(self) -> None:
        self._executor.close()

    def load(self, folder: Path, backend: BackendName, settings: Settings) -> str:
        """Loads a model; the device that it is on."""
        self._executor.load(folder, backend, self._settled(settings))
        return self._executor.device

    def outputs(self, task: Task, items: Sequence[Item]) -> list[tuple[int, Output]]:
        """(index of the item, its output) for every item."""
        return list(self._executor.outputs(task, items))

    def evaluate(self, model: Model, suites: Sequence[str], data: Path, options: Options) -> dict[str, dict[str, Any]]:
        """Whole suites with grading, results on disk included: suite → result. Of a GPU that it shares it keeps nothing
        afterwards, but for vllm, which holds its share for good."""
        from distill_rl.evals.run import evaluate_models

        loaded = self._questions(suites, data, options)
        options = replace(options, settings=self._settled(options.settings))
        start = time.perf_counter()
        try:
            return evaluate_models([model], suites, data, options, self._executor, loaded=loaded)[model.name]
        finally:
            self._gauges.set("evaluator_seconds", time.perf_counter() - start)
            self._gauges.add("evaluator_evaluations", 1)
            if options.backend != "vllm":
                self._executor.close()

    def _questions(self, suites: Sequence[str], data: Path, options: Options) -> list[LoadedSuite]:
        """Read once, as long as the same are asked for."""
        from distill_rl.evals.options import load_questions

        wanted = (tuple(suites), data, options)
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = wanted, load_questions(suites, data, options)
        return self._loaded[1]

    def _settled(self, settings: Settings) -> Settings:
        return replace(settings, gpu_share=self._share, threads=self._threads)
