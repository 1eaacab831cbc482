"""The student's side of a loss: logits, or hidden states whose logits never exist as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Shard

from distill_rl.losses.core import checks
from distill_rl.losses.core.logits.given import GivenLogits
from distill_rl.losses.core.logits.linear import ComputedLogits
from distill_rl.losses.core.row_function import KernelChoice, StudentLogits
from distill_rl.losses.core.shards import VocabularyShard, local_like, split


@dataclass(frozen=True, slots=True)
class StudentHidden:
    """Hidden states and the output layer: losses make the logits a chunk of rows at a time."""

    hidden: Tensor
    """[N, H] or [B, S, H], the same on every tensor-parallel rank (plain, or a DTensor Replicate); its gradient arrives
    complete on every rank"""
    lm_head_weight: Tensor
    """[V, H]; a DTensor Shard(0) over ranks that work on the same rows (the hidden states are replicated over the same
    group, its mesh dimension is called "tp", or `tp_group` names it), or with `tp_group` this rank's [Vl, H]. Its
    gradient is the shard's."""
    bias: Tensor | None = None
    """[V], sharded as the weight; −inf masks a column"""
    softcap: float | None = None
    """logits = softcap · tanh(logits / softcap), before the temperature"""
    logit_scale: float = 1.0
    """factor on hidden · Wᵀ"""
    num_tokens: int | None = None
    """columns from this one on stand for no token and are masked; None: every column is one"""


Student = Tensor | StudentHidden


def student_of(
    student: Student,
    tp_group: ProcessGroup | None,
    name: str,
    *,
    inplace: bool = False,
    kernels: KernelChoice | None = None,
) -> tuple[StudentLogits, VocabularyShard, torch.Size]:
    """The student's logits of this rank's columns, which columns these are, and the dimensions of the rows.

    Args:
        name: of the argument that holds logits, for error messages.
        kernels: None: torch computes.
        inplace: write the gradient over the logits; no effect on hidden states, which have none to overwrite.

    Raises:
        ValueError: shapes, dtypes or shardings that do not fit each other, a softcap or scale that is not positive, or
            `inplace` with logits that are a leaf.
    """
    if isinstance(student, StudentHidden):
        return _computed(student, tp_group, kernels)
    checks.floating(name, student, (2, 3))
    logits, shard = split(student, tp_group, dim=-1, name=name)
    checks.inplace(inplace, logits)
    leading = logits.shape[:-1]
    return GivenLogits(logits.reshape(leading.numel(), shard.size), inplace, kernels), shard, leading


def columns_of(student: Student) -> VocabularyShard:
    """The columns of the student's logits that this rank holds, for DTensors and whole tensors."""
    if isinstance(student, StudentHidden):
        return split(student.lm_head_weight.detach(), None, dim=0, name="lm_head_weight")[1]
    return split(student.detach(), None, dim=-1, name="student_logits")[1]


def _computed(
    student: StudentHidden, tp_group: ProcessGroup | None, kernels: KernelChoice | None
) -> tuple[ComputedLogits, VocabularyShard, torch.Size]:
    hidden, weight, bias = student.hidden, student.lm_head_weight, student.bias
    if student.softcap is not None:
        checks.positive("softcap", student.softcap)
    checks.positive("logit_scale", student.logit_scale)
    checks.floating("hidden", hidden, (2, 3))
    checks.floating("lm_head_weight", weight, (2,))
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"lm_head_weight: must be [V, {hidden.shape[-1]}], the hidden size; got {list(weight.shape)}")
    named = None if isinstance(weight, DTensor) else tp_group
    local, shard = split(weight, named, dim=0, name="lm_head_weight")
    if isinstance(weight, DTensor):
        _require_same_rows(hidden, weight, shard, tp_group)
    if isinstance(hidden, DTensor):
        if not all(_keeps_width(placement, hidden.ndim) for placement in hidden.placements):
            raise ValueError(f"hidden: a DTensor must be replicated over the group; got {hidden.placements}")
        hidden = hidden.to_local()
    if bias is not None:
        bias = local_like(bias, shard, dim=0, name="bias")
    tokens = shard.total if student.num_tokens is None else student.num_tokens
    if not 1 <= tokens <= shard.total:
        raise ValueError(f"num_tokens: must lie in [1, {shard.total}], the rows of lm_head_weight; got {tokens}")
    if tokens < shard.offset + shard.size:
        bias = local.new_zeros(shard.size) if bias is None else bias
        numbers = torch.arange(shard.offset, shard.offset + shard.size, device=bias.device)
        bias = bias.masked_fill(numbers >= tokens, -torch.inf)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = ComputedLogits(flat, local, bias, student.softcap, student.logit_scale, shard, kernels)
    return logits, shard, hidden.shape[:-1]


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
