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
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from distill_rl.bench import harness
from distill_rl.bench.material import train_tokenizer, write_llama, write_texts

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
CONFIG = """\
run: {{name: {name}, dir: {root}/runs}}
student: {{model: {root}/student, dtype: fp32}}
teachers: [{{name: teacher, model: {root}/teacher, dtype: fp32}}]
data: {{path: {root}/text.jsonl, max_length: {length}}}
loss: {{top_k: 32}}
optimizer: {{lr: 1.0e-4}}
train: {{steps: {steps}, global_batch_size: {batch}, micro_batch_size: {micro_batch}}}
aligner: {{workers: 1}}
prefetch: {{depth: {depth}}}
observe: {{tensorboard: false}}
"""


def write_material(root: Path, *, rows: int, length: int) -> None:
    """Write student/ and text.jsonl: documents longer than `length` tokens, so that all rows are full and all steps equal."""
    texts = write_texts(root / "text.jsonl", rows=rows, words_per_row=length)
    tokenizer = train_tokenizer(texts, VOCABULARY, "</s>")
    tokenizer.save_pretrained(root / "student")
    write_model(root / "student", tokenizer, STUDENT_LAYERS, length)


def write_teacher(root: Path, layers: int, length: int) -> None:
    """Write teacher/, replacing an existing one."""
    from transformers import AutoTokenizer

    shutil.rmtree(root / "teacher", ignore_errors=True)
    (root / "teacher").mkdir()
    for file in (root / "student").glob("tokenizer*"):
        shutil.copyfile(file, root / "teacher" / file.name)
    write_model(root / "teacher", AutoTokenizer.from_pretrained(root / "student"), layers, length)


def write_model(folder: Path, tokenizer: PreTrainedTokenizerBase, layers: int, length: int) -> None:
    """Write a random Llama for this tokenizer."""
    import torch

    torch.manual_seed(0)
    write_llama(folder, tokenizer, hidden=HIDDEN, intermediate=4 * HIDDEN, layers=layers, positions=length)


def run(root: Path, name: str, depth: int, **sizes: int) -> dict[str, Any]:
    """Train once; return the figures of its metrics."""
    config = root / f"{name}.yaml"
    config.write_text(CONFIG.format(root=root, name=name, depth=depth, **sizes), "utf-8")
    harness.train(config, environment=harness.ONE_THREAD, quiet=True)
    return figures(root / "runs" / name / "metrics.jsonl")


def figures(metrics: Path) -> dict[str, Any]:
    """Medians over the steps after the warm-up, in seconds, and the losses of all steps."""
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


def make_equal(root: Path, sizes: Mapping[str, int]) -> int:
    """Write a teacher whose forward pass takes as long as a student's step; return its number of layers.

    Scales the number of layers by the measured ratio of the two times. A pass has costs besides its layers, so this
    takes a few rounds to converge.
    """
    layers = 3 * STUDENT_LAYERS
    for attempt in range(4):
        write_teacher(root, layers, sizes["length"])
        found = run(root, f"calibration-{attempt}", 0, **{**sizes, "steps": WARM_UP + 8})
        ratio = found["student"] / found["teacher"]
        print(f"teacher of {layers} layers: {found['teacher']:.3f} s, student {found['student']:.3f} s", flush=True)
        better = max(1, round(layers * ratio))
        if better == layers or 1 / 1.03 < ratio < 1.03:
            break
        layers = better
    else:
        write_teacher(root, layers, sizes["length"])
    return layers


