"""Attention within documents without a mask, for rows that hold one document or several.

transformers finds documents from restarts of the positions and builds a mask [R, 1, S, S] in every forward. That
doubles the number of products (no kernel skips what a mask excludes), rules out grouped key-value heads, and makes the
host wait for the GPU to learn whether there are several documents at all. Here the host reads the boundaries of the
documents from the numpy rows before these go to the device (`Documents.of`), and passes them through the model in the
keyword arguments that transformers has for them. `attend` then uses

    one document per row     SDPA with `is_causal`, grouped heads, no mask
    several                  a variable-length kernel over all rows as one sequence, [R·S, heads, head size]
    several, on a CPU        SDPA document by document: the same function in plain torch

Under sequence parallelism a rank holds a part of the positions of every row. `attend_spread` then exchanges them for all
positions of a part of the heads, attends as above, and exchanges back (`parallel/sequence.py`); the documents are those
of the whole rows.

It is registered as an attention function without a mask function, so transformers makes no mask and does not inspect
the positions (`masking_utils._preprocess_mask_arguments`).

Shapes: R rows, S positions, T = R·S, H query heads, K key-value heads, E features per head, D documents.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from distill_rl.models.attention import ON_CPU, OURS, SPREAD, VARLEN, softcap_of, window_of
from distill_rl.parallel.sequence import heads_of_own_share, positions_of_own_share

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TILE = 128
"""Queries per block of a kernel. Rounding bounds up to multiples of it keeps the number of compiled programs small."""
_GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""torch 2.11 accepts fewer key-value heads than query heads as it is; later versions need this option."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Boundaries of the documents of some rows, read as one sequence.

    A document ends where the next one begins or the row ends, so trailing padding belongs to the last document.
    """

    starts: Tensor
    """int32 [D + 1]; the last entry is R·S."""
    longest: int
    """Upper bound of the length of a document."""
    one_per_row: bool
    group: dist.ProcessGroup | None = None
    """The ranks over which the positions of these rows are divided; None: every rank has whole rows."""

    @classmethod
    def of(cls, position_ids: np.ndarray, device: torch.device, group: dist.ProcessGroup | None = None) -> Documents:
        """The documents of packed rows, as the kernels want them, on `device`.

        Args:
            position_ids: integers [R, S], 0 where a document begins and nowhere else; of whole rows.
            group: see the field.

        Raises:
            ValueError: a row does not begin with a document.
        """
        if not (position_ids[:, 0] == 0).all():
            raise ValueError("every row must begin with position 0")
        starts = np.append(np.flatnonzero(position_ids == 0), position_ids.size).astype(np.int32)
        longest = -(-int(np.diff(starts).max()) // _TILE) * _TILE
        moved = torch.from_numpy(starts)
        if device.type == "cuda":  # from pinned memory; otherwise the copy would wait for the device
            moved = moved.pin_memory().to(device, non_blocking=True)
        return cls(moved, longest, len(starts) == len(position_ids) + 1, group)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments by which transformers passes them to attention functions."""
        length = dict.fromkeys(("max_length_q", "max_length_k"), self.longest)
        return {"cu_seq_lens_q": self.starts, "cu_seq_lens_k": self.starts, **length}


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a model turns products of queries and keys into weights."""

    scale: float
    """Factor on the products."""
    window: int | None = None
    """Number of positions that a query sees, its own included. None: all up to its own."""
    softcap: float | None = None
    """Bound of the scores."""
    dropout: float = 0.0
    """Applied to the weights."""


def documents_for(
    hf_config: PreTrainedConfig, position_ids: np.ndarray, device: torch.device, group: dist.ProcessGroup | None = None
) -> Documents | None:
    """The documents of some whole rows, if the model's attention function takes them, else None.

    Args:
        group: see `Documents`.
    """
    return Documents.of(position_ids, device, group) if reads_documents(hf_config) else None


def reads_documents(hf_config: PreTrainedConfig) -> bool:
    """Whether the model's attention function takes boundaries of documents.

    This module's does, and so does transformers' flash attention.
    """
    name = str(hf_config._attn_implementation)
    return name in OURS or name.startswith("flash")


def needs_documents(hf_config: PreTrainedConfig, width: int, *, one_per_row: bool) -> bool:
    """Whether attention over whole rows, without the boundaries of documents, would give another result.

    Args:
        width: positions of a whole row.
        one_per_row: no row holds more than one document. Then boundaries matter only for our own kernels with a soft
            cap, or with a window shorter than a row.
    """
    if not one_per_row:
        return True
    if hf_config._attn_implementation not in OURS:
        return False  # transformers' flash attention supports windows and soft caps on whole rows
    window = window_of(hf_config)
    return softcap_of(hf_config) is not None or (window is not None and window < width)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    package: str,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, with the signature that transformers expects.

    Args:
        query: [R, H, S, E], `key` and `value` [R, K, S, E].
        attention_mask: must be None.
        package: whose kernels to use, a key of `VARLEN` or `SPREAD`.
        sliding_window, softcap: as `window` and `softcap` of `Scoring`.
        cu_seq_lens_q: `Documents.starts`. None: every row is one document, and torch's SDPA computes it without
            `sliding_window` and `softcap`; callers must know that these do not matter (`needs_documents`).
        max_length_q: `Documents.longest`, required with `cu_seq_lens_q`.

    Returns:
        [R, S, H, E], and None instead of weights.

    Raises:
        ValueError: a mask, a bias or sinks, which no kernel here supports; or a soft cap or dropout with torch's kernels.
    """
    _require_no_mask(module, attention_mask, kwargs)
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=True)
    assert max_length_q is not None
    rows, heads, width, size = query.shape
    query, key, value = (
        tensor.transpose(1, 2).to(value.dtype).reshape(rows * width, *tensor.shape[1::2]).contiguous()
        for tensor in (query, key, value)
    )
    kernel = per_document if query.device.type == "cpu" else _KERNELS[package]
    scoring = Scoring(size**-0.5 if scaling is None else scaling, sliding_window, softcap, dropout)
    return kernel(query, key, value, cu_seq_lens_q, max_length_q, scoring).view(rows, width, heads, -1), None


def attend_spread(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attend` for rows whose positions are divided over the ranks of a group. Collective over it.

    Args:
        query: [R, H, S / sp, E], `key` and `value` [R, K, S / sp, E]: this rank's positions.
        sequence_group: `Documents.group`.
        kwargs: of `attend`; documents are those of the whole rows.

    Returns:
        [R, S / sp, H, E], and None instead of weights.

    Raises:
        ValueError: as `attend`, or the model has not passed `sequence_group` on.
    """
    _require_no_mask(module, attention_mask, kwargs)
    if sequence_group is None:
        rule = "does not pass on over which ranks rows are divided"
        raise ValueError(f"{type(module).__name__} {rule}: set parallel.sp=1")
    query, key, value = heads_of_own_share(sequence_group, query.to(value.dtype), key.to(value.dtype), value)
    if kwargs.get("cu_seq_lens_q") is None:
        dropout, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
        # Not transformers' function, which takes the number of key-value heads from the module.
        out = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    else:
        out, _ = attend(module, query, key, value, attention_mask, **kwargs)
    return positions_of_own_share(sequence_group, out), None


def _require_no_mask(module: nn.Module, attention_mask: Tensor | None, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if scores have a mask, a bias or sinks, which no kernel here supports."""
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} has a mask or a bias on its scores: set attention=sdpa")
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks: set attention=eager")


@torch.compiler.disable
def per_document(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scoring: Scoring) -> Tensor:
    """Computes what the kernels do, one document after another: for CPUs, and as a reference on GPUs.

    Args:
        query: [T, H, E], `key` and `value` [T, K, E].
        starts: int32 [D + 1].
        longest: not used here, but by the kernels.

    Returns:
        [T, H, E]
    """
    parts = []
    for start, stop in itertools.pairwise(starts.tolist()):
        q, k, v = (tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value))
        if scoring.softcap is None and (scoring.window is None or scoring.window >= stop - start):
            options: dict[str, Any] = {"dropout_p": scoring.dropout, "scale": scoring.scale, "is_causal": True}
            part = scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        else:
            part = _plain(q, k, v, scoring)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def _plain(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Computes causal attention of one document with all scores in memory, in fp32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query.float() @ key.float().transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if scoring.window is not None:
        visible = visible.triu(1 - scoring.window)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(value.dtype)
    return torch.dropout(weights, scoring.dropout, scoring.dropout > 0) @ value


def _torch_kernel(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scoring: Scoring) -> Tensor:
    """torch's FlashAttention 2: bf16 or fp16, E a multiple of 8 up to 256, compute capability 8.0 or newer."""
    # Arguments and result as for `per_document`.
    if scoring.softcap is not None or scoring.dropout:
        raise ValueError("torch's variable-length attention has neither a soft cap nor dropout")
    # A query sees itself and `left` positions before it. (-1, 0) means plain causal attention.
    left = -1 if scoring.window is None else scoring.window - 1
    options: dict[str, Any] = {"scale": scoring.scale, "window_size": (left, 0), **_GROUPED_HEADS}
    out = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


def _package_kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scoring: Scoring
) -> Tensor:
    """FlashAttention 2 of the package flash_attn, which also supports soft caps and dropout."""
    # Arguments and result as for `per_document`; `longest` is the length of the longest document or an upper bound.
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return flash_attn_varlen_func(
        *(query, key, value, starts, starts, longest, longest),
        dropout_p=scoring.dropout,
        softmax_scale=scoring.scale,
        causal=True,
        window_size=(-1, -1) if scoring.window is None else (scoring.window - 1, 0),
        softcap=scoring.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "flash_attn": _package_kernel,
    "torch": _torch_kernel,
    "sdpa": per_document,
}


def no_kernel(device: torch.device) -> str | None:
    """Why variable-length kernels do not run on a device; None if they do."""
    if device.type != "cuda":
        return ON_CPU if device.type == "cpu" else f"there are no variable-length kernels for {device.type}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"the kernels need compute capability 8.0, the GPU has {major}.{minor}"


def register() -> None:
    """Registers this module's attention with transformers in this process, under the names in `OURS`."""
    from transformers import AttentionInterface

    for package, name in VARLEN.items():
        AttentionInterface.register(name, partial(attend, package=package))
    for package, name in SPREAD.items():
        AttentionInterface.register(name, partial(attend_spread, package=package))
