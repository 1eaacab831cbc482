"""One rank, real models: what a training step promises on any layout. Sharded layouts: tests/distributed."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.errors import NumericsError
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    no_targets,
    plain_logits,
    plain_losses,
    plain_model,
    plain_topk,
    random_documents,
    rank_batch,
    relative_l2,
    token_rows,
    whole_gradients,
    whole_parameters,
)
from tests.helpers.models import write_tiny_model
from tests.helpers.rows import laid_out

VOCABULARY, WIDTH, TOP = 320, 24, 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "student": write_tiny_model(root / "student", "llama", seed=1, tie=True),
        "teacher": write_tiny_model(root / "teacher", "llama", seed=2, hidden=48),
        "wide-student": write_tiny_model(root / "wide-student", "qwen2", seed=3, vocab_size=384, tie=True),
        "wide-teacher": write_tiny_model(root / "wide-teacher", "qwen2", seed=4, vocab_size=352),
        "dropout": write_tiny_model(root / "dropout", "gpt2", seed=5),
    }


@pytest.fixture
def rows() -> TokenRows:
    return token_rows([[document] for document in random_documents(4, seed=7)], WIDTH)


def student(world, path, teachers=(), total_steps: int = 10, **settings) -> StudentEngine:
    return StudentEngine(
        engine_config(path, teachers, **settings), world, vocabulary_size=VOCABULARY, total_steps=total_steps
    )


def targets_of(world, path, rows: TokenRows):
    config = engine_config("unused", [path])
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    return engine_targets(teacher, rank_batch(rows))


def gradient_of(world, path, rows: TokenRows, teacher, **settings) -> dict[str, torch.Tensor]:
    settings = {"loss__ce_weight": 0.5, **settings}
    engine = student(world, path, [teacher], **settings)
    engine.forward_backward(rank_batch(rows), fixed_targets([targets_of(world, teacher, rows)], rows.shape[1]))
    return whole_gradients(engine.model)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradient_is_exact_for_any_micro_batch_size(world, folders, rows, size: int):
    found = gradient_of(world, folders["student"], rows, folders["teacher"], train__micro_batch_size=size)
    model = plain_model(folders["student"])
    target = plain_topk(plain_model(folders["teacher"]), rows, VOCABULARY, TOP)
    kd, ce = plain_losses(plain_logits(model, rows, VOCABULARY), rows.labels, target)
    ((kd + 0.5 * ce) / rank_batch(rows).num_labels).backward()
    assert relative_l2(found, whole_gradients(model)) < 1e-5


def test_packed_and_padded_rows_give_one_gradient(world, folders):
    documents = [Encoded(ids, np.ones(len(ids), bool), False) for ids in random_documents(7, seed=3)]
    share = BatchSharding(1, 2)
    padded, packed = (laid_out(documents, BatchPlan(share, (), 3 * WIDTH, packing, 2)) for packing in (False, True))
    assert padded.shape[0] > 2 * packed.shape[0]
    assert (np.count_nonzero(packed.position_ids == 0, axis=1) > 1).any()
    one, other = (gradient_of(world, folders["student"], rows, folders["teacher"]) for rows in (padded, packed))
    assert relative_l2(one, other) < 1e-5


def test_activation_checkpointing_keeps_the_gradient(world, folders, rows):
    engine = student(
        world, folders["student"], loss__kd_weight=0.0, loss__ce_weight=1.0, student__activation_checkpointing=True
    )
    assert engine.model.is_gradient_checkpointing
    engine.forward_backward(rank_batch(rows), no_targets)
    plain = student(world, folders["student"], loss__kd_weight=0.0, loss__ce_weight=1.0)
    plain.forward_backward(rank_batch(rows), no_targets)
    assert relative_l2(whole_gradients(engine.model), whole_gradients(plain.model)) < 1e-6


def test_a_step_without_a_label_leaves_the_dynamic_scale(world, folders, rows):
    engine = student(world, folders["student"], [folders["teacher"]], loss__ce_weight=0.5, loss__dynamic_scale="on")
    source = fixed_targets([targets_of(world, folders["teacher"], rows)], rows.shape[1])
    engine.train_step(rank_batch(rows), source)
    found = engine.kd_scale
    assert found not in (0.0, 1.0)
    engine.train_step(rank_batch(replace(rows, labels=np.full_like(rows.labels, IGNORE_INDEX))), source)
    assert engine.kd_scale == found


def test_student_equal_to_its_teacher_does_not_move(world, folders, rows):
    # AdamW divides a gradient by its size, so an epsilon well above rounding noise keeps the noise small.
    settings = {"optimizer__lr": 1e-3, "optimizer__eps": 1e-4, "optimizer__weight_decay": 0.0}
    engine = student(world, folders["student"], [folders["student"]], **settings)
    before = whole_parameters(engine.model)
    source = fixed_targets([targets_of(world, folders["student"], rows)], WIDTH)
    losses = [engine.train_step(rank_batch(rows), source)["train/kl_loss"].value for _ in range(4)]
    assert all(0 <= loss < 1e-6 for loss in losses)
    assert relative_l2(whole_parameters(engine.model), before) < 1e-6


def test_steps_lower_the_loss_and_report_metrics(world, folders, rows):
    settings = {"optimizer__lr": 5e-3, "loss__ce_weight": 0.25, "schedule__kind": "linear"}
    engine = student(world, folders["student"], [folders["teacher"]], total_steps=8, **settings)
    source = fixed_targets([targets_of(world, folders["teacher"], rows)], WIDTH)
    history = [engine.train_step(rank_batch(rows), source) for _ in range(8)]
    last = history[-1]
    assert last["train/loss"].value < 0.8 * history[0]["train/loss"].value
    assert last["train/loss"].value == pytest.approx(last["train/kl_loss"].value + 0.25 * last["train/nll_loss"].value)
    assert last["train/tokens"].value == last["train/kl_loss"].weight == rank_batch(rows).num_labels
    assert [metrics["train/lr"].value for metrics in history] == pytest.approx([5e-3 * (1 - i / 8) for i in range(8)])
    assert 0 < last["train/teacher_mass"].value < 1
    assert last["train/grad_norm"].value > 0
    assert engine.step == 8


def test_step_uses_scheduled_rate_and_clears_gradients(world, folders, rows):
    settings = {"loss__kd_weight": 0.0, "loss__ce_weight": 1.0, "schedule__kind": "linear", "optimizer__lr": 1e-2}
    engine = student(world, folders["student"], total_steps=1, **settings)
    weights = [whole_parameters(engine.model)]
    for _ in range(2):
        engine.train_step(rank_batch(rows), no_targets)
        assert all(parameter.grad is None for parameter in engine.parameters)
        weights.append(whole_parameters(engine.model))
    assert relative_l2(weights[1], weights[0]) > 1e-3
    assert relative_l2(weights[2], weights[1]) == 0, "behind its end the schedule has a rate of zero"


def test_evaluation_reports_losses_and_changes_nothing(world, folders, rows):
    source = fixed_targets([targets_of(world, folders["teacher"], rows)], WIDTH)
    weights = []
    for evaluated in (False, True):
        engine = student(world, folders["student"], [folders["teacher"]], optimizer__lr=1e-2)
        for _ in range(2):
            if evaluated:
                report = engine.evaluate(rank_batch(rows), source)
            trained = engine.train_step(rank_batch(rows), source)
        weights.append(whole_parameters(engine.model))
    names = (
        "kl_loss",
        "nll_loss",
        "top1_agreement",
        "acceptance_low",
        "acceptance_high",
        "student_entropy",
        "teacher_entropy_low",
        "teacher_entropy_high",
    )
    assert report.keys() == {f"validation/{name}" for name in names}
    assert report["validation/kl_loss"].value == pytest.approx(trained["train/kl_loss"].value, rel=1e-6)
    assert report["validation/nll_loss"].value == pytest.approx(trained["train/nll_loss"].value, rel=1e-6)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_evaluation_uses_no_dropout(world, folders, rows):
    engine = student(world, folders["dropout"], loss__kd_weight=0.0, loss__ce_weight=1.0)
    for module in engine.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    state = torch.get_rng_state()
    one, other = (engine.evaluate(rank_batch(rows), no_targets) for _ in range(2))
    assert one == other
    assert torch.equal(torch.get_rng_state(), state)
    train = [engine.forward_backward(rank_batch(rows), no_targets)["train/nll_loss"].value for _ in range(2)]
    assert train[0] != train[1]


def test_without_teachers_only_cross_entropy_is_trained(world, folders, rows):
    engine = student(world, folders["student"], loss__kd_weight=0.0, loss__ce_weight=1.0)
    metrics = engine.train_step(rank_batch(rows), no_targets)
    model = plain_model(folders["student"])
    _, ce = plain_losses(plain_logits(model, rows, VOCABULARY), rows.labels, None)
    assert metrics["train/nll_loss"].value == pytest.approx(ce.item() / rank_batch(rows).num_labels, rel=1e-5)
    assert "train/kl_loss" not in metrics
    assert engine.evaluate(rank_batch(rows), no_targets).keys() == {"validation/nll_loss"}


def test_padded_columns_get_no_probability_or_gradient(world, folders, rows):
    target = targets_of(world, folders["wide-teacher"], rows)
    assert int(target["ids"].max()) < VOCABULARY
    exact = plain_topk(plain_model(folders["wide-teacher"]), rows, VOCABULARY, TOP)
    torch.testing.assert_close(target["rest_logprob"].double(), exact["rest_logprob"], rtol=1e-4, atol=1e-5)
    engine = student(
        world, folders["wide-student"], [folders["wide-teacher"]], optimizer__weight_decay=0.0, optimizer__lr=1e-2
    )
    table = engine.model.get_output_embeddings().weight
    before = table.detach().clone()
    for _ in range(3):
        engine.forward_backward(rank_batch(rows), fixed_targets([target], WIDTH))
        assert not table.grad[VOCABULARY:].any()
        engine.optim_step()
    assert torch.equal(table[VOCABULARY:], before[VOCABULARY:])
    assert not torch.equal(table[:VOCABULARY], before[:VOCABULARY])
    model = plain_model(folders["wide-student"])
    kd, _ = plain_losses(plain_logits(model, rows, VOCABULARY), rows.labels, exact)
    fresh = student(world, folders["wide-student"], [folders["wide-teacher"]])
    found = fresh.evaluate(rank_batch(rows), fixed_targets([target], WIDTH))["validation/kl_loss"].value
    assert found == pytest.approx(kd.item() / rank_batch(rows).num_labels, rel=1e-4)


def test_top_k_of_the_whole_vocabulary_is_dense_distillation(world, folders, rows):
    config = engine_config(folders["student"], [folders["teacher"]], loss__top_k=VOCABULARY)
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    source = fixed_targets([engine_targets(teacher, rank_batch(rows))], WIDTH)
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=1)
    p, q = (
        torch.log_softmax(plain_logits(plain_model(folders[name]), rows, VOCABULARY), -1)
        for name in ("teacher", "student")
    )
    kl = (p.exp() * (p - q)).sum(-1)[torch.tensor(rows.labels != IGNORE_INDEX)].mean().item()
    found = engine.forward_backward(rank_batch(rows), source)
    assert found["train/kl_loss"].value == pytest.approx(kl, rel=1e-5)
    assert found["train/teacher_mass"].value == pytest.approx(1.0, rel=1e-5)
    assert all(torch.isfinite(tensor).all() for tensor in whole_gradients(engine.model).values())


def test_bf16_keeps_weights_and_optimizer_in_fp32(world, folders, rows):
    engine = student(world, folders["student"], [folders["teacher"]], student__dtype="bf16", optimizer__lr=5e-3)
    seen = []
    engine.model.get_output_embeddings().register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    source = fixed_targets([targets_of(world, folders["teacher"], rows)], WIDTH)
    losses = [engine.train_step(rank_batch(rows), source)["train/kl_loss"].value for _ in range(6)]
    assert set(seen) == {torch.bfloat16}
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    assert {value.dtype for state in engine.optimizer.state.values() for value in state.values()} == {torch.float32}
    exact = student(world, folders["student"], [folders["teacher"]]).evaluate(rank_batch(rows), source)
    assert losses[0] == pytest.approx(exact["validation/kl_loss"].value, rel=0.03)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("at", ["the targets", "the backward pass"])
def test_a_step_that_fails_leaves_nothing_of_itself(world, folders, rows, dtype, at):
    settings = {"student__dtype": dtype, "train__micro_batch_size": 2, "loss__kd_weight": 0.0, "loss__ce_weight": 1.0}
    engines = [student(world, folders["student"], **settings) for _ in range(2)]
    batch, failing = rank_batch(rows), engines[0]
    if at == "the targets":
        with pytest.raises(TimeoutError):
            failing.forward_backward(batch, lambda first, count: no_targets(first, count) if first == 0 else fail())
    else:
        calls = count()

        def fail_in_the_second(*given):
            if next(calls):
                given[-1].register_hook(lambda _: fail())

        hook = failing.model.get_input_embeddings().register_forward_hook(fail_in_the_second)
        with pytest.raises(TimeoutError):
            failing.forward_backward(batch, no_targets)
        hook.remove()
    found = [engine.train_step(batch, no_targets) for engine in engines]
    assert found[0]["train/grad_norm"] == found[1]["train/grad_norm"]
    assert found[0]["train/loss"] == found[1]["train/loss"]


def fail():
    raise TimeoutError


def test_non_finite_gradient_is_skipped_until_the_limit(world, folders, rows):
    engine = student(world, folders["student"], loss__kd_weight=0.0, loss__ce_weight=1.0, faults__skipped_steps=1)
    before = whole_parameters(engine.model)

    def poisoned_step():
        engine.forward_backward(rank_batch(rows), no_targets)
        next(iter(engine.parameters)).grad.mul_(math.nan)
        return engine.optim_step()

    assert poisoned_step()["train/skipped"].value == 1
    assert engine.step == 1
    with pytest.raises(NumericsError, match=r"step 2: its gradient norm must be finite; got nan after 1 steps skipped"):
        poisoned_step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole_parameters(engine.model).items())
    assert all(not value.any() for state in engine.optimizer.state.values() for value in state.values())


def test_skipped_step_leaves_no_trace(world, folders, rows):
    undisturbed, engine = (student(world, folders["student"], loss__kd_weight=0.0, loss__ce_weight=1.0) for _ in "ab")
    engine.forward_backward(rank_batch(rows), no_targets)
    next(iter(engine.parameters)).grad.mul_(math.inf)
    engine.optim_step()
    for each in (undisturbed, engine):
        each.step = 1
        assert each.train_step(rank_batch(rows), no_targets)["train/skipped"].value == 0
    expected = whole_parameters(undisturbed.model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole_parameters(engine.model).items())


def test_read_only_arrays_are_accepted_silently(world, folders, rows, recwarn):
    frozen = TokenRows(*(np.array(array) for array in (rows.input_ids, rows.labels, rows.position_ids)))
    for array in (frozen.input_ids, frozen.labels, frozen.position_ids):
        array.flags.writeable = False
    engine = student(world, folders["student"], loss__kd_weight=0.0, loss__ce_weight=1.0)
    engine.train_step(rank_batch(frozen), no_targets)
    assert not [warning for warning in recwarn if "writ" in str(warning.message)]
    assert np.array_equal(frozen.labels, rows.labels)


def test_micro_batch_of_padding_rows_changes_nothing(world, folders, rows):
    empty = token_rows([[], []], WIDTH)
    longer = TokenRows(
        *(np.concatenate([getattr(rows, n), getattr(empty, n)]) for n in ("input_ids", "labels", "position_ids"))
    )
    assert (empty.labels == IGNORE_INDEX).all()
    one, other = (gradient_of(world, folders["student"], part, folders["teacher"]) for part in (rows, longer))
    assert relative_l2(other, one) < 1e-6


def test_clipping_limits_the_step_to_the_global_norm(world, folders, rows):
    settings = {"loss__kd_weight": 0.0, "loss__ce_weight": 1.0, "train__max_grad_norm": 0.01}
    engine = student(world, folders["student"], **settings)
    engine.forward_backward(rank_batch(rows), no_targets)
    whole = math.sqrt(sum(tensor.square().sum().item() for tensor in whole_gradients(engine.model).values()))
    clipped = []
    engine.optimizer.register_step_pre_hook(lambda *_: clipped.append(whole_gradients(engine.model)))
    metrics = engine.optim_step()
    assert metrics["train/grad_norm"].value == pytest.approx(whole, rel=1e-5)
    assert math.sqrt(sum(t.square().sum().item() for t in clipped[0].values())) == pytest.approx(0.01, rel=1e-3)


def test_seed_determines_the_run(world, folders, rows):
    def run(seed: int) -> list[float]:
        engine = student(world, folders["dropout"], loss__kd_weight=0.0, loss__ce_weight=1.0, run__seed=seed)
        for module in engine.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        batch: RankBatch = rank_batch(rows)
        return [engine.train_step(batch, no_targets)["train/loss"].value for _ in range(2)]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_five_hundred_steps_in_bf16_follow_a_plain_loop_with_fp32_weights(world, folders):
    """The rate is so small that most updates are less than a weight's last bit in bf16."""
    batches = [token_rows([[each] for each in random_documents(2, seed=seed)], WIDTH) for seed in range(3)]
    engine = student(
        world,
        folders["student"],
        total_steps=500,
        student__dtype="bf16",
        optimizer__lr=3e-5,
        schedule__kind="constant",
        loss__kd_weight=0.0,
        loss__ce_weight=1.0,
    )
    losses = []
    for step in range(500):
        batch = rank_batch(batches[step % 3])
        losses.append(engine.forward_backward(batch, no_targets, last=True)["train/nll_loss"].value)
        engine.optim_step()
    assert all(parameter.dtype == torch.float32 for parameter in engine.model.parameters())
    ours = whole_parameters(engine.model)
    kept, kept_losses = plain_bf16(folders["student"], batches, engine.config)
    first = plain_model(folders["student"], torch.float32).state_dict()
    learnt = {name: tensor - first[name] for name, tensor in kept.items()}
    apart = {name: ours[name] - kept[name] for name in learnt}
    size = math.sqrt(sum(tensor.square().sum().item() for tensor in learnt.values()))
    assert losses == pytest.approx(kept_losses, rel=0.01)
    assert losses[-1] < 0.9 * losses[2]
    assert math.sqrt(sum(tensor.square().sum().item() for tensor in apart.values())) < 0.05 * size


