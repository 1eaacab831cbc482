"""A step's metrics from what the workers returned."""

from __future__ import annotations

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.observe.metrics import values
from distill_rl.types import BatchInfo, Cursor
from distill_rl.workers.actors.teacher import TeacherStats
from distill_rl.workers.pipeline.student_group import describe_alignment, describe_transport


def test_batches_report_supervised_tokens_and_rows_left_out():
    info = BatchInfo(0, Cursor(), 8, 4, 200, 50, 1, 0.5, num_left_out=1, peak_gib=1.5, num_positions=250)
    found = describe_alignment(info)
    assert (found["align/labelled"].value, found["align/labelled"].weight) == (0.25, 200)
    assert (found["align/efficiency"].value, found["align/efficiency"].weight) == (0.8, 250)
    assert (found["align/bad_rows"].value, found["memory/aligner"].value) == (1, 1.5)
    empty = BatchInfo(0, Cursor(), 0, 0, 0, 0, 0, 0.0)
    assert describe_alignment(empty)["align/labelled"].value == 0


def test_memory_of_a_teacher_is_that_of_its_largest_replica():
    config = Config(student=StudentConfig(model="s"), teachers=[TeacherConfig(name=name, model="t") for name in "ab"])
    stats = [[[TeacherStats(peak_gib=1.0), TeacherStats(peak_gib=3.0)], [TeacherStats(peak_gib=2.0)]]] * 2
    found = values(describe_transport(config, stats, {"a": 0.5, "b": 0.5}))
    assert (found["memory/a"], found["memory/b"]) == (3.0, 2.0)
    assert "memory/a" not in describe_transport(config, stats, {"a": 0.5, "b": 0.5}, lost=("a",))
