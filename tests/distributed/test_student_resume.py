"""Checkpoints of the student: bit-exact on the same mesh, resharded on another, errors raised on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.errors import CheckpointError
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.student.optim import build_optimizer
from distill_rl.types import TokenRows
from tests.helpers import ranks
from tests.helpers.engines import (
    engine_config,
    fixed_targets,
    no_targets,
    plain_model,
    plain_topk,
    random_documents,
    rank_batch,
    token_rows,
    whole_parameters,
)
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, TOP, STEPS = 320, 24, 16, 4


def world_of(dp: int, tp: int, name: str, replicas: int = 1, sp: int = 1) -> World:
    """A world with its own process groups among the ranks of the call."""
    store = torch.distributed.PrefixStore(name, ranks.store())
    return open_world(rank=ranks.rank(), dp=dp, tp=tp, sp=sp, replicas=replicas, store=store)


def rows_of(step: int) -> TokenRows:
    return token_rows([[document] for document in random_documents(4, seed=step)], WIDTH)


def run_steps(engine: StudentEngine, teacher: Path, first: int, last: int) -> list[float]:
    """Takes steps first+1 … last, before the third an evaluation; returns losses and gradient norms."""
    targets, losses = torch.load(teacher / "targets.pt"), []
    for step in range(first, last):
        batch = rank_batch(rows_of(step), engine.world.dp_rank, engine.world.dp, step)
        source = fixed_targets([targets[step]], WIDTH)
        if step == 2:
            engine.evaluate(batch, source)
        metrics = engine.train_step(batch, source)
        losses += [metrics[name].value for name in ("train/kl_loss", "train/nll_loss", "train/grad_norm") if metrics]
    return losses


def engine_on(world: World, student: Path, teacher: Path, fused: str = "off") -> StudentEngine:
    config = engine_config(
        student, [teacher], optimizer__lr=1e-2, loss__ce_weight=0.5, loss__fused=fused, schedule__warmup_steps=2
    )
    return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)


def whole_state(engine: StudentEngine) -> dict[str, torch.Tensor]:
    state = whole_parameters(engine.model)
    for name, parameter in engine.model.named_parameters():
        for key, value in engine.optimizer.state[parameter].items():
            state[f"{name}.{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return state


def straight_and_resumed(
    dp: int,
    tp: int,
    student: Path,
    teacher: Path,
    folder: Path,
    beside: bool = True,
    replicas: int = 1,
    fused: str = "off",
    sp: int = 1,
) -> list[tuple]:
    """Four steps without interruption, then 1 + 2 + 1 steps with a new process group and engine each time.

    With `beside`, checkpoints are saved beside the training, otherwise at once.
    """
    world = world_of(dp, tp, f"{folder}/straight", replicas, sp)
    engine = engine_on(world, student, teacher, fused)
    outcomes = [(run_steps(engine, teacher, 0, STEPS), whole_state(engine), torch.get_rng_state())]
    close_world(world)
    losses: list[float] = []
    for first, last in ((0, 1), (1, 3), (3, STEPS)):
        world = world_of(dp, tp, f"{folder}/resumed-{first}", replicas, sp)
        engine = engine_on(world, student, teacher, fused)
        if first:
            torch.manual_seed(999)
            engine.load(folder / f"step-{first}")
            assert engine.step == first
        losses += run_steps(engine, teacher, first, last)
        marker = folder / f"written-{last}" if beside else None
        engine.save(folder / f"step-{last}", marker)
        engine.finish_saving()
        if last == STEPS:
            outcomes.append((losses, whole_state(engine), torch.get_rng_state()))
        close_world(world)
    return outcomes


def resharded(
    dp: int,
    tp: int,
    student: Path,
    teacher: Path,
    source: Path,
    target: Path,
    replicas: int = 1,
    sp: int = 1,
    trains: bool = True,
) -> tuple[dict, dict]:
    """Loads `source` on another mesh, saves it unchanged to `target`, and if it `trains` takes a step more.

    Returns the state after loading and after the step.
    """
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp, replicas=replicas, sp=sp)
    engine = engine_on(world, student, teacher)
    engine.load(source)
    loaded = whole_state(engine)
    assert engine.step == 3
    engine.save(target)
    if not trains:
        return loaded, {}
    run_steps(engine, teacher, 3, STEPS)
    return loaded, whole_state(engine)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The student's, and the teacher's with what it says of the rows of every step."""
    root = tmp_path_factory.mktemp("models")
    student = write_tiny_model(root / "student", "llama", seed=51, tie=True, vocab_size=327)
    teacher = write_tiny_model(root / "teacher", "llama", seed=52, hidden=48)
    model = plain_model(teacher, torch.float32)
    torch.save([plain_topk(model, rows_of(step), VOCABULARY, TOP) for step in range(STEPS)], teacher / "targets.pt")
    return student, teacher


