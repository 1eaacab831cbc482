"""A teacher's targets that were stored are those that it would compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distill_rl.config.schema import ParallelConfig
from distill_rl.config.schema.backends import StoreConfig
from distill_rl.errors import DataError
from distill_rl.store.compact import error_bound
from distill_rl.store.store import Shard, Store, StoreWriter
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.teacher.stored import StoredTeacher
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.helpers.command import until
from tests.helpers.engines import engine_config, engine_targets, plain_model, plain_topk, random_documents
from tests.helpers.models import write_tiny_model
from tests.helpers.stores import batch_of, is_of_pieces, make_store, piece_of

VOCABULARY, WIDTH, TOP, DRAWS = 320, 24, 16, 6
SHORT = WIDTH // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "teacher", "llama", seed=2)


@pytest.fixture(scope="module")
def batch() -> RankBatch:
    """Four rows: two packed documents, one alone, two packed, and a row that only fills the batch."""
    documents = random_documents(5, seed=7, longest=SHORT)
    return batch_of([documents[:2], documents[2:3], documents[3:], []], WIDTH)


class Kit:
    """Makes the engines of one model, and stores for them."""

    def __init__(self, world, model: Path, root: Path):
        self.world, self.model, self.root = world, model, root

    def store(self, **changes) -> Store:
        return make_store(self.root / "store", **{"entries": TOP} | changes)

    def live(self, micro_batch_size: int = 2, top_k: int = TOP, **settings) -> TeacherEngine:
        config = engine_config("unused", [self.model], loss__top_k=top_k, train__micro_batch_size=micro_batch_size)
        config.loss.draws = DRAWS
        config.teachers[0] = replace(config.teachers[0], **settings)
        return TeacherEngine(config, config.teachers[0], self.world, vocabulary_size=VOCABULARY)

    def reader(self, store: Store, micro_batch_size: int = 2, top_k: int = TOP, **settings) -> StoredTeacher:
        """Reads, without a model."""
        config = engine_config("unused", [self.model], loss__top_k=top_k, train__micro_batch_size=micro_batch_size)
        config.teachers[0] = replace(
            config.teachers[0], backend="store", store=StoreConfig(str(store.folder)), **settings
        )
        return StoredTeacher(config, config.teachers[0], self.world, store)

    def cached(self, store: Store, *, write_every_s: float = math.inf, **settings) -> StoredTeacher:
        """Reads what is there, computes and writes the rest."""
        live = self.live(**settings)
        writer = StoreWriter(store, write_every_s=write_every_s)
        return StoredTeacher(live.config, live.teacher, self.world, store, live, writer)

    def captured(self, batch: RankBatch, micro_batch_size: int = 2, **settings) -> Store:
        """A new store with the targets of a batch."""
        changes = {"wire_dtype": settings["wire_dtype"]} if "wire_dtype" in settings else {}
        return self.filled(self.store(**changes), batch, micro_batch_size=micro_batch_size, **settings)

    def filled(self, store: Store, batch: RankBatch, **settings) -> Store:
        """The store with the targets of a batch, opened again."""
        teacher = self.cached(store, **settings)
        teacher.fill(batch)
        teacher.close()
        return Store(teacher.store.folder)


@pytest.fixture
def kit(world, folder, tmp_path) -> Kit:
    return Kit(world, folder, tmp_path)


def tokens_of(batch: RankBatch) -> int:
    return sum(piece.length for row in batch.pieces for piece in row)


def assert_equal_at_pieces(found: dict, wanted: dict, batch: RankBatch) -> None:
    at = torch.from_numpy(is_of_pieces(batch))
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name][at], values[at]), name


# ------------------------------------------------------------------ read without a model


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_stored_targets_are_the_live_ones_to_the_bit(kit, batch, micro_batch_size):
    reader = kit.reader(kit.captured(batch), micro_batch_size)
    assert_equal_at_pieces(engine_targets(reader, batch), engine_targets(kit.live(), batch), batch)
    assert (reader.use.read, reader.use.computed) == (tokens_of(batch), 0)


def test_layouts_are_those_of_the_live_teacher(kit, batch):
    later = replace(batch, first_row=8)
    store = kit.captured(batch)
    for size in (1, 2, 4):
        layouts = [layout for layout, _ in kit.reader(store, size).forward(later)]
        assert layouts == [layout for layout, _ in kit.live(size).forward(later)]


@pytest.mark.parametrize("wire_dtype", ["fp16", "bf16"])
def test_narrow_logprobs_are_stored_as_they_are_sent(kit, batch, wire_dtype):
    store = kit.captured(batch, wire_dtype=wire_dtype)
    live = kit.live(wire_dtype=wire_dtype)
    reader = kit.reader(store)
    assert_equal_at_pieces(engine_targets(reader, batch), engine_targets(live, batch), batch)
    assert reader.bytes_per_token == live.bytes_per_token


def test_documents_are_found_in_other_rows(kit, batch):
    """The targets are those of the rows that were captured, whichever rows the documents are in now."""
    store = kit.captured(batch)
    live = engine_targets(kit.live(), batch)
    order = [(2, 1), (0, 0), (1, 0), (0, 1), (2, 0)]  # row and place of every document
    documents = [[_tokens(batch, row, place)] for row, place in order]
    mixed = batch_of(documents, WIDTH)
    found = engine_targets(kit.reader(store, micro_batch_size=5), mixed)
    for i, (row, place) in enumerate(order):
        start = row * WIDTH + sum(piece.length for piece in batch.pieces[row][:place])
        length = batch.pieces[row][place].length
        for name, values in live.items():
            assert torch.equal(found[name][i * WIDTH : i * WIDTH + length], values[start : start + length])


def _tokens(batch: RankBatch, row: int, place: int) -> np.ndarray:
    start = sum(piece.length for piece in batch.pieces[row][:place])
    return batch.rows.input_ids[row, start : start + batch.pieces[row][place].length]


def test_padding_has_a_valid_target(kit, batch):
    found = engine_targets(kit.reader(kit.captured(batch)), batch)
    padding = ~torch.from_numpy(is_of_pieces(batch))
    assert padding.sum() > WIDTH
    assert all(torch.isfinite(values.float()).all() for values in found.values())
    mass = found["logprobs"].double().exp().sum(1) + found["rest_logprob"].double().exp()
    torch.testing.assert_close(mass[padding], torch.ones_like(mass[padding]), rtol=0, atol=1e-6)
    ids = found["ids"][padding]
    assert all(len(set(row)) == TOP and min(row) >= 0 and max(row) < VOCABULARY for row in ids.tolist())


def test_a_smaller_top_k_adds_what_it_drops_to_the_rest(kit, batch):
    store, few = kit.captured(batch), 5
    reader = kit.reader(store, top_k=few)
    found = engine_targets(reader, batch)
    at = torch.from_numpy(is_of_pieces(batch))
    all_entries, live = (engine_targets(kit.live(top_k=k), batch) for k in (TOP, few))
    for name in ("ids", "logprobs"):
        assert torch.equal(found[name][at], all_entries[name][at, :few])
    assert torch.equal(found["ids"][at], live["ids"][at])
    for name in ("logprobs", "rest_logprob", "label_logprob"):  # another k is summed in another order: a few roundings
        torch.testing.assert_close(found[name][at], live[name][at], rtol=0, atol=4e-6)
    dropped = all_entries["logprobs"][:, few:].double().exp().sum(1) + all_entries["rest_logprob"].double().exp()
    # The sum is taken in fp32, whose rounding is 6e-8 of a log-probability below one or two.
    torch.testing.assert_close(found["rest_logprob"].double()[at], dropped.log()[at], rtol=1e-6, atol=1e-6)
    assert reader.bytes_per_token == kit.live(top_k=few).bytes_per_token


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_sampled_targets_are_the_live_ones_to_the_bit(kit, batch, micro_batch_size):
    store = kit.filled(kit.store(kind="sampled", entries=DRAWS), batch, export="sampled")
    reader = kit.reader(store, micro_batch_size, export="sampled")
    found, live = engine_targets(reader, batch), engine_targets(kit.live(export="sampled"), batch)
    assert_equal_at_pieces(found, live, batch)
    at = torch.from_numpy(is_of_pieces(batch))
    assert (found["counts"][at].sum(1) == DRAWS).all()
    assert (found["counts"][~at].sum(1) == 1).all(), "padding has one draw"
    assert torch.isfinite(found["mean_logprob"]).all()


@pytest.mark.parametrize("mass", [None, 0.05])
def test_compact_targets_are_the_live_ones_within_their_bound(kit, batch, mass):
    store = kit.filled(kit.store(format="compact", mass=mass), batch)
    found, live = engine_targets(kit.reader(store), batch), engine_targets(kit.live(), batch)
    at = torch.from_numpy(is_of_pieces(batch))
    kept = found["ids"][at] >= 0
    assert kept[:, 0].all()
    assert kept.all() == (mass is None)
    assert torch.equal(found["ids"][at][kept], live["ids"][at][kept])
    bound = error_bound(live["logprobs"][at][kept].numpy())
    error = (found["logprobs"][at][kept] - live["logprobs"][at][kept]).abs().numpy()
    assert (error <= bound + 1e-6).all()
    assert (found["logprobs"][at][~kept] == -torch.inf).all()
    total = found["logprobs"].double().exp().sum(1) + found["rest_logprob"].double().exp()
    # Every log-probability, that of the rest included, is off by at most the largest bound.
    assert (total[at].log().abs() <= error_bound(np.array([-20.0])).max()).all()


def test_a_smaller_top_k_is_cut_from_rows_of_few_entries(kit, batch):
    store = kit.filled(kit.store(format="compact", mass=0.05), batch)
    few, all_entries = (engine_targets(kit.reader(store, top_k=k), batch) for k in (2, TOP))
    at = torch.from_numpy(is_of_pieces(batch))
    assert torch.equal(few["ids"][at], all_entries["ids"][at, :2])
    dropped = all_entries["logprobs"][:, 2:].double().exp().sum(1) + all_entries["rest_logprob"].double().exp()
    torch.testing.assert_close(few["rest_logprob"].double()[at], dropped.log()[at], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("score", ["ce", "entropy", "static"])
def test_scores_are_those_of_the_live_teacher(kit, batch, score):
    store = kit.captured(batch)
    reader, live = kit.reader(store, score=score), kit.live(score=score)
    for teacher in (reader, live):
        engine_targets(teacher, batch)
    assert reader.score == live.score
    assert (reader.score == 0) == (score == "static")


def test_a_missing_piece_is_an_error_that_names_it(kit, batch):
    store = kit.captured(replace(batch, rows=batch.rows[:2], pieces=batch.pieces[:2]))
    slots = kit.reader(store, micro_batch_size=1).forward(batch)
    for _ in range(2):
        next(slots)
    piece = batch.pieces[2][0]
    with pytest.raises(DataError) as refused:
        next(slots)
    line = str(refused.value)
    assert f"document {piece.name.hex()}, tokens 0 to {piece.length}" in line
    assert f"store {store.folder}: must have every document of the run" in line
    assert "set teachers[].store.missing to skip or live, or capture it" in line


# ------------------------------------------------------------------ a cache


def count_forwards(teacher: StoredTeacher) -> list[int]:
    """The positions of every forward pass, padding included."""
    calls: list[int] = []

    def count(_, __, settings: dict) -> None:
        calls.append(settings["input_ids"].numel())

    teacher.live.model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    return calls


def assert_are_the_models(found: dict, batch: RankBatch, model: Path) -> None:
    """The targets of all pieces are those of Transformers in fp64, document by document."""
    labels = np.full_like(batch.rows.labels, IGNORE_INDEX)
    at = is_of_pieces(batch).reshape(labels.shape)
    labels[:, :-1] = np.where(at[:, :-1] & at[:, 1:], batch.rows.input_ids[:, 1:], IGNORE_INDEX)
    wanted = plain_topk(plain_model(model), replace(batch.rows, labels=labels), VOCABULARY, TOP)
    learnt = at.reshape(-1) & (batch.rows.labels.reshape(-1) != IGNORE_INDEX)
    for name, values in wanted.items():
        where = torch.from_numpy(learnt if name == "label_logprob" else at.reshape(-1))
        torch.testing.assert_close(found[name][where].double(), values[where].double(), rtol=0, atol=2e-5)


def test_a_cache_publishes_what_the_teacher_computes_and_then_reads_it(kit, batch):
    teacher = kit.cached(kit.store())
    calls = count_forwards(teacher)
    live = engine_targets(kit.live(), batch)
    first = engine_targets(teacher, batch)
    assert all(torch.equal(first[name], live[name]) for name in live), "padding, too"
    assert (teacher.use.read, teacher.use.computed, len(calls)) == (0, tokens_of(batch), 2)
    assert len(teacher.store) == 0, "it waits to be written"
    assert_equal_at_pieces(engine_targets(teacher, batch), live, batch)
    assert (teacher.use.read, teacher.use.computed, len(calls)) == (tokens_of(batch), tokens_of(batch), 2)
    assert len(teacher.store) == 5


def test_a_cache_writes_when_it_is_due(kit, batch):
    teacher = kit.cached(kit.store(), write_every_s=0)
    engine_targets(teacher, batch)
    until(lambda: len(Store(teacher.store.folder)) == 5, "targets written")
    engine_targets(teacher, batch)
    assert (teacher.use.read, teacher.use.computed) == (tokens_of(batch), tokens_of(batch))


def test_replicas_read_what_the_others_have_written(kit, batch):
    """In the second epoch a document may come to another replica, which has the same cache open."""
    store = kit.store()
    one, other = (kit.cached(Store(store.folder), parallel=ParallelConfig(dp=2)) for _ in range(2))
    engine_targets(one, batch)
    one.close()
    engine_targets(other, batch)
    assert (other.use.read, other.use.computed) == (tokens_of(batch), 0)


def test_a_cache_goes_on_in_another_process(kit, batch):
    store = kit.captured(batch)
    teacher = kit.cached(store)
    calls = count_forwards(teacher)
    teacher.fill(batch)
    engine_targets(teacher, batch)
    assert calls == []
    assert (teacher.use.read, teacher.use.computed) == (2 * tokens_of(batch), 0)
    assert len(store) == 5


@pytest.mark.parametrize("writes", [True, False], ids=["cache", "missing-live"])
@pytest.mark.parametrize("packing", [True, False])
def test_only_the_missing_pieces_are_computed(kit, batch, folder, packing, writes):
    """One of two documents in rows 0 and 2 is stored, and nothing of row 1."""
    known = batch_of([[_tokens(batch, 0, 1)], [_tokens(batch, 2, 0)]], WIDTH)
    store = kit.captured(known)
    stored = engine_targets(kit.reader(store), known)
    teacher = kit.cached(store, micro_batch_size=1)
    teacher.config.data.packing = packing
    if not writes:
        teacher.writer = None
    calls = count_forwards(teacher)
    found = engine_targets(teacher, batch)
    assert_are_the_models(found, batch, folder)
    for row, place in ((0, 1), (2, 0)):
        start = row * WIDTH + sum(piece.length for piece in batch.pieces[row][:place])
        length = batch.pieces[row][place].length
        there = 0 if row == 0 else WIDTH
        for name, values in stored.items():
            assert torch.equal(found[name][start : start + length], values[there : there + length]), "as it was stored"
    read = tokens_of(known)
    assert (teacher.use.read, teacher.use.computed) == (read, tokens_of(batch) - read)
    alone = [batch.pieces[0][0].length, batch.pieces[2][1].length]
    apart = [sum(alone)] if packing else sorted(alone, reverse=True)
    assert sorted(calls) == sorted([WIDTH, *(-(-length // 8) * 8 for length in apart)])
    teacher.close()
    assert len(store) == (5 if writes else 2)
    assert len(set(refs(store))) == len(store)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_filling_computes_each_missing_piece_once(kit, batch, micro_batch_size):
    """Of a batch in which one document is stored and another is there three times."""
    twice, stored = _tokens(batch, 1, 0), _tokens(batch, 0, 1)
    store = kit.captured(batch_of([[stored]], WIDTH), micro_batch_size=1)
    teacher = kit.cached(store, micro_batch_size=micro_batch_size)
    rows = batch_of([[_tokens(batch, 0, 0), stored], [twice], [twice], [twice, _tokens(batch, 2, 0)]], 2 * WIDTH)
    teacher.fill(rows)
    teacher.close()
    computed = sum(len(tokens) for tokens in (_tokens(batch, 0, 0), twice, _tokens(batch, 2, 0)))
    assert (teacher.use.read, teacher.use.computed) == (tokens_of(rows) - computed, computed)
    assert sum(piece.length for piece in store.pieces()) == computed + len(stored)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_whichever_shards_a_kill_leaves_the_others_come_back_to_the_bit(kit, micro_batch_size):
    """A forward pass is in one shard as a whole, and what is missing is packed as it was among all documents."""
    documents = random_documents(12, seed=3, longest=SHORT)
    first = batch_of([[document] for document in documents[:4]], WIDTH)
    rows = [[documents[4 + i], documents[i % 4]] for i in range(8)]
    second = batch_of(rows, WIDTH)
    whole = kit.captured(first)
    teacher = kit.cached(whole, write_every_s=0, micro_batch_size=micro_batch_size)
    teacher.fill(second)
    teacher.close()
    shards = Store(whole.folder).shards
    assert len(shards) >= 3
    wanted = _columns(shards)
    for kept in range(1, len(shards)):
        for shard in shards[kept:]:
            shard.path.unlink(missing_ok=True)
        again = kit.cached(Store(whole.folder), write_every_s=0, micro_batch_size=micro_batch_size)
        again.fill(second)
        again.close()
        assert _columns(Store(whole.folder).shards) == wanted
        shards = Store(whole.folder).shards


def _columns(shards: Sequence[Shard]) -> dict[tuple, dict[str, bytes]]:
    """The bytes of every piece; a piece that is there twice fails."""
    found: dict[tuple, dict[str, bytes]] = {}
    for shard in shards:
        for i in range(len(shard)):
            piece = shard.piece(i)
            assert piece not in found
            found[piece] = {name: column.values.tobytes() for name, column in shard.targets(i).items()}
    return found


def test_a_document_twice_in_a_batch_is_stored_once(kit, batch):
    document = _tokens(batch, 1, 0)
    store = kit.captured(batch_of([[document], [document], [document]], WIDTH), micro_batch_size=2)
    assert len(store) == 1


def test_filling_writes_when_it_is_due_and_counts_what_waits_as_found(kit, batch):
    patient, eager = (kit.cached(kit.store(), write_every_s=seconds) for seconds in (math.inf, 0))
    for teacher, written in ((patient, 0), (eager, 5)):
        for _ in range(2):
            teacher.fill(batch)
        assert (teacher.use.read, teacher.use.computed) == (tokens_of(batch), tokens_of(batch))
        assert len(teacher.store) == written
    patient.close()
    assert len(patient.store) == 5


def test_documents_of_one_name_with_other_tokens_are_all_stored(kit, batch):
    """A name is of the text's form NFC, which a tokenizer may not apply."""
    one, other = (_tokens(batch, row, 0) for row in (1, 2))
    same_name = tuple((piece_of("name", tokens),) for tokens in (one, other))
    batch = replace(batch_of([[one], [other]], WIDTH), pieces=same_name)
    teacher = kit.cached(kit.store(), micro_batch_size=1)
    teacher.fill(batch)
    assert teacher.use.computed == len(one) + len(other)
    teacher.close()
    assert_equal_at_pieces(engine_targets(kit.reader(teacher.store), batch),
                           engine_targets(kit.live(micro_batch_size=1), batch), batch)  # fmt: skip