def plain_bf16(folder, batches, config):
    """Weights and losses of a plain loop: fp32 weights, rounded to bf16 for each step, gradients summed in fp32."""
    weights = plain_model(folder, torch.float32)
    rounded = plain_model(folder, torch.bfloat16)
    names = [name for name, _ in weights.named_parameters()]
    settings = config.optimizer
    decayed = [parameter for name, parameter in weights.named_parameters() if "norm" not in name]
    others = [parameter for name, parameter in weights.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps)
    losses = []
    for step in range(500):
        rows, total = batches[step % 3], 0.0
        rounded.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in weights.state_dict().items()})
        sums = {name: torch.zeros_like(weights.get_parameter(name)) for name in names}
        count = int((rows.labels != IGNORE_INDEX).sum())
        for first in range(0, rows.shape[0], config.train.micro_batch_size):
            part = rows[first : first + config.train.micro_batch_size]
            rounded.zero_grad()
            _, ce = plain_losses(plain_logits(rounded, part, VOCABULARY).float(), part.labels, None)
            (ce / count).backward()
            total += ce.item() / count
            for name in names:
                sums[name] += rounded.get_parameter(name).grad.float()
        for name in names:
            weights.get_parameter(name).grad = sums[name]
        torch.nn.utils.clip_grad_norm_(weights.parameters(), config.train.max_grad_norm)
        optimizer.step()
        losses.append(total)
    return {name: weights.get_parameter(name).detach() for name in names}, losses
