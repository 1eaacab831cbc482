"""Argument checks. Each error names the argument, the rule and the value.

Shapes are always checked. Values are checked on CPU tensors, and on a GPU only on request (`validate`), because reading
them waits for it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from distill_rl.losses.targets import SampledTokens, TopKLogprobs

Tail = Literal["bucket", "truncate", "renormalize"]
TAILS: tuple[Tail, ...] = ("bucket", "truncate", "renormalize")
Backend = Literal["eager", "triton"]
"""Who computes: torch, or the Triton kernels."""

_ROUNDING = 2.0**-8
"""The most by which bf16 changes a number, relative to it: what log-probabilities may have lost before they arrive."""
_MASS_LIMIT = 1.01
"""How much of a row's probability k tokens may hold, beside that: a log-softmax in 16 bits is not exact either."""


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(allowed)}; got {value!r}")


def common(temperature: float, chunk_size: int | None, *, backend: str | None = None, tail: str = "bucket") -> None:
    """Checks the settings that all losses have, or some of them."""
    positive("temperature", temperature)
    at_least_one("chunk_size", chunk_size)
    one_of("tail", tail, TAILS)
    if backend not in ("eager", "triton", None):
        raise ValueError(f"backend: must be eager, triton or None; got {backend!r}")


def positive(name: str, value: float) -> None:
    """Requires one positive, finite number, or a tensor of one; a GPU's is read, which waits for it."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name}: must be one number for all rows; got a tensor {list(value.shape)}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}: must be positive and finite; got {value!r}")


def at_least_one(name: str, value: int | None) -> None:
    """None passes."""
    if value is not None and value < 1:
        raise ValueError(f"{name}: must be at least 1; got {value!r}")


def count(name: str, value: int | float | Tensor | None) -> None:
    """Requires a denominator: one constant number that is 0 or at least 1, or None. A GPU tensor's value is not read."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype == torch.bool:
            raise ValueError(f"{name}: must be one number; got {value.dtype} {list(value.shape)}")
        if value.requires_grad:
            raise ValueError(f"{name}: is a constant; got a tensor that requires a gradient")
        if not readable(value):
            return
        value = float(value)
    if value is not None and not (value == 0 or 1 <= value < math.inf):
        raise ValueError(f"{name}: must be a count, at least 1, or 0 where nothing counts; got {value!r}")


def floating(name: str, tensor: Tensor, dims: tuple[int, ...]) -> None:
    """Requires a float tensor whose number of dimensions is one of `dims`, outside torch.func transforms."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ValueError(f"{name}: torch.func's transforms are not supported; use torch.autograd")
    if tensor.ndim not in dims or not tensor.is_floating_point():
        wanted = " or ".join(str(dim) for dim in dims)
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name}: must be a float tensor of {wanted} dimensions; got {found}")


def rows(name: str, tensor: Tensor, leading: torch.Size) -> Tensor:
    """Returns the tensor, of the shape `leading` of the logits' rows, [N] or [B, S], or flat already, flattened to [N]."""
    if isinstance(tensor, DTensor):
        raise ValueError(f"{name}: must be a plain tensor, this rank's rows; got a DTensor, give its local part")
    count = math.prod(leading)
    if tensor.shape not in (leading, torch.Size([count])):
        raise ValueError(f"{name}: must have the shape of the logits' rows, {list(leading)}; got {list(tensor.shape)}")
    return tensor.reshape(count)


