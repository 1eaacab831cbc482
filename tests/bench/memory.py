"""Peak memory of workers: estimate against measurement.

Writes a random Llama and a random mixture of experts, large enough that their weights dominate, to a temporary folder. Each case runs a teacher or a
student engine in separate processes for three steps of full rows, and compares the peak resident size (VmHWM) of the
largest process with the estimate of `config/memory/`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_rl.config.facts import ModelFacts
from distill_rl.config.memory import WorkerMemory, student_memory, teacher_memory
from distill_rl.config.schema import Config, DataConfig, LoraConfig, ParallelConfig, StudentConfig, TeacherConfig
from distill_rl.models.classes import survey
from distill_rl.types import RankBatch, TokenRows
from tests.bench import harness, record

if TYPE_CHECKING:
    from distill_rl.losses import TopKLogprobs

TOLERANCE = 0.3
"""Largest allowed difference, as a fraction of the measured peak."""
STEPS = 3
TOP_K = 64
SHAPE = {
    "vocab_size": 16_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
"""Of the Llama: 51.8M parameters."""
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
    "head_dim": 64,
    "num_hidden_layers": 6,
}
"""What the mixture, a Qwen3-MoE, has besides: 73.0M parameters, of which a token visits a part."""
_WORKER = "import json, sys; from tests.bench.memory import work; work(*json.loads(sys.argv[1]))"


@dataclass(frozen=True)
class Case:
    """A worker to measure: a student or a teacher engine (`role`), its layout, dtype and rows."""

    name: str
    role: str
    dtype: str = "fp32"
    dp: int = 1
    tp: int = 1
    sp: int = 1
    rows: int = 2
    """Micro-batch size."""
    length: int = 256
    activation_checkpointing: bool = False
    fused: bool = False
    """The loss makes the logits itself."""
    lora: bool = False
    """Adapters of rank 16 are trained, and nothing else."""
    quantization: str | None = None
    """Of a teacher's weights, or of those beside a student's adapters."""
    first_length: int | None = None
    """Of a student: length of the rows of as many steps before, whose peak is measured first; None: there are none."""
    mixture: bool = False
    """The model is the mixture of experts."""

    @property
    def ranks(self) -> int:
        return self.dp * self.sp * self.tp

    @property
    def model(self) -> str:
        """Name of the model's folder."""
        return "mixture" if self.mixture else "llama"


CASES = (
    Case("student fp32", "student"),
    Case("student bf16", "student", dtype="bf16"),
    Case("student fp32, dp 2", "student", dp=2),
    Case("student fp32, tp 2", "student", tp=2),
    Case("student fp32, 4 rows of 512", "student", rows=4, length=512),
    Case("student fp32, 4 rows of 512, checkpointing", "student", rows=4, length=512, activation_checkpointing=True),
    Case("student fp32, 4 rows of 512, fused loss", "student", rows=4, length=512, fused=True),
    Case("student bf16, LoRA", "student", dtype="bf16", lora=True),
    Case("student bf16, LoRA beside int4", "student", dtype="bf16", lora=True, quantization="int4"),
    Case("student bf16, LoRA beside int4, dp 2", "student", dtype="bf16", dp=2, lora=True, quantization="int4"),
    Case("student fp32, mixture of experts", "student", mixture=True),
    Case("teacher fp32", "teacher"),
    Case("teacher bf16", "teacher", dtype="bf16"),
    Case("teacher fp32, tp 2", "teacher", tp=2),
    Case("teacher fp32, 4 rows of 512", "teacher", rows=4, length=512),
    Case("teacher fp32, int8", "teacher", quantization="int8"),
    Case("teacher bf16, int4", "teacher", dtype="bf16", quantization="int4"),
)


def configuration(case: Case, model: Path) -> Config:
    """The configuration of a case, with KD and CE. A global batch is two micro-batches per data-parallel rank.

    Args:
        case: sets layout, dtype and rows.
        model: folder of the model that is both student and teacher.
    """
    parallel = ParallelConfig(dp=case.dp, sp=case.sp, tp=case.tp)
    student = StudentConfig(
        model=str(model),
        dtype=case.dtype,  # type: ignore[arg-type]
        parallel=parallel,
        activation_checkpointing=case.activation_checkpointing,
        lora=LoraConfig() if case.lora else None,
        quantization=case.quantization if case.lora else None,  # type: ignore[arg-type]
    )
    teacher = TeacherConfig(
        model=str(model),
        dtype=case.dtype,  # type: ignore[arg-type]
        quantization=case.quantization,  # type: ignore[arg-type]
        parallel=parallel,
    )
    config = Config(student=student, teachers=[teacher], data=DataConfig(max_length=case.length))
    config.loss.top_k = TOP_K
    config.loss.ce_weight, config.loss.fused = 0.5, "on" if case.fused else "off"
    config.train.micro_batch_size = case.rows
    config.train.global_batch_size = 2 * case.rows * case.dp
    return config


def estimate(case: Case, config: Config, facts: ModelFacts) -> WorkerMemory:
    """The estimate of `distill-rl check` for the worker that the case measures."""
    facts = replace(facts, adapters=survey(Path(config.student.model), config.student))
    if case.role == "student":
        return student_memory(config, facts)
    return teacher_memory(config, config.teachers[0], facts)


def write_model(folder: Path, shape: Mapping[str, int | bool] = SHAPE, family: str = "llama") -> ModelFacts:
    """Writes a random model of a shape in fp32 to `folder`; returns its facts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from distill_rl.models.files import read_model_facts

    config = AutoConfig.for_model(family, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return read_model_facts(folder, config)


def write_models(folder: Path) -> dict[str, ModelFacts]:
    """Writes both models into `folder`; returns their facts, by the name of a model's folder."""
    mixture = write_model(folder / "mixture", SHAPE | EXPERTS, "qwen3_moe")
    return {"llama": write_model(folder / "llama"), "mixture": mixture}