def test_every_token_has_its_label_whatever_the_run_is_trained_on(kit, batch):
    labels = np.where(
        np.arange(batch.rows.labels.size).reshape(batch.rows.labels.shape) % 3, IGNORE_INDEX, batch.rows.labels
    )
    masked = replace(batch, rows=replace(batch.rows, labels=labels))
    found = engine_targets(kit.reader(kit.captured(masked)), batch)["label_logprob"]
    wanted = engine_targets(kit.live(), batch)["label_logprob"]
    labelled = torch.from_numpy(batch.rows.labels).flatten() != IGNORE_INDEX
    assert torch.equal(found[labelled], wanted[labelled])


@pytest.mark.parametrize("score", ["ce", "entropy"])
def test_scores_of_a_cache_are_of_the_labels_of_the_run(kit, batch, score):
    teacher, live = kit.cached(kit.store(), score=score), kit.live(score=score)
    labels = np.where(np.arange(WIDTH) % 3, IGNORE_INDEX, batch.rows.labels)
    masked = replace(batch, rows=replace(batch.rows, labels=labels))
    engine_targets(live, masked)
    for _ in range(2):  # computed, then read
        engine_targets(teacher, masked)
        assert teacher.score == live.score


def split_in_two(tokens: np.ndarray, name: str = "long") -> tuple[RankBatch, RankBatch]:
    """A document as one row, and as two rows of its halves."""
    half = len(tokens) // 2
    whole = replace(batch_of([[tokens]], WIDTH), pieces=((piece_of(name, tokens),),))
    parts = (piece_of(name, tokens[:half], whole=False), piece_of(name, tokens[half:], first=half))
    halves = replace(batch_of([[tokens[:half]], [tokens[half:]]], WIDTH), pieces=tuple((part,) for part in parts))
    return whole, halves