def readable(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read without waiting for a device: a CPU tensor that is not fake."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def looked_at(validate: bool | None, tensor: Tensor) -> bool:
    """Whether values are to be checked: `validate` itself or, if it is None, whether the tensor is `readable`."""
    return readable(tensor) if validate is None else validate


def labels(name: str, values: Tensor, valid: Tensor, vocabulary: int, ignore_index: int, validate: bool | None) -> None:
    """Requires integer labels [N] that are ids of the vocabulary where `valid` [N]; the others may hold anything."""
    if values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(f"{name}: must be integers; got {values.dtype}")
    if not looked_at(validate, values):
        return
    bad = valid & ((values < 0) | (values >= vocabulary))
    if bad.any():
        first = int(values[bad][0])
        raise ValueError(f"{name}: must lie in [0, {vocabulary}) or be ignore_index ({ignore_index}); got {first}")


def top_k(teacher: TopKLogprobs, num_rows: int, vocabulary: int, temperature: float, validate: bool | None) -> None:
    """Requires top-k targets that fit the student: dtypes, shapes, k, temperature, and distinct ids that are in range."""
    ids, logprobs = teacher.ids, teacher.logprobs
    if ids.ndim != 2 or ids.shape[0] != num_rows:
        raise ValueError(f"teacher.ids: must be [N, k] with N = {num_rows} rows; got {list(ids.shape)}")
    if logprobs.shape != ids.shape or not logprobs.is_floating_point():
        found = f"{logprobs.dtype} {list(logprobs.shape)}"
        raise ValueError(f"teacher.logprobs: must be floats of the shape of ids, {list(ids.shape)}; got {found}")
    _beside_entries(ids, teacher.temperature, temperature, "rest_logprob", teacher.rest_logprob)
    if not 1 <= ids.shape[1] <= vocabulary:
        raise ValueError(f"teacher.ids: k must lie in [1, {vocabulary}], the vocabulary; got {ids.shape[1]}")
    if looked_at(validate, ids) and ids.numel():
        _distinct_ids(ids, vocabulary)
        if bool((logprobs[ids < 0] > -torch.inf).any()):
            raise ValueError("teacher.logprobs: must be -inf where the id is -1, an absent entry")


def log_probabilities(teacher: TopKLogprobs, counted: Tensor, validate: bool | None) -> None:
    """Requires log-probabilities, not raw logits: the exponentials of a row sum to at most one, but for rounding.

    Rounding may add several percent: 100,000 equally likely tokens at −11.51 arrive from bf16 at −11.5. So each entry
    counts as the lowest number that bf16 would have rounded to it, whatever its dtype is now. NaN passes, to reach the
    loss. Values are looked at with `validate` only: in a run, a teacher that is not finite makes a step that is skipped.

    Args:
        teacher: as `top_k` requires it.
        counted: bool [N]; other rows may hold anything.

    Raises:
        ValueError: more than that; the message gives the first such row and its sum as it stands.
    """
    if not validate or not teacher.ids.numel():
        return
    logprobs = teacher.logprobs.detach()
    wide = logprobs.to(torch.float64 if logprobs.dtype == torch.float64 else torch.float32)
    above = (wide * torch.where(wide < 0, 1 + _ROUNDING, 1 - _ROUNDING)).exp().sum(1) > _MASS_LIMIT
    above &= counted
    if bool(above.any()):
        row = int(above.nonzero()[0, 0])
        mass = float(wide[row].exp().sum())
        rule = "must be log-probabilities, whose exponentials sum to at most 1 in a row"
        remedy = "take log_softmax over the whole vocabulary before the top k"
        raise ValueError(f"teacher.logprobs: {rule}; got {mass:.4g} in row {row}, {remedy}")


def sampled(teacher: SampledTokens, num_rows: int, vocabulary: int, temperature: float, validate: bool | None) -> None:
    """Requires draws that fit the student: dtypes, shapes, temperature, distinct ids in range, and counts beside them."""
    ids, counts = teacher.ids, teacher.counts
    if ids.ndim != 2 or ids.shape[0] != num_rows or not ids.shape[1]:
        raise ValueError(f"teacher.ids: must be [N, m] with N = {num_rows} rows and m >= 1; got {list(ids.shape)}")
    if counts.shape != ids.shape or counts.is_floating_point() or counts.dtype == torch.bool:
        found = f"{counts.dtype} {list(counts.shape)}"
        raise ValueError(f"teacher.counts: must be integers of the shape of ids, {list(ids.shape)}; got {found}")
    _beside_entries(ids, teacher.temperature, temperature, "mean_logprob", teacher.mean_logprob)
    if looked_at(validate, ids) and ids.numel():
        if bool(((counts > 0) != (ids >= 0)).any()) or int(counts.min()) < 0:
            raise ValueError("teacher.counts: must be positive where there is an id, and 0 where the id is -1")
        _distinct_ids(ids, vocabulary)


def _beside_entries(ids: Tensor, theirs: float, ours: float, name: str, per_row: Tensor | None) -> None:
    """Requires integer ids [N, k], one number per row if there are any, and that both sides have one temperature."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"teacher.ids: must be int32 or int64; got {ids.dtype}")
    if per_row is not None and per_row.shape != ids.shape[:1]:
        raise ValueError(f"teacher.{name}: must be [N] with N = {len(ids)} rows; got {list(per_row.shape)}")
    if theirs != ours:
        raise ValueError(f"temperature: must be that of the teacher's targets, {theirs}; got {ours}")


def _distinct_ids(ids: Tensor, vocabulary: int) -> None:
    """Requires ids [N, k] of the vocabulary, each at most once per row; −1 any number of times. Waits for the device."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < -1 or highest >= vocabulary:
        raise ValueError(f"teacher.ids: must lie in [0, {vocabulary}); got {lowest if lowest < 0 else highest}")
    ordered = ids.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)
    if twice.any():
        row, column = twice.nonzero()[0].tolist()
        found = f"{int(ordered[row, column])} twice in row {row}"
        raise ValueError(f"teacher.ids: must be distinct within a row; got {found}")
