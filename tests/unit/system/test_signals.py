import os
import signal
import subprocess
import sys
import threading

import pytest

from distill_rl.system.signals import Preempted, Signals, signals_blocked


@pytest.fixture
def heard():
    """SIGHUP is not ignored, as it is below `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_sighup_is_a_request_to_stop_that_no_second_one_turns_into_an_interrupt(heard):
    now = [100.0]
    with Signals(lambda: now[0]) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.preempted
        for number in (signal.SIGHUP, signal.SIGTERM):  # the terminal is lost, then the machine goes down
            now[0] += 60.0
            os.kill(os.getpid(), number)
            signals.raise_if_interrupted()


def test_an_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.preempted
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_second_request_to_stop_interrupts(number):
    now = [100.0]
    with Signals(lambda: now[0]) as signals:
        os.kill(os.getpid(), number)
        assert signals.preempted
        signals.raise_if_interrupted()
        now[0] += 1.0
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()


def test_two_signals_within_a_second_are_one_request():
    now = [100.0]
    with Signals(lambda: now[0]) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 0.9
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.preempted
        signals.raise_if_interrupted()
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C is always a request of its own
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()


def test_sigterm_after_sigusr1_does_not_interrupt_the_save():
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


def test_ctrl_c_interrupts_at_the_next_poll():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert not signals.preempted
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()


def test_at_once_raises_on_arrival_or_on_entry():
    with Signals() as signals:
        with pytest.raises(Preempted), signals.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted), signals.at_once():
            pass
    with Signals() as signals, pytest.raises(KeyboardInterrupt), signals.at_once():
        os.kill(os.getpid(), signal.SIGINT)


def test_blocked_signals_arrive_later_and_never_in_children():
    with Signals() as signals:
        with signals_blocked():
            child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1)
            assert child.stdout.readline() == b"up\n"
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            assert not signals.preempted
        assert signals.preempted
    child.terminate()
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0


def test_blocked_signals_arrive_later_although_other_threads_take_them():
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        with Signals() as signals:
            with signals_blocked():
                os.kill(os.getpid(), signal.SIGTERM)
                assert not any(signals.preempted for _ in range(1000))
            assert signals.preempted
    finally:
        end.set()
        other.join()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_previous_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


def test_second_ctrl_c_ends_the_process_at_once():
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


def test_embedded_a_further_ctrl_c_goes_to_the_handler_from_before():
    with Signals(embedded=True) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_embedded_the_process_is_never_ended():
    with Signals(embedded=True) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # noted; a further one has no handler in Python that it could go to
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.preempted


def test_embedded_in_another_thread_nothing_is_handled():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with Signals(embedded=True) as signals:
            signals.install_again()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
