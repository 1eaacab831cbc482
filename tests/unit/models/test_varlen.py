"""Attention within documents: equal numbers on every path, no mask, and no read from the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, masking_utils

from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.models import families, forward, varlen
from distill_rl.models.attention import PASSES_WINDOW, VARLEN
from distill_rl.models.varlen import Documents
from distill_rl.models.weights import skeleton
from distill_rl.parallel.mesh import World
from distill_rl.types import TokenRows
from tests.gpu.conftest import Figures
from tests.gpu.test_attention import FAMILIES as SMALL_MODELS
from tests.gpu.test_attention import SMALL, check_kernel, check_model
from tests.helpers.load import load_model
from tests.helpers.rows import laid_out
from tests.helpers.zoo import write_family, write_model

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mistral-window", "phi3", "gpt2", "gemma2", "granite", "cohere")
OURS = VARLEN["torch"]
CPU = torch.device("cpu")
LENGTHS = (5, 11, 3, 24, 1, 9)


def rows_of(*, packing: bool, lengths: tuple[int, ...] = LENGTHS) -> TokenRows:
    draw = np.random.default_rng(0)
    documents = [Encoded(draw.integers(5, 250, size).astype(np.int32), np.ones(size, bool), False) for size in lengths]
    return laid_out(documents, BatchPlan(BatchSharding(1, 4), (), 24, packing, pad_id=7))


def model_of(folder: Path, implementation: str) -> nn.Module:
    varlen.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).train()
    model.config.use_cache = False
    return model


def logits_and_gradients(model: nn.Module, rows: TokenRows, real: np.ndarray) -> list[Tensor]:
    ids, positions = (torch.from_numpy(each).long() for each in (rows.input_ids, rows.position_ids))
    out = forward.logits(model, ids, positions, Documents.of(rows.position_ids, CPU))[torch.from_numpy(real)]
    out.log_softmax(-1).square().sum().backward()
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return [out.detach(), torch.cat(gradients)]


def restarted(rows: TokenRows) -> tuple[TokenRows, np.ndarray]:
    """The rows with padding as a separate document, and which tokens are not padding."""
    positions, real = rows.position_ids.copy(), np.zeros(rows.shape, bool)
    for row, ids in enumerate(rows.input_ids):
        stop = len(ids) - int(np.argmax(ids[::-1] != 7)) if (ids != 7).any() else 0
        real[row, :stop] = True
        positions[row, stop:] = np.arange(len(ids) - stop)
    return TokenRows(rows.input_ids, rows.labels, positions), real


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_continued_padding_leaves_real_tokens_bit_identical(tmp_path: Path, name: str, packing: bool) -> None:
    rows = rows_of(packing=packing)
    apart, real = restarted(rows)
    assert not np.array_equal(apart.position_ids, rows.position_ids)
    model = model_of(write_model(tmp_path, name), "sdpa")
    found = [
        forward.logits(model, *(torch.from_numpy(each).long() for each in (one.input_ids, one.position_ids)))
        for one in (rows, apart)
    ]
    assert torch.equal(*(each[torch.from_numpy(real)] for each in found))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_mask_and_documents_agree_in_value_and_gradient(tmp_path: Path, name: str, packing: bool) -> None:
    folder, rows = write_model(tmp_path, name), rows_of(packing=packing)
    _, real = restarted(rows)
    # sdpa has no soft cap
    masked = logits_and_gradients(model_of(folder, "eager" if name == "gemma2" else "sdpa"), rows, real)
    ours = logits_and_gradients(model_of(folder, OURS), rows, real)
    for one, other in zip(ours, masked):
        assert (one - other).norm() <= 5e-6 * other.norm()  # fp32, sums in another order


@pytest.mark.parametrize("family", sorted(PASSES_WINDOW))
@torch.no_grad()
def test_a_family_tells_its_window(tmp_path: Path, family: str) -> None:
    kinds = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "max_window_layers": 0}
    ids, positions = torch.arange(3, 23)[None], torch.arange(20)[None]

    def logits(folder: Path, implementation: str) -> Tensor:
        return forward.logits(model_of(folder, implementation).eval(), ids, positions)

    folder = write_family(tmp_path / "narrow", family, **kinds, sliding_window=4)
    narrow, ours = (logits(folder, name) for name in ("eager", OURS))
    wide = logits(write_family(tmp_path / "wide", family, **kinds, sliding_window=100), "eager")
    assert (wide - narrow).norm() > 1e-3 * narrow.norm(), "the window matters"
    assert (ours - narrow).norm() <= 5e-6 * narrow.norm()


@pytest.mark.parametrize("family", SMALL_MODELS)
def test_all_paths_of_a_model_agree_on_a_cpu(family: str) -> None:
    figures = Figures()
    check_model(family, "torch", CPU, figures)
    assert {f"{family}, documents alone: gradient", f"{family}, torch: gradient"} <= figures.keys()


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_stand_in_for_the_kernels_matches_fp64(shape: tuple[int, int, int, int | None]) -> None:
    check_kernel("torch", shape, CPU, figures := Figures())
    assert any("packed: dk" in name for name in figures)


@pytest.mark.parametrize(("packing", "asked"), [(False, 0), (True, 1)], ids=["padded", "packed"])
@torch.no_grad()
def test_sdpa_makes_a_mask_only_for_packed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool, asked: int
) -> None:
    """Including a row that only fills the batch."""
    made: list[Any] = []
    original = masking_utils.sdpa_mask
    monkeypatch.setitem(
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
        "sdpa",
        lambda **arguments: made.append(original(**arguments)) or made[-1],
    )
    rows = rows_of(packing=packing)
    assert (rows.input_ids == 7).all(axis=1).any()
    packed = masking_utils.find_packed_sequence_indices(torch.from_numpy(rows.position_ids))
    assert (packed is not None) == packing
    model = model_of(write_model(tmp_path, "llama"), "sdpa")
    forward.logits(model, *(torch.from_numpy(each).long() for each in (rows.input_ids, rows.position_ids)))
    assert [mask is not None for mask in made] == [bool(asked)]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", [each for each in FAMILIES if each != "gemma2"])
def test_no_mask_and_no_host_read(tmp_path: Path, name: str, packing: bool) -> None:
    """On the meta device, where reading a value is an error and torch's kernel computes shapes only."""
    from distill_rl.models.files import read_config

    model = skeleton(read_config(write_model(tmp_path, name)), dtype=torch.bfloat16, attention=OURS).train()
    rows = rows_of(packing=packing)
    starts = Documents.of(rows.position_ids, CPU)
    documents = Documents(starts.starts.to("meta"), starts.longest, starts.one_per_row)
    masks: list[Any] = []
    layer = families.decoder_layers(model)[0]
    layer.register_forward_pre_hook(
        lambda _, inputs, named: masks.append((*inputs[1:], named.get("attention_mask"))), with_kwargs=True
    )
    ids = torch.zeros(rows.shape, dtype=torch.int64, device="meta")
    out = forward.logits(model, ids, ids, documents)
    out.sum().backward()
    assert out.shape[:2] == rows.shape
    assert masks
    assert all(each is None for mask in masks for each in mask)
    model.config._attn_implementation = "sdpa"
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        forward.logits(model, ids, ids, documents)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_recomputed_activations_give_the_same_gradient(tmp_path: Path, world: World, name: str) -> None:
    folder, rows = write_model(tmp_path, name), rows_of(packing=True)
    gradients = []
    for recompute in (False, True):
        model = load_model(
            folder, world, role="student", dtype="fp32", attention=OURS, activation_checkpointing=recompute
        )
        ids, positions = (torch.from_numpy(each).long() for each in (rows.input_ids, rows.position_ids))
        out = forward.logits(model, ids, positions, Documents.of(rows.position_ids, CPU))
        out.square().sum().backward()
        gradients.append([each.grad for each in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients))


