"""The cost model's byte counts are those of the code, counted operation by operation while it runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from distill_rl.losses import VocabularyProjection, chunk_kd_loss, kd_loss, vocab_parallel_topk
from distill_rl.losses.core import rows
from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.scaling import model as costs
from distill_rl.scaling.shape import Shape
from distill_rl.student.objective import flat_chunks
from distill_rl.student.optim import clip_gradients
from tests.bench.gpu import cost_model as model
from tests.bench.gpu.engines import Engines, made_up_chunks, made_up_projection
from tests.bench.gpu.shapes import PAIRS, TINY_PAIRS, TINY_QWEN3, TINY_STUDENT, Pair
from tests.helpers.traffic import Traffic

ROWS, COLUMNS, K = 32, 2**14, 4
STEP = model.Step()
H200 = model.CARDS["h200"]


def test_counted_bytes_are_what_operations_move() -> None:
    x, y = torch.ones(8, 4), torch.ones(8, 4, dtype=torch.bfloat16)
    with Traffic() as counted:
        z = x + y.float()  # the cast reads 64 and writes 128, the sum reads 256 and writes 128
        z.view(4, 8).mul_(2)  # 128 each way
        z[0].copy_(y[0])  # 8 and 16
        torch.sub(z, x[:, :1].expand(8, 4), out=z)  # 128 and one column of 32, and 128
        torch.empty_like(z)
        z.new_zeros(8)  # 32
        x @ x.T
    assert counted.total == (64 + 128) + (256 + 128) + 256 + (8 + 16) + (128 + 32 + 128) + 32


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are not copied first, which is faster on a CPU only."""
    monkeypatch.setattr(rows, "is_copied", lambda *_, first: False)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_kd_and_top_k_move_the_bytes_of_the_model() -> None:
    """Within 2 %: numbers per row, and the k entries, are small beside a row of logits."""
    student, teacher, labels = _sides(COLUMNS)
    with Traffic() as top_k:
        target = vocab_parallel_topk(teacher, K, labels=labels)
    with Traffic() as kd:
        kd_loss(student, target, labels=labels, reduction="sum").loss.backward()
    assert top_k.total / (ROWS * COLUMNS) == pytest.approx(costs.TOP_K, rel=0.02)
    assert kd.total / (ROWS * COLUMNS) == pytest.approx(costs.KD, rel=0.02)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_the_loss_over_chunks_moves_the_bytes_of_the_same_model() -> None:
    """Within 2 %, as above: chunks add numbers per row only."""
    pair = Pair(
        replace(TINY_STUDENT, columns=COLUMNS, tokens=COLUMNS), replace(TINY_QWEN3, columns=COLUMNS, tokens=COLUMNS - 9)
    )
    made = made_up_projection(pair)
    bridge = VocabularyProjection.from_arrays(
        made.indptr,
        made.indices,
        made.values,
        num_teacher=made.num_teacher,
        student_common=made.student_common,
        teacher_common=made.teacher_common,
    )
    chunks = flat_chunks(made_up_chunks(model.Step(1, 1, ROWS, K)), torch.device("cpu"))
    student, teacher, labels = _sides(COLUMNS)
    target = vocab_parallel_topk(teacher, K, labels=labels)
    with Traffic() as kd:
        output = chunk_kd_loss(student, target, chunks, bridge, method="hybrid", labels=labels)
        (output.kd + output.ce).backward()
    assert kd.total / (ROWS * COLUMNS) == pytest.approx(costs.KD, rel=0.02)


