"""Ordered, bounded look-ahead over jobs of any kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

Job = TypeVar("Job")
Item = TypeVar("Item")


class Lookahead(Generic[Job, Item]):
    """Yields `submit(job)` for each job, in order, with up to `depth` later jobs already submitted.

    Job t + depth + 1 is submitted only when the consumer asks for item t + 1, that is, when it has finished with
    item t. So at most depth + 1 items are alive, and a ring of depth + 1 slots is enough for them.

    Consumes: jobs. Waits for: nothing. Unblocked by: the consumer's next call. Produces: items.
    `close` releases every item that was submitted and not yet handed out, newest first. It is also called when the
    iteration ends, in whatever way.
    """

    def __init__(self, jobs: Iterable[Job], submit: Callable[[Job], Item], release: Callable[[Item], None], depth: int):
        self._jobs, self._submit, self._release, self._depth = iter(jobs), submit, release, depth
        self._pending: deque[Item] = deque()

    def __iter__(self) -> Iterator[Item]:
        """Yields the items in the order of their jobs, submitting up to `depth` jobs ahead; can be iterated once.

        When the iteration ends, in whatever way, items that were not handed out are released.
        """
        try:
            while True:
                for job in islice(self._jobs, self._depth + 1 - len(self._pending)):
                    self._pending.append(self._submit(job))
                if not self._pending:
                    return
                yield self._pending.popleft()
        finally:
            self.close()

    @property
    def next(self) -> Item | None:
        """The item that will be handed out next, which stays here; None if none has been submitted."""
        return self._pending[0] if self._pending else None

    def close(self) -> None:
        """Releases every item that was submitted and not handed out, newest first. No further job should be asked
        for."""
        while self._pending:
            self._release(self._pending.pop())
