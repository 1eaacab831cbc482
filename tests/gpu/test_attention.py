"""All attention paths compute the same: variable-length kernels, whole causal rows, a mask, and each document alone.

On a CPU a reference implementation stands in for the variable-length kernels, with the same registration and arguments.

1. Each kernel (`check_kernel`): outputs and gradients of `varlen.attend` against softmax of whole score matrices in fp64.
2. Each model family (`check_model`): first, packed rows with a mask against every document alone, both in fp32, which shows
   that documents do not see each other. Then every path in the dtype of the device against that fp32 result; it may be
   at most twice as far from it as the plain masked path in the same dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distill_rl.models import forward, varlen
from distill_rl.models.attention import VARLEN, installed
from tests.gpu.conftest import Figures
from tests.gpu.material import tensor_error

pytestmark = pytest.mark.gpu

_BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest relative L2 error of a kernel against fp64. fp32: sums of a few thousand terms; bf16: five roundings of 2⁻⁸
(scores, weights and output, and those of the backward pass)."""
_COMMON = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.1}
_GPT2_SIZES = {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256, **_COMMON}
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    **_COMMON,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "mistral-window": ("MistralConfig", {"sliding_window": 40, "head_dim": None}),
    "phi3": ("Phi3Config", {"pad_token_id": None, "sliding_window": None}),
    "gpt2": ("GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gemma2": ("Gemma2Config", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 40}),
}

Shape = tuple[int, int, int, int | None]
"""Query heads, key-value heads, features per head, sliding window."""
SMALL: list[Shape] = [(4, 2, 16, None), (4, 4, 8, None), (4, 1, 16, 40)]
LARGE: list[Shape] = [(32, 8, 64, None), (32, 8, 128, None), (16, 16, 96, None), (8, 4, 256, None), (32, 8, 128, 700)]


