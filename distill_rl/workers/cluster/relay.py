"""Calls some ranks of a node in place of the driver, which then makes one call and not one for each of them.

A call of an actor takes the driver half a millisecond, so with a thousand ranks a step would take it half a second. Neighbouring
ranks of a group therefore have a relay, a process on their node that computes nothing: it calls them all at the same time, and
answers when all have. Relays of one group have another one, which calls them in the same way. References to arguments pass
through them unopened, so that a rank waits for them as if the driver had called it.

Ranks of one process group fail together: where one has failed, `Failed` takes the place of what all of them would have returned, as soon as
that is known. Those of another process group, which share the relay, are not concerned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ray.exceptions import RayActorError, RayTaskError

from distill_rl.workers.actors.rank import Worker

MOST_RANKS = 8
"""Of a relay: those of a node with eight GPUs; and relays of one that calls relays."""
DIRECT = 4
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


class Failed(NamedTuple):
    """In place of a value that ranks of a process group have not returned, because of one of them."""

    error: RankError | RayActorError


class Request(NamedTuple):
    """A call that a relay is to make, as one argument, because Ray serialises every argument by itself."""

    number: int
    """Among the relay's calls, from 0."""
    method: str
    values: int
    """That the method returns."""
    parts: Sequence[Mapping[int, Any]]
    """What fails together, by the place of a rank in the relay: its first argument, of which references are passed on, or of a relay
    its request."""
    arguments: Sequence[Any]
    """The ranks' others, the same for all; references are passed on."""

    def returned(self, part: Mapping[int, Any]) -> int:
        """Values that a part returns: one that all its ranks return together, else those of its first rank, or of its relay."""
        first = next(iter(part.values()))
        return first.returns if isinstance(first, Request) else self.values

    @property
    def returns(self) -> int:
        """Values that the relay returns, part by part."""
        return sum(map(self.returned, self.parts))


class Relay(Worker):
    """The actor that calls neighbouring ranks, or relays.

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
        """Calls a method of ranks, and returns what they return or why they have not (`Failed`), part by part."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == request.number)
            parts = [
                self._together([self._call(request, part, place) for place in part], request.returned(part))
                for part in request.parts
            ]
            self._next += 1
            self._turn.notify_all()
        values = [value for part in await asyncio.gather(*parts) for value in part]
        return values if len(values) > 1 else values[0]

    async def collect(self, *results: Any) -> Together:
        """Returns results as one, for calls that would otherwise carry a reference to each of them."""
        return Together(results)

    async def settle(self, number: int) -> None:
        """Waits until all calls before `number` have been passed on."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == number)

    def _call(self, request: Request, part: Mapping[int, Any], place: int) -> Awaitable[Any]:
        """Calls one of those that the relay calls, without waiting."""
        (name, actor), own = self._ranks[place], part[place]
        if isinstance(own, Request):
            made = bound(actor, "call", own.returns, self._kind, name).remote(own)
        else:
            made = bound(actor, request.method, request.values, self._kind, name).remote(own, *request.arguments)
        return _answer(name, made, is_alone=len(part) == 1)

    async def _together(self, calls: Sequence[Awaitable[Any]], values: int) -> list[Any]:
        """Waits for all calls of a part, or until one of them has failed, and returns its values."""
        try:
            results = await asyncio.gather(*calls)
        except (RankError, RayActorError) as error:
            return [Failed(error)] * values
        return list(results[0]) if values > 1 else [Together(each(results))]


async def _answer(name: str, call: Awaitable[Any] | list[Awaitable[Any]], *, is_alone: bool) -> Any:
    """Waits for all values of a call; what a rank raises carries its name."""
    try:
        found = await (asyncio.gather(*call) if isinstance(call, list) else call)
    except Exception as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RayActorError):
            raise cause from None
        raise RankError(name, cause, str(error)) from None
    # A relay that is alone in its part may stand for several process groups.
    first = found[0] if isinstance(call, list) and not is_alone else found
    if isinstance(first, Failed):
        raise first.error
    return found