def _sides(columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 logits of a student, which wants a gradient, and of a teacher; labels."""
    draw = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(ROWS, columns, generator=draw).bfloat16() for _ in range(2))
    return student.requires_grad_(), teacher, torch.randint(columns, (ROWS,), generator=draw)


def test_fused_adamw_and_clipping_move_the_bytes_of_the_model() -> None:
    weight = nn.Parameter(torch.randn(256, 256))
    optimizer = torch.optim.AdamW([weight], fused=True)
    for _ in range(2):  # the first makes the state
        weight.grad = torch.randn(256, 256)
        with Traffic() as clipping:
            clip_gradients([weight], 1.0)
        with Traffic() as update:
            optimizer.step()
    # scalars beside 65,536 numbers
    assert clipping.total / weight.numel() == pytest.approx(costs.CLIP, rel=0.001)
    assert update.total / weight.numel() == pytest.approx(costs.ADAMW, rel=0.001)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_move_the_bytes_of_the_model(family: str) -> None:
    """Of one layer more. Within 3 %: what a norm keeps per row is small beside the row."""
    shape = Shape("", family, 2, 256, 512, 4, 2, 64, 64, 64, tied=True)
    more = replace(shape, layers=3)
    counted = [_layer_traffic(each) for each in (shape, more)]
    for phase, backward in ((0, 0), (1, 1)):
        (less,), (one_more,) = ([costs._elementwise("", each, backward).bytes] for each in (shape, more))
        assert counted[1][phase] - counted[0][phase] == pytest.approx(one_more - less, rel=0.03)


def _layer_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes per token, forward and backward, of all layers in bf16."""
    rows, length = 2, 128
    settings = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    body = AutoModelForCausalLM.from_config(shape.config(use_cache=False), **settings).model
    positions = torch.arange(length).expand(rows, length)
    with Traffic() as forward:
        hidden = body(input_ids=torch.zeros_like(positions), position_ids=positions).last_hidden_state
    with Traffic() as backward:
        hidden.backward(torch.ones_like(hidden))
    return forward.total / (rows * length), backward.total / (rows * length)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_moves_the_models_bytes_per_parameter(tmp_path: Path, micro_batches: int) -> None:
    """Weights to bf16, and gradients added up: all that `forward_backward` does per parameter.

    Within 3 %: the sums behind the loss and numbers per row are not in the model.
    """
    shape = replace(TINY_STUDENT, layers=3, hidden=256, intermediate=1024, head_size=64)
    step = model.Step(rows=micro_batches, micro_batch=1, length=16, top_k=4)
    world = open_world(rank=0, dp=1, tp=1)
    try:
        engines = Engines(Pair(shape, replace(TINY_STUDENT, head_size=16)), step, world, tmp_path, 2)
        engines.step()
        for _ in engines.teach():
            pass
        with Traffic() as counted:
            engines.student.forward_backward(engines.batch, engines.targets)
        assert all(each.grad is not None for each in engines.student.model.parameters())
    finally:
        close_world(world)
    found = model.parts(Pair(shape, shape), step, H200)
    expected = step.tokens * sum(part.bytes for part in found if part.phase in model.PHASES[2:5])
    assert counted.total == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_sums_by_phase_and_by_kind_agree(pair: Pair) -> None:
    found = model.parts(pair, STEP, H200)
    for ideal in (False, True):
        sums = [sum(model.microseconds(found, H200, by=by, ideal=ideal).values()) for by in ("phase", "kind")]
        assert sums[0] == pytest.approx(sums[1])
        assert min(model.microseconds(found, H200, by="phase").values()) > 0
    for part in found:
        assert part.ideal_seconds(H200) <= part.seconds(H200), part
    # Exactly the models' FLOPs, but for the scores that backward computes again.
    again = 0.5 * pair.student.attention_flops(STEP.length)
    assert sum(part.flops for part in found) - again == pytest.approx(pair.flops_per_token(STEP.length))


def test_a_faster_card_shortens_what_it_is_faster_at() -> None:
    pair = PAIRS["qwen3-4b"]
    slow, fast = H200, replace(H200, bandwidth=2 * H200.bandwidth)
    times = [model.microseconds(model.parts(pair, STEP, card), card, by="kind") for card in (slow, fast)]
    for kind in model.KINDS:
        ratio = 1 if kind in ("GEMM", "attention") else 2
        assert times[0][kind] == pytest.approx(ratio * times[1][kind])


def test_larger_steps_share_the_optimizer_among_more_tokens() -> None:
    pair = PAIRS["qwen3-4b"]
    small, large = (
        model.microseconds(model.parts(pair, step, H200), H200, by="kind") for step in (STEP, replace(STEP, rows=16))
    )
    assert small["optimizer"] == pytest.approx(2 * large["optimizer"])
    assert small["GEMM"] == large["GEMM"]


def test_the_committed_page_is_what_the_program_writes(tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    assert model.main(["--write", str(written)]) == 0
    assert written.read_text("utf-8") == model.page()
    assert model.PAGE.read_text("utf-8") == model.page(), "bash launch/bench.sh cost_model --write"


def test_the_program_prints_every_phase_and_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main(["--card", "h100", "--pair", "llama-8b", "--rows", "4"]) == 0
    printed = capsys.readouterr().out
    assert "Llama-3.2-1B ← Llama-3.1-8B on one H100" in printed
    assert all(name in printed for name in (*model.PHASES, *model.KINDS))


def test_bad_sizes_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main(["--rows", "7"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cost_model: error: --rows must be a multiple of --micro-batch")
    assert "7 rows, micro-batches of 2" in line


def test_the_cost_model_needs_the_standard_library_only() -> None:
    program = (
        "import sys\nfrom tests.bench.gpu.cost_model import main\nmain([])\n"
        "print({'torch', 'numpy', 'transformers', 'omegaconf', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_tiny_pairs_are_of_the_same_kinds_as_the_real_ones() -> None:
    assert set(TINY_PAIRS) == set(PAIRS)
    for name, pair in PAIRS.items():
        tiny = TINY_PAIRS[name]
        assert tiny.one_tokenizer == pair.one_tokenizer
        for small, large in ((tiny.student, pair.student), (tiny.teacher, pair.teacher)):
            assert (small.family, small.tied) == (large.family, large.tied)
            assert (small.tokens < small.columns) == (large.tokens < large.columns)
