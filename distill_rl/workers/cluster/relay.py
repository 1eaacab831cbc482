"""Calls some ranks of a node in place of the driver, which then makes one call and not one for each of them.

A call of an actor takes the driver half a millisecond, so with a thousand ranks a step would take it half a second. In a large
run neighbouring ranks of a process group therefore have a relay, a process on their node that computes nothing: it calls them
all at the same time, and answers when all have, or as soon as one has failed. References to arguments pass through it
unopened, so that a rank waits for them as if the driver had called it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, NamedTuple

from ray.exceptions import RayActorError, RayTaskError

from distill_rl.workers.actors.rank import Worker

MOST_RANKS = 8
"""Ranks of a relay: those of a node with eight GPUs."""
DIRECT = 16
"""Student's and teachers' ranks up to which a run has no relays: their processes would cost more than they save."""


def bound(actor: Any, method: str, values: int, kind: str, name: str) -> Any:
    """A method of an actor that returns so many values, each with a reference of its own.

    Ray's timeline and dashboard, and the titles of processes, call it `KIND.METHOD NAME`: the ranks of a kind differ in their name.
    """
    return getattr(actor, method).options(num_returns=values, name=f"{kind}.{method} {name}")


class Together(list[Any]):
    """The results of several ranks, in their order, as one."""


def each(results: Iterable[Any]) -> list[Any]:
    """Results one by one, those in a `Together` too."""
    return [one for result in results for one in (result if isinstance(result, Together) else [result])]


class RankError(Exception):
    """What the call of a rank by a relay has raised, unless the rank died.

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


class Request(NamedTuple):
    """A call that a relay is to make of its ranks, as one argument, because Ray serialises every argument by itself."""

    number: int
    """Among the relay's calls, from 0."""
    method: str
    values: int
    """That the method returns."""
    rows: Sequence[Any]
    """The first argument of each rank's call; references are passed on."""
    arguments: Sequence[Any]
    """The others, the same for all; references are passed on."""


class Relay(Worker):
    """The actor that calls neighbouring ranks.

    Its calls are numbered, because Ray may start those of an actor with `async` methods in any order, and the order of the calls of
    a rank counts.

    Args:
        kind: class of the ranks.
        ranks: name and handle of each, in their order.
    """

    def __init__(self, kind: str, ranks: Sequence[tuple[str, Any]]):
        self._kind, self._ranks = kind, ranks
        self._next = 0
        """Number of the call whose turn it is."""
        self._turn = asyncio.Condition()

    async def call(self, request: Request) -> Any:
        """Calls a method of every rank.

        Returns:
            What the ranks return together; of a method of several values, those of the first rank.

        Raises:
            RankError: a rank has raised, or an argument could not be had; the others go on.
            RayActorError: a rank has died.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == request.number)
            calls = [
                self._answer(
                    name,
                    bound(rank, request.method, request.values, self._kind, name).remote(own, *request.arguments),
                )
                for (name, rank), own in zip(self._ranks, request.rows, strict=True)
            ]
            self._next += 1
            self._turn.notify_all()
        results = await asyncio.gather(*calls)
        return results[0] if request.values > 1 else Together(results)

    async def collect(self, *results: Any) -> Together:
        """Returns results as one, for calls that would otherwise carry a reference to each of them."""
        return Together(results)

    async def settle(self, number: int) -> None:
        """Waits until all calls before `number` have been passed on."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == number)

    async def _answer(self, name: str, call: Awaitable[Any] | list[Awaitable[Any]]) -> Any:
        """Waits for all values of the call of a rank; what it raises carries the rank's name."""
        try:
            return await (asyncio.gather(*call) if isinstance(call, list) else call)
        except Exception as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RayActorError):
                raise
            raise RankError(name, cause, str(error)) from None
