"""Whole runs from the command line: what they write, and which settings must not change a bit of it."""

import importlib.metadata
import json
import math
import os
import shutil
import socket
from operator import mul
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill_rl.config.derive import sizes
from distill_rl.observe.metrics import described
from distill_rl.preflight import gather
from distill_rl.system.environment import commit
from distill_rl.system.files import write_json_lines
from tests.helpers.command import distill_rl, distill_rl_in_process, records, series
from tests.helpers.corpus import corpus_rows
from tests.helpers.zoo import write_family
from tests.unit.student.test_damage import replace_metadata, seal

pytestmark = pytest.mark.cli

LOSSES = ("train/kl_loss", "train/nll_loss", "train/loss", "train/grad_norm")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def assert_equal_runs(run: Path, other: Path) -> None:
    for metric in LOSSES:
        assert series(run, metric) == series(other, metric)
        assert len(series(run, metric)) == 8
    assert_equal_weights(run, other)


def assert_equal_weights(run: Path, other: Path) -> None:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_equal_but_for_sums(run: Path, other: Path) -> None:
    """A ring smaller than a batch trains in sub-batches, and their means are summed in another order in fp64."""
    assert_equal_weights(run, other)
    for metric in LOSSES:
        ours, theirs = ([value for _, value in series(folder, metric)] for folder in (run, other))
        assert ours == pytest.approx(theirs, rel=1e-14, abs=0)
    ours, theirs = (series(folder, "validation/kl_loss")[-1][1] for folder in (run, other))
    assert ours == pytest.approx(theirs, rel=1e-14, abs=0)


def shards(run: Path, step: int) -> dict[str, str]:
    """sha256 of the files that the student's ranks saved: weights and optimizer state."""
    manifest = json.loads((run / "checkpoints" / f"step-{step}" / "MANIFEST.json").read_text())
    return {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".distcp")}


def test_a_run_leaves_the_documented_files(straight):
    names = {path.name for path in straight.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "logs", "checkpoints", "export", "report.html"} <= names
    assert sorted(path.name for path in (straight / "checkpoints").iterdir()) == ["step-4", "step-8"]
    assert [step for step, _ in series(straight, "train/kl_loss")] == list(range(1, 9))
    assert [step for step, _ in series(straight, "validation/kl_loss")] == [4, 8]
    assert [step for step, _ in series(straight, "timing/save")] == [5, 8], "saved after step 4, beside the training"
    assert {"timing/step", "timing/student", "transport/bytes", "train/tokens_per_second", "align/documents"} <= set(
        records(straight)[0]
    )


def test_validation_measures_agreement_with_the_teacher(straight):
    low, high = (series(straight, f"validation/acceptance_{bound}") for bound in ("low", "high"))
    assert [step for step, _ in low] == [4, 8]
    assert all(0 < least < most < 1 for (_, least), (_, most) in zip(low, high))
    assert not series(straight, "validation/acceptance"), "16 of 320 tokens tell no more"
    assert [step for step, share in series(straight, "validation/top1_agreement") if 0 <= share <= 1] == [4, 8]
    assert not series(straight, "train/acceptance")


def test_every_worker_reports_how_busy_it_was_and_its_memory(straight):
    for worker in ("student", "big", "aligner"):
        assert all(share > 0 for _, share in series(straight, f"busy/{worker}"))
        assert 0.01 < series(straight, f"memory/{worker}")[-1][1] < 24
    assert {value for _, value in series(straight, "align/bad_rows")} == {0}
    assert all(0 < share <= 1 for _, share in series(straight, "align/labelled"))


def test_memory_is_estimated_as_it_is_measured(straight):
    """Of models so small that a process is most of it."""
    checked = gather(straight / "config.yaml")
    estimated = {each.worker: each.total / 2**30 for each in sizes(checked.config, checked.facts).memory}
    for worker in ("student", "big"):
        measured = series(straight, f"memory/{worker}")[-1][1]
        # A process that is a fork does not count what it has not touched since.
        assert 0.93 < estimated[worker] / measured < 1.2, (worker, estimated[worker], measured)


