"""kill -9 at any moment of a save: every checkpoint found afterwards is complete, and none is lost."""

import random
import subprocess
import sys
import time

import pytest

from distill_rl.run.checkpoints import CheckpointStore
from tests.helpers.kill_at_call import NO_EXCHANGE, Killer

PROGRAM = """\
import itertools, sys
from pathlib import Path
from distill_rl.run.checkpoints import CheckpointStore, SavedState
from distill_rl.types import TrainState

store = CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_best=1)
store.clean_up()
checkpoint = store.newest()
first = checkpoint.state.train.step + 1 if checkpoint else 1
print("saving", flush=True)
for step in itertools.count(first):
    draft = store.begin(SavedState(TrainState(step), {}, float(step % 7)))
    for name in "abc":
        (draft.student / name).write_bytes(f"{step}{name}".encode() * 9000)
    store.commit(draft)
    print("saved", flush=True)
"""


AGAIN = """\
import sys
from pathlib import Path
from distill_rl.run.checkpoints import CheckpointStore, SavedState
from distill_rl.types import TrainState

store = CheckpointStore(Path(sys.argv[1]), keep_last=1, keep_best=0)
store.clean_up()
draft = store.begin(SavedState(TrainState(7)))
(draft.student / "weights").write_text(sys.argv[2])
store.commit(draft)
"""


@pytest.mark.parametrize("refuse", [None, NO_EXCHANGE])
def test_a_kill_at_any_call_of_a_second_save_of_a_step_leaves_one_of_the_two(tmp_path, refuse):
    killer, found = Killer(tmp_path, refuse), set()

    def saved(place):
        assert killer.run(["-c", AGAIN, place, "first"]).code == 0
        return ["-c", AGAIN, place, "second"]

    for place, killed in killer.every_kill(saved):
        store = CheckpointStore(place, keep_last=1, keep_best=0)
        store.clean_up()
        newest = store.newest(pytest.fail)
        assert newest is not None, killed.calls[-1]
        found.add((newest.student / "weights").read_text())
        assert sorted(path.name for path in place.iterdir()) in (["step-7"], ["scores.json", "step-7"])
    assert found == {"first", "second"}


def test_twenty_kills_during_saves_lose_nothing(tmp_path):
    draw, last, interrupted, took_s = random.Random(7), 0, 0, 0.02
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path], stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == b"saving\n"
            for _ in range(draw.randrange(3)):
                start = time.monotonic()
                assert child.stdout.readline() == b"saved\n"
                took_s = time.monotonic() - start
            time.sleep(draw.uniform(0, took_s))  # so that the kill can hit any moment of a save
            child.kill()
        interrupted += any(tmp_path.glob(".tmp-*"))
        checkpoint = CheckpointStore(tmp_path, keep_last=2, keep_best=1).newest(pytest.fail)
        step = checkpoint.state.train.step if checkpoint else 0
        assert step >= last
        for name in "abc" if checkpoint else ():
            assert (checkpoint.student / name).read_bytes() == f"{step}{name}".encode() * 9000
        last = step
    assert last > 0
    assert interrupted > 0
