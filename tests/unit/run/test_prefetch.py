from contextlib import closing

import pytest

from distill_rl.run.prefetch import Lookahead


class Recorder:
    """Submits jobs as items, remembering what was submitted and what was released."""

    def __init__(self):
        self.submitted, self.released = [], []

    def submit(self, job):
        self.submitted.append(job)
        return f"item {job}"

    def release(self, item):
        self.released.append(item)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_next_item_is_known_while_one_is_in_use(depth):
    recorder = Recorder()
    items = Lookahead(range(4), recorder.submit, recorder.release, depth)
    known = [items.next for _ in items]
    assert known == ([None] * 4 if depth == 0 else ["item 1", "item 2", "item 3", None])


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_in_order_with_depth_jobs_ahead(depth):
    recorder, seen = Recorder(), []
    for position, item in enumerate(Lookahead(range(6), recorder.submit, recorder.release, depth)):
        seen.append(item)
        assert recorder.submitted == list(range(min(position + 1 + depth, 6)))
    assert seen == [f"item {job}" for job in range(6)]
    assert recorder.released == []


def test_leaving_early_releases_pending_items():
    recorder = Recorder()
    with closing(Lookahead(range(9), recorder.submit, recorder.release, depth=2)) as items:
        for _ in items:
            break
    assert recorder.submitted == [0, 1, 2]
    assert recorder.released == ["item 2", "item 1"]


def test_consumer_error_releases_pending_items():
    recorder = Recorder()

    def consume():
        with closing(Lookahead(range(9), recorder.submit, recorder.release, depth=1)) as items:
            for item in items:
                raise RuntimeError(item)

    with pytest.raises(RuntimeError, match="item 0"):
        consume()
    assert recorder.released == ["item 1"]


def test_submit_error_releases_pending_items():
    recorder = Recorder()

    def submit(job):
        if job == 2:
            raise ValueError("job 2")
        return recorder.submit(job)

    with pytest.raises(ValueError, match="job 2"):
        list(Lookahead(range(9), submit, recorder.release, depth=5))
    assert recorder.released == ["item 1", "item 0"]
