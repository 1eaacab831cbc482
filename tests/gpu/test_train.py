"""Whole runs with student and teacher on one GPU."""

import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Material
from tests.helpers.command import actor_pid, distill_rl, leftovers, running, series, until
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.cli]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "teacher", hidden=64, seed=1)
    write_tiny_model(root / "student", hidden=32, seed=2)
    write_tiny_model(root / "foreign", hidden=64, seed=4, tokenizer=tiny_tokenizer(600, seed=7))
    write_corpus(root / "corpus.jsonl", rows=80, seed=5)
    return Material(root)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deterministic_runs_repeat_at_any_depth(material, tmp_path, dtype):
    curves = []
    for depth in (0, 2):
        folder = tmp_path / str(depth)
        result = distill_rl(
            "train", "-c", material.config(folder), f"prefetch.depth={depth}", "train.deterministic=true",
            f"student.dtype={dtype}", f"teachers.0.dtype={dtype}", "teachers.0.wire_dtype=auto",
        )  # fmt: skip
        assert result.code == 0, result.err
        curves.append(series(folder / "runs" / "tiny", "train/kl_loss"))
        shares = [share for _, share in series(folder / "runs" / "tiny", "train/mfu")]
        assert len(shares) == 8, "the card's nominal rate is known"
        assert all(0 < share < 1 for share in shares)
    assert len(curves[0]) == 8
    assert curves[0] == curves[1]


@pytest.mark.parametrize("export", ["topk", "hidden", "logits"])
def test_the_transport_changes_no_bit(material, tmp_path, export):
    curves = {}
    for transport in ("cuda_ipc", "object_store", "shared_memory"):
        folder = tmp_path / transport
        result = distill_rl(
            "train", "-c", material.config(folder), f"transport={transport}", f"teachers.0.export={export}",
            "prefetch.depth=2", "train.deterministic=true", "student.dtype=bf16", "teachers.0.dtype=bf16",
        )  # fmt: skip
        assert result.code == 0, result.err
        assert f"transport {transport}: " in result.out
        run = folder / "runs" / "tiny"
        curves[transport] = [series(run, metric) for metric in ("train/loss", "train/kl_loss", "train/grad_norm")]
        assert [len(curve) for curve in curves[transport]] == [8, 8, 8]
    assert curves["cuda_ipc"] == curves["object_store"] == curves["shared_memory"]


@pytest.mark.parametrize("export", ["topk", "sampled"])
def test_a_run_from_a_store_keeps_every_bit(material, tmp_path, export):
    """Targets cross in fp16, and the reader is on the CPU."""
    common = (f"teachers.0.export={export}", "train.deterministic=true", "student.dtype=bf16", "teachers.0.dtype=bf16")
    store, config = tmp_path / "store", material.config(tmp_path)
    ended = distill_rl("capture", "-c", config, "--out", store, *common)
    assert ended.code == 0, ended.err
    curves = []
    for name, settings in (("live", ()), ("stored", ("teachers.0.backend=store", f"teachers.0.store={store}"))):
        ended = distill_rl("train", "-c", config, *common, *settings, f"run.name={name}")
        assert ended.code == 0, ended.err
        run = tmp_path / "runs" / name
        curves.append([series(run, metric) for metric in ("train/loss", "train/kl_loss", "train/grad_norm")])
    assert curves[0] == curves[1]


@pytest.mark.parametrize("worker", ["TeacherWorker", "StudentWorker"])
def test_a_killed_worker_leaves_no_ipc_counters(material, tmp_path, worker):
    """Torch counts the readers of a shared buffer in a file, which a process killed by SIGKILL leaves behind."""
    log, run = tmp_path / "log", tmp_path / "runs" / "tiny"
    config = material.config(tmp_path)
    with running("train", "-c", config, "transport=cuda_ipc", "train.steps=100000", log=log) as process:
        until(lambda: series(run, "train/loss") or process.poll() is not None, "the first step")
        assert process.poll() is None, log.read_text()
        pids = leftovers(process.pid)
        assert counters(pids)
        os.kill(actor_pid(process.pid, worker), signal.SIGKILL)
        # It is replaced, and the run goes on; without a checkpoint a student begins again.
        until(lambda: "restarting " in log.read_text() or process.poll() is not None, "the restart")
        done = len(series(run, "train/loss"))
        until(lambda: len(series(run, "train/loss")) > done + 5 or process.poll() is not None, "later steps")
        pids |= leftovers(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130, log.read_text()
    assert counters(pids) == []


def counters(pids):
    return [file.name for pid in pids for file in Path("/dev/shm").glob(f"torch_{pid}_*")]


def test_an_aligner_on_the_gpu_runs_the_dynamic_programme(material, tmp_path):
    runs = []
    for backend in ("numba", "cuda"):
        result = distill_rl(
            "train", "-c", material.config(tmp_path / backend, "foreign"), "train.deterministic=true", "train.steps=3",
            "aligner.method=dp", "aligner.num_gpus=0.1", f"aligner.dp.backend={backend}",
        )  # fmt: skip
        assert result.code == 0, result.err
        run, metrics = tmp_path / backend / "runs" / "tiny", (f"align/method/dp/{backend}", "train/loss")
        runs.append([series(run, metric) for metric in metrics])
    assert runs[0] == runs[1]
    assert runs[0][0][0] == (1, 8)