@pytest.fixture(scope="module")
def straight(folders, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint after three steps and the state after four, of a run on one rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    ((_, state, _), _) = ranks.run_ranks(1, straight_and_resumed, 1, 1, *folders, folder, group=False)[0]
    return folder / "step-3", state


@pytest.mark.parametrize(
    ("dp", "tp", "replicas", "beside", "fused", "sp"),
    [
        (1, 1, 1, True, "on", 1),
        (2, 1, 1, True, "off", 1),
        (1, 2, 1, False, "on", 1),
        (1, 1, 1, True, "on", 2),
        (2, 2, 1, True, "off", 1),
        (4, 1, 2, True, "off", 1),
        (2, 1, 2, True, "off", 2),
    ],
    ids=lambda value: {True: "beside", False: "at-once"}[value] if isinstance(value, bool) else value,
)
def test_a_resumed_run_equals_the_straight_run_bit_for_bit(
    folders, tmp_path, dp: int, tp: int, replicas: int, beside: bool, fused: str, sp: int
):
    arguments = (dp, tp, *folders, tmp_path, beside, replicas, fused, sp)
    for outcomes in ranks.run_ranks(dp * sp * tp, straight_and_resumed, *arguments, group=False):
        (losses, state, random_state), (resumed_losses, resumed_state, resumed_random_state) = outcomes
        assert losses == resumed_losses
        assert len(losses) in (0, 3 * STEPS)
        assert state.keys() == resumed_state.keys()
        assert all(torch.equal(tensor, resumed_state[name]) for name, tensor in state.items())
        assert torch.equal(random_state, resumed_random_state)


def test_a_checkpoint_moves_to_another_mesh_and_back(folders, straight, tmp_path):
    checkpoint, wanted = straight
    loaded, ended = ranks.run_ranks(4, resharded, 2, 2, *folders, checkpoint, tmp_path / "wide")[0]
    again, ended_again = ranks.run_ranks(1, resharded, 1, 1, *folders, tmp_path / "wide", tmp_path / "narrow")[0]
    assert all(torch.equal(tensor, again[name]) for name, tensor in loaded.items())
    for state in (ended, ended_again):
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=2e-5, msg=name)


def test_a_checkpoint_moves_between_sharded_and_replicated_meshes(folders, straight, tmp_path):
    checkpoint, wanted = straight
    loaded = None
    for i, (dp, tp, replicas) in enumerate([(4, 1, 2), (2, 2, 2), (2, 1, 1), (2, 1, 2)]):
        target = tmp_path / str(i)
        arguments = (dp, tp, *folders, checkpoint, target, replicas, 1, i in (0, 3))
        now, ended = ranks.run_ranks(dp * tp, resharded, *arguments)[0]
        loaded, checkpoint = loaded or now, target
        assert all(torch.equal(tensor, now[name]) for name, tensor in loaded.items())
        assert ended.keys() == (wanted.keys() if i in (0, 3) else set())
        for name, tensor in ended.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=2e-5, msg=name)


def test_a_checkpoint_moves_to_divided_rows(folders, straight, tmp_path):
    checkpoint, wanted = straight
    arguments = (1, 1, *folders, checkpoint, tmp_path / "divided", 1, 2)
    loaded, ended = ranks.run_ranks(2, resharded, *arguments)[0]
    again, _ = ranks.run_ranks(1, resharded, 1, 1, *folders, tmp_path / "divided", tmp_path / "whole")[0]
    assert all(torch.equal(tensor, again[name]) for name, tensor in loaded.items())
    for name, tensor in ended.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=2e-5, msg=name)


FAMILIES = {"phi3": 53, "gpt2": 54, "mixtral": 55}


def all_straight_and_resumed(students: dict[str, Path], teacher: Path, root: Path) -> dict[str, list[tuple]]:
    return {name: straight_and_resumed(1, 2, path, teacher, root / name) for name, path in students.items()}


def all_resharded(
    dp: int, tp: int, students: dict[str, Path], teacher: Path, root: Path, source: str, target: str
) -> dict[str, tuple[dict, dict]]:
    return {
        name: resharded(dp, tp, path, teacher, root / name / source, root / name / target)
        for name, path in students.items()
    }


@pytest.fixture(scope="module")
def of_families(folders, tmp_path_factory) -> tuple[list[dict], dict, dict]:
    """Per family: the outcomes of all ranks, and those of its checkpoint on two other meshes."""
    root, teacher = tmp_path_factory.mktemp("families"), folders[1]
    students = {
        name: write_tiny_model(root / name / "student", name, seed=seed, vocab_size=327)
        for name, seed in FAMILIES.items()
    }
    outcomes = ranks.run_ranks(2, all_straight_and_resumed, students, teacher, root, group=False)
    wide = ranks.run_ranks(4, all_resharded, 2, 2, students, teacher, root, "step-3", "wide")[0]
    narrow = ranks.run_ranks(1, all_resharded, 1, 1, students, teacher, root, "wide", "narrow")[0]
    return outcomes, wide, narrow


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_resume_and_reshard(of_families, family: str):
    outcomes, wide, narrow = of_families
    for of_rank in outcomes:
        (losses, state, _), (resumed_losses, resumed_state, _) = of_rank[family]
        assert losses == resumed_losses
        assert all(torch.equal(tensor, resumed_state[name]) for name, tensor in state.items())
    (loaded, ended), (again, _) = wide[family], narrow[family]
    assert all(torch.equal(tensor, again[name]) for name, tensor in loaded.items())
    for name, tensor in ended.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-4, atol=2e-5, msg=name)


