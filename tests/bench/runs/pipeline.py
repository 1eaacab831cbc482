"""How well teacher and student overlap: the time of a step at prefetch.depth 0, 1 and 2, for two equally long stages.

1. Write two random models with the same tokenizer to a temporary folder, and choose the number of the teacher's layers
   so that its forward pass takes as long as the student's whole step.
2. Train with the real command line on two cores, one for each model, with each depth in turn.
3. Compare the time of a step (from one record of metrics.jsonl to the next, so it includes everything) with the longer
   stage (measured by its worker at depth 0, where it has the machine to itself). Perfect overlap gives 1.

The losses of all runs, including one at depth 5, must be equal bit for bit.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.bench import harness
from tests.bench.material import train_tokenizer, write_config, write_llama, write_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEPTHS = (0, 1, 2)
FURTHER = 5
"""A depth for which only the losses are compared."""
MOST = 1.15
"""Largest allowed ratio of a step at depth 1 to the longer stage; stages that only sleep give 1.06."""
SHORTEST = 0.1
"""Fewest seconds of a stage: Ray's own overhead, about 5 ms per step, must stay small."""
UNEQUAL = 1.1
"""Largest allowed ratio of the longer stage to the shorter."""
WARM_UP = 4
"""First steps of a run, which are not counted: caches fill."""
CORES = 2
HIDDEN, STUDENT_LAYERS, VOCABULARY = 256, 4, 2000
TEACHER = "teacher"


def write_material(root: Path, *, rows: int, length: int) -> None:
    """Writes student/ (tokenizer and model) and text.jsonl below `root`.

    Documents are longer than `length` tokens, so that all rows are full and all steps equal.

    Args:
        rows: documents.
        length: tokens per row.
    """
    texts = write_texts(root / "text.jsonl", rows=rows, words_per_row=length)
    tokenizer = train_tokenizer(texts, VOCABULARY, "</s>")
    tokenizer.save_pretrained(root / "student")
    write_model(root / "student", tokenizer, STUDENT_LAYERS, length)


def write_teacher(root: Path, layers: int, length: int) -> None:
    """Writes teacher/, with the student's tokenizer and a random model, replacing an existing one."""
    from transformers import AutoTokenizer

    shutil.rmtree(root / "teacher", ignore_errors=True)
    (root / "teacher").mkdir()
    for file in (root / "student").glob("tokenizer*"):
        shutil.copyfile(file, root / "teacher" / file.name)
    write_model(root / "teacher", AutoTokenizer.from_pretrained(root / "student"), layers, length)


def write_model(folder: Path, tokenizer: PreTrainedTokenizerBase, layers: int, length: int) -> None:
    """Writes a random Llama for this tokenizer to `folder`. The tokenizer itself is not written."""
    import torch

    torch.manual_seed(0)
    write_llama(
        folder,
        tokenizer,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        max_position_embeddings=length,
    )


def configuration(root: Path, name: str, depth: int, **sizes: Any) -> Path:
    """Writes the configuration of a run with prefetch.depth = `depth` and returns its path.

    Args:
        sizes: keywords of `write_config`.
    """
    return write_config(root, name, **sizes, top_k=32, lr=1e-4, prefetch={"depth": depth})


def run(root: Path, name: str, depth: int, **sizes: int) -> dict[str, Any]:
    """Trains once in `runs/<name>`; returns the figures of its metrics. Raises SystemExit if the run fails.

    Args:
        sizes: keywords of `write_config`.
    """
    folder = root / "runs" / name
    harness.train(configuration(root, name, depth, **sizes), folder, environment=harness.ONE_THREAD, quiet=True)
    return figures(folder / "metrics.jsonl")


def figures(metrics: Path) -> dict[str, Any]:
    """Medians over the steps after the warm-up, in seconds, and the losses of all steps, from a metrics.jsonl."""
    steps = harness.step_records(metrics)
    counted = steps[WARM_UP - 1 :]

    def middle(name: str) -> float:
        return round(median(step[f"timing/{name}"] for step in counted[1:]), 4)

    return {
        "step": round(median(after["time"] - before["time"] for before, after in pairwise(counted)), 4),
        "teacher": middle(f"{TEACHER}/forward"),
        "student": middle("student/step"),
        "waited_for_teacher": middle("wait_teachers"),
        "losses": [step["train/loss"] for step in steps],
    }


