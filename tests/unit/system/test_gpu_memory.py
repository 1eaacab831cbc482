"""CUDA out of memory as one line, in every phase. PyTorch's error is raised by the tests, with its allocator's text."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from distill_rl.errors import GpuMemoryError, NumericsError
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.executor import LocalExecutor, SuiteTask
from distill_rl.evals.suites.base import Item
from distill_rl.student.engine import StudentEngine
from distill_rl.system.gpu_memory import REMEDIES, gpu_phase, is_out_of_memory
from distill_rl.teacher.engine import TeacherEngine
from tests.helpers.engines import engine_config, engine_targets, no_targets, random_documents, rank_batch, token_rows
from tests.helpers.models import write_tiny_model

TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 72.31 GiB memory in use. 80.00 GiB allowed; Of the allocated "
    "memory 70.10 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
    "documentation for Memory Management\n(https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
AMOUNTS = (
    "2.00 GiB asked, 70.10 GiB held and 1.50 GiB more reserved by PyTorch, 512.00 MiB free of 139.72 GiB, "
    "80.00 GiB allowed to this process"
)
VOCABULARY, WIDTH = 320, 24


def run_out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(TEXT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(root / name, "llama", seed=seed) for seed, name in enumerate(("student", "teacher"))}


@pytest.fixture
def student(world, folders) -> StudentEngine:
    config = engine_config(folders["student"], [])
    config.loss.kd_weight, config.loss.ce_weight = 0.0, 1.0
    return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)


@pytest.fixture
def batch():
    return rank_batch(token_rows([[document] for document in random_documents(2, seed=3)], WIDTH))


def line(caught: pytest.ExceptionInfo[GpuMemoryError]) -> str:
    unpickled = pickle.loads(pickle.dumps(caught.value))
    assert type(unpickled) is GpuMemoryError
    assert str(unpickled) == str(caught.value)
    return str(unpickled)


@pytest.mark.parametrize("phase", REMEDIES)
def test_every_phase_names_amounts_and_settings(phase) -> None:
    with pytest.raises(GpuMemoryError) as caught, gpu_phase(phase):
        run_out_of_memory()
    assert line(caught) == f"{phase}: needs more GPU memory; got {AMOUNTS}; {REMEDIES[phase]}"
    assert "\n" not in line(caught)


def test_innermost_phase_is_named() -> None:
    with pytest.raises(GpuMemoryError, match=r"^backward: "), gpu_phase("forward"), gpu_phase("backward"):
        run_out_of_memory()


def test_other_errors_pass_unchanged() -> None:
    for error in (RuntimeError("shapes do not fit"), NumericsError("loss"), MemoryError()):
        with pytest.raises(type(error)) as caught, gpu_phase("forward"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("text", [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
])  # fmt: skip
def test_errors_of_other_libraries_are_recognised(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    with pytest.raises(GpuMemoryError) as caught, gpu_phase("forward"):
        raise RuntimeError(text)
    assert text.splitlines()[0] in line(caught)


def test_forward_pass_names_its_phase(student, batch) -> None:
    student.model.register_forward_hook(run_out_of_memory)
    with pytest.raises(GpuMemoryError, match=r"^rank 0, forward: .*lower train\.micro_batch_size"):
        student.forward_backward(batch, no_targets)


def test_backward_pass_names_its_phase(student, batch) -> None:
    def in_backward(module: object, arguments: object, output: Any) -> None:
        output.logits.register_hook(run_out_of_memory)

    student.model.register_forward_hook(in_backward)
    with pytest.raises(GpuMemoryError, match=r"^rank 0, backward: .*student\.activation_checkpointing=true"):
        student.forward_backward(batch, no_targets)


def test_optimizer_step_names_its_phase(student, batch) -> None:
    student.optimizer.register_step_pre_hook(run_out_of_memory)
    with pytest.raises(GpuMemoryError, match=r"^rank 0, optimizer step: .*raise student\.parallel\.dp"):
        student.train_step(batch, no_targets)


def test_loading_a_model_names_its_phase(world, folders, monkeypatch) -> None:
    config = engine_config(folders["student"], [folders["teacher"]])
    monkeypatch.setattr(torch.nn.Module, "to_empty", run_out_of_memory)
    with pytest.raises(GpuMemoryError, match=r"^rank 0, student load: .*ray\.placement=disaggregated"):
        StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
    with pytest.raises(GpuMemoryError, match=r"^rank 0, teacher load: .*teachers\[\]\.parallel\.tp"):
        TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)


def test_teacher_forward_pass_names_its_phase(world, folders, batch) -> None:
    config = engine_config(folders["student"], [folders["teacher"]])
    engine = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    engine.model.get_input_embeddings().register_forward_hook(run_out_of_memory)
    with pytest.raises(GpuMemoryError, match=r"teacher forward: .*lower teachers\[\]\.micro_batch_size"):
        engine_targets(engine, batch)


@pytest.mark.parametrize("choose", [True, False])
def test_evaluation_names_its_phase(folders, choose: bool) -> None:
    executor = LocalExecutor()
    executor.load(folders["student"], "hf", Settings(batch_size=2))
    executor._backend.model.register_forward_hook(run_out_of_memory)
    item = Item("0", "ka", "lo", choices=("lo", "mi")) if choose else Item("0", "ka", "lo")
    with pytest.raises(GpuMemoryError, match=r"evaluation: .*evaluate\.batch_size .*raise evaluate\.gpu_share"):
        list(executor.outputs(SuiteTask(choose, max_new_tokens=2), [item]))
