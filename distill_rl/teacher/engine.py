"""The teacher of one rank: a frozen model that turns rows into targets. Runs under Ray, plain `torchrun`, or in a
test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distill_rl.config import facts
from distill_rl.config.facts import runs_model, teacher_length, teacher_rows
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.config.target_bytes import target_bytes_per_token
from distill_rl.errors import ConfigError
from distill_rl.losses import context_keys
from distill_rl.losses.targets import Wire
from distill_rl.models import forward
from distill_rl.models.determinism import be_deterministic
from distill_rl.models.families import length_limit
from distill_rl.models.inputs import micro_batches, to_device
from distill_rl.models.load import load_model
from distill_rl.models.skeleton import DTYPES
from distill_rl.models.varlen import documents_for
from distill_rl.parallel.mesh import World
from distill_rl.parallel.sequence import gather_positions, own_positions
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.teacher.targets import (
    TargetHead,
    chunk_tokens,
    hidden_targets,
    logits_targets,
    sampled_targets,
    score_of,
    topk_targets,
    unused_targets,
)
from distill_rl.transport.base import Layout
from distill_rl.types import RankBatch, TokenRows


class TeacherEngine:
    """One teacher's model on one rank. `forward` is collective over the ranks that work on the same rows.

    Under sequence parallelism every rank holds the whole model, but computes its part of the positions only. Their targets
    are joined on the first of these ranks.

    Args:
        config: the run's settings.
        teacher: one of `config.teachers`.
        world: this rank of the teacher's mesh.
        vocabulary_size: ids of the tokenizer. Further columns of the output layer are padding without probability.

    Raises:
        ConfigError: the teacher's backend is not supported, or its model cannot be loaded.
    """

    @gpu_phase("teacher load")
    def __init__(self, config: Config, teacher: TeacherConfig, world: World, *, vocabulary_size: int):
        if teacher.backend == "vllm" or not runs_model(teacher):
            raise ConfigError(f"teacher {teacher.name}", "must have backend hf", teacher.backend)
        be_deterministic(config.train.deterministic, world.device)
        self.config, self.teacher = config, teacher
        self.world = world
        self.micro_batch_size = teacher_rows(config, teacher)
        self.wire_dtype = wire_dtype(teacher, world.device)
        self.model = load_model(teacher, world, packing=config.data.packing, longest=teacher_length(config, teacher))
        self._by_length = length_limit(self.model.config) is not None
        self.head = TargetHead(
            partial(forward.head, self.model),
            temperature=config.loss.temperature,
            vocabulary_size=vocabulary_size,
            chunk=chunk_tokens(-(-self.model.config.vocab_size // world.tp), _free_bytes(config, world)),
            backend="eager" if config.loss.backend == "eager" else None,
        )
        self.score = 0.0
        """Of the last complete `forward`: sum over labelled positions of −log p(label), or of the entropy."""

    def forward(self, batch: RankBatch) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
        """Yields the targets of this rank's part of a global batch. A micro-batch is computed when it is requested.

        Rows that only fill the batch are computed like any other. `score` is set when the iterator is exhausted; an
        iterator that is left before its end does not change it.

        Yields:
            The rows covered, and their TopKLogprobs, SampledTokens, HiddenStates or DenseLogits as tensors in the wire
            dtype, on this rank's device; the same on every tensor-parallel rank. No tensors on the sequence-parallel
            ranks after the first.
        """
        world = self.world
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        for first_row, rows in micro_batches(batch, self.micro_batch_size, padding_apart=self._by_length):
            num_rows, width = rows.shape
            labels = to_device(rows.labels[:, own_positions(world, width)], world.device).flatten()
            target, entropies = self._target(rows, labels)
            temperature, chunk = self.head.temperature, self.head.chunk
            total += score_of(self.teacher.score, target, entropies, labels, temperature, chunk)
            parts = target.to_tensors(self.wire_dtype)
            whole = {name: gather_positions(part, num_rows, world) for name, part in parts.items()}
            yield (
                Layout(first_row, num_rows, width),
                {name: tensor for name, tensor in whole.items() if tensor is not None},
            )
        if self.teacher.score == "static":
            self.score = 0.0
            return
        if world.sp_group is not None:
            dist.all_reduce(total, group=world.sp_group)
        self.score = total.item()

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of the tensors that `forward` yields; columns that are padding count, too."""
        return target_bytes_per_token(self.teacher.export, self._entries, self._dtype.itemsize)

    @property
    def _entries(self) -> int:
        """Ids, columns or numbers per position of the targets."""
        model = self.model.config
        by_export = {
            "hidden": model.hidden_size,
            "logits": model.vocab_size,
            "sampled": min(self.config.loss.draws, model.vocab_size),
            "topk": self.config.loss.top_k,
        }
        return int(by_export[self.teacher.export])

    @property
    def _dtype(self) -> torch.dtype:
        """Of the targets' log-probabilities, logits or hidden states."""
        return self.model.dtype if self.teacher.export == "hidden" else self.wire_dtype  # type: ignore[no-any-return]

    def unused_targets(self, positions: int) -> dict[str, Tensor]:
        """As of `TeacherBackend`."""
        return unused_targets(
            self.teacher.export, positions, self._entries, self._dtype, vocabulary_size=self.head.vocabulary_size
        )

    def close(self) -> None:
        """Does nothing: the process that holds the model ends."""

    @gpu_phase("teacher forward")
    @torch.no_grad()
    def _target(self, rows: TokenRows, labels: Tensor) -> tuple[Wire, Tensor | None]:
        """Runs the model on this rank's positions of a micro-batch; returns their target in the form that `teacher.export` names.

        They are flattened to [N, …]. Also returns the entropy per token, fp32 [N], if it is the score and hidden states
        are exported, from which it does not follow; else None.

        Args:
            rows: whole.
            labels: int64 [N], of this rank's positions.
        """
        device, part = self.world.device, own_positions(self.world, rows.shape[1])
        documents = documents_for(self.model.config, rows.position_ids, device, self.world.sp_group)
        ids, positions = to_device(rows.input_ids, device), to_device(rows.position_ids, device)
        hidden = forward.body(self.model, ids[:, part], positions[:, part], documents).flatten(0, 1)
        if self.teacher.export == "hidden":
            return hidden_targets(hidden, labels, self.head, with_entropy=self.teacher.score == "entropy")
        if self.teacher.export == "logits":
            return logits_targets(hidden, labels, self.head, wire_dtype=self.wire_dtype), None
        if self.teacher.export == "sampled":
            keys = context_keys(ids, positions, self.config.run.seed)[:, part].flatten()  # of all that precedes
            return sampled_targets(hidden, labels, self.head, draws=self.config.loss.draws, keys=keys), None
        return topk_targets(hidden, labels, self.head, k=self.config.loss.top_k), None


def wire_dtype(teacher: TeacherConfig, device: torch.device) -> torch.dtype:
    """The dtype in which a teacher's log-probabilities or logits are sent; `device`, its rank's, decides `auto`."""
    return DTYPES[facts.wire_dtype(teacher, on_gpu=device.type == "cuda")]


def _free_bytes(config: Config, world: World) -> int | None:
    """The bytes that are free on the fullest of the ranks' GPUs, the same on every rank. Collective.

    None on CPUs, and with `train.deterministic`, where chunks must not depend on them.
    """
    if world.device.type != "cuda" or config.train.deterministic:
        return None
    free = torch.tensor(torch.cuda.mem_get_info(world.device)[0], device=world.device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    return int(free)