def measure(case: Case, model: Path) -> int:
    """Runs a case, one process per rank, and returns the peak resident bytes of its largest process.

    Raises:
        SystemExit: a process failed.
    """
    return peaks(case, model)[-1]


def peaks(case: Case, model: Path) -> list[int]:
    """As `measure`, but with a `first_length` two peaks: after the steps with these rows, and at the end."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(case.ranks):
            arguments = json.dumps([asdict(case), rank, str(model), f"{folder}/store"])
            command = [sys.executable, "-c", _WORKER, arguments]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{case.name}: a process failed; see its error above")
    of_ranks = [[int(word) for word in output.splitlines()[-1].split()] for output in outputs]
    return [max(each) for each in zip(*of_ranks, strict=True)]


def work(fields: dict[str, Any], rank: int, model: str, store: str) -> None:
    """Runs `STEPS` steps of one rank of a case; the last line it prints has the peak resident bytes of this process.

    Args:
        fields: of the `Case`.
        model: folder of the model.
        store: path of the file by which the ranks of a case find each other.
    """
    import torch

    from distill_rl.parallel.mesh import close_world, open_world
    from distill_rl.student.engine import StudentEngine
    from distill_rl.teacher.engine import TeacherEngine

    torch.set_num_threads(1)
    case = Case(**fields)
    config = configuration(case, Path(model))
    vocabulary = json.loads(Path(model, "config.json").read_text())["vocab_size"]
    rendezvous = torch.distributed.FileStore(store, case.ranks) if case.ranks > 1 else None
    world = open_world(rank=rank, dp=case.dp, sp=case.sp, tp=case.tp, store=rendezvous, timeout_s=300)
    batch, first = _batch(case, world.dp_rank, vocabulary), ""
    if case.role == "student":
        student = StudentEngine(config, world, vocabulary_size=vocabulary, total_steps=STEPS)
        if case.first_length is not None:
            before = replace(case, length=case.first_length)
            for _ in range(STEPS):
                student.train_step(_batch(before, world.dp_rank, vocabulary), _targets(before, vocabulary))
            first = f"{record.peak_bytes()} "
        for _ in range(STEPS):
            student.train_step(batch, _targets(case, vocabulary))
    else:
        teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=vocabulary)
        for _ in range(STEPS):
            for _, tensors in teacher.forward(batch):
                del tensors
    close_world(world)
    print(f"{first}{record.peak_bytes()}")


def _batch(case: Case, dp_rank: int, vocabulary: int) -> RankBatch:
    """A rank's two micro-batches of full rows of random ids, with every token labelled; always the same for a rank."""
    draw = np.random.default_rng(dp_rank)
    shape = (2 * case.rows, case.length)
    ids, labels = (draw.integers(0, vocabulary, shape).astype(np.int32) for _ in range(2))
    positions = np.broadcast_to(np.arange(case.length, dtype=np.int32), shape).copy()
    return RankBatch(0, dp_rank * shape[0], TokenRows(ids, labels, positions), num_labels=case.dp * ids.size)


def _targets(case: Case, vocabulary: int) -> Any:
    """Returns the `targets` argument of `train_step`: makes a context manager that yields new random top-k targets."""
    import torch

    from distill_rl.losses import TopKLogprobs

    @contextmanager
    def source(first_row: int, num_rows: int) -> Iterator[list[TopKLogprobs]]:
        tokens = num_rows * case.length
        logprobs = torch.log_softmax(torch.randn(tokens, TOP_K + 1), dim=-1)
        apart = vocabulary // TOP_K
        ids = torch.arange(TOP_K, dtype=torch.int32) * apart + torch.randint(0, apart, (tokens, 1), dtype=torch.int32)
        tensors = {
            "ids": ids,
            "logprobs": logprobs[:, :TOP_K].contiguous(),
            "rest_logprob": logprobs[:, TOP_K].contiguous(),
            "label_logprob": logprobs[:, 0].contiguous(),
        }
        yield [TopKLogprobs.from_tensors(tensors, 1.0)]

    return source


def compare(folder: Path) -> dict[str, Any]:
    """Runs all cases and prints a line for each; returns estimates, peaks and the largest difference."""
    rows: list[dict[str, Any]] = []
    facts = write_models(folder)
    for case in CASES:
        model = folder / case.model
        expected = estimate(case, configuration(case, model), facts[case.model])
        measured = measure(case, model)
        ratio = round(expected.total / measured, 3)
        print(f"{case.name:<46} estimate over measurement {ratio:.2f}", flush=True)
        row = {"case": asdict(case), "estimate": expected.total, "parts": expected.parts, "measured": measured}
        rows.append({**row, "ratio": ratio})
    worst = max(abs(row["ratio"] - 1) for row in rows)
    parameters = {name: known.parameters for name, known in facts.items()}
    return {"parameters": parameters, "tolerance": TOLERANCE, "worst": round(worst, 3), "cases": rows}


def verdict(figures: dict[str, Any]) -> list[str]:
    """One line if the largest difference between estimate and measurement exceeds `TOLERANCE`; otherwise empty."""
    worst = figures["worst"]
    return harness.missed((worst > TOLERANCE, f"largest difference {worst:.0%}; must be at most {TOLERANCE:.0%}"))


main = harness.program("memory", compare, verdict, columns=("case.name", "estimate", "measured", "ratio"))

if __name__ == "__main__":
    sys.exit(main())