def make_equal(root: Path, sizes: Mapping[str, int], times: float = 1) -> int:
    """Writes a teacher whose forward pass takes about as long as a student's step; returns its number of layers.

    Scales the number of layers by the measured ratio of the two times. A pass has costs besides its layers, so this
    takes a few rounds, at most four. Each is a run of the command line, and prints a line.

    Args:
        times: or so many times as long.
    """
    layers = round(3 * STUDENT_LAYERS * times)
    for attempt in range(4):
        write_teacher(root, layers, sizes["length"])
        stages = run(root, f"calibration-{attempt}", 0, **{**sizes, "steps": WARM_UP + 8})
        ratio = times * stages["student"] / stages["teacher"]
        print(f"teacher of {layers} layers: {stages['teacher']:.3f} s, student {stages['student']:.3f} s", flush=True)
        better = max(1, round(layers * ratio))
        if better == layers or 1 / 1.03 < ratio < 1.03:
            break
        layers = better
    else:
        write_teacher(root, layers, sizes["length"])
    return layers


def measure(
    folder: Path,
    *,
    repeats: int = 5,
    steps: int = 24,
    batch: int = 4,
    length: int = 128,
    teacher_layers: int | None = None,
) -> dict[str, Any]:
    """Run every depth in turn, with a teacher that takes as long as the student.

    Binds this process to two cores. Raises `Refused` where there are fewer.

    Args:
        repeats: runs per depth.
        steps: optimizer steps per run.
        batch: rows per step.
        length: tokens per row.
        teacher_layers: chosen by measuring, unless given.
    """
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise harness.Refused("needs two cores, one for each model")
    os.sched_setaffinity(0, cores)  # inherited by the runs, which give each model one thread
    sizes = {"steps": steps, "batch": batch, "length": length, "micro_batch": max(1, batch // 2)}
    write_material(folder, rows=4 * batch, length=length)
    if teacher_layers is None:
        teacher_layers = make_equal(folder, sizes)
    else:
        write_teacher(folder, teacher_layers, length)
    runs: dict[int, list[dict[str, Any]]] = {depth: [] for depth in DEPTHS}
    for i in range(repeats):
        for depth in DEPTHS:
            runs[depth].append(run(folder, f"depth-{depth}-{i}", depth, **sizes))
            print(f"run {i + 1} of {repeats}, depth {depth}: {runs[depth][-1]['step']:.3f} s a step", flush=True)
    losses = run(folder, f"depth-{FURTHER}", FURTHER, **sizes)["losses"]
    return summary(runs) | {
        "same_losses": all(other["losses"] == losses for others in runs.values() for other in others),
        "depths_of_losses": [*DEPTHS, FURTHER],
        "workload": sizes | {"hidden": HIDDEN, "student_layers": STUDENT_LAYERS, "teacher_layers": teacher_layers},
        "repeats": repeats,
    }


def summary(runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """`stages`: seconds of each stage at depth 0; `depths`: by depth, medians over runs and ratios to the longer stage.

    `over_longer_stage` refers to the stages at depth 0, `over_longer_stage_as_it_ran` to those at the same depth.

    Args:
        runs: by depth, what `run` returned.
    """
    names = ("step", "teacher", "student", "waited_for_teacher")
    depths: dict[str, dict[str, Any]] = {
        str(depth): {name: round(median(run[name] for run in runs[depth]), 4) for name in names} for depth in runs
    }
    teacher, student = depths["0"]["teacher"], depths["0"]["student"]
    longer = max(teacher, student)
    for depth, middle in depths.items():
        middle["step_of_runs"] = [run["step"] for run in runs[int(depth)]]
        middle["over_longer_stage"] = round(middle["step"] / longer, 3)
        as_it_ran = max(middle["teacher"], middle["student"])
        middle["over_longer_stage_as_it_ran"] = round(middle["step"] / as_it_ran, 3)
    stages = {"teacher": teacher, "student": student, "longer": longer, "sum": round(teacher + student, 4)}
    return {"stages": stages, "depths": depths}


def verdict(measured: Mapping[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    stages, at_1 = measured["stages"], measured["depths"]["1"]["over_longer_stage"]
    teacher, student = stages["teacher"], stages["student"]
    shorter = min(teacher, student)
    return harness.missed(
        (
            shorter < SHORTEST,
            f"a stage takes {shorter:.3f} s; must be at least {SHORTEST:g} s; raise --batch or --length",
        ),
        (
            stages["longer"] > UNEQUAL * shorter,
            f"the stages take {teacher:.3f} and {student:.3f} s; they must be about equal",
        ),
        (at_1 > MOST, f"a step at depth 1 takes {at_1:.2f} times the longer stage; must be at most {MOST:g}"),
        (not measured["same_losses"], "the losses differ between runs"),
    )


main = harness.program("pipeline", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
