"""Captures on the real command line, and what their stores hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from distill_rl.store.store import Store
from tests.helpers.command import Ended, distill_rl

WHOLE = ("train.steps=null", "train.epochs=1")
"""Settings with which a capture goes through all documents."""


def contents(folder: Path) -> dict[tuple, dict[str, bytes]]:
    """The bytes of every piece of a store, by column; fails if a piece is there twice."""
    pieces: dict[tuple, dict[str, bytes]] = {}
    for piece, columns in records(folder):
        assert piece not in pieces, f"{piece} is there twice"
        pieces[piece] = columns
    return pieces


def records(folder: Path) -> Iterator[tuple[tuple, dict[str, bytes]]]:
    """Every record of a store: what it is of, and its columns."""
    for shard in Store(folder).shards:
        for i in range(len(shard)):
            piece = shard.piece(i)
            columns = {name: column.values.tobytes() for name, column in shard.targets(i).items()}
            columns["tokens"] = shard.tokens(i).tobytes()
            yield (piece.name, piece.first, piece.prefix, piece.length, piece.whole), columns


def num_tokens(folder: Path) -> int:
    return sum(shard.num_tokens for shard in Store(folder).shards)


def num_shards(folder: Path) -> int:
    return sum(not path.name.startswith(".") for path in (folder / "shards").glob("*.safetensors"))


def unfinished(folder: Path) -> list[str]:
    """Half-written files of a store; the logs of captures are left out."""
    places = [folder, folder / "teacher", folder / "shards"]
    return [path.name for place in places for path in place.glob(".*") if path.name != ".lock"]


def assert_clean(folder: Path) -> None:
    """`verify` finds no damage, and no half-written file is left."""
    ended = distill_rl("store", "verify", folder)
    assert ended.code == 0, ended.err
    assert "every checksum matches" in ended.out
    assert not unfinished(folder)


def info(folder: Path) -> str:
    ended = distill_rl("store", "info", folder)
    assert ended.code == 0, ended.err
    return ended.out


def from_store(store: Path) -> str:
    """The setting of a training that reads its only teacher from a store."""
    return f"teachers=[{{name: big, backend: store, store: {store}}}]"


def the_error(ended: Ended) -> str:
    """The only line of an error, without a traceback."""
    assert "Traceback" not in ended.err + ended.out
    (line,) = ended.errors
    return line