def compare(root: Path, repeats: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Run every depth in turn, `repeats` times, on material that has been written."""
    found: dict[int, list[dict[str, Any]]] = {depth: [] for depth in DEPTHS}
    for repeat in range(repeats):
        for depth in DEPTHS:
            found[depth].append(run(root, f"depth-{depth}-{repeat}", depth, **sizes))
            print(f"run {repeat + 1} of {repeats}, depth {depth}: {found[depth][-1]['step']:.3f} s a step", flush=True)
    further = run(root, f"depth-{FURTHER}", FURTHER, **sizes)
    losses = [one["losses"] for one in (*(one for runs in found.values() for one in runs), further)]
    return summary(found) | {
        "same_losses": all(one == losses[0] for one in losses),
        "depths_of_losses": [*DEPTHS, FURTHER],
    }


def summary(found: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians over the runs of each depth, and of the stages alone."""

    def middle(depth: int, name: str) -> float:
        return round(median(one[name] for one in found[depth]), 4)

    teacher, student = middle(0, "teacher"), middle(0, "student")
    return {
        "stages": {
            "teacher": teacher,
            "student": student,
            "longer": max(teacher, student),
            "sum": round(teacher + student, 4),
        },
        "depths": {
            str(depth): {
                "step": middle(depth, "step"),
                "step_of_runs": [one["step"] for one in runs],
                "over_longer_stage": round(middle(depth, "step") / max(teacher, student), 3),
                "over_longer_stage_as_it_ran": round(
                    middle(depth, "step") / max(middle(depth, "teacher"), middle(depth, "student")), 3
                ),
                **{name: middle(depth, name) for name in ("teacher", "student", "waited_for_teacher")},
            }
            for depth, runs in found.items()
        },
    }


def verdict(measured: Mapping[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    stages, at_1 = measured["stages"], measured["depths"]["1"]["over_longer_stage"]
    shorter = min(stages["teacher"], stages["student"])
    problems = []
    if shorter < SHORTEST:
        problems.append(f"a stage takes {shorter:.3f} s; must be at least {SHORTEST:g} s; raise --batch or --length")
    if stages["longer"] > UNEQUAL * shorter:
        problems.append(
            f"the stages take {stages['teacher']:.3f} and {stages['student']:.3f} s; they must be about equal"
        )
    if at_1 > MOST:
        problems.append(f"a step at depth 1 takes {at_1:.2f} times the longer stage; must be at most {MOST:g}")
    if not measured["same_losses"]:
        problems.append("the losses differ between runs")
    return problems


def show(measured: Mapping[str, Any]) -> None:
    stages = measured["stages"]
    print(f"\nteacher {stages['teacher']:.3f} s, student {stages['student']:.3f} s, sequentially {stages['sum']:.3f} s")
    print(f"{'depth':>5}{'step':>9}{'step / longer stage':>23}{'teacher':>9}{'student':>9}{'waited':>9}")
    for depth, one in measured["depths"].items():
        print(
            f"{depth:>5}{one['step']:>8.3f}s{one['over_longer_stage']:>23.2f}{one['teacher']:>8.3f}s"
            f"{one['student']:>8.3f}s{one['waited_for_teacher']:>8.3f}s"
        )


def main(argv: list[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs per depth; default: %(default)s")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps per run; default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="rows per step; default: %(default)s")
    parser.add_argument("--length", type=int, default=128, help="tokens per row; default: %(default)s")
    parser.add_argument("--teacher-layers", type=int, help="default: chosen by measuring")
    options = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        print("pipeline: error: needs two cores, one for each model", file=sys.stderr)
        return 2
    os.sched_setaffinity(0, cores)  # inherited by the runs, which give each model one thread
    sizes = {"steps": options.steps, "batch": options.batch, "length": options.length}
    sizes["micro_batch"] = max(1, options.batch // 2)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_material(root, rows=4 * options.batch, length=options.length)
        layers = options.teacher_layers
        if layers is None:
            layers = make_equal(root, sizes)
        else:
            write_teacher(root, layers, options.length)
        measured = compare(root, options.repeats, sizes)
    show(measured)
    workload = sizes | {"hidden": HIDDEN, "student_layers": STUDENT_LAYERS, "teacher_layers": layers}
    figures = measured | {"workload": workload, "repeats": options.repeats}
    return harness.finish("pipeline", figures, options.out, verdict(measured))


if __name__ == "__main__":
    sys.exit(main())
