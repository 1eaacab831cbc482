"""Waiting for real actors: results in order, and one clear error for every kind of failure."""

import os
import signal
from pathlib import Path

import pytest
import torch

from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError, DataError, GpuMemoryError, NumericsError, WorkerError
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.session import ray_session
from tests.helpers.command import ended, until

pytestmark = pytest.mark.ray


class Worker:
    def identify(self):
        return os.getpid()

    def pid(self):
        return os.getpid()

    def echo(self, value):
        return value

    def fail(self, error):
        raise error

    def hang(self):
        signal.pause()

    def wait_for(self, path):
        until(Path(path).exists, "the file")
        return Path(path).name

    def after(self, ignored):
        return "ran"


@pytest.fixture
def workers(ray_cluster):
    calls = Calls(interrupted=lambda: None)
    actors = []
    for name in ("student-dp0-tp0", "big/dp0-tp0"):
        actor = ray_cluster.remote(Worker).options(num_cpus=0).remote()
        calls.register(name, actor)
        actors.append(actor)
    yield calls, *actors
    for actor in actors:
        ray_cluster.kill(actor)


def named(calls, *refs):
    return dict(zip(refs, calls.names.values()))


def test_results_keep_the_order_of_the_calls(workers):
    calls, student, teacher = workers
    made = {student.echo.remote(1): "student", teacher.echo.remote(2): "big", student.echo.remote(3): "student"}
    assert calls.gather(made, what="x", timeout_s=60) == [1, 2, 3]


def test_a_wait_is_interrupted_for_other_calls(workers, tmp_path):
    """A chain of calls, each made after the one before it has ended, takes no poll interval (0.25 s) per call."""
    calls, student, teacher = workers
    chain = [teacher.echo.remote(0)]

    def make_the_next_call():
        if len(chain) == 100:
            (tmp_path / "done").touch()
        elif calls.outcomes({chain[-1]: "big/dp0-tp0"}, what="y", timeout_s=60)[chain[-1]] == len(chain) - 1:
            chain.append(teacher.echo.remote(len(chain)))

    waiting = student.wait_for.remote(str(tmp_path / "done"))
    assert calls.gather(
        {waiting: "student"},
        what="x",
        timeout_s=12,
        meanwhile=make_the_next_call,
        also=lambda: chain[-1:] if len(chain) < 100 else [],
    ) == ["done"]


def test_gpu_out_of_memory_names_actor_phase_and_setting(workers):
    calls, student, teacher = workers
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free. "
    sizes = "2.00 GiB asked, 70.00 GiB held and 1.00 GiB more reserved by PyTorch, 1.00 GiB free of 80.00 GiB"
    message += "Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    raised = GpuMemoryError("rank 0, backward", "needs more GPU memory", sizes, "lower train.micro_batch_size")
    for error, phase, setting in (
        (raised, "rank 0, backward needs more GPU memory", "lower train.micro_batch_size"),
        (torch.OutOfMemoryError(message), "needs more GPU memory", "see `distill-rl check`"),
    ):
        refs = named(calls, student.fail.remote(error), teacher.echo.remote(1))
        with pytest.raises(GpuMemoryError) as caught:
            calls.gather(refs, what="step 3", timeout_s=60)
        assert str(caught.value).startswith(f"student-dp0-tp0, step 3: {phase}; got {sizes}; {setting}")
        assert caught.value.exit_code == 1


def test_an_exception_names_actor_task_and_cause(workers):
    calls, student, _ = workers
    with pytest.raises(WorkerError) as caught:
        calls.gather({student.fail.remote(ValueError("bad\nvalue")): "student-dp0-tp0"}, what="step 7", timeout_s=60)
    assert str(caught.value) == "student-dp0-tp0: step 7 failed; got ValueError: bad"
    assert "Traceback" in caught.value.__notes__[0] or "ValueError" in caught.value.__notes__[0]


def test_our_errors_keep_their_message_and_data_errors_their_type(workers):
    calls, student, _ = workers
    with pytest.raises(WorkerError, match=r"student.*NumericsError: loss: must be finite"):
        calls.gather(
            {student.fail.remote(NumericsError("loss", "must be finite")): "student-dp0-tp0"},
            what="step 7",
            timeout_s=60,
        )
    with pytest.raises(DataError, match="row 3"):
        calls.gather({student.fail.remote(DataError("row 3", "must be text")): "student"}, what="batch 1", timeout_s=60)


def test_a_killed_actor_is_named_even_if_its_victim_reports_first(workers, ray_cluster):
    calls, student, teacher = workers
    pid = ray_cluster.get(teacher.pid.remote(), timeout=60)
    lost = teacher.hang.remote()
    victim = student.after.remote(lost)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^big/dp0-tp0: its process died during step 2"):
        calls.gather(named(calls, victim, lost), what="step 2", timeout_s=60)


def test_a_dead_actor_is_named_instead_of_one_missing_its_objects(workers, ray_cluster):
    calls, student, teacher = workers
    pid = ray_cluster.get(teacher.pid.remote(), timeout=60)
    os.kill(pid, signal.SIGKILL)
    until(lambda: ended(pid), "the death")
    with pytest.raises(WorkerError, match=r"^big/dp0-tp0: its process died during step 3"):
        calls.gather({student.fail.remote(KeyError("object lost")): "student-dp0-tp0"}, what="step 3", timeout_s=120)


def test_an_expired_wait_names_the_silent_actor(workers):
    calls, student, teacher = workers
    calls.gather({student.echo.remote(0): "student", teacher.echo.remote(0): "big"}, what="warm-up", timeout_s=60)
    refs = {student.echo.remote(1): "student-dp0-tp0", teacher.hang.remote(): "big/dp0-tp0"}
    with pytest.raises(WorkerError, match=r"^big/dp0-tp0: step 9 must end within 1 s"):
        calls.gather(refs, what="step 9", timeout_s=1)


def test_an_interrupt_ends_a_wait(workers):
    _, student, _ = workers
    polls = iter([False, False, True])

    def interrupted():
        if next(polls):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Calls(interrupted).gather({student.hang.remote(): "student"}, what="x", timeout_s=60)


def test_a_process_that_uses_ray_already_is_refused(ray_cluster):
    line = r"Ray: is connected in this process already; call ray.shutdown\(\) first"
    with pytest.raises(ConfigError, match=line), ray_session(RayConfig(), num_cpus=1):
        pass
    assert ray_cluster.is_initialized()