def test_compiled_layers_give_the_same_gradient(tmp_path: Path) -> None:
    """Layer by layer, as `compile: true` does it, but traced only: no compiler is needed. Another number of documents
    and another bound on their length come second."""
    torch._dynamo.reset()
    folder = write_model(tmp_path, "llama")
    plain, compiled = model_of(folder, OURS), model_of(folder, OURS)
    for layer in families.decoder_layers(compiled):
        layer.compile(backend="aot_eager")
    for lengths in (LENGTHS, (24, 8, 8, 8, 20), (3,) * 20):
        rows = rows_of(packing=True, lengths=lengths)
        real = np.ones(rows.shape, bool)
        for one, other in zip(*(logits_and_gradients(model, rows, real) for model in (compiled, plain))):
            assert (one - other).norm() <= 5e-6 * other.norm()  # fp32, sums in another order


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gpt2"])
def test_compiled_layer_with_torch_kernel_is_one_graph(tmp_path: Path, name: str) -> None:
    """Without numbers, on the meta device. Three programs at most: the second sizes make the graph's sizes symbols."""
    from distill_rl.models.files import read_config

    torch._dynamo.reset()
    model = skeleton(read_config(write_model(tmp_path, name)), dtype=torch.bfloat16, attention=OURS).train()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = families.decoder_layers(model)[0]
    layer.compile(backend=count, fullgraph=True)
    ids = torch.zeros(4, 24, dtype=torch.int64, device="meta")
    for number, longest in ((6, 128), (9, 256), (11, 384), (17, 512), (5, 640)):
        starts = torch.empty(number, dtype=torch.int32, device="meta")
        forward.logits(model, ids, ids, Documents(starts, longest, one_per_row=False)).sum().backward()
    assert 1 <= len(graphs) <= 3


