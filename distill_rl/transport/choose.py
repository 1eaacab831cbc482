"""Which transport a run uses, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distill_rl.errors import ConfigError

if TYPE_CHECKING:
    from distill_rl.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: str


def choose(name: str) -> Choice:
    """Resolves `auto`."""
    if name == "auto":
        return Choice(
            "object_store", "works from any node to any node, and is the fastest way between processes on CPUs"
        )
    return Choice(name, "set by transport")


def make(name: str, *, deadline_s: float) -> Transport:
    """The transport of this process, reading or writing side."""
    if name == "object_store":
        from distill_rl.transport.object_store import ObjectStoreTransport

        return ObjectStoreTransport(deadline_s=deadline_s)
    raise ConfigError("transport", "must be one of auto, object_store", name)
