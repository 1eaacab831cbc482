"""What to expect of 128 nodes with 8 H100s each: the tables of docs/scaling.md, from the models of `scaling`.

Predictions, not measurements: nothing is run. The models are an 8B student and a 70B teacher of Llama's shape, and a step has 2,048 rows of
4,096 tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from distill_rl.config.facts import Facts, ModelFacts, TeacherFacts
from distill_rl.config.schema import Config, DataConfig, StudentConfig, TeacherConfig, TrainConfig
from distill_rl.scaling.model import Cluster, Stages, step_seconds
from distill_rl.scaling.splits import JITTER, Prediction, Split, predict
from distill_rl.system.environment import ROOT
from distill_rl.system.files import write_atomic
from tests.bench import harness

PAGE = ROOT / "docs" / "scaling.md"

CLUSTER = Cluster(1024, "h100", per_node=8)
STUDENT = ModelFacts("llama", 8_030_000_000, 4096, 14_336, 32, 32, 8, 128_256, tied=False, bytes_on_disk=16_060_000_000)
TEACHER = ModelFacts(
    "llama", 70_600_000_000, 8192, 28_672, 80, 64, 8, 128_256, tied=False, bytes_on_disk=141_100_000_000
)
FACTS = Facts(vocabulary_size=128_256, student=STUDENT, teachers=(TeacherFacts(model=TEACHER),))
CONFIG = Config(
    student=StudentConfig(model="student", activation_checkpointing=True),
    teachers=[TeacherConfig(name="teacher", model="teacher")],
    data=DataConfig(path="text", max_length=4096),
    train=TrainConfig(steps=10_000, global_batch_size=2048),
)
SPLITS = {
    of_teacher: Split(1024 - of_teacher, 1, of_teacher // 8, 8, 1, shared=False)
    for of_teacher in (256, 384, 512, 640, 768)
}


@dataclass(frozen=True, slots=True)
class Printed:
    """A table."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def markdown(self) -> str:
        return harness.markdown_table(self.heading, self.rows)


def by_split() -> Printed:
    """Teacher and student on GPUs of their own."""
    rows = []
    for of_teacher, split in SPLITS.items():
        found = _predicted(split)
        times = (found.teacher.total, found.student.total)
        idle = [f"{1 - each / found.step:.0%}" for each in times]
        rows.append(
            [
                f"{of_teacher} + {1024 - of_teacher}",
                *(f"{each:.2f} s" for each in (*times, found.step)),
                *idle,
                f"{found.tokens_per_second:,.0f}",
            ]
        )
    heading = ["GPUs of teacher + student", "teacher", "student", "step", "teacher idle", "student idle", "tokens/s"]
    return Printed(heading, rows)


def by_interval() -> Printed:
    """Goodput by the time between two checkpoints, and by how long the student's recovery takes."""
    found = _best()
    rows = []
    for minutes in (1, 5, 15, 60, 240):
        every = max(1, round(60 * minutes / found.step))
        shares = [
            replace(found, faults=replace(found.faults, student_recovery=seconds)).goodput_at(every)
            for seconds in (30.0, 120.0, 600.0)
        ]
        rows.append([f"{minutes} min", *(f"{share:.2%}" for share in shares)])
    return Printed(["a checkpoint every", "recovery in 30 s", "in 2 min", "in 10 min"], rows)


def by_depth() -> Printed:
    """What look-ahead hides: a step over its longer stage."""
    found = _best()
    rows = []
    for depth in (0, 1, 2, 4):
        rows.append(
            [str(depth), *(f"{_over_longer(found, depth=depth, jitter=each):.2f}" for each in (0.0, JITTER, 0.1))]
        )
    return Printed(["`prefetch.depth`", "no jitter", f"{JITTER:.0%}", "10%"], rows)


def by_ring() -> Printed:
    """What a ring must hold."""
    found = _best()
    rows = [
        [str(ring), *(f"{_over_longer(found, depth=2, jitter=each, ring=ring):.2f}" for each in (0.0, JITTER, 0.1))]
        for ring in (1, 2, 3)
    ]
    return Printed(["batches that a ring holds, depth 2", "no jitter", f"{JITTER:.0%}", "10%"], rows)


TABLES: Mapping[str, Callable[[], Printed]] = MappingProxyType(
    {"split": by_split, "interval": by_interval, "depth": by_depth, "ring": by_ring}
)


def page(text: str) -> str:
    """The text of the page with its tables written anew."""
    return harness.with_tables(text, lambda name: TABLES[name]().markdown)


def _predicted(split: Split) -> Prediction:
    return predict(CONFIG, FACTS, CLUSTER, split)


def _best() -> Prediction:
    """Of the splits that are shown."""
    return max(map(_predicted, SPLITS.values()), key=lambda found: found.kept)


def _over_longer(found: Prediction, *, depth: int, jitter: float, ring: int | None = None) -> float:
    """The time of a step over its longer stage without jitter."""
    teacher, student = found.teacher.total, found.student.total
    stages = Stages(
        teacher,
        student,
        depth=depth,
        ring=ring,
        jitter=jitter,
        teacher_ranks=found.split.teacher_gpus,
        student_ranks=found.split.student_gpus,
    )
    return step_seconds(stages, steps=1000) / max(teacher, student)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables, or with --write puts them into the page. Returns the exit code, 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write them into docs/scaling.md")
    if parser.parse_args(argv).write:
        write_atomic(PAGE, page(PAGE.read_text("utf-8")))
        print(f"written: {PAGE}")
    else:
        print("\n\n".join(f"{make.__doc__}\n\n{make().markdown}" for make in TABLES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