def test_environment_of_the_attempt_is_recorded(straight):
    kept = json.loads((straight / "logs" / "attempt_1" / "environment.json").read_text())
    assert kept["commit"] == commit()["commit"]
    assert kept["packages"]["torch"] == importlib.metadata.version("torch")
    assert kept["host"] == socket.gethostname()
    assert kept["cores"] == os.cpu_count()
    assert len(kept["nodes"]) == 1
    assert kept["nodes"][0].endswith(" CPUs")


def test_training_lowers_the_validation_loss(straight):
    kd, ce = dict(series(straight, "validation/kl_loss")), dict(series(straight, "validation/nll_loss"))
    assert kd[8] + 0.5 * ce[8] < kd[4] + 0.5 * ce[4]


def test_the_export_loads_and_its_card_names_the_teacher(straight, material):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(straight / "export")
    tokenizer = AutoTokenizer.from_pretrained(straight / "export")
    ids = tokenizer("kalomi ter", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    card = (straight / "export" / "README.md").read_text()
    assert str(material.root / "teacher").replace("_", "") in card.replace("_", "").replace("\\", "")
    assert f"{series(straight, 'validation/kl_loss')[-1][1]:.4f}" in card


@pytest.fixture(scope="module")
def small_ring(material, cluster, tmp_path_factory) -> Path:
    """The straight run with a ring smaller than a batch, which keeps the checkpoint with the best agreement."""
    folder = tmp_path_factory.mktemp("small-ring")
    settings = ("prefetch.depth=2", "transport=shared_memory", "prefetch.slots=2", "evaluate.every=1")
    best = "checkpoint={every: 1, keep_last: 1, keep_best: 2, best_by: validation/top1_agreement}"
    ended = distill_rl("train", "-c", material.config(folder), *settings, best, cluster=cluster)
    assert ended.code == 0, ended.err
    return folder / "runs" / "tiny"


def test_a_ring_smaller_than_a_batch_changes_no_weight(straight, small_ring):
    assert_equal_but_for_sums(small_ring, straight)


def test_checkpoints_with_the_best_agreement_are_kept(small_ring):
    shares = dict(series(small_ring, "validation/top1_agreement"))
    assert list(shares) == list(range(1, 9))
    best = sorted(shares, key=lambda step: (-shares[step], step))[:2]
    kept = {int(path.name.removeprefix("step-")) for path in (small_ring / "checkpoints").glob("step-*")}
    assert kept == {*best, 8}
    assert min(shares[step] for step in best) > min(shares.values()), "the order would not show"


def boxes(run: Path, call: str, row: str) -> list[tuple[float, float]]:
    """(start, end) of one worker's calls of a method, from the run's timeline."""
    events = json.loads((run / "logs" / "latest" / "timeline.json").read_text())["traceEvents"]
    rows = {event["args"]["name"]: (event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    calls = [event for event in events if event["name"] == call and (event["pid"], event["tid"]) == rows[row]]
    return [(event["ts"], event["ts"] + event["dur"]) for event in calls]


def overlap(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> bool:
    return any(start < end and begin < stop for start, stop in some for begin, end in others)


def test_the_timeline_and_the_time_table_show_the_workers(straight):
    student, teacher = boxes(straight, "train", "student-dp0-tp0"), boxes(straight, "forward", "big/dp0-tp0")
    # Documents that are split make more rows than a sub-batch has, which is as many as a batch has documents.
    batch_size = OmegaConf.load(straight / "config.yaml").train.global_batch_size
    calls = sum(math.ceil(rows / batch_size) for _, rows in series(straight, "align/rows"))
    assert calls > 8
    assert len(student) == calls
    assert len(teacher) >= calls + 2, "those of two validation passes, too"
    assert len(boxes(straight, "build", "aligner-0")) == 8 + 2
    assert overlap(student, teacher), "the teacher never worked while the student did"
    log = (straight / "logs" / "latest" / "driver.log").read_text()
    assert "where the time went, steps 1 to 4" in log
    assert "where the time went, steps 5 to 8" in log
    assert records(straight)[0]["transport/bytes_per_token"] == 16 * 8 + 8


def test_resume_refuses_another_teacher_order_or_data(straight, material):
    config = straight.parent.parent / "tiny.yaml"
    ended = distill_rl_in_process(
        "train", "-c", config, "--resume", "train.steps=9", "run.seed=4", f"teachers.0.model={material.root}/student",
        "data.validation.fraction=0.2",
    )  # fmt: skip
    assert ended.code == 2
    assert len(ended.errors) == 3
    for name in ("teacher big", "order of the data", "data of this run"):
        assert any(name in line for line in ended.errors), ended.errors


def test_any_checkpoint_can_be_exported_later(straight, tmp_path):
    ended = distill_rl_in_process("export", straight, "--checkpoint", "8", "--out", tmp_path / "again")
    assert ended.code == 0, ended.err
    ours, theirs = load_file(tmp_path / "again" / "model.safetensors"), weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert distill_rl_in_process("export", straight, "--checkpoint", "5", "--out", tmp_path / "no").code == 2
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    refused = distill_rl_in_process("export", straight, "--out", tmp_path / "thesis")
    assert refused.code == 2
    assert "--out" in refused.err
    assert (tmp_path / "thesis" / "thesis.tex").exists()


def test_code_in_a_received_run_folder_is_not_run(straight, tmp_path, cluster):
    run, mark = tmp_path / "runs" / "tiny", tmp_path / "ran"
    shutil.copytree(straight, run, symlinks=True)
    replace_metadata(run / "checkpoints" / "step-8" / "student", mark)
    seal(run / "checkpoints" / "step-8")
    exported = distill_rl_in_process("export", run, "--out", tmp_path / "export")
    config = straight.parent.parent / "tiny.yaml"
    resumed = distill_rl("train", "-c", config, "--resume", "train.steps=9", f"run.dir={run.parent}", cluster=cluster)
    assert not mark.exists()
    for ended in (exported, resumed):
        assert ended.code == 2, ended.err
        (line,) = ended.errors
        assert "step-8" in line
        assert "its metadata must be what torch writes for tensors" in line
    assert not (tmp_path / "export").exists()


def test_a_run_is_not_overwritten_and_check_changes_nothing(straight, material):
    folder = straight.parent.parent
    before = sorted(path.name for path in straight.rglob("*"))
    again = distill_rl_in_process("train", "-c", folder / "tiny.yaml")
    assert again.code == 2
    assert "--resume" in again.err
    assert "--clean" in again.err
    checked = distill_rl_in_process("check", "-c", folder / "tiny.yaml", "train.steps=9")
    assert checked.code == 0, checked.err
    assert "steps: 9" in checked.out
    assert "bytes per token" in checked.out
    assert sorted(path.name for path in straight.rglob("*")) == before


def test_models_with_frequencies_by_length_and_a_soft_cap_learn_what_they_are_alone(cluster, tmp_path):
    """A twin of Phi-4-mini teaches one of Gemma 2, with documents on both sides of the original length, packed.

    The first step's losses are recomputed by Transformers, document by document.
    """
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors}
    phi = {"rope_parameters": {**rope, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 32}
    write_family(tmp_path / "phi", "phi3", vocab_size=320, **phi)
    write_family(tmp_path / "gemma", "gemma2", vocab_size=320)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "phi")
    texts = [text for row in corpus_rows(64) if len(tokenizer(text := row["text"])["input_ids"]) < 96][:24]
    write_json_lines(tmp_path / "texts.jsonl", ({"text": text} for text in texts))
    config = tmp_path / "twins.yaml"
    config.write_text(f"""\
student: {{model: {tmp_path}/gemma, dtype: fp32}}
teachers: [{{name: phi, model: {tmp_path}/phi, dtype: fp32, export: logits}}]
data: {{path: {tmp_path}/texts.jsonl, max_length: 96}}
loss: {{kd_weight: 1.0, ce_weight: 0.5}}
optimizer: {{lr: 0.01}}
train: {{steps: 1, global_batch_size: 24, micro_batch_size: 4}}
run: {{dir: {tmp_path}/runs}}
""")
    ended = distill_rl("train", "-c", config, cluster=cluster)
    assert ended.code == 0, ended.err
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager") for name in ("phi", "gemma")
    ]
    kd = nll = labels = 0.0
    lengths = set()
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            teacher, student = (model(ids, use_cache=False).logits[0, :-1].log_softmax(-1) for model in models)
        kd += (teacher.exp() * (teacher - student)).sum().item()
        nll -= student.gather(1, ids[0, 1:, None]).sum().item()
        labels += ids.shape[1] - 1
        lengths.add(ids.shape[1] > 32)
    assert lengths == {False, True}
    run = tmp_path / "runs" / "twins"
    found = {name: series(run, f"train/{name}")[0][1] for name in ("tokens", "kl_loss", "nll_loss")}
    assert found == pytest.approx({"tokens": labels, "kl_loss": kd / labels, "nll_loss": nll / labels}, rel=1e-4)


def test_every_metric_of_a_run_is_described(straight):
    for record in records(straight):
        assert not [name for name in record.keys() - {"step", "time"} if described(name) is None]


def test_records_of_several_steps_hold_what_those_of_one_do(straight, material, cluster, tmp_path):
    """Also of a run that was stopped between two records and resumed. Validation and saves end a record, too."""
    config = material.config(tmp_path)
    several = ("observe.every=5", "evaluate.every=4", "checkpoint.every=4")
    for more in (("train.steps=3",), ("--resume", "latest")):
        ended = distill_rl("train", "-c", config, *several, *more, cluster=cluster)
        assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "tiny"
    single = {record["step"]: record for record in records(straight) if "train/steps" in record}
    assert all(record["train/steps"] == 1 for record in single.values())
    first = 0
    covered = [record for record in records(run) if "train/steps" in record]
    assert [record["step"] for record in covered] == [3, 4, 5, 8]
    for record in covered:
        steps = [single[step] for step in range(first + 1, record["step"] + 1)]
        first = record["step"]
        assert record["train/steps"] == len(steps)
        weights = {"labelled tokens": "train/tokens", "tokens": "align/tokens"}
        for name, value in record.items():
            what = described(name)
            at_any_time = ("seconds", "CPU seconds", "tokens/s", "GiB")
            if what is None or what.unit in at_any_time or name in ("align/queue", "transport/slot_occupancy"):
                continue
            values = [step[name] for step in steps]
            if what.reduction == "mean" and what.over in weights:
                counts = [step[weights[what.over]] for step in steps]
                assert value == pytest.approx(sum(map(mul, values, counts)) / sum(counts), rel=1e-9), name
            elif what.reduction in ("sum", "max", "last"):
                reduce = {"sum": sum, "max": max, "last": lambda numbers: numbers[-1]}[what.reduction]
                assert value == pytest.approx(reduce(values), rel=1e-9), name
        parts = [
            value
            for name, value in record.items()
            if name
            in ("timing/wait_aligner", "timing/wait_teachers", "timing/student", "timing/other", "timing/recovery")
        ]
        assert sum(parts) == pytest.approx(record["timing/step"])
        assert record["train/tokens_per_second"] == pytest.approx(
            record["train/tokens"] / record["train/steps"] / record["timing/step"]
        )
    last = records(run)[-1]
    assert last["step"] == 8
    assert last.keys() >= {"timing/validation", "timing/save"}
