"""A teacher whose targets are in a store: reads them, and computes and writes what the store lacks if it has a model.

The same class serves three purposes:

    from a store       no model: every piece of every row must be in the store (`teachers[].backend: store`)
    with a cache       a model: what is not in the store is computed, written and published (`teachers[].cache`)
    capturing          a model, and nobody who reads: what is not in the store is computed and written (`fill`)

With a model, a sub-batch is divided by piece, so that nothing is computed that is stored:

1. Every piece of every micro-batch is looked up.
2. A micro-batch that is stored is read. One of which nothing is stored is computed as it is, and has the bits of a run
   without a store.
3. The missing pieces of all other micro-batches are packed into rows of their own and computed; the rest is read.

What one forward pass gives is written to one shard, so a capture that is killed has stored whole passes. Its next start
makes the rows of the others as before, since the rows of a first fit do not change if all documents of another row are left
out. So it computes the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distill_rl.config.derive import target_bytes_per_token
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding, arrange, lay_out
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.errors import DataError, NumericsError
from distill_rl.losses.targets import target_of
from distill_rl.models.forward import micro_batches, to_device
from distill_rl.models.weights import DTYPES
from distill_rl.parallel.mesh import World
from distill_rl.store.store import Column, Found, Store, StoreWriter
from distill_rl.teacher.base import TeacherBackend
from distill_rl.teacher.engine import CHUNK_TOKENS, score_of, unused_targets
from distill_rl.transport.base import Layout
from distill_rl.types import IGNORE_INDEX, PieceRef, RankBatch, TokenRows

_NAMES = {torch.int16: "I16", torch.int32: "I32", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""dtypes of targets → as safetensors names them."""


@dataclass(frozen=True, slots=True)
class PieceInRows:
    """A piece in the rows of a micro-batch."""

    piece: PieceRef
    start: int
    """Its first position, counted over the rows of the micro-batch one after the other."""
    tokens: np.ndarray
    """int32 [piece.length]"""

    @property
    def place(self) -> slice:
        """Its positions."""
        return slice(self.start, self.start + self.piece.length)

    @property
    def what(self) -> str:
        """For messages."""
        first, length = self.piece.first, self.piece.length
        return f"document {self.piece.name.hex()}, tokens {first:,} to {first + length:,}"


@dataclass(slots=True)
class StoredMicroBatch:
    """The rows of one forward pass, and the pieces that they hold."""

    layout: Layout
    rows: TokenRows
    stored: list[PieceInRows]
    """Those that the store has, or will have once it is written."""
    missing: list[PieceInRows] = field(default_factory=list)
    """Those that are to be computed."""

    @property
    def is_missing(self) -> bool:
        """Whether nothing of it is stored."""
        return bool(self.missing) and not self.stored


@dataclass(slots=True)
class TokenCounts:
    """Tokens of pieces, by where their targets came from, since the start."""

    read: int = 0
    computed: int = 0


