import os
import signal
import subprocess
import sys
import threading

import pytest

from distill_rl.system.signals import Preempted, Signals, held_back


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_request_to_stop_waits_for_the_step_and_the_second_does_not(number):
    now = [100.0]
    with Signals(lambda: now[0]) as signals:
        os.kill(os.getpid(), number)
        assert signals.preempted
        signals.raise_if_interrupted()
        now[0] += 1.0
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()


def test_a_request_that_a_scheduler_delivers_twice_at_once_is_one():
    now = [100.0]
    with Signals(lambda: now[0]) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 0.9
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.preempted
        signals.raise_if_interrupted()
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C is never the same request
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()


def test_the_term_of_a_time_limit_does_not_interrupt_the_save_that_its_warning_began():
    now = [100.0]
    with Signals(lambda: now[0]) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        now[0] += 60.0
        os.kill(os.getpid(), signal.SIGTERM)
        signals.raise_if_interrupted()
        now[0] += 60.0
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()


def test_ctrl_c_interrupts_at_the_next_poll_and_is_no_preemption():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert not signals.preempted
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()


def test_at_once_a_signal_raises_where_it_arrives_or_on_entry():
    with Signals() as signals:
        with pytest.raises(Preempted), signals.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted), signals.at_once():
            pass
    with Signals() as signals, pytest.raises(KeyboardInterrupt), signals.at_once():
        os.kill(os.getpid(), signal.SIGINT)


def test_what_is_held_back_is_heard_afterwards_and_never_by_children():
    with Signals() as signals:
        with held_back():
            child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1)
            assert child.stdout.readline() == b"up\n"
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            assert not signals.preempted
        assert signals.preempted
    child.terminate()
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


def test_pressing_ctrl_c_again_ends_the_process_at_once():
    code = (
        "import os, signal\n"
        "from distill_rl.system.signals import Signals\n"
        "with Signals():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (130, "")
