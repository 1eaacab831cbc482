"""All ways through attention compute the same thing: variable-length kernels, whole rows, a mask, document by document.

On a CPU the variable-length kernels are stood in for by their twin, through the same registration and arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from distill_rl.models import families
from distill_rl.models.attention import varlen
from distill_rl.models.attention.choice import VARLEN, installed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative L2 error against fp64 that a kernel may have: sums of some thousand terms of fp32, and five roundings of
2⁻⁸ (scores, weights, output, and as many in backward)."""
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
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "mistral-window": ("MistralConfig", {"sliding_window": 40, "head_dim": None}),
    "phi3": ("Phi3Config", {"pad_token_id": None, "sliding_window": None}),
    "gpt2": ("GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gemma2": ("Gemma2Config", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 40}),
}


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """Compares all paths that this device has, values and gradients.

    Args:
        tiny: small sizes, for a CPU.

    Returns:
        Relative L2 errors by name.

    Raises:
        AssertionError: one is above its bound, or a forward waited for the GPU.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    why = varlen.no_kernel(device)
    assert device.type != "cuda" or why is None, f"no variable-length attention on this GPU: {why}"
    packages = [name for name in VARLEN if name == "torch" or (installed(name) and device.type == "cuda")]
    found: dict[str, float] = {}
    for package, (heads, groups, size, window) in itertools.product(packages, _shapes(tiny)):
        name = f"{package} {heads}/{groups} heads of {size}{f', window {window}' if window else ''}"
        found |= _kernel(name, package, heads, groups, size, window, dtype=dtype, device=device, tiny=tiny)
    for name, error in found.items():
        assert error <= _BOUND[dtype], f"{name}: relative error {error:.1e}, at most {_BOUND[dtype]:.0e} is rounding"
    for family, package in itertools.product(_FAMILIES, packages):
        if family == "gemma2" and package == "torch" and device.type == "cuda":
            continue  # torch's kernels have no soft cap
        found |= _model(family, package, dtype=dtype, device=device)
    return found


def _shapes(tiny: bool) -> list[tuple[int, int, int, int | None]]:
    """Query heads, key-value heads, features per head, sliding window."""
    if tiny:
        return [(4, 2, 16, None), (4, 4, 8, None), (4, 1, 16, 40)]
    return [(32, 8, 64, None), (32, 8, 128, None), (16, 16, 96, None), (8, 4, 256, None), (32, 8, 128, 700)]


def _positions(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """int64 [rows, width]: documents of any length, the last row one document; what is padding does not matter here."""
    draw, positions = np.random.default_rng(seed), np.tile(np.arange(width), (rows, 1))
    for row in range(rows - 1):
        for start in np.sort(draw.choice(np.arange(1, width), size=4, replace=False)):
            positions[row, start:] = np.arange(width - start)
    return positions


def _kernel(
    name: str,
    package: str,
    heads: int,
    groups: int,
    size: int,
    window: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tiny: bool,
) -> dict[str, float]:
    """`varlen.attend` on packed rows and on whole rows against an fp64 oracle."""
    rows, width = (3, 128) if tiny else (4, 2048)
    draw = torch.Generator().manual_seed(size)
    inputs = [
        torch.randn(rows, count, width, size, generator=draw).to(device, dtype) for count in (heads, groups, groups)
    ]
    weight = torch.randn(rows, width, heads, size, generator=draw).to(device, dtype)
    module = nn.Module()
    module.num_key_value_groups = heads // groups  # type: ignore[assignment]
    found: dict[str, float] = {}
    for kind in ("packed", "whole rows"):
        if kind == "whole rows" and window is not None:
            continue
        positions = _positions(rows, width) if kind == "packed" else np.tile(np.arange(width), (rows, 1))
        documents = varlen.Documents.of(positions, device)
        arguments = documents.arguments() if kind == "packed" else {}

        def attend(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any] = arguments) -> Tensor:
            return varlen.attend(module, q, k, v, None, package=package, sliding_window=window, **arguments)[0]

        def oracle(q: Tensor, k: Tensor, v: Tensor, positions: np.ndarray = positions) -> Tensor:
            return _oracle(q, k, v, positions, window)

        ours, wanted = (
            _with_gradients(attend, inputs, weight),
            _with_gradients(oracle, [each.double() for each in inputs], weight.double()),
        )
        found |= {
            f"{name}, {kind}: {what}": _error(one, other)
            for what, one, other in zip(("output", "dq", "dk", "dv"), ours, wanted)
        }
    return found


def _oracle(query: Tensor, key: Tensor, value: Tensor, positions: np.ndarray, window: int | None) -> Tensor:
    """[R, S, H, E] by whole matrices of scores, row by row and head by head group."""
    width, size = query.shape[2], query.shape[3]
    document = torch.from_numpy((positions == 0).cumsum(-1)).to(query.device)
    place = torch.arange(width, device=query.device)
    distance = place[:, None] - place
    near = (distance >= 0) & (distance < (window or width))
    repeat = query.shape[1] // key.shape[1]
    out = []
    for row in range(len(query)):
        seen = near & (document[row][:, None] == document[row])
        k, v = (each[row].repeat_interleave(repeat, 0) for each in (key, value))
        scores = (query[row] @ k.transpose(-1, -2) * size**-0.5).masked_fill(~seen, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.stack(out)


def _with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def _model(family: str, package: str, *, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """A small model of random weights by all paths, logits and gradients. In bf16 a path may be twice as far from fp32
    as the one with a mask."""
    ids, positions, real = _documents(rows=3, width=128)
    exact = _paths(family, "eager", torch.float32, device, ids, positions, real)
    alone = _paths(family, "eager", torch.float32, device, ids, positions, real, apart=True)
    found = {f"{family}, documents alone: {what}": _error(alone[what], exact[what]) for what in exact}
    for name, error in found.items():
        assert error <= _BOUND[torch.float32] * 10, f"{name}: relative error {error:.1e}: documents see each other"
    masked = _paths(family, "eager", dtype, device, ids, positions, real)
    others = {package: VARLEN[package]} | ({} if family == "gemma2" else {"sdpa with a mask": "sdpa"})
    for name, implementation in others.items():
        ours = _paths(family, implementation, dtype, device, ids, positions, real)
        for what in exact:
            error, usual = _error(ours[what], exact[what]), _error(masked[what], exact[what])
            found[f"{family}, {name}: {what}"] = error
            message = f"{family}, {name}: {what}: relative error {error:.1e}, with plain operations it is {usual:.1e}"
            assert error <= 2 * usual + _BOUND[torch.float32], message
    return found


def _documents(rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, positions and which tokens are real, each [rows, width]: packed rows whose padding continues the last document."""
    draw = np.random.default_rng(1)
    positions = _positions(rows, width, seed=2)
    real = np.tile(np.arange(width) < width - 9, (rows, 1))
    return np.where(real, draw.integers(5, 250, (rows, width)), 0), positions, real


