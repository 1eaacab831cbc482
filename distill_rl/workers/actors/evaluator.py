"""The evaluation actor: it loads a model, or its part of one, on a share of a GPU or on the CPU, and runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from distill_rl.evals.backends.base import BackendName, Output, Settings
from distill_rl.evals.executor import LocalExecutor, SuiteTask
from distill_rl.evals.options import Options, load_questions
from distill_rl.evals.suites.base import Item
from distill_rl.workers.actors.rank import GroupMember, see_assigned_gpus
from distill_rl.workers.cluster.telemetry import Gauges

if TYPE_CHECKING:
    from distill_rl.evals.run import Model
    from distill_rl.parallel.mesh import World


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the evaluation of a model gives."""

    results: dict[str, dict[str, Any]]
    """By suite, its result (score, interval, number of items, …)."""
    samples: list[dict[str, Any]]
    """As `evals.results.samples_of` returns them."""


class EvalWorker(GroupMember):
    """One copy of a model, loaded by `load` or `evaluate`. It sees only the GPUs that Ray assigned to it.

    With tensor parallelism of the backend hf, `tp` consecutive actors hold one copy. All of them are called alike:
    `load` and `outputs` with the same arguments; or `evaluate` on the first one and `follow` on the others.
    """

    def __init__(self, rank: int, tp: int, threads: int, deadline_s: float, run: str = ""):
        """Restricts this process to the GPUs that Ray assigned to the actor (none: CPU only). No model is loaded yet.

        Args:
            rank: among all actors of the group.
            tp: number of actors that hold one copy of the model together. More than one must `start`.
            threads: of the CPU for computation.
            deadline_s: how long a rank of a copy waits for the others, in seconds.
            run: the run's name, as a tag of the gauges.
        """
        self._rank, self._tp, self._deadline_s = rank % tp, tp, deadline_s
        self._world: World | None = None
        see_assigned_gpus()
        self._share = min(1.0, ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0))
        self._threads = threads
        self._gauges = Gauges(run)
        self._executor = LocalExecutor()
        self._questions = lru_cache(maxsize=1)(load_questions)

    def start(self, host: str, port: int, gpu_memory: float = 1.0) -> None:
        """Joins the process group of the actors that hold this copy of the model, and waits for them.

        Args:
            host, port: of the store that the first of them serves; that one ignores them.
            gpu_memory: not used, because a model is limited to the share that Ray assigned.
        """
        from distill_rl.parallel.mesh import open_world

        store = self._meet(host, port, self._tp)
        device = "cuda:0" if ray.get_gpu_ids() else "cpu"
        self._world = open_world(
            rank=self._rank, dp=1, tp=self._tp, device=device, store=store, timeout_s=self._deadline_s
        )
        self._executor = LocalExecutor(self._world)

    def stop(self) -> None:
        """Frees the loaded model, if there is one, and leaves the process group together with its other ranks."""
        self._executor.close()
        if self._world is not None:
            from distill_rl.parallel.mesh import close_world

            close_world(self._world)

    def load(self, folder: Path, backend: BackendName, settings: Settings) -> str:
        """Loads the model in `folder`, in place of an earlier one, and returns its device.

        This actor's GPU share and threads replace those in `settings`.
        """
        self._executor.load(folder, backend, self._with_resources(settings))
        return self._executor.device

    def outputs(self, task: SuiteTask, items: Sequence[Item]) -> list[tuple[int, Output]]:
        """Runs the loaded model on all items. Returns (index into `items`, output) for each, in any order; only on the
        first rank of a copy, and nothing on the others."""
        outputs = list(self._executor.outputs(task, items))
        return outputs if self._rank == 0 else []

    def follow(self) -> None:
        """Runs this rank's part of the models that the first rank evaluates, until it is done with `evaluate`."""
        self._executor.follow()

    def evaluate(
        self, model: Model, suites: Sequence[str], data: Path, options: Options, num_samples: int
    ) -> Evaluated:
        """Loads a model, runs and grades whole suites on it, and writes the results to `model.out`.

        Frees the model's memory afterwards, even after an error, but not an engine, which keeps its share of the GPU for
        good.

        Args:
            data: folder of the suites' questions, which are read once and kept for later calls with the same arguments.
            options: the GPU share and threads in its settings are replaced by those of this actor.
            num_samples: completions per suite to return.
        """
        from distill_rl.evals.results import samples_of
        from distill_rl.evals.run import FileProgress, evaluate_models, progress_file

        assert model.out is not None
        loaded = self._questions(tuple(suites), data, options)
        options = replace(options, settings=self._with_resources(options.settings))
        start = time.perf_counter()
        executor = self._executor if self._world is None else self._executor.lead()
        try:
            with FileProgress(progress_file(model.out)) as progress:
                results = evaluate_models([model], loaded, options, executor, progress)[model.name]
        finally:
            self._gauges.set("evaluator_seconds", time.perf_counter() - start)
            self._gauges.add("evaluator_evaluations", 1)
            if options.backend == "hf":
                executor.close()
        return Evaluated(results, samples_of(loaded, model.out, num_samples))

    def _with_resources(self, settings: Settings) -> Settings:
        """Returns a copy of the settings with this actor's GPU share and number of threads."""
        return replace(settings, gpu_share=self._share, threads=self._threads)
