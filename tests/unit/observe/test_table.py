"""The step-time table: shares add up, workers have their own block, and tables are written on schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill_rl.config.schema import Config
from distill_rl.observe.log import log_file
from distill_rl.observe.metrics import Metric
from distill_rl.observe.sinks import open_observer
from distill_rl.observe.timing import TableSink, step_table
from distill_rl.types import RunPaths


def record(student: float, wait: float = 0.0, **others: float) -> dict[str, float]:
    """One step of `student` + `wait` + 0.1 s; `others` are further metrics, with two underscores for a slash."""
    parts = {"timing/student": student, "timing/wait_teachers": wait, "timing/other": 0.1}
    renamed = {name.replace("__", "/"): value for name, value in others.items()}
    return parts | {"timing/step": sum(parts.values()), "train/loss": 1.0} | renamed


def cells(table: str, label: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.strip().startswith(f"{label}  "))
    return line.strip().removeprefix(label).replace(" ms", "ms").split()


def test_driver_parts_add_up_to_the_step() -> None:
    table = step_table([record(0.5, 0.1), record(0.7, 0.1), record(0.6, 1.0)])
    assert cells(table, "student") == ["600.0ms", "600.0ms", "54.5%"]
    assert cells(table, "wait_teachers") == ["100.0ms", "400.0ms", "36.4%"]
    assert cells(table, "other") == ["100.0ms", "100.0ms", "9.1%"]
    assert cells(table, "step")[2] == "100.0%"


def test_parts_are_sorted_by_time_before_other_and_step() -> None:
    lines = step_table([record(0.05, 0.9)]).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["wait_teachers", "student", "other", "step"]


def test_time_between_steps_counts_towards_the_total() -> None:
    table = step_table([record(0.8, 0.1), record(0.8, 0.1, timing__validation=2.0)])
    assert cells(table, "validation") == ["1,000.0ms", "1,000.0ms", "50.0%"]
    assert cells(table, "step") == ["1,000.0ms", "1,000.0ms", "50.0%"]


def test_workers_have_a_block_with_shares_of_the_step() -> None:
    table = step_table([record(0.8, 0.1, **{"timing/big/forward": 0.95, "timing/student/fetch": 0.01})])
    before, _, workers = table.partition("in the workers, concurrently\n")
    assert "forward" not in before
    assert cells(workers, "big/forward") == ["950.0ms", "950.0ms", "95.0%"]
    assert cells(workers, "student/fetch")[2] == "1.0%"
    assert cells(table, "step")[2] == "100.0%", "workers' times are not part of the driver's"


def test_the_drivers_own_time_is_not_among_the_workers() -> None:
    table = step_table([record(0.8, 0.1, **{"timing/big/forward": 0.95, "timing/driver/cpu": 0.02})])
    _, _, workers = table.partition("in the workers, concurrently\n")
    workers, _, driver = workers.partition("processor time of the driver\n")
    assert "driver/cpu" not in workers
    assert cells(driver, "driver/cpu")[2] == "2.0%"


def test_transport_block_has_units_and_teachers() -> None:
    transport = {
        "transport/bytes": 3 * 2.0**20,
        "transport/bytes_per_token": 392.0,
        "transport/slot_occupancy/big": 0.75,
        "transport/slot_occupancy/small": 1.0,
        "transport/teacher_wait": 0.031,
    }
    table = step_table([record(1.0, **transport)])
    assert cells(table, "MiB of targets") == ["3.00", "3.00"]
    assert cells(table, "bytes per token") == ["392.0", "392.0"]
    assert cells(table, "peak slots in use, big") == ["75.0%", "75.0%"]
    assert cells(table, "peak slots in use, small") == ["100.0%", "100.0%"]
    assert cells(table, "waiting for teachers") == ["3.1%", "3.1%"]


def test_columns_are_aligned_without_trailing_spaces() -> None:
    lines = step_table([record(12.0, 0.1, **{"timing/big/forward": 0.95, "transport/bytes_per_token": 4.0})]).split(
        "\n"
    )
    figures = [line for line in lines if line.endswith("%")]
    assert len({len(line) for line in figures}) == 1
    assert all(line == line.rstrip() for line in lines)


def test_table_of_a_run_without_teachers() -> None:
    table = step_table([{"timing/step": 1.0, "timing/student": 0.9, "timing/other": 0.1}])
    assert "workers" not in table
    assert "teachers" not in table


def test_tables_are_written_every_n_steps_and_on_close(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "distill_rl")
    sink = TableSink(3)
    for step in range(2, 8):
        sink.write(step, record(0.1 * step))
        sink.write(step, {"validation/loss": 1.0})
    titles = [text.splitlines()[0] for text in caplog.messages]
    assert titles == ["where the time went, steps 2 to 3", "where the time went, steps 4 to 6"]
    sink.close()
    sink.close()
    assert [text.splitlines()[0] for text in caplog.messages[2:]] == ["where the time went, step 7"]
    assert cells(caplog.messages[1], "student")[0] == "500.0ms", "a table covers only the steps since the last one"


@pytest.mark.parametrize(("table_every", "tables"), [(2, 3), (0, 0)])
def test_table_every_controls_the_tables_in_the_log(tmp_path: Path, table_every: int, tables: int) -> None:
    config, paths = Config(), RunPaths(tmp_path)
    config.observe.tensorboard, config.observe.table_every, config.observe.every = False, table_every, 100
    with log_file(paths.logs / "driver.log") as file:
        observer = open_observer(config, paths, total_steps=5)
        for step in range(1, 6):
            observer.log(step, {name: Metric(value) for name, value in record(1.0).items()})
        observer.close()
    text = file.read_text()
    assert text.count("where the time went") == tables
    assert text.count("wait_teachers") == tables
    assert ("steps 3 to 4\n" in text) == bool(tables)