class StoredTeacher:
    """Targets from a store, on one rank. Collective over the ranks that work on the same rows if there is a model.

    Args:
        store: on every rank the same.
        live: computes what the store lacks; None: that is an error.
        writer: writes what was computed, on the first of these ranks; None: nothing is written.
    """

    def __init__(
        self,
        config: Config,
        teacher: TeacherConfig,
        world: World,
        store: Store,
        live: TeacherBackend | None = None,
        writer: StoreWriter | None = None,
    ):
        self.config, self.teacher, self.world = config, teacher, world
        self.store, self.live, self.writer = store, live, writer
        self.micro_batch_size = config.rows_of(teacher)
        self.score = 0.0
        """As of `TeacherBackend`."""
        self.use = TokenCounts()
        manifest = store.manifest
        self._entries = config.loss.top_k if manifest.kind == "topk" else manifest.entries
        self._dtype = DTYPES[manifest.wire_dtype]
        stored = target_bytes_per_token(manifest.kind, self._entries, self._dtype.itemsize)
        self.bytes_per_token = stored if live is None else max(stored, live.bytes_per_token)

    def forward(self, batch: RankBatch) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
        """Yields the targets of this rank's part of a global batch, as `TeacherBackend.forward` does.

        They are on the CPU where they were read, and on this rank's device where they were computed. Positions of padding
        have some valid target. Ranks after the first of a tensor-parallel group yield only what was computed.

        Raises:
            DataError: the store lacks a piece, and there is no model.
            NumericsError: what is to be stored is NaN.
            StoreError: what is read is damaged, or what was computed cannot be written.
        """
        total = 0.0
        if self.writer is not None and self.teacher.parallel.dp > 1:
            self.store.refresh()  # with what the other replicas have written
        divided = self._divide(batch)
        apart = self._compute_apart(divided, batch)
        for micro_batch in divided:
            is_read = not micro_batch.is_missing
            tensors = self._read(micro_batch, apart) if is_read else self._compute(micro_batch, batch.index)
            if self.teacher.score != "static" and tensors:
                target = target_of(tensors, self.config.loss.temperature)
                assert target.label_logprob is not None
                labels = to_device(micro_batch.rows.labels, target.label_logprob.device).flatten()
                temperature = self.config.loss.temperature
                total += float(score_of(self.teacher.score, target, None, labels, temperature, CHUNK_TOKENS))
            yield micro_batch.layout, tensors
        self.score = total
        if self.writer is not None:
            self.writer.flush_if_due()

    def fill(self, batch: RankBatch) -> None:
        """Computes and writes what the store lacks of this rank's part of a batch, each piece once.

        Raises:
            NumericsError: what is to be stored is NaN.
            StoreError: it cannot be written.
        """
        divided = self._divide(batch, once=True)
        for micro_batch in divided:
            if micro_batch.is_missing:
                self._compute(micro_batch, batch.index)
            self.use.read += _num_tokens(micro_batch.stored)
        for micro_batch in self._packed(divided, batch)[0]:
            self._compute(micro_batch, batch.index)
        if self.writer is not None:
            self.writer.flush_if_due()

    def flush(self) -> None:
        """Writes what is waiting.

        Raises:
            StoreError: it cannot be written.
        """
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Writes what is waiting, and closes what computes.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            self.flush()
        finally:
            if self.live is not None:
                self.live.close()

    def _micro_batches(self, batch: RankBatch) -> Iterator[StoredMicroBatch]:
        """Yields the micro-batches of this rank's part of a batch."""
        for first_row, rows in micro_batches(batch, self.micro_batch_size):
            part = range(first_row - batch.first_row, batch.rows.shape[0])[: self.micro_batch_size]
            held = [batch.pieces[row] for row in part if batch.asked is None or batch.asked[row]]
            pieces, width = [], rows.shape[1]
            for row, of_row in enumerate(held):
                start = 0
                for piece in of_row:
                    tokens = rows.input_ids[row, start : start + piece.length]
                    pieces.append(PieceInRows(piece, row * width + start, tokens))
                    start += piece.length
            yield StoredMicroBatch(Layout(first_row, *rows.shape), rows, pieces)

    def _divide(self, batch: RankBatch, *, once: bool = False) -> list[StoredMicroBatch]:
        """The micro-batches of a batch, with the pieces that the store has, or will have, apart from those that it lacks."""
        # The same on every rank of these rows, of which only the first knows what it has written. Collective if there
        # is a model; without one, all pieces should be stored.
        divided = [*self._micro_batches(batch)]
        if self.live is None:
            return divided
        world, parts = self.world, [part for micro_batch in divided for part in micro_batch.stored]
        lacks = np.zeros(len(parts), np.int64)
        seen: set[tuple[PieceRef, bytes]] = set()
        for i, part in enumerate(parts if world.reports else ()):
            lacks[i] = not self._has(part)
            if once and lacks[i]:
                key = part.piece, part.tokens.tobytes()
                lacks[i] = key not in seen
                seen.add(key)
        if parts and world.sp * world.tp > 1:
            answer = torch.from_numpy(lacks).to(world.device)
            for group in (world.tp_group, world.sp_group):  # from the first rank to its own group, from there to all
                if group is not None:
                    dist.broadcast(answer, group=group, group_src=0)
            lacks = answer.cpu().numpy()
        lacking = iter(lacks.tolist())
        for micro_batch in divided:
            parts, micro_batch.stored = micro_batch.stored, []
            for part in parts:
                (micro_batch.missing if next(lacking) else micro_batch.stored).append(part)
        return divided

    def _has(self, part: PieceInRows) -> bool:
        """Whether just what the model would compute for a piece is stored, or waits to be written."""
        if self.writer is not None and self.writer.holds(part.piece, part.tokens):
            return True
        found = self.store.find(part.piece, part.tokens)
        return found is not None and not found.in_context  # with more context the model would give other targets

    def _find(self, part: PieceInRows) -> Found:
        """Where the store has a piece; what waits is written first."""
        if self.writer is not None and self.writer.holds(part.piece, part.tokens):
            self.writer.flush()
        found = self.store.find(part.piece, part.tokens)
        if found is None:
            remedy = "see `distill-rl check`; set teachers[].store.missing to skip or live, or capture it"
            raise DataError(f"store {self.store.folder}", "must have every document of the run", part.what, remedy)
        return found

    def _compute(self, micro_batch: StoredMicroBatch, index: int) -> dict[str, Tensor]:
        """Runs the model on a micro-batch that is missing, and writes its pieces, to one shard. Collective."""
        # Every token but a piece's first gets a label, whatever this run is trained on: another one may need it.
        assert self.live is not None
        rows = micro_batch.rows
        labels = np.full_like(rows.labels, IGNORE_INDEX)
        for part in micro_batch.missing:
            labels.reshape(-1)[part.place][:-1] = part.tokens[1:]
        alone = RankBatch(index, micro_batch.layout.first_row, replace(rows, labels=labels), 0)
        ((_, tensors),) = self.live.forward(alone)
        self.use.computed += _num_tokens(micro_batch.missing)
        if self.writer is not None:
            on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
            for part in micro_batch.missing:
                if self._has(part):  # it is twice in the batch
                    continue
                targets = {name: tensor[part.place] for name, tensor in on_host.items()}
                for name, tensor in targets.items():
                    if tensor.is_floating_point() and tensor.isnan().any():
                        teacher, remedy = self.teacher.name, "try teachers[].dtype=fp32, or look for damaged weights"
                        raise NumericsError(f"teacher {teacher}", f"{name} must not be NaN", part.what, remedy)
                self.writer.add(part.piece, part.tokens, {name: _column(tensor) for name, tensor in targets.items()})
            self.writer.flush_if_due()
        return tensors

    def _packed(
        self, divided: Sequence[StoredMicroBatch], batch: RankBatch
    ) -> tuple[list[StoredMicroBatch], list[int]]:
        """Micro-batches of the pieces that are missing beside others that are stored, and the number of each among these pieces."""
        parts = [part for micro_batch in divided if micro_batch.stored for part in micro_batch.missing]
        if not parts:
            return [], []
        encoded = [Encoded(part.tokens, np.ones(len(part.tokens), dtype=bool)) for part in parts]
        width, rows = batch.rows.shape[1], BatchSharding(1, self.micro_batch_size)
        on_gpu, divisor = self.world.device.type == "cuda", self.config.width_divisor
        plan = BatchPlan(rows, (), width, self.config.data.packing, pad_id=0, on_gpu=on_gpu, width_divisor=divisor)
        members = [row for row in arrange([encoded], [width], plan) if row]
        pieces = tuple(tuple(parts[i].piece for i in row) for row in members)
        packed = [*self._micro_batches(RankBatch(batch.index, 0, lay_out(encoded, plan, members), 0, pieces=pieces))]
        for micro_batch in packed:
            micro_batch.stored, micro_batch.missing = [], micro_batch.stored
        return packed, [i for row in members for i in row]

    def _compute_apart(self, divided: Sequence[StoredMicroBatch], batch: RankBatch) -> Iterator[dict[str, Tensor]]:
        """Computes the pieces that are missing beside others that are stored, when the first one is asked for."""
        # Yields their targets in order, [piece.length, …] on the host; nothing of them on a rank that has none.
        # Collective.
        packed, order = self._packed(divided, batch)
        found: list[dict[str, Tensor]] = [{} for _ in order]
        place = iter(order)
        for micro_batch in packed:
            tensors = {name: tensor.cpu() for name, tensor in self._compute(micro_batch, batch.index).items()}
            for part in micro_batch.missing:
                found[next(place)] = {name: tensor[part.place].clone() for name, tensor in tensors.items()}
        yield from found

    def _read(self, micro_batch: StoredMicroBatch, apart: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The targets of the positions of a micro-batch, on the CPU; empty on a rank that does not report. Collective."""
        computed = [(part.start, next(apart)) for part in micro_batch.missing]
        self.use.read += _num_tokens(micro_batch.stored)
        if not self.world.reports:
            return {}
        tensors = self.unused_targets(micro_batch.rows.input_ids.size)  # which padding keeps
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            for part in micro_batch.stored:
                found = self._find(part)
                targets = {name: _tensor(column) for name, column in self.store.targets(found).items()}
                if self.store.manifest.kind == "topk" and self._entries < self.store.manifest.entries:
                    targets = _cut_to_k(targets, self._entries)  # loss.top_k is less than that of the store
                _write(targets, tensors, part.start + found.skip)
        for start, targets in computed:
            for name, values in targets.items():  # a model that writes nothing may send another dtype than the store's
                tensors[name] = tensors[name].to(values.dtype)
            _write(targets, tensors, start)
        return tensors

    def unused_targets(self, positions: int) -> dict[str, Tensor]:
        """As of `TeacherBackend`."""
        return unused_targets(self.store.manifest.kind, positions, self._entries, self._dtype)


def _num_tokens(parts: Sequence[PieceInRows]) -> int:
    return sum(part.piece.length for part in parts)


def _write(targets: Mapping[str, Tensor], into: Mapping[str, Tensor], start: int) -> None:
    """Copies the targets of a piece into those of a micro-batch, from position `start` on; absent entries are kept."""
    for name, values in targets.items():
        rows = into[name][start : start + len(values)]
        (rows if values.ndim == 1 else rows[:, : values.shape[1]]).copy_(values)


def _cut_to_k(tensors: dict[str, Tensor], k: int) -> dict[str, Tensor]:
    """Top-k targets with the first `k` entries; the probability of the others is added to the rest."""
    ids, logprobs = tensors["ids"], tensors["logprobs"]
    rest = torch.logsumexp(torch.cat([logprobs[:, k:].float(), tensors["rest_logprob"][:, None]], dim=1), dim=1)
    return tensors | {"ids": ids[:, :k], "logprobs": logprobs[:, :k], "rest_logprob": rest}


def _column(tensor: Tensor) -> Column:
    """A tensor on the CPU as a column of a store."""
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return Column(_NAMES[tensor.dtype], bits.numpy())


def _tensor(column: Column) -> Tensor:
    """A column of a store as a tensor, which must not be written to."""
    tensor = torch.from_numpy(column.values)
    return tensor.view(torch.bfloat16) if column.dtype == "BF16" else tensor