def exchanged(dp: int, tp: int, student: Path, teacher: Path, folder: Path) -> list[tuple[bool, dict, dict]]:
    """A checkpoint of either AdamW kernel, loaded by the other one.

    Per writer: (whether the state was loaded whole, the reader's state after a step, the writer's after that step).
    """
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)

    def engine(fused: bool) -> StudentEngine:
        new = engine_on(world, student, teacher)
        new.optimizer = build_optimizer(new.trained, new.config.optimizer, fused=fused)
        return new

    outcomes = []
    for fused in (False, True):
        writer, reader = engine(fused), engine(not fused)
        run_steps(writer, teacher, 0, 2)
        writer.save(folder / str(fused))
        reader.load(folder / str(fused))
        saved, loaded = whole_state(writer), whole_state(reader)
        equal = saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
        for trained in (writer, reader):
            run_steps(trained, teacher, 2, 3)
        outcomes.append((equal, whole_state(reader), whole_state(writer)))
    return outcomes


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_fused_and_foreach_adamw_load_each_others_checkpoints(folders, tmp_path, dp: int, tp: int):
    for loaded_whole, state, wanted in ranks.run_ranks(dp * tp, exchanged, dp, tp, *folders, tmp_path)[0]:
        assert loaded_whole
        for name, tensor in state.items():
            # The kernels round differently, and the update divides by moments near zero.
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def load_error(dp: int, tp: int, student: Path, teacher: Path, checkpoint: Path) -> str:
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    engine = engine_on(world, student, teacher)
    before = whole_parameters(engine.model)
    with pytest.raises(CheckpointError) as caught:
        engine.load(checkpoint)
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole_parameters(engine.model).items())
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_before_reading(folders, straight, tmp_path):
    other = write_tiny_model(tmp_path / "other", "llama", layers=1, vocab_size=327)
    messages = ranks.run_ranks(2, load_error, 1, 2, other, folders[1], straight[0])
    assert len(set(messages)) == 1
    assert "must hold what is trained of student.model" in messages[0]
    assert "\n" not in messages[0]


def save_error(folder: Path, student: Path, teacher: Path) -> str:
    engine = engine_on(open_world(rank=ranks.rank(), dp=2, tp=1), student, teacher)
    with pytest.raises(CheckpointError) as caught:
        engine.save(folder / "checkpoint")
    return str(caught.value)


def test_an_unwritable_directory_is_an_error_on_every_rank(folders, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    messages = ranks.run_ranks(2, save_error, blocked, *folders)
    assert len(set(messages)) == 1
    assert "must be writable" in messages[0]


def write_error_of_one_rank(folder: Path, student: Path, teacher: Path) -> str:
    world = open_world(rank=ranks.rank(), dp=2, tp=1)
    engine = engine_on(world, student, teacher)
    folder.mkdir(exist_ok=True)
    if world.rank == 1:
        # A folder with the name of this rank's file, __<rank>_<n>.distcp, makes DCP fail to write it.
        (folder / "__1_0.distcp").mkdir()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.save(folder)
    return str(caught.value)


def test_a_failed_write_is_raised_on_all_ranks_and_names_the_rank(folders, tmp_path):
    messages = ranks.run_ranks(2, write_error_of_one_rank, tmp_path / "checkpoint", *folders)
    assert len(set(messages)) == 1
    assert "rank 1: " in messages[0]
    assert "\n" not in messages[0]


def dropout_runs(dp: int, tp: int, student: Path, folder: Path) -> tuple[list[float], list[float]]:
    """The last two of four losses with dropout, without interruption and after a resume."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    config = engine_config(student, loss__kd_weight=0.0, loss__ce_weight=1.0)

    def engine() -> StudentEngine:
        new = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
        for module in new.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        return new

    def steps(student_engine: StudentEngine, count: int) -> list[float]:
        rows = token_rows([[document] for document in random_documents(4, seed=1)], WIDTH)
        batch = rank_batch(rows, world.dp_rank, dp)
        metrics = [student_engine.train_step(batch, no_targets) for _ in range(count)]
        return [step["train/nll_loss"].value for step in metrics if step]

    first = engine()
    steps(first, 2)
    first.save(folder)
    straight = steps(first, 2)
    resumed = engine()
    resumed.load(folder)
    return straight, steps(resumed, 2)


def test_dropout_resumes_with_the_straight_runs_random_numbers(tmp_path):
    student = write_tiny_model(tmp_path / "student", "gpt2")
    results = ranks.run_ranks(2, dropout_runs, 2, 1, student, tmp_path / "checkpoint")
    assert all(straight == resumed for straight, resumed in results)
    assert results[0][0] != results[1][0]
    # Tensor-parallel ranks must drop the same activations.
    (whole, _), (split, resumed) = (
        ranks.run_ranks(tp, dropout_runs, 1, tp, student, tmp_path / f"tp-{tp}")[0] for tp in (1, 2)
    )
    assert split == resumed == pytest.approx(whole, rel=1e-4)
