"""Losses of hidden states and an output layer. Logits exist a chunk of rows at a time, never as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Shard

from distill_rl.losses.core import checks
from distill_rl.losses.core.autograd import Anchor, untraced
from distill_rl.losses.core.labels import LabelRows
from distill_rl.losses.core.linear import FusedRows
from distill_rl.losses.core.reduce import ReductionName
from distill_rl.losses.core.row_function import RowFunction
from distill_rl.losses.core.shards import VocabularyShard, local_like, split
from distill_rl.losses.core.streaming import accumulator
from distill_rl.losses.core.task import Batch, KDOutput, local_teacher, make_task, spread
from distill_rl.losses.options import KDOptions, Tail
from distill_rl.losses.targets import Teacher

_LEAST_CHUNK = 64
"""Rows; fewer make a poor matrix product."""


def default_chunk(hidden_size: int) -> int:
    """Rows per chunk: half the hidden size, at least 64.

    A chunk of fp32 logits is then as large as the weight's bf16 gradient, which every chunk reads and writes.
    """
    return max(_LEAST_CHUNK, hidden_size // 2)


@untraced
def fused_linear_kd_loss(
    student_hidden: Tensor,
    lm_head_weight: Tensor,
    teacher: Teacher | None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    labels: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: Tail = "bucket",
    kd_ratio: float = 1.0,
    reduction: ReductionName = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
    validate: bool | None = None,
) -> KDOutput:
    """`kd_loss` of the logits softcap(student_hidden · lm_head_weightᵀ + bias), which never exist as a whole.

    Ignored rows are dropped before the output layer (their count waits for a GPU once). Logits are accumulated in fp32
    whatever the dtypes. Extra memory: the inputs' gradients, the weight's in fp32 until it is complete, and a chunk of
    logits, independent of N·V. For "sum" and "mean" the gradients are computed during forward.

    Args:
        student_hidden: [N, H] or [B, S, H], the same on every tensor-parallel rank (plain, or a DTensor Replicate); its
            gradient arrives complete on every rank.
        lm_head_weight: [V, H]; a DTensor Shard(0) over ranks that work on the same rows (the hidden states are
            replicated over the same group, its mesh dimension is called "tp", or `tp_group` names it), or with
            `tp_group` this rank's [Vl, H]. Its gradient is the shard's.
        teacher: TeacherHidden has its own output layer and hidden size, sharded as the student's.
        bias: [V], sharded as the weight.
        softcap: softcap · tanh(logits / softcap), before the temperature.
        inplace_backward: no effect, since there are no logits to overwrite.

    All other arguments, the result and errors are those of `kd_loss`; but ignored rows are dropped whatever `validate`
    says, and the default `chunk_size` is half the hidden size.

    Raises:
        ValueError: naming the argument, the rule and the value; also for a sharded DTensor weight of which nothing says
            that its ranks work on the same rows, as after FSDP.
    """
    options = KDOptions.of(locals())
    batch = Batch(labels, token_weights, num_items_in_batch)
    hidden, weight, bias, shard = _inputs(student_hidden, lm_head_weight, bias, softcap, tp_group)
    task = make_task(options, batch, hidden.shape[:-1], shard, hidden.device)
    targets = local_teacher(teacher, task)
    hidden = hidden.reshape(task.num_rows, hidden.shape[-1])

    # Ignored rows never reach the output layer.
    counted, kept = task.without_ignored()
    if kept is not None:
        hidden, targets = hidden.index_select(0, kept), None if targets is None else targets.select(kept)

    layer = Layer(weight, bias, softcap, shard, chunk_size or default_chunk(hidden.shape[-1]))
    like = weight.new_empty(0, dtype=accumulator(weight.dtype))
    rows = counted.rows(targets, like)
    if reduction == "none":
        values = layer.rows(hidden, rows)
        return task.output(spread(values, kept, task.num_rows), teacher is not None)
    # The weight of every row in the loss is known, so the gradients are computed while a chunk's logits exist.
    loss, *constants = layer.rows(hidden, rows, counted.row_weights(like.dtype, teacher is not None))
    return counted.output(constants, teacher is not None, loss=loss)


@untraced
def fused_linear_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`vocab_parallel_logprobs` of the logits softcap(hidden · lm_head_weightᵀ + bias), which never exist as a whole.

    Arguments as in `fused_linear_kd_loss` and `vocab_parallel_logprobs`, results and errors too. Every row is worked
    on. Backward computes the logits again. `inplace_backward` has no effect.
    """
    checks.positive("temperature", temperature)
    checks.chunk_size(chunk_size)
    local, weight, bias, shard = _inputs(hidden, lm_head_weight, bias, softcap, tp_group)
    targets = checks.rows("target_ids", target_ids, local.shape[:-1])
    like = weight.new_empty(0, dtype=accumulator(weight.dtype))
    function = LabelRows(targets, shard, like, temperature, return_entropy)
    layer = Layer(weight, bias, softcap, shard, chunk_size or default_chunk(local.shape[-1]))
    values = [value.view(target_ids.shape) for value in layer.rows(local.reshape(-1, local.shape[-1]), function)]
    return (values[0], values[1]) if return_entropy else values[0]