def _paths(
    family: str,
    implementation: str,
    dtype: torch.dtype,
    device: torch.device,
    ids: np.ndarray,
    positions: np.ndarray,
    real: np.ndarray,
    *,
    apart: bool = False,
) -> dict[str, Tensor]:
    """Logits of real tokens, and the gradient of all weights as one vector; `apart`: every document alone in a forward."""
    import transformers

    name, own = _FAMILIES[family]
    config = getattr(transformers, name)(**(_GPT2_SIZES if family == "gpt2" else _SIZES), **own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = _build(config, implementation)
    for parameter in model.parameters():  # rotary frequencies stay in fp32, as in a model that is loaded
        parameter.data = parameter.data.to(dtype)
    model.to(device).train()
    weight = torch.randn(*ids.shape, 256, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    pieces = []
    for rows, columns in _pieces(positions) if apart else [(slice(None), slice(None))]:
        place = positions[rows, columns]
        documents = varlen.Documents.of(place, device)
        inputs = [torch.from_numpy(each[rows, columns]).to(device) for each in (ids, positions)]
        with _no_synchronisation(device, varlen.reads_documents(config)):
            logits = families.logits(model, inputs[0], inputs[1], documents)
        mask = torch.from_numpy(real[rows, columns]).to(device)
        (logits * weight[rows, columns] * mask[..., None]).sum().backward()
        pieces.append(logits.detach().float()[mask])
    gradient = torch.cat([each.grad.flatten().float() for each in model.parameters() if each.grad is not None])
    return {"logits": torch.cat(pieces), "gradient": gradient}


def _build(config: Any, implementation: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    varlen.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    model.config.use_cache = False
    return model


def _pieces(positions: np.ndarray) -> Iterator[tuple[slice, slice]]:
    for row, places in enumerate(positions):
        for start, stop in itertools.pairwise([*np.flatnonzero(places == 0), len(places)]):
            yield slice(row, row + 1), slice(int(start), int(stop))


@contextmanager
def _no_synchronisation(device: torch.device, wanted: bool) -> Iterator[None]:
    """Raises AssertionError where work on a GPU is waited for."""
    if device.type != "cuda" or not wanted:
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
