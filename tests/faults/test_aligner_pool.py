"""The aligner pool replaces processes that die or hang, and leaves out a row that they die of."""

import json
import signal

import psutil
import pytest

from tests.helpers.command import ended
from tests.ray.test_pool import assert_same, batch, config, open_pool, pids, settled, wanted

__all__ = ["config", "open_pool", "wanted"]

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(("number", "deadline_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 2.0)])
def test_a_dead_or_stopped_aligner_is_replaced_and_its_batches_redone(open_pool, wanted, number, deadline_s):
    opened = open_pool(2, deadline_s=deadline_s)
    before = pids(opened.group)
    first = before[0]
    psutil.Process(first).send_signal(number)
    assert_same(settled(opened, *(batch(index) for index in range(5))), wanted)
    assert set(pids(opened.group)) - set(before), "no aligner was replaced"
    assert ended(first)


def test_a_fault_that_does_not_recur_costs_nothing(open_pool, tmp_path):
    text = f"ONCE {tmp_path / 'marker'}"
    (result,) = settled(open_pool(1), batch(0, {3: text}))
    assert_same([result], settled(open_pool(0), batch(0, {3: text})))
    assert not (tmp_path / "bad_rows.jsonl").exists()


@pytest.mark.parametrize(
    ("fate", "deadline_s", "reason"),
    [
        ("DIE", 60.0, "its process died"),
        ("HANG", 1.0, "must end within"),
        ("RAISE", 60.0, "this row cannot be aligned"),
    ],
)
def test_a_poison_row_is_left_out_and_listed(open_pool, fate, deadline_s, reason):
    opened = open_pool(1, deadline_s=deadline_s)
    results = settled(opened, batch(0, {5: fate}))
    (listed,) = [json.loads(line) for line in opened.listed.read_text().splitlines()]
    assert (listed["source"], listed["row"]) == ("train", 5)
    assert reason in listed["reason"]
    assert results[0][0].num_documents == 8
    assert_same(settled(opened, batch(0, {5: fate})), results)  # a row known to be bad is never read again
    empty = settled(open_pool(0), batch(0, {5: ""}))[0][0]
    assert results[0][0].num_labels == empty.num_labels