@dataclass(frozen=True)
class Layer:
    """This rank's part of the student's output layer."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    shard: VocabularyShard
    chunk: int

    def rows(
        self, hidden: Tensor, function: RowFunction, weights: Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor, ...]:
        """Streams hidden [N, H] through the row function; returns the outputs of `FusedRows` in either of its modes."""
        given = (hidden, self.weight, *([] if self.bias is None else [self.bias]))
        anchors = [Anchor.apply(each) for each in given if each.requires_grad and torch.is_grad_enabled()]
        return FusedRows.apply(
            hidden, self.weight, self.bias, self.softcap, function, self.shard, self.chunk, weights, *anchors
        )


def _inputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, tp_group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor | None, VocabularyShard]:
    """The checked local parts of hidden ([N, H] or [B, S, H]), weight [Vl, H] and bias [Vl], and this rank's shard.

    Raises:
        ValueError: shapes, dtypes or shardings that do not fit each other, or a softcap that is not positive.
    """
    if softcap is not None:
        checks.positive("softcap", softcap)
    checks.floating("hidden", hidden, (2, 3))
    checks.floating("lm_head_weight", weight, (2,))
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"lm_head_weight: must be [V, {hidden.shape[-1]}], the hidden size; got {list(weight.shape)}")
    named = None if isinstance(weight, DTensor) else tp_group
    local_weight, shard = split(weight, named, dim=0, name="lm_head_weight")
    if isinstance(weight, DTensor):
        _require_same_rows(hidden, weight, shard, tp_group)
    if isinstance(hidden, DTensor):
        if not all(_keeps_width(placement, hidden.ndim) for placement in hidden.placements):
            raise ValueError(f"hidden: a DTensor must be replicated over the group; got {hidden.placements}")
        hidden = hidden.to_local()
    if bias is not None:
        bias = local_like(bias, shard, dim=0, name="bias")
    return hidden, local_weight, bias, shard


def _require_same_rows(hidden: Tensor, weight: DTensor, shard: VocabularyShard, tp_group: ProcessGroup | None) -> None:
    """Checks that the ranks that share a DTensor weight are declared to work on the same rows. Passes without a group.

    FSDP shards a weight in the same way, but its ranks have different rows. So one of these must say it: hidden states
    that are replicated over the same group, a mesh dimension called "tp", or a `tp_group` from the caller.

    Raises:
        ValueError: none of them does, or `tp_group` is not the group over which the weight is sharded.
    """
    if shard.group is None:
        return
    name = shard.group.group_name
    if tp_group is not None:
        if tp_group.group_name != name:
            raise ValueError("tp_group: must be the group over which lm_head_weight is sharded; got another one")
        return
    if isinstance(hidden, DTensor):
        mesh = hidden.device_mesh
        dims = [dim for dim, placement in enumerate(hidden.placements) if placement.is_replicate()]
    else:
        mesh = weight.device_mesh
        dims = [dim for dim, called in enumerate(mesh.mesh_dim_names or ()) if called == "tp"]
    if any(mesh.get_group(dim).group_name == name for dim in dims):
        return
    raise ValueError(
        "lm_head_weight: is sharded over ranks of which nobody has said that they work on the same rows; give hidden as a "
        "DTensor that is replicated over them, or name them with tp_group; a weight that FSDP has sharded must be gathered"
    )


def _keeps_width(placement: Placement, ndim: int) -> bool:
    """Whether a placement leaves the last of `ndim` dimensions whole: replicated, or sharded over another dimension."""
    return placement.is_replicate() or (isinstance(placement, Shard) and placement.dim % ndim != ndim - 1)
