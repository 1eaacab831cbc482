"""Calls some ranks of a node in place of the driver, which then makes one call and not one for each of them.

A call of an actor takes the driver half a millisecond, so with a thousand ranks a step would take it half a second. In a large run each
group of neighbouring ranks of a process group therefore has a relay, a process on their node that computes nothing: it calls them all at the same time, and
answers when all have, or as soon as one has failed. References to rows pass through it unopened; what teachers publish, some hundred
bytes, does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError

from distill_rl.workers.actors.rank import Worker

MOST_RANKS = 8
"""Ranks of a relay: those of a node with eight GPUs."""
DIRECT = 16
"""Student's and teachers' ranks up to which a run has no relays: their processes would cost more than they save."""


class Together(list[Any]):
    """The results of several ranks, in their order, as one."""


class RankError(Exception):
    """What a rank has raised when a relay called it.

    Args:
        name: of the rank.
        cause: what it has raised.
        text: Ray's text with the traceback.
    """

    def __init__(self, name: str, cause: BaseException, text: str):
        super().__init__(name, cause, text)
        self.name, self.cause, self.text = name, cause, text

    def __str__(self) -> str:
        return self.text


class Relay(Worker):
    """The actor that calls neighbouring ranks.

    Args:
        ranks: name and handle of each, in their order.
    """

    def __init__(self, ranks: Sequence[tuple[str, Any]]):
        self._ranks = ranks

    async def call(self, method: str, only_first: bool, rows: Sequence[Any], *arguments: Any) -> Any:
        """Calls a method of every rank.

        Args:
            only_first: return the result of the first rank, as it is, and not those of all.
            rows: the first argument of each rank's call; references are passed on.
            arguments: the others, the same for all.

        Raises:
            RankError: a rank has raised; the others go on.
            RayError: a rank has died, or an argument could not be fetched.
        """
        calls = [
            self._answer(name, getattr(rank, method).remote(own, *arguments))
            for (name, rank), own in zip(self._ranks, rows, strict=True)
        ]
        results = await asyncio.gather(*calls)
        return results[0] if only_first else Together(results)

    async def _answer(self, name: str, call: Awaitable[Any]) -> Any:
        """Waits for the call of a rank; what it raises carries the rank's name."""
        try:
            return await call
        except RayTaskError as error:
            if isinstance(error.cause, RayError):
                raise
            raise RankError(name, error.cause, str(error)) from None
