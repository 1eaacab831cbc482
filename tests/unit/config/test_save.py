from dataclasses import replace

import pytest

from distill_rl.config.load import load_config
from distill_rl.config.save import decisive, fingerprint, save_config, to_yaml
from distill_rl.config.schema import Config, DataConfig, RunConfig, StudentConfig, TeacherConfig, TrainConfig


def config(**changes) -> Config:
    whole = Config(
        run=RunConfig(name="r"),
        student=StudentConfig(model="s"),
        teachers=[TeacherConfig(model="t")],
        data=DataConfig(path="d"),
        train=TrainConfig(steps=3),
    )
    return replace(whole, **changes)


def test_saved_configuration_reads_back_equal(tmp_path):
    path = tmp_path / "config.yaml"
    save_config(config(), path)
    assert load_config(path) == config()
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_credentials_in_a_path_are_not_saved():
    text = to_yaml(config(data=DataConfig(path="https://me:hunter2@host/data.jsonl", text_key="body")))
    assert "hunter2" not in text
    assert "text_key: body" in text


def test_fingerprint_is_a_sha256_and_survives_a_round_trip(tmp_path):
    save_config(config(), tmp_path / "x.yaml")
    assert fingerprint(load_config(tmp_path / "x.yaml")) == fingerprint(config())
    assert len(bytes.fromhex(fingerprint(config()))) == 32


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=elsewhere",
        "run.name=other",
        "prefetch.depth=3",
        "transport=object_store",
        "ray.num_cpus=4",
        "observe.every=10",
        "checkpoint.every=5",
        "checkpoint.async_save=false",
        "faults.report_after_s=5",
        "faults.stopped_s=5",
        "faults.teacher_restarts=0",
        "faults.aligner_restarts=0",
        "evaluate.every=5",
        "train.steps=99",
        "train.epochs=2",
        "train.minutes=5",
        "train.micro_batch_size=1",
        "slurm.account=me",
        "slurm.nodes=2",
        "student.parallel.dp=2",
        "teachers.0.parallel.tp=2",
        "student.activation_checkpointing=true",
    ],
)
def test_fingerprint_ignores_settings_without_effect_on_numbers(tmp_path, override):
    assert fingerprint(changed(tmp_path, override)) == fingerprint(config())


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1",
        "student.model=other",
        "student.dtype=fp32",
        "student.lora.rank=8",
        "teachers.0.model=other",
        "teachers.0.weight=2",
        "teachers.0.wire_dtype=bf16",
        "teachers.1.model=second",
        "data.path=other",
        "data.packing=false",
        "data.validation.fraction=0.1",
        "loss.top_k=3",
        "loss.temperature=2",
        "optimizer.betas.1=0.9",
        "schedule.warmup_steps=3",
        "train.global_batch_size=4",
        "train.max_grad_norm=0",
    ],
)
def test_fingerprint_changes_with_settings_that_affect_numbers(tmp_path, override):
    other = changed(tmp_path, override)
    assert fingerprint(other) != fingerprint(config())
    different = {
        key for key in decisive(other) | decisive(config()) if decisive(other).get(key) != decisive(config()).get(key)
    }
    assert override.partition("=")[0] in different


def changed(tmp_path, override: str) -> Config:
    save_config(config(), tmp_path / "r.yaml")
    return load_config(tmp_path / "r.yaml", [override])
