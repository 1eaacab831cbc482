"""A teacher over two ranks with a cache: both ranks agree on what is computed, and only the first reads and writes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from distill_rl.parallel.mesh import open_world
from distill_rl.store.store import Store, StoreWriter
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.teacher.stored import StoredTeacher
from tests.helpers import ranks
from tests.helpers.engines import engine_config, random_documents
from tests.helpers.models import write_tiny_model
from tests.helpers.stores import batch_of, is_of_pieces, make_store

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, TOP = 320, 24, 16


def batches() -> list:
    """Three batches of four rows; the second shares its first two rows with the first one, the third is the first."""
    documents = [[document] for document in random_documents(6, seed=5)]
    first = batch_of(documents[:4], WIDTH)
    return [first, batch_of([*documents[:2], *documents[4:]], WIDTH), first]


def targets_with_a_cache(model: Path, store: Path, tp: int, sp: int) -> list[tuple]:
    """Per batch: the targets of every micro-batch, and the tokens that were read and computed."""
    world = open_world(rank=ranks.rank(), dp=1, tp=tp, sp=sp)
    config = engine_config("unused", [model], loss__top_k=TOP)
    config.teachers[0].parallel.tp, config.teachers[0].parallel.sp = tp, sp
    config.teachers[0].cache = str(store)
    config.teachers[0].score = "ce"
    live = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    opened = Store(store)
    writer = StoreWriter(opened, write_every_s=math.inf) if world.reports else None
    teacher = StoredTeacher(config, config.teachers[0], world, opened, live, writer)
    results = []
    for batch in batches():
        parts = [tensors for _, tensors in teacher.forward(batch)]
        results.append((parts, teacher.use.read, teacher.use.computed, teacher.score))
        teacher.use.read = teacher.use.computed = 0
    teacher.fill(batches()[1])
    teacher.close()
    live_targets = [[tensors for _, tensors in live.forward(batch)] for batch in batches()]
    return [results, live_targets, (teacher.use.read, teacher.use.computed), live.score]


@pytest.mark.parametrize(("tp", "sp"), [(2, 1), (1, 2)], ids=["tp2", "sp2"])
def test_ranks_of_the_same_rows_agree_on_what_is_computed(tmp_path, tp: int, sp: int):
    model = write_tiny_model(tmp_path / "model", "llama", seed=61)
    store = make_store(tmp_path / "store", entries=TOP).folder
    first, second = ranks.run_ranks(2, targets_with_a_cache, model, store, tp, sp)
    (results, live, filled, score), (others, _, filled_there, _) = first, second
    lengths = [[sum(piece.length for piece in row) for row in batch.pieces] for batch in batches()]
    shared, new = sum(lengths[1][:2]), sum(lengths[1][2:])
    assert [counts[1:3] for counts in results] == [(0, sum(lengths[0])), (shared, new), (sum(lengths[2]), 0)]
    assert [counts[1:3] for counts in others] == [counts[1:3] for counts in results]
    assert filled == filled_there == (shared + new, 0)
    computed = [[True, True], [False, True], [False, False]] if tp == 2 else [[False, False]] * 3
    for batch, (parts, *_), (there, *_), wanted, is_computed in zip(batches(), results, others, live, computed):
        assert [bool(part) for part in there] == is_computed, "the second rank has nothing of what is read or joined"
        at = torch.from_numpy(is_of_pieces(batch)).view(2, -1)
        for i, (found, part) in enumerate(zip(parts, wanted, strict=True)):
            assert all(torch.equal(found[name][at[i]], part[name][at[i]]) for name in part)
            assert all(torch.equal(there[i][name], part[name]) for name in there[i])
    assert results[2][3] == score, "of the same batch, read and computed"
    assert len(Store(store)) == 6, "every document once: only the first rank writes"
