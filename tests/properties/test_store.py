"""Whatever is captured in whatever pieces and order: what was stored is found with its own targets, nothing else is."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.data.batch.document_aligner import STUDENT, DocumentPiece, PieceLimits, Splitter
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.store.store import Store, StoreWriter
from distill_rl.types import PieceRef
from tests.helpers.stores import labels, make_store, record_of

BOS = 0
quick = settings(max_examples=60, deadline=None)
documents = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=1, max_size=4)
"""Of two tokens only, so that documents often share stretches."""
limits = st.lists(st.integers(2, 15), min_size=1, max_size=3)


def pieces_of(name: str, tokens: list[int], limit: int, bos: bool) -> list[tuple[PieceRef, np.ndarray]]:
    """A document in pieces of at most `limit` tokens."""
    ids = np.array([BOS] * bos + tokens, np.int32)
    splitter = Splitter(PieceLimits(limit, (BOS,) if bos else ()), {})
    parts: list[DocumentPiece] = splitter.split(Encoded(ids, np.ones(len(ids), dtype=bool)), {})
    refs = []
    for part in parts:
        extent = part.extents[STUDENT]
        tokens_of_part = part.encoded.input_ids
        refs.append((record_of(name, tokens_of_part, **extent._asdict()).piece, tokens_of_part))
    return refs


def stored(folder: Path, captures: list[tuple[PieceRef, np.ndarray]], every: int) -> tuple[Store, dict]:
    """A store of these pieces, written in shards of `every`, and the number that tells each piece's targets."""
    store = make_store(folder)
    writer = StoreWriter(store, write_every_s=float("inf"))
    numbers: dict[tuple[PieceRef, bytes], float] = {}
    for i, (piece, tokens) in enumerate(captures):
        numbers.setdefault((piece, tokens.tobytes()), 1000.0 * (i + 1))
        writer.add(piece, tokens, record_of("", tokens, number=1000.0 * (i + 1)).targets)
        if i % every == 0:
            writer.flush()
    writer.flush()
    return store, numbers


@quick
@given(st.data(), documents, limits, st.booleans(), st.integers(1, 5), st.booleans())
def test_pieces_are_found_with_targets_of_their_own_place(data, documents, limits, bos, every, reopened):
    captures = [part for limit in limits for i, tokens in enumerate(documents)
                for part in pieces_of(f"document {i}", tokens, limit, bos)]  # fmt: skip
    captures = data.draw(st.permutations(captures))
    with tempfile.TemporaryDirectory() as folder:
        store, numbers = stored(Path(folder) / "store", captures, every)
        store = Store(store.folder) if reopened else store
        for piece, tokens in captures:
            found = store.find(piece, tokens)
            assert found is not None
            assert not found.in_context, "the piece itself was captured"
            assert (found.start, found.skip, found.count) == (0, 0, piece.length)
            values = labels(store, found)
            number = -values[0]
            source = next(key for key, value in numbers.items() if value == number)
            assert source[0].name == piece.name
            assert source[0].first == piece.first
            assert source[1][: 4 * len(tokens)] == tokens.tobytes()
            assert values == [-number - p for p in range(piece.length)]


@quick
@given(documents, st.integers(2, 15), st.integers(2, 15), st.booleans())
def test_a_whole_document_serves_every_split_of_it(documents, limit, other, bos):
    """Position p of a whole document is found at the piece's position that predicts the same token."""
    captures = [pieces_of(f"document {i}", tokens, 99, bos)[0] for i, tokens in enumerate(documents)]
    with tempfile.TemporaryDirectory() as folder:
        store, numbers = stored(Path(folder) / "store", captures, 2)
        for i, tokens in enumerate(documents):
            for longest in (limit, other):
                for piece, part in pieces_of(f"document {i}", tokens, longest, bos):
                    found = store.find(piece, part)
                    number = numbers[captures[i][0], captures[i][1].tobytes()]
                    wanted = [piece.first + p - piece.prefix for p in range(piece.length)]
                    assert labels(store, found) == [-number - p for p in wanted[found.skip :]]
                    assert found.skip + found.count == piece.length
                    assert found.skip == max(piece.prefix - 1, 0)


@quick
@given(st.data(), documents, st.integers(2, 15), st.booleans())
def test_pieces_with_other_tokens_are_never_found(data, documents, limit, bos):
    captures = [part for i, tokens in enumerate(documents) for part in pieces_of(f"document {i}", tokens, limit, bos)]
    with tempfile.TemporaryDirectory() as folder:
        store, _ = stored(Path(folder) / "store", captures, 3)
        piece, tokens = data.draw(st.sampled_from(captures))
        changed = tokens.copy()
        place = data.draw(st.integers(0, len(tokens) - 1))
        changed[place] = 77
        if place >= piece.prefix:
            assert store.find(piece, changed) is None
        longer = np.append(tokens, np.int32(77))
        assert store.find(PieceRef(piece.name, piece.first, piece.prefix, len(longer), True), longer) is None
        unknown = record_of("another document", tokens).piece
        assert store.find(unknown, tokens) is None
