"""Every figure of a run, recomputed from its texts and models by a plain loop in torch, after the definitions in docs/metrics.md.

Only the order of the documents is asked of the loader. Runs have a step that is skipped (the teacher's weights of one rare token
are NaN), in both epochs, and end with a short batch.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill_rl.config.load import load_config
from distill_rl.observe.metrics import described
from distill_rl.run.job import prepare
from distill_rl.run.opened import open_rows
from distill_rl.run.run_directory import paths_of
from tests.helpers.command import distill_rl, records
from tests.helpers.corpus import corpus_rows
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite

pytestmark = pytest.mark.cli

K, CE_WEIGHT, PEAK, STEPS, LENGTH = 16, 0.5, 0.01, 10, 64
LEAST, WARMUP, DECAY, BETAS, EPS = 0.1, 2, 0.1, (0.9, 0.95), 1e-8
CONFIG = """\
student: {{model: {root}/student, dtype: fp32}}
teachers: [{{name: big, model: {root}/poisoned, dtype: fp32, wire_dtype: fp32}}]
data: {{path: {root}/train.jsonl, max_length: 64, long_documents: cut, validation: {{path: {root}/held-out.jsonl}}}}
loss: {{top_k: 16, kd_weight: 1.0, ce_weight: 0.5}}
optimizer: {{lr: 0.01, weight_decay: 0.1}}
schedule: {{warmup_steps: 2, steps: 10, min_lr_ratio: 0.1}}
train: {{epochs: 2, steps: 10, global_batch_size: 8, micro_batch_size: 2}}
evaluate: {{every: 5, suites: [{root}/own.py], data: {root}}}
observe: {{tensorboard: false}}
checkpoint: {{every: 5}}
run: {{name: figures, dir: {runs}, seed: 3}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("figures")
    write_tiny_model(root / "student", hidden=16, seed=2)
    poisoned = write_tiny_model(root / "poisoned", hidden=32, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(root / "student")
    rows, held_out = corpus_rows(38, seed=5), corpus_rows(12, seed=6)
    used = {token for row in (*rows, *held_out) for token in tokenizer(row["text"])["input_ids"]}
    sign = next(chr(code) for code in range(33, 127) if not used & set(tokenizer(chr(code) * 4)["input_ids"]))
    rows[20]["text"] = sign * 4 + rows[20]["text"][:20]
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][sorted(set(tokenizer(sign * 4)["input_ids"]))] = torch.nan
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    for name, table in (("train", rows), ("held-out", held_out)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    write_suite(root, count=6, max_new_tokens=8)
    return root


@dataclass
class PlainLoop:
    """What a run computes, one document after the other, and all that is recorded of it, by step."""

    root: Path
    dense: bool
    """The teacher sends all logits, not the top k."""
    temperature: float

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.root / "student")
        self.student, self.teacher = (
            AutoModelForCausalLM.from_pretrained(self.root / name, dtype=torch.float32)
            for name in ("student", "poisoned")
        )
        decayed = [each for name, each in self.student.named_parameters() if "norm" not in name]
        others = [each for name, each in self.student.named_parameters() if "norm" in name]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, eps=EPS)
        self.skipped = 0

    def ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]

    def kd(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """T² · KL of the teacher from the student by token, all columns beyond the top k as one; the probability of the top k."""
        p, q = (logits / self.temperature for logits in (teacher, student))
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        mass = torch.ones(len(p))
        if not self.dense:
            top = p.topk(K).indices
            mass = p.gather(1, top).exp().sum(1)
            p, q = (with_rest(each, top) for each in (p, q))
        return self.temperature**2 * (p.exp() * (p - q)).sum(-1), mass

    def document(self, text: str) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """Logits of student and teacher, labels, all ids, and whether the text is cut."""
        ids = torch.tensor(self.ids(text))
        cut = len(ids) > LENGTH
        ids = ids[:LENGTH]
        with torch.no_grad():
            teacher = self.teacher(ids[None, :-1]).logits[0]
        return self.student(ids[None, :-1]).logits[0], teacher, ids[1:], ids, cut

    def step(self, number: int, texts: list[str]) -> dict[str, float]:
        read = [self.document(text) for text in texts]
        student, teacher, labels = (torch.cat([each[part] for each in read]) for part in range(3))
        kd, mass = self.kd(student, teacher)
        ce = cross_entropy(student, labels)
        loss = kd.mean() + CE_WEIGHT * ce
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        x = max(0, number - 1 - WARMUP) / (STEPS - WARMUP)
        rate = PEAK * (number / WARMUP if number <= WARMUP else LEAST + (1 - LEAST) * (1 + math.cos(math.pi * x)) / 2)
        if skipped := not math.isfinite(loss.item()):
            self.skipped += 1
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        figures = {
            "train/loss": loss.item(),
            "train/kl_loss": kd.mean().item(),
            "train/nll_loss": ce.item(),
            "train/teacher_mass": mass.mean().item(),
            "train/tokens": len(labels),
            "train/grad_norm": norm.item(),
            "train/lr": rate,
            "train/skipped": float(skipped),
            "align/documents": len(texts),
            "align/tokens": sum(len(each[3]) for each in read),
            "align/truncated": sum(each[4] for each in read),
            "align/split": 0,
            "align/unlabelled": 0,
            "align/labelled": len(labels) / sum(len(each[3]) for each in read),
        }
        return figures | ({"faults/skipped_steps": self.skipped} if self.skipped else {})

    @torch.no_grad()
    def validate(self, texts: list[str]) -> dict[str, float]:
        read = [self.document(text) for text in texts]
        student, teacher, labels = (torch.cat([each[part] for each in read]) for part in range(3))
        p, q = teacher.log_softmax(-1), student.log_softmax(-1)
        known = {
            "validation/kl_loss": self.kd(student, teacher)[0].mean(),
            "validation/nll_loss": cross_entropy(student, labels),
            "validation/top1_agreement": (student.argmax(-1) == teacher.argmax(-1)).float().mean(),
            "validation/student_entropy": -(q.exp() * q).sum(-1).mean(),
        }
        shared, entropy = torch.minimum(p, q).exp(), -(p.exp() * p)
        exact = {"acceptance": shared.sum(-1).mean(), "teacher_entropy": entropy.sum(-1).mean()}
        known |= {f"validation/{name}": value for name, value in exact.items()}
        return {name: value.item() for name, value in known.items()}

    def score(self) -> float:
        """Of the suite: the share of greedy completions with an even number of characters."""
        even = 0
        for number in range(6):
            ids = self.tokenizer(f"question {number * 7919 % 1000} is", return_tensors="pt")
            made = self.student.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
            even += len(self.tokenizer.decode(made, skip_special_tokens=True)) % 2 == 0
        return even / 6


def with_rest(logprobs: Tensor, top: Tensor) -> Tensor:
    """The columns of the top k, and one for all others together."""
    rest = logprobs.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, top), rest], 1)


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def batches(config: Path, root: Path) -> Iterator[list[str]]:
    loaded, rows = load_config(config), texts(root / "train.jsonl")
    for batch in prepare(open_rows(loaded), paths_of(loaded)).loader():
        yield [rows[number] for number in batch.row_numbers]


