from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from distill_rl.config.schema import Config
from distill_rl.observe.metrics import Metric
from distill_rl.observe.report.report import figures, read_run, sections
from distill_rl.observe.sinks import JsonlSink, Observer, ProgressSink, TensorBoardSink, open_observer, read_records
from distill_rl.observe.timing import StepTimer
from distill_rl.types import RunPaths


class ListSink:
    def __init__(self, *, fails_to_close: str = "") -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed, self.fails_to_close = False, fails_to_close

    def write(self, step: int, record: Mapping[str, float]) -> None:
        self.records.append((step, dict(record)))

    def close(self) -> None:
        self.closed = True
        if self.fails_to_close:
            raise OSError(self.fails_to_close)


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_metrics_are_reduced_between_records() -> None:
    sink = ListSink()
    observer = Observer([sink], every=2)
    observer.log(1, {"loss": Metric(4.0, "mean", 1.0), "tokens": Metric(10, "sum"), "lr": Metric(0.1, "last")})
    observer.log(2, {"loss": Metric(1.0, "mean", 2.0), "tokens": Metric(20, "sum"), "lr": Metric(0.2, "last")})
    assert sink.records == [(2, {"loss": 2.0, "tokens": 30, "lr": 0.2})]


def test_flush_and_close_write_pending_metrics_once() -> None:
    sink = ListSink()
    observer = Observer([sink], every=10)
    observer.log(1, {"tokens": Metric(1, "sum")})
    observer.flush()
    observer.log(2, {"tokens": Metric(2, "sum")})
    observer.log(3, {"tokens": Metric(4, "sum")})
    observer.close()
    assert sink.records == [(1, {"tokens": 1}), (3, {"tokens": 6})]


def test_live_sinks_get_every_step() -> None:
    live = ListSink()
    observer = Observer([], every=10, live=[live])
    observer.log(1, {"loss": Metric(1.0)})
    observer.log(2, {"loss": Metric(2.0)})
    assert live.records == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]


def test_ranks_logged_together_are_reduced() -> None:
    sink = ListSink()
    Observer([sink], every=1).log(1, {"loss": Metric(1.0, "mean", 3.0)}, {"loss": Metric(5.0, "mean", 1.0)})
    assert sink.records == [(1, {"loss": 2.0})]


def test_tokens_per_second_over_several_steps() -> None:
    sink = ListSink()
    observer = Observer([sink], every=2)
    observer.log(1, {"train/tokens": Metric(100, "sum"), "timing/step": Metric(1.0)})
    observer.log(2, {"train/tokens": Metric(100, "sum"), "timing/step": Metric(3.0)})
    assert sink.records[0][1]["train/tokens_per_second"] == pytest.approx(200 / 4)


def test_busy_shares_are_weighted_by_the_seconds_of_the_steps() -> None:
    sink = ListSink()
    observer = Observer([sink], every=2)
    for step, (seconds, forward) in enumerate(((1.0, 0.5), (3.0, 3.0)), start=1):
        parts = {"timing/step": Metric(seconds), "timing/big/forward": Metric(forward, "max")}
        observer.log(step, parts | {"timing/student/fetch": Metric(9.0, "max"), "timing/student": Metric(0.1)})
    record = sink.records[0][1]
    assert record["busy/big"] == pytest.approx(3.5 / 4)
    assert [name for name in record if name.startswith("busy/")] == ["busy/big"]


def test_every_sink_is_closed_even_if_one_fails() -> None:
    first, second, live = ListSink(fails_to_close="first"), ListSink(), ListSink(fails_to_close="live")
    with pytest.raises(OSError, match="live"):  # they are closed in the order in which they were given
        Observer([first, second], every=1, live=[live]).close()
    assert second.closed
    assert live.closed


def test_records_are_flushed_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "logs" / "metrics.jsonl")
    sink.write(3, {"train/loss": 0.5})
    record = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text())
    assert record["step"] == 3
    assert record["train/loss"] == 0.5
    assert record["time"] > 1.6e9


def test_nan_and_infinity_are_written_as_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    sink.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert [json.loads(text)[name] for name in "abcd"] == [None, None, None, 1.0]