def test_a_later_piece_is_read_from_a_whole_document(kit):
    tokens = random_documents(1, seed=3)[0]
    whole, halves = split_in_two(tokens)
    store = kit.captured(whole)
    found = engine_targets(kit.reader(store), halves)
    wanted = engine_targets(kit.live(), whole)
    half = len(tokens) // 2
    for name, values in wanted.items():
        assert torch.equal(found[name][:half], values[:half])
        assert torch.equal(found[name][WIDTH : WIDTH + len(tokens) - half], values[half : len(tokens)])


def test_a_prefix_without_a_stored_place_has_a_valid_target(kit):
    tokens = random_documents(1, seed=3)[0]
    whole, _ = split_in_two(tokens)
    later = np.concatenate([[0, 0], tokens[4:]]).astype(np.int32)
    piece = piece_of("long", later, first=4, prefix=2)
    batch = replace(batch_of([[later]], WIDTH), pieces=((piece,),))
    found = engine_targets(kit.reader(kit.captured(whole)), batch)
    wanted = engine_targets(kit.live(), whole)
    for name, values in wanted.items():
        assert torch.equal(found[name][1 : len(later)], values[3 : len(tokens)]), "from the last token of the prefix on"
    assert found["rest_logprob"][0] == found["rest_logprob"][-1] == np.float32(math.log(0.5))