@pytest.fixture(scope="module", params=["topk", "logits"])
def run(request, root, cluster, tmp_path_factory) -> tuple[Path, PlainLoop, dict[int, dict[str, float]], float]:
    """A run, the plain loop of it, what this found by step, and the score of its student.

    The top k: records of single steps. All logits: T is 2, and records of up to seven steps, in a run that was stopped after its third.
    """
    dense = request.param == "logits"
    folder = tmp_path_factory.mktemp(request.param)
    config = folder / "figures.yaml"
    config.write_text(CONFIG.format(root=root, runs=folder / "runs"))
    settings = [f"teachers.0.export={request.param}", *(["observe.every=7", "loss.temperature=2"] if dense else [])]
    starts = [("train.steps=3", "train.epochs=null"), ("--resume", "latest")] if dense else [()]
    for more in starts:
        ended = distill_rl("train", "-c", config, *settings, *more, cluster=cluster)
        assert ended.code == 0, ended.err
    loop, found = PlainLoop(root, dense, 2.0 if dense else 1.0), {}
    config.write_text(config.read_text().replace(str(folder / "runs"), str(folder / "order")))
    for number, batch in enumerate(batches(config, root), start=1):
        found[number] = loop.step(number, batch)
        if number % 5 == 0:
            found[number] |= loop.validate(texts(root / "held-out.jsonl"))
    assert list(found) == list(range(1, STEPS + 1))
    assert [len(batch) for batch in batches(config, root)] == [8] * 9 + [4]
    return folder / "runs" / "figures", loop, found, loop.score()


