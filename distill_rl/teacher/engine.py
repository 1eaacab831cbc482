"""The teacher of one rank: a frozen model that turns rows into targets. Runs under Ray, plain `torchrun`, or in a
test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill_rl.config.derive import target_bytes_per_token
from distill_rl.config.memory import TEACHER_CHUNK_BYTES as CHUNK_BYTES
from distill_rl.config.memory import TEACHER_CHUNK_TOKENS as CHUNK_TOKENS
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.losses import (
    DenseLogits,
    HiddenStates,
    SampledTokens,
    TopKLogprobs,
    context_keys,
    vocab_parallel_logprobs,
    vocab_parallel_sample,
    vocab_parallel_topk,
)
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.targets import Wire
from distill_rl.models import forward
from distill_rl.models.determinism import be_deterministic
from distill_rl.models.families import length_limit
from distill_rl.models.forward import micro_batches, to_device
from distill_rl.models.load import load_model
from distill_rl.models.varlen import documents_for
from distill_rl.models.weights import DTYPES
from distill_rl.parallel.mesh import World
from distill_rl.parallel.sequence import gather_positions, own_positions
from distill_rl.parallel.shards import mask_padded_columns
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.transport.base import Layout
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows

# From a teacher's hidden states to its targets, a chunk of tokens at a time.
#
# The logits of all tokens together would be far larger than the targets. So for each chunk of tokens: compute the logits,
# mask the padded columns, extract what is exported, and write it to its rows of the result. Only one chunk of logits
# exists at a time.


def chunk_tokens(columns: int, free: int | None = None) -> int:
    """Tokens per chunk for a rank that holds `columns` columns of the output layer.

    1,024, or as many as fit into 256 MiB of fp32 logits (512 at a vocabulary of 131,072), but at least one.

    Args:
        free: bytes that are free on the GPU, of which a chunk takes at most a quarter. None: only the bound counts.
    """
    bound = CHUNK_BYTES if free is None else min(CHUNK_BYTES, free // 4)
    return max(1, min(CHUNK_TOKENS, bound // (4 * columns)))


@dataclass(frozen=True, slots=True)
class TargetHead:
    """How hidden states become log-probabilities."""

    logits: Callable[[Tensor], Tensor]
    """Hidden states [n, H] → logits [n, V], plain or DTensor Shard(-1)."""
    temperature: float
    """Of the softmax."""
    vocabulary_size: int
    """Columns from here on are padding and get no probability."""
    chunk: int
    """Number of tokens whose logits exist at once."""
    backend: Backend | None = None
    """`eager`, or None: kernels where they work."""


def topk_targets(hidden: Tensor, labels: Tensor, head: TargetHead, *, k: int) -> TopKLogprobs:
    """Returns per token the k largest log-probabilities, that of all other tokens together, and the label's.

    They are taken over the whole vocabulary and not renormalised. Collective over the tensor-parallel group.

    Args:
        hidden: [N, H] last hidden states, the same on every tensor-parallel rank.
        labels: int64 [N], shifted; the label log-probability of an ignored position is meaningless.
        k: entries kept per token.

    Returns:
        Plain tensors, fp32 (ids: int32), of N rows, equal on every tensor-parallel rank.
    """

    def top_k(logits: Tensor, rows: slice) -> dict[str, Tensor]:
        top = vocab_parallel_topk(logits, k, labels=labels[rows], temperature=head.temperature, backend=head.backend)
        return top.to_tensors(torch.float32)

    return TopKLogprobs.from_tensors(_by_chunk(hidden, head, top_k), head.temperature)


def sampled_targets(hidden: Tensor, labels: Tensor, head: TargetHead, *, draws: int, keys: Tensor) -> SampledTokens:
    """Returns per token the distinct ids of `draws` draws with their counts, the draws' mean log-probability, the label's.

    Collective. Arguments as in `topk_targets`.

    Args:
        keys: int64 [N], see `vocab_parallel_sample`.

    Returns:
        Plain tensors of N rows, ids int32, counts int16, otherwise fp32, equal on every tensor-parallel rank.
    """

    def sample(logits: Tensor, rows: slice) -> dict[str, Tensor]:
        drawn = vocab_parallel_sample(logits, draws, keys=keys[rows], labels=labels[rows], temperature=head.temperature)
        return drawn.to_tensors(torch.float32)

    return SampledTokens.from_tensors(_by_chunk(hidden, head, sample), head.temperature)


def logits_targets(hidden: Tensor, labels: Tensor, head: TargetHead, *, wire_dtype: torch.dtype) -> DenseLogits:
    """Returns all logits in `wire_dtype`, and the label's log-probability in fp32.

    Only the label's log-probability is taken at the temperature; the logits are not divided by it. Collective.
    Arguments as in `topk_targets`.

    Returns:
        Plain tensors of N rows with every column of the output layer, padding at −inf, equal on every tensor-parallel
        rank.
    """

    def gather(logits: Tensor, rows: slice) -> dict[str, Tensor]:
        logprob = vocab_parallel_logprobs(logits, labels[rows], temperature=head.temperature, backend=head.backend)
        assert isinstance(logprob, Tensor)
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return {"logits": whole.to(wire_dtype), "label_logprob": logprob.float()}

    return DenseLogits(**_by_chunk(hidden, head, gather))


def hidden_targets(
    hidden: Tensor, labels: Tensor, head: TargetHead, *, with_entropy: bool = False
) -> tuple[HiddenStates, Tensor | None]:
    """Returns the hidden states as they are with the label's fp32 log-probability, and on request the entropies.

    Collective. Arguments as in `topk_targets`.

    Returns:
        Plain tensors of N rows, equal on every tensor-parallel rank; and the entropies, fp32 [N] in nats, or None.
    """

    def logprobs(logits: Tensor, rows: slice) -> dict[str, Tensor]:
        found = vocab_parallel_logprobs(
            logits, labels[rows], temperature=head.temperature, return_entropy=with_entropy, backend=head.backend
        )
        if isinstance(found, Tensor):
            return {"label_logprob": found.float()}
        return {"label_logprob": found[0].float(), "entropy": found[1].float()}

    whole = _by_chunk(hidden, head, logprobs)
    return HiddenStates(hidden, whole["label_logprob"]), whole.get("entropy")


def _by_chunk(
    hidden: Tensor, head: TargetHead, compute: Callable[[Tensor, slice], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """What `compute` makes of the logits of each chunk, padded columns at −inf, and its rows, for all rows of `hidden`."""
    whole: dict[str, Tensor] = {}
    for start in range(0, hidden.shape[0], head.chunk):
        rows = slice(start, start + head.chunk)
        logits = mask_padded_columns(head.logits(hidden[rows]), head.vocabulary_size)
        for name, part in compute(logits, rows).items():
            if name not in whole:  # concatenating parts at the end would need twice the memory
                whole[name] = part.new_empty(hidden.shape[0], *part.shape[1:])
            whole[name][rows] = part
        del logits, part
    return whole


def unused_targets(
    kind: str, positions: int, entries: int, dtype: torch.dtype, *, vocabulary_size: int | None = None
) -> dict[str, Tensor]:
    """A valid target for each of some positions that nothing reads, such as padding, in the wire form of their kind.

    Half of the probability is that of `entries` ids, of draws all are of id 0, and logits and hidden states are 0.

    Args:
        kind: `teachers[].export`.
        entries: ids per position; of logits the columns, of hidden states their size.
        dtype: of log-probabilities, logits or hidden states.
        vocabulary_size: columns of logits from here on are padding; None: there is none.

    Returns:
        Tensors on the CPU with `positions` rows, each with memory of its own.
    """
    half = torch.full((positions,), math.log(0.5))
    if kind == "hidden":
        return {"hidden": torch.zeros(positions, entries, dtype=dtype), "label_logprob": half}
    if kind == "logits":
        logits = torch.zeros(positions, entries, dtype=dtype)
        logits[:, vocabulary_size or entries :] = -torch.inf
        return {"logits": logits, "label_logprob": half}
    if kind == "sampled":
        first = torch.arange(entries) == 0
        return {
            "ids": torch.where(first, 0, -1).to(torch.int32).repeat(positions, 1),
            "counts": first.to(torch.int16).repeat(positions, 1),
            "mean_logprob": torch.zeros(positions),
            "label_logprob": half,
        }
    return {
        "ids": torch.arange(entries, dtype=torch.int32).repeat(positions, 1),
        "logprobs": torch.full((positions, entries), math.log(0.5) - math.log(entries), dtype=dtype),
        "rest_logprob": half,
        "label_logprob": half.clone(),
    }


@torch.no_grad()
def score_of(
    score: str, target: Wire, entropies: Tensor | None, labels: Tensor, temperature: float, chunk: int
) -> Tensor | float:
    """Returns the sum of a teacher's score over the labelled positions of a micro-batch: −log p(label), or the entropy.

    It is an fp64 scalar on the device; the float 0 if the score is `static`.

    Args:
        score: `teachers[].score`.
        entropies: fp32 [N]; None: they follow from the target, or are not the score.
        labels: int64 [N].
        temperature, chunk: as for `entropy`.
    """
    if score == "static":
        return 0.0
    assert target.label_logprob is not None
    values = -target.label_logprob
    if entropies is not None:
        values = entropies
    elif score == "entropy":
        assert not isinstance(target, HiddenStates)
        values = entropy(target, temperature, chunk)
    return torch.where(labels != IGNORE_INDEX, values, 0).double().sum()


def entropy(target: TopKLogprobs | SampledTokens | DenseLogits, temperature: float, chunk: int) -> Tensor:
    """Returns the entropy of each row in nats, fp32 [N]; all tokens outside a top k count as one more outcome.

    Of draws it is an estimate without bias, minus their mean log-probability.

    Args:
        temperature: applied to logits; log-probabilities of the top k already have one.
        chunk: rows of logits to handle at once.
    """
    if isinstance(target, DenseLogits):
        rows = (part.float().div_(temperature).log_softmax(1) for part in target.logits.split(chunk))
        return torch.cat([_entropy_of(logprobs) for logprobs in rows])
    if isinstance(target, SampledTokens):
        assert target.mean_logprob is not None
        return -target.mean_logprob
    assert target.rest_logprob is not None
    return _entropy_of(torch.cat([target.logprobs.float(), target.rest_logprob.float()[:, None]], 1))


def _entropy_of(logprobs: Tensor) -> Tensor:
    return -torch.where(logprobs == -torch.inf, 0, logprobs.exp() * logprobs).sum(1)


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
        if teacher.origin.engine or not teacher.origin.runs_model:
            raise ConfigError(f"teacher {teacher.name}", "must have backend hf", teacher.backend)
        be_deterministic(config.train.deterministic, world.device)
        self.config, self.teacher, self.world = config, teacher, world
        self.micro_batch_size = config.rows_of(teacher)
        self.wire_dtype = wire_dtype(teacher, world.device)
        self.model = load_model(teacher, world, packing=config.data.packing, longest=config.length_of(teacher))
        self._by_length = length_limit(self.model.config) is not None
        self.head = TargetHead(
            partial(forward.head, self.model),
            temperature=config.loss.temperature,
            vocabulary_size=vocabulary_size,
            chunk=chunk_tokens(-(-self.model.config.vocab_size // world.tp), _free_bytes(config, world)),
            backend="eager" if config.loss.backend == "eager" else None,
        )
        model, export = self.model.config, teacher.export
        by_export = {
            "hidden": model.hidden_size,
            "logits": model.vocab_size,
            "sampled": min(config.loss.draws, model.vocab_size),
            "topk": config.loss.top_k,
        }
        self._entries = int(by_export[export])
        """Ids, columns or numbers per position of the targets."""
        self._dtype: torch.dtype = self.model.dtype if export == "hidden" else self.wire_dtype
        self.bytes_per_token = target_bytes_per_token(export, self._entries, self._dtype.itemsize)
        """Of the tensors that `forward` yields; columns that are padding count, too."""
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
            tensors = {name: tensor for name, tensor in whole.items() if tensor is not None}
            yield Layout(first_row, num_rows, width), tensors
        if self.teacher.score == "static":
            self.score = 0.0
            return
        if world.sp_group is not None:
            dist.all_reduce(total, group=world.sp_group)
        self.score = total.item()

    def unused_targets(self, positions: int) -> dict[str, Tensor]:
        """As of `TeacherBackend`."""
        kind, size = self.teacher.export, self.head.vocabulary_size
        return unused_targets(kind, positions, self._entries, self._dtype, vocabulary_size=size)

    def close(self) -> None:
        """Does nothing: the process that holds the model ends."""

    @gpu_phase("teacher forward")
    @torch.no_grad()
    def _target(self, rows: TokenRows, labels: Tensor) -> tuple[Wire, Tensor | None]:
        """Runs the model on this rank's positions of a micro-batch; returns their target in the form that `teacher.export` names."""
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
    return DTYPES[teacher.sent_dtype(on_gpu=device.type == "cuda")]


def _free_bytes(config: Config, world: World) -> int | None:
    """The bytes that are free on the fullest of the ranks' GPUs, the same on every rank. Collective."""
    # None on CPUs, and with `train.deterministic`, where chunks must not depend on them.
    if world.device.type != "cuda" or config.train.deterministic:
        return None
    free = torch.tensor(torch.cuda.mem_get_info(world.device)[0], device=world.device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    return int(free)