def test_a_teacher_that_runs_does_not_use_what_it_saw_in_context(kit):
    whole, halves = split_in_two(random_documents(1, seed=3)[0])
    store = kit.captured(whole)
    teacher = kit.cached(store)
    found, live = engine_targets(teacher, halves), engine_targets(kit.live(micro_batch_size=1), halves)
    learnt = torch.from_numpy(
        halves.rows.labels.reshape(-1) != IGNORE_INDEX
    )  # a first half has no next token at its end
    assert all(torch.equal(found[name][learnt], live[name][learnt]) for name in live)
    teacher.close()
    assert [piece.first for piece in store.pieces()] == [0, halves.pieces[1][0].first]
    assert_equal_at_pieces(engine_targets(kit.reader(store, micro_batch_size=1), _second(halves)),
                           {name: values[WIDTH:] for name, values in live.items()}, _second(halves))  # fmt: skip


def _second(batch: RankBatch) -> RankBatch:
    return replace(batch, first_row=1, rows=batch.rows[1:], pieces=batch.pieces[1:])


def refs(store: Store) -> Sequence[tuple[bytes, int]]:
    return [(piece.name, piece.first) for piece in store.pieces()]


def test_what_is_missing_is_computed_for_a_run_that_writes_nothing(kit, batch):
    """`missing: live`: a model, and no writer."""
    store = kit.captured(replace(batch, rows=batch.rows[:2], pieces=batch.pieces[:2]), micro_batch_size=1)
    before = refs(store)
    live = kit.live(micro_batch_size=1)
    teacher = StoredTeacher(live.config, live.teacher, kit.world, store, live)
    found = engine_targets(teacher, batch)
    teacher.close()
    assert_equal_at_pieces(found, engine_targets(kit.live(micro_batch_size=1), batch), batch)
    read = sum(piece.length for row in batch.pieces[:2] for piece in row)
    assert (teacher.use.read, teacher.use.computed) == (read, tokens_of(batch) - read)
    assert refs(store) == before