def test_resume_removes_records_of_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    straight = JsonlSink(path)
    for step in range(1, 7):
        straight.write(step, {"a": step})
    straight.close()
    resumed = JsonlSink(path, resume_step=4)
    assert steps_of(path) == [1, 2, 3, 4]
    for step in (5, 6, 7):
        resumed.write(step, {"a": -step})
    assert [(record["step"], record["a"]) for record in read_records(path)] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (5, -5), (6, -6), (7, -7),
    ]  # fmt: skip


@pytest.mark.parametrize("resume_step", [None, 9])
@pytest.mark.parametrize("torn", [b'{"step": 3, "a": 0.', b'{"step"', b"\x00\x00\x00", b'{"step": 3, "a": "\xc3'])
def test_a_half_written_last_line_is_removed(tmp_path: Path, torn: bytes, resume_step: int | None) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    sink = JsonlSink(path, resume_step=resume_step)
    sink.write(3, {"a": 1.0})
    assert steps_of(path) == [1, 2, 3]
    assert path.read_bytes().count(b"\n") == 3


def test_broken_lines_that_a_resumed_run_drops_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st{"step": 2}\n\n\x00\n{"step": 3}\n{"step"')
    JsonlSink(path, resume_step=9)
    assert steps_of(path) == [1, 3]
    (line,) = caplog.messages
    assert line == f"{path}: 2 lines are no records, and are dropped"


def test_a_complete_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    JsonlSink(path).write(3, {})
    assert steps_of(path) == [1, 2, 3]


def test_a_new_sink_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonlSink(tmp_path / "m.jsonl")
        sink.write(step, {})
        sink.close()
    assert steps_of(tmp_path / "m.jsonl") == [1, 2]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_drops_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in range(1, 6):
        first.write(step, {"train/loss": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=3)
    second.write(4, {"train/loss": 40.0})
    second.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_progress(total: int, clock: Clock, start: int = 0) -> tuple[ProgressSink, StringIO]:
    from rich.console import Console

    out = StringIO()
    return ProgressSink(total, start_step=start, console=Console(file=out, width=40), interval_s=10, clock=clock), out


def test_progress_lines_without_a_terminal() -> None:
    clock = Clock()
    sink, out = plain_progress(100, clock)
    for step in range(1, 101):
        clock.now = step * 1.0
        figures = {"train/tokens": 100.0 * step, "align/tokens": 400.0 * step, "timing/step": 0.5 if step % 2 else 1.5}
        sink.write(step, {"train/loss": 1 / step, **figures})
    sink.close()
    lines = out.getvalue().splitlines()
    assert [int(line.split("/")[0].removeprefix("step")) for line in lines] == [1, *range(11, 100, 10), 100]
    # Steps 2 to 11 in 10 seconds: 6,500 labelled tokens of 26,000.
    assert lines[1] == "step  11/100  loss 0.0909  650 trained of 2,600 tokens/s  1:29 left"
    assert "\x1b" not in out.getvalue()


def test_time_left_is_measured_in_this_attempt() -> None:
    clock = Clock()
    sink, out = plain_progress(5000, clock, start=1000)
    clock.now = 500.0
    sink.write(1001, {"train/loss": 1.0})
    clock.now = 520.0
    sink.write(1011, {"train/loss": 1.0})
    assert out.getvalue().splitlines() == ["step 1001/5000  loss 1.0000", "step 1011/5000  loss 1.0000  2:12:58 left"]


def test_validation_metrics_do_not_replace_the_training_line() -> None:
    sink, out = plain_progress(10, Clock())
    sink.write(1, {"validation/kl_loss": 1.0})
    assert out.getvalue() == ""


def test_progress_bar_restores_the_cursor() -> None:
    from rich.console import Console

    out = StringIO()
    sink = ProgressSink(4, console=Console(file=out, force_terminal=True, width=100))
    sink.write(2, {"train/loss": 0.25})
    sink.close()
    assert "2/4" in out.getvalue()
    assert "loss 0.2500" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize("width", [80, 120])
def test_progress_bar_counts_faults(width: int) -> None:
    from rich.console import Console

    clock, out = Clock(), StringIO()
    sink = ProgressSink(10_000, console=Console(file=out, force_terminal=True, width=width), clock=clock)
    record = {"train/loss": 0.25, "train/tokens_per_second": 12345.0}
    sink.write(1, record)
    assert "faults" not in out.getvalue()
    clock.now = 3.0
    sink.write(2, record | {"faults/teacher_restarts": 2.0, "faults/skipped_steps": 3.0})
    sink.close()
    assert "2/10000" in out.getvalue()
    assert "faults 5  8:19:54 left" in out.getvalue()


def test_open_observer_opens_the_configured_sinks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, config = RunPaths(tmp_path), Config()
    observer = open_observer(config, paths, total_steps=1)
    observer.log(1, {"train/loss": Metric(2.0)})
    observer.close()
    assert read_records(paths.metrics)[0]["train/loss"] == 2.0
    assert scalars(paths.tensorboard, "train/loss") == [(1, 2.0)]
    assert "loss 2.0000" in capsys.readouterr().out


def test_importing_sinks_imports_nothing_heavy() -> None:
    import subprocess

    code = "import sys, distill_rl.observe.sinks as s; print([m for m in ('torch', 'ray', 'tensorboard', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("total", "asked", "wanted"), [(20_000, None, 1), (50_000, None, 3), (50_000, 1, 1), (None, None, 1)]
)
def test_a_long_run_has_fewer_records_unless_asked_for_all(
    tmp_path: Path, total: int | None, asked: int | None, wanted: int
) -> None:
    paths, config = RunPaths(tmp_path), Config()
    config.observe.every = asked
    observer = open_observer(config, paths, total_steps=total)
    for step in range(1, 7):
        observer.log(step, {"train/loss": Metric(float(step)), "train/tokens": Metric(1.0, "sum")})
    observer.close()
    records = read_records(paths.metrics)
    assert [record["step"] for record in records] == list(range(wanted, 7, wanted))
    assert sum(record["train/tokens"] for record in records) == 6


@pytest.mark.parametrize("every", [1, 5, 7])
def test_records_of_several_steps_add_up(tmp_path: Path, every: int) -> None:
    """Steps of 1 s and more, what happens in some of them only, and work between them: seconds per step times steps is the
    time that passed, the parts of the steps are the steps, sums are sums, and the report draws both per step."""
    clock = Clock()
    timer = StepTimer(lambda: clock.now)
    observer = Observer([JsonlSink(tmp_path / "metrics.jsonl")], every)
    spent = dict.fromkeys(("student", "recovery", "validation", "save", "step"), 0.0)

    def work(part: str, seconds: float) -> None:
        with timer.part(part):
            clock.now += seconds
        spent[part] += seconds

    tokens, slowest = 0, 0.0
    for step in range(1, 41):
        began = clock.now
        with timer.step(step):
            work("student", 1 + step / 8)
            if step == 17:
                work("recovery", 10.0)
        spent["step"] += clock.now - began
        ranks = [{"timing/student/step": Metric(seconds, "per_step")} for seconds in (0.5, step / 16)]
        slowest += max(0.5, step / 16)
        tokens += 100 * step
        observer.log(step, *ranks, {"align/tokens": Metric(100.0 * step, "sum")}, timer.flush())
        if step % 10 == 0:
            work("validation", 5.0)
            observer.flush()
            work("save", 20.0)
    observer.log(40, timer.flush())
    observer.close()

    run = read_run(tmp_path)
    records = read_records(tmp_path / "metrics.jsonl")
    assert sum(record.get("train/steps", 0) for record in records) == 40
    for part, seconds in spent.items():
        assert sum(r.get(f"timing/{part}", 0) * r.get("train/steps", 1) for r in records) == pytest.approx(seconds)
        assert run.total(f"timing/{part}") == pytest.approx(seconds)
    for record in records:
        if "timing/step" in record:
            inside = [record.get(f"timing/{part}", 0.0) for part in ("student", "recovery", "other")]
            assert sum(inside) == pytest.approx(record["timing/step"])
    assert run.total("timing/student/step") == pytest.approx(slowest)
    assert sum(run.finite("align/tokens")) == tokens
    (chart,) = [chart for part in sections([run]) for chart in part.charts if chart.title == "All tokens per step"]
    last = {1: 1, 5: 5, 7: 5}[every]  # with 7, steps 36 to 40
    assert chart.curves[0].points[-1] == (40, np.mean([100 * step for step in range(41 - last, 41)]))
    assert figures(run)["steps"] == "40"
    assert figures(run)["tokens, all"] == f"{tokens:,}"