def reduced(name: str, steps: list[dict[str, float]]) -> float:
    """A metric of several steps, as the table of docs/metrics.md reduces it."""
    values = [(step[name], step) for step in steps if name in step]
    match described(name).reduction:
        case "sum":
            return sum(value for value, _ in values)
        case "max":
            return max(value for value, _ in values)
        case "last":
            return values[-1][0]
    weight = {"align/labelled": "align/tokens"}.get(name, "train/tokens")
    finite = [(value, step[weight]) for value, step in values if math.isfinite(value)]
    if not finite:
        return math.nan
    return sum(value * count for value, count in finite) / sum(count for _, count in finite)


def test_every_record_is_what_a_plain_loop_finds(run):
    folder, loop, found, _ = run
    recorded = [record for record in records(folder) if "train/steps" in record]
    assert [record["step"] for record in recorded] == ([3, 5, 7, 10] if loop.dense else list(range(1, STEPS + 1)))
    assert sum(step["train/skipped"] for step in found.values()) == 2
    first, compared = 1, set()
    for record in recorded:
        steps = [found[number] for number in range(first, record["step"] + 1)]
        first = record["step"] + 1
        assert record["train/steps"] == len(steps)
        for name in steps[-1].keys() - {name for name in steps[-1] if name.startswith(("validation/", "faults/"))}:
            expected = reduced(name, steps)
            if loop.dense and name == "train/teacher_mass":
                assert record[name] == pytest.approx(1) or not math.isfinite(expected)
            elif math.isfinite(expected):
                assert record[name] == pytest.approx(expected, rel=2e-4), (name, record["step"])
            else:
                assert record[name] is None, (name, record["step"])
            compared.add(name)
        seconds = record["timing/step"] * len(steps)
        for rate, tokens in (("train", "train/tokens"), ("align", "align/tokens")):
            assert record[f"{rate}/tokens_per_second"] == pytest.approx(record[tokens] / seconds)
        parts = ("wait_aligner", "wait_teachers", "student", "other")
        assert sum(record[f"timing/{part}"] for part in parts) == pytest.approx(record["timing/step"])
        assert record["transport/teacher_wait"] == pytest.approx(record["timing/wait_teachers"] / record["timing/step"])
        assert record["busy/student"] == pytest.approx(record["timing/student/step"] / record["timing/step"])
        positions = record["transport/bytes"] / record["transport/bytes_per_token"]
        assert record["align/efficiency"] == pytest.approx(record["align/tokens"] / positions, rel=0.1)
    assert len(compared) == 14


def test_validation_is_what_a_plain_loop_finds(run):
    folder, _, found, _ = run
    kinds = 0
    for record in records(folder):
        for name, expected in found.get(record["step"], {}).items():
            if name.startswith("validation/") and name in record:
                assert record[name] == pytest.approx(expected, rel=5e-4), (name, record["step"])
                kinds += 1
            elif f"{name}_low" in record:
                assert record[f"{name}_low"] < expected < record[f"{name}_high"], (name, record["step"])
                kinds += 1
    assert kinds == 2 * 6


def test_the_report_the_card_and_the_score_say_the_same(run):
    folder, loop, found, score = run
    last = found[STEPS]
    page = html.unescape(re.sub(r"<[^>]+>", " ", (folder / "report.html").read_text()))
    card = (folder / "export" / "README.md").read_text()
    trained, read = (sum(step[name] for step in found.values()) for name in ("train/tokens", "align/tokens"))
    for label, value in (
        ("tokens, trained", f"{trained:,}"),
        ("tokens, all", f"{read:,}"),
        ("top-1 agreement, validation", f"{last['validation/top1_agreement']:.1%}"),
        ("steps skipped", "2"),
    ):
        assert re.search(rf"{re.escape(label)}\s+{re.escape(value)}", page), (label, value)
    shown = {"validation/kl\\_loss": last["validation/kl_loss"], "eval/own": score}
    for name, value in shown.items():
        (found_there,) = re.findall(rf"^\| {re.escape(name)} \| ([\d.]+) \|$", card, re.MULTILINE)
        assert float(found_there) == pytest.approx(value, abs=2e-4), name
    compared = "the whole vocabulary" if loop.dense else f"top {K}"
    assert f"`1 x KD (forward_kl, {compared}, T = {loop.temperature:g}) + {CE_WEIGHT:g} x CE`" in card
    assert json.loads((folder / "evals" / "student" / "own.json").read_text())["score"] == pytest.approx(score)
    assert [record["eval/own"] for record in records(folder) if "eval/own" in record][-1] == pytest.approx(score)