@pytest.fixture(params=VARLEN)
def package(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Whose variable-length kernels to use."""
    if request.param != "torch" and not (installed(request.param) and device.type == "cuda"):
        pytest.skip(f"{request.param} is not installed, or does not run on this device")
    missing = varlen.no_kernel(device)
    assert device.type != "cuda" or missing is None, f"no variable-length attention on this GPU: {missing}"
    return request.param


@pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=str)
def test_kernels_match_fp64(package: str, shape: Shape, device: torch.device, tiny: bool, figures: Figures) -> None:
    if tiny and shape in LARGE:
        pytest.skip("small sizes only")
    check_kernel(package, shape, device, figures)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_paths_of_a_model_agree(package: str, family: str, device: torch.device, figures: Figures) -> None:
    if family == "gemma2" and package == "torch" and device.type == "cuda":
        pytest.skip("torch's kernels have no soft cap")
    check_model(family, package, device, figures)


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _positions(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """int64 [rows, width]: the position of each token in its document.

    The last row is a single document; every other row is filled by five documents of random lengths.
    """
    draw, positions = np.random.default_rng(seed), np.tile(np.arange(width), (rows, 1))
    for row in range(rows - 1):
        for start in np.sort(draw.choice(np.arange(1, width), size=4, replace=False)):
            positions[row, start:] = np.arange(width - start)
    return positions


def check_kernel(package: str, shape: Shape, device: torch.device, figures: Figures) -> None:
    """Compares the output of `varlen.attend` and the gradients of q, k and v with an fp64 oracle.

    Rows are packed with several documents and, for a shape without a window, also whole: one document per row. Those of
    `SMALL` shapes are fewer and shorter.

    Args:
        package: whose kernels to use, a key of `VARLEN`.

    Raises:
        AssertionError: a relative error is above the bound of the dtype.
    """
    heads, groups, size, window = shape
    name = f"{package} {heads}/{groups} heads of {size}{f', window {window}' if window else ''}"
    rows, width = (3, 128) if shape in SMALL else (4, 2048)
    dtype = dtype_on(device)
    draw = torch.Generator().manual_seed(size)
    inputs = [
        torch.randn(rows, count, width, size, generator=draw).to(device, dtype) for count in (heads, groups, groups)
    ]
    weight = torch.randn(rows, width, heads, size, generator=draw).to(device, dtype)
    module = nn.Module()
    module.num_key_value_groups = heads // groups  # type: ignore[assignment]
    for kind in ("packed", "whole rows"):
        if kind == "packed":
            positions = _positions(rows, width)
            documents = varlen.Documents.of(positions, device).arguments()
        elif window is None:
            positions, documents = np.tile(np.arange(width), (rows, 1)), {}
        else:
            continue
        attend = partial(
            varlen.attend, module, attention_mask=None, package=package, sliding_window=window, **documents
        )
        oracle = partial(_oracle, positions=positions, window=window)
        values = _with_gradients(attend, inputs, weight)
        truth = _with_gradients(oracle, [tensor.double() for tensor in inputs], weight.double())
        for i, what in enumerate(("output", "dq", "dk", "dv")):
            figures.within(f"{name}, {kind}: {what}", tensor_error(values[i], truth[i]), _BOUND[dtype])


def _oracle(query: Tensor, key: Tensor, value: Tensor, positions: np.ndarray, window: int | None) -> Tensor:
    """Causal attention [R, S, H, E] within documents by its definition, with whole score matrices, one row at a time.

    Args:
        query: [R, H, S, E]; `key` and `value` are [R, K, S, E], with H a multiple of K.
        positions: int [R, S], 0 at the first token of each document.
        window: how many tokens a token sees, itself included; None: all up to itself.
    """
    width, size = query.shape[2], query.shape[3]
    document = torch.from_numpy((positions == 0).cumsum(-1)).to(query.device)
    index = torch.arange(width, device=query.device)
    distance = index[:, None] - index
    near = (distance >= 0) & (distance < (window or width))
    repeat = query.shape[1] // key.shape[1]
    out = []
    for row in range(len(query)):
        visible = near & (document[row][:, None] == document[row])
        k, v = (tensor[row].repeat_interleave(repeat, 0) for tensor in (key, value))
        scores = (query[row] @ k.transpose(-1, -2) * size**-0.5).masked_fill(~visible, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.stack(out)


def _with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """The output of `function(*inputs)`, then the gradient of sum(output · weight) for each input.

    If the function returns a tuple, its first item is the output. The inputs are copied.
    """
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    if isinstance(out, tuple):
        out = out[0]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def check_model(family: str, package: str, device: torch.device, figures: Figures) -> None:
    """Checks a small random model on all paths; the steps are described under 2. at the top of this module.

    Args:
        family: a key of `FAMILIES`.
        package: whose variable-length kernels to use, a key of `VARLEN`.

    Raises:
        AssertionError: documents see each other, a path is too far from the fp32 result, or a forward pass waited for
            the GPU.
    """
    exact = _path(family, "eager", torch.float32, device)
    alone = _path(family, "eager", torch.float32, device, separately=True)
    for what, truth in exact.items():
        figures.within(
            f"{family}, documents alone: {what}", tensor_error(alone[what], truth), _BOUND[torch.float32] * 10
        )
    masked = _path(family, "eager", dtype_on(device), device)
    others = {package: VARLEN[package]} | ({} if family == "gemma2" else {"sdpa with a mask": "sdpa"})
    for name, implementation in others.items():
        result = _path(family, implementation, dtype_on(device), device)
        for what, truth in exact.items():
            bound = 2 * tensor_error(masked[what], truth) + _BOUND[torch.float32]
            figures.within(f"{family}, {name}: {what}", tensor_error(result[what], truth), bound)


def _path(
    family: str, implementation: str, dtype: torch.dtype, device: torch.device, *, separately: bool = False
) -> dict[str, Tensor]:
    """`logits` [N, 256] of all N tokens that are not padding, and the `gradient` of all weights as one vector, in fp32.

    The gradient is that of a randomly weighted sum of these logits. For a family, the model and the rows are always the
    same up to their dtype.

    Args:
        family: a key of `FAMILIES`.
        implementation: transformers' name of the attention function.
        separately: gives every document a forward pass of its own.

    Raises:
        AssertionError: a forward pass of a variable-length path waited for the GPU.
    """
    import transformers

    rows, width = 3, 128
    positions = _positions(rows, width, seed=2)
    real = np.tile(np.arange(width) < width - 9, (rows, 1))  # the last tokens are padding
    ids = np.where(real, np.random.default_rng(1).integers(5, 250, (rows, width)), 0)
    name, options = FAMILIES[family]
    config = getattr(transformers, name)(**(_GPT2_SIZES if family == "gpt2" else _SIZES), **options)
    varlen.register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    model.config.use_cache = False
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay in fp32, as in a loaded model
        parameter.data = parameter.data.to(dtype)
    model.to(device).train()
    weight = torch.randn(*ids.shape, 256, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    pieces = []
    for part in _documents_of(positions) if separately else [(slice(None), slice(None))]:
        documents = varlen.Documents.of(positions[part], device)
        inputs = [torch.from_numpy(array[part]).to(device) for array in (ids, positions)]
        with _no_synchronisation(device, varlen.reads_documents(config)):
            logits = forward.logits(model, inputs[0], inputs[1], documents)
        mask = torch.from_numpy(real[part]).to(device)
        (logits * weight[part] * mask[..., None]).sum().backward()
        pieces.append(logits.detach().float()[mask])
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    return {"logits": torch.cat(pieces), "gradient": gradient}


def _documents_of(positions: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Yields the rows and columns of each document, one by one; a document starts where `positions` [R, S] is 0."""
    for row, row_positions in enumerate(positions):
        for start, stop in itertools.pairwise([*np.flatnonzero(row_positions == 0), len(row_positions)]):
            yield slice(row, row + 1), slice(int(start), int(stop))


@contextmanager
def _no_synchronisation(device: torch.device, enabled: bool) -> Iterator[None]:
    """Raises AssertionError if the host waits for the GPU inside the block. Does nothing on a CPU or if not enabled."""
    if device.type != "cuda" or not enabled:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" in str(error):
            raise AssertionError(f"a forward waits for the GPU: {error}") from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")