def test_documents_end_where_the_next_begins_or_the_row_ends() -> None:
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 1, 2, 3, 4]])
    documents = Documents.of(positions, CPU)
    assert documents.starts.tolist() == [0, 3, 8, 16, 17, 19, 24]
    assert (documents.starts.dtype, documents.longest, documents.one_per_row) == (torch.int32, 128, False)
    assert Documents.of(positions[1:2], CPU).one_per_row
    assert Documents.of(np.tile(np.arange(300), (2, 1)), CPU).longest == 384
    with pytest.raises(ValueError, match="begin with position 0"):
        Documents.of(positions[:, 1:], CPU)


def test_missing_documents_are_read_from_positions(tmp_path: Path) -> None:
    model, rows = model_of(write_model(tmp_path, "llama"), OURS), rows_of(packing=True)
    ids, positions = (torch.from_numpy(each).long() for each in (rows.input_ids, rows.position_ids))
    found = [forward.logits(model, ids, positions, given) for given in (None, Documents.of(rows.position_ids, CPU))]
    assert torch.equal(*found)


@pytest.mark.parametrize(("heads", "groups", "window"), [(4, 4, None), (8, 2, None), (8, 2, 16)])
def test_torch_kernel_supports_grouped_heads_and_windows(heads: int, groups: int, window: int | None) -> None:
    query, key, value = (
        torch.empty(64, count, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for count in (heads, groups, groups)
    )
    starts = torch.empty(5, dtype=torch.int32, device="meta")
    out = varlen._torch_kernel(query, key, value, starts, 128, varlen.Scoring(0.2, window))
    out.sum().backward()
    assert out.shape == query.shape
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_masks_and_biases_are_refused() -> None:
    query = torch.zeros(1, 2, 4, 8)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="set attention=sdpa"):
        varlen.attend(nn.Module(), query, query, query, mask, package="torch")
    with pytest.raises(ValueError, match="soft cap"):
        varlen._torch_kernel(query[0], query[0], query[0], torch.tensor([0, 2]), 2, varlen.Scoring(1.0, softcap=5.0))
