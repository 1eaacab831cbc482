"""A teacher whose targets are in a store: reads them, and computes and writes what the store lacks if it has a model.

The same class serves three purposes:

    from a store       no model: every piece of every row must be in the store (`teachers[].backend: store`)
    with a cache       a model: what is not in the store is computed, written and published (`teachers[].cache`)
    capturing          a model, and nobody who reads: what is not in the store is computed and written (`fill`)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distill_rl.config.facts import teacher_rows
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.config.target_bytes import target_bytes_per_token
from distill_rl.errors import DataError, NumericsError
from distill_rl.losses.targets import target_of
from distill_rl.models.inputs import micro_batches, to_device
from distill_rl.models.load import DTYPES
from distill_rl.parallel.mesh import World
from distill_rl.store.shard import Column
from distill_rl.store.store import Found, Store
from distill_rl.store.writer import StoreWriter
from distill_rl.teacher.backends.base import TeacherBackend
from distill_rl.teacher.targets import CHUNK_TOKENS, score_of, unused_targets
from distill_rl.transport.base import Layout
from distill_rl.types import IGNORE_INDEX, PieceRef, RankBatch, TokenRows

_NAMES = {
    torch.int16: "I16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
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
    def what(self) -> str:
        """For messages."""
        return (
            f"document {self.piece.name.hex()}, tokens {self.piece.first:,} to {self.piece.first + self.piece.length:,}"
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass, and the pieces that they hold."""

    layout: Layout
    rows: TokenRows
    pieces: list[PieceInRows]

    @property
    def num_tokens(self) -> int:
        """Of the pieces."""
        return sum(part.piece.length for part in self.pieces)


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
        self.micro_batch_size = teacher_rows(config, teacher)
        self.score = 0.0
        """As of `TeacherBackend`."""
        self.use = TokenCounts()
        manifest = store.manifest
        self._entries = config.loss.top_k if manifest.kind == "topk" else manifest.entries
        self._dtype = DTYPES[manifest.wire_dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of the tensors that `forward` yields."""
        stored = target_bytes_per_token(self.store.manifest.kind, self._entries, self._dtype.itemsize)
        return stored if self.live is None else max(stored, self.live.bytes_per_token)

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
        for micro_batch in self._micro_batches(batch):
            if self._is_stored(micro_batch):
                tensors = self._read(micro_batch)
                self.use.read += micro_batch.num_tokens
            else:
                tensors = self._compute(micro_batch, batch)
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
        """Computes and writes what the store lacks of this rank's part of a batch; micro-batches that it has are skipped.

        Raises:
            NumericsError: what is to be stored is NaN.
            StoreError: it cannot be written.
        """
        for micro_batch in self._micro_batches(batch):
            if self._is_stored(micro_batch):
                self.use.read += micro_batch.num_tokens
            else:
                self._compute(micro_batch, batch)
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

    def _micro_batches(self, batch: RankBatch) -> Iterator[MicroBatch]:
        """Yields the micro-batches of this rank's part of a batch."""
        for first_row, rows in micro_batches(batch, self.micro_batch_size):
            part = range(first_row - batch.first_row, batch.rows.shape[0])[: self.micro_batch_size]
            held = [batch.pieces[row] for row in part if batch.asked is None or batch.asked[row]]
            pieces = _pieces_in(rows, held)
            yield MicroBatch(Layout(first_row, *rows.shape), rows, pieces)

    def _is_stored(self, micro_batch: MicroBatch) -> bool:
        """Whether the store has, or will have, all pieces of a micro-batch; the same on every rank of these rows.

        Collective if there is a model. Only the first rank knows what it has written.

        Raises:
            DataError: it lacks one, and there is no model.
        """
        if self.live is None:
            return all(self._find(part) is not None for part in micro_batch.pieces)
        world = self.world
        is_stored = not world.reports or all(map(self._has, micro_batch.pieces))
        if world.sp * world.tp > 1:
            answer = torch.tensor([is_stored], dtype=torch.int64, device=world.device)
            for group in (world.tp_group, world.sp_group):  # from the first rank to its own group, from there to all
                if group is not None:
                    dist.broadcast(answer, group=group, group_src=0)
            is_stored = bool(answer.item())
        return is_stored

    def _has(self, part: PieceInRows) -> bool:
        """Whether just what the model would compute for a piece is stored, or waits to be written."""
        if self.writer is not None and self.writer.holds(part.piece, part.tokens):
            return True
        found = self.store.find(part.piece, part.tokens)
        return found is not None and not found.in_context  # with more context the model would give other targets

    def _find(self, part: PieceInRows) -> Found:
        """Where the store has a piece; what waits is written first.

        Raises:
            DataError: it has none.
        """
        if self.writer is not None and self.writer.holds(part.piece, part.tokens):
            self.writer.flush()
        found = self.store.find(part.piece, part.tokens)
        if found is None:
            remedy = "see `distill-rl check`; set teachers[].missing to skip or live, or capture it"
            raise DataError(f"store {self.store.folder}", "must have every document of the run", part.what, remedy)
        return found

    def _compute(self, micro_batch: MicroBatch, batch: RankBatch) -> dict[str, Tensor]:
        """Runs the model on a micro-batch, and writes the pieces that the store lacks. Collective.

        Every token but a piece's first gets a label, whatever this run is trained on: another one may need it.
        """
        assert self.live is not None
        rows = micro_batch.rows
        labels = np.full_like(rows.labels, IGNORE_INDEX)
        for part in micro_batch.pieces:
            labels.reshape(-1)[part.start : part.start + part.piece.length - 1] = part.tokens[1:]
        alone = RankBatch(batch.index, micro_batch.layout.first_row, replace(rows, labels=labels), batch.num_labels)
        ((_, tensors),) = self.live.forward(alone)
        self.use.computed += micro_batch.num_tokens
        if self.writer is not None:
            on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
            for part in micro_batch.pieces:
                if self._has(part):
                    continue
                place = slice(part.start, part.start + part.piece.length)
                targets = {name: tensor[place] for name, tensor in on_host.items()}
                self._require_numbers(part, targets)
                self.writer.add(part.piece, part.tokens, {name: _column(tensor) for name, tensor in targets.items()})
        return tensors

    def _require_numbers(self, part: PieceInRows, targets: Mapping[str, Tensor]) -> None:
        """Raises NumericsError if a target of a piece that is to be stored is NaN."""
        for name, tensor in targets.items():
            if tensor.is_floating_point() and tensor.isnan().any():
                remedy = "try teachers[].dtype=fp32, or look for damaged weights"
                raise NumericsError(f"teacher {self.teacher.name}", f"{name} must not be NaN", part.what, remedy)

    def _read(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The targets of the positions of a micro-batch, on the CPU; empty on a rank that does not report."""
        if not self.world.reports:
            return {}
        tensors = self.unused_targets(micro_batch.rows.input_ids.size)  # which padding keeps
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            for part in micro_batch.pieces:
                found = self._find(part)
                start = part.start + found.skip
                for name, values in self._targets(found).items():
                    into = tensors[name][start : start + found.count]
                    (into if values.ndim == 1 else into[:, : values.shape[1]]).copy_(values)
        return tensors

    def _targets(self, found: Found) -> dict[str, Tensor]:
        """What the store has of a piece; a smaller `loss.top_k` than the store's is cut from it."""
        tensors = {name: _tensor(column) for name, column in self.store.targets(found).items()}
        if self.store.manifest.kind == "topk" and self._entries < self.store.manifest.entries:
            tensors = _cut_to_k(tensors, self._entries)
        return tensors

    def unused_targets(self, positions: int) -> dict[str, Tensor]:
        """As of `TeacherBackend`."""
        return unused_targets(self.store.manifest.kind, positions, self._entries, self._dtype)


def _pieces_in(rows: TokenRows, pieces: Sequence[tuple[PieceRef, ...]]) -> list[PieceInRows]:
    """The pieces of the rows of a micro-batch, with their places and tokens."""
    parts: list[PieceInRows] = []
    width = rows.shape[1]
    for row, of_row in enumerate(pieces):
        start = 0
        for piece in of_row:
            parts.append(PieceInRows(piece, row * width + start, rows.input_ids[row, start : start + piece.length]))
            start += piece.length
    return parts


def _cut_to_k(tensors: dict[str, Tensor], k: int) -> dict[str, Tensor]:
    """Top-k targets with the first `k` entries; the probability of the others is added to the rest."""
    dropped = tensors["logprobs"][:, k:].float()
    rest = torch.logsumexp(torch.cat([dropped, tensors["rest_logprob"][:, None]], dim=1), dim=1)
    return tensors | {
        "ids": tensors["ids"][:, :k],
        "logprobs": tensors["logprobs"][:, :k],
        "rest_logprob": rest,
    }


def _column(tensor: Tensor) -> Column:
    """A tensor on the CPU as a column of a store."""
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return Column(_NAMES[tensor.dtype], bits.numpy())


def _tensor(column: Column) -> Tensor:
    """A column of a store as a tensor, which must not be written to."""
    tensor = torch.from_numpy(column.values)
    return tensor.view(torch.bfloat16) if column.dtype == "BF16" else tensor
