import pytest

from distill_rl.config.load import load_config
from distill_rl.errors import ConfigError

MINIMAL = "student: {model: s}\ndata: {path: d}\n"


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return lambda *overrides: load_config(path, overrides)


def test_reference_has_value_and_type_of_its_key(load):
    config = load("train.steps=${schedule.warmup_steps}", "schedule.warmup_steps=7", "run.dir=out/${run.name}/x")
    assert config.train.steps == 7
    assert config.run.dir == "out/run/x"
    assert load("run.dir=packed-${data.packing}").run.dir == "packed-true"


def test_reference_to_defaults_and_list_entries(load):
    config = load("teachers.0.model=t", "student.tokenizer=${teachers.0.model}", "teachers.0.name=${teachers.0.dtype}")
    assert (config.student.tokenizer, config.teachers[0].name) == ("t", "bf16")
    assert load("train.micro_batch_size=${loss.top_k}").train.micro_batch_size == 64


def test_allowed_environment_variable_is_read(load, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("WORK", raising=False)
    assert load("run.dir=${oc.env:SCRATCH}/runs").run.dir == "/scratch/me/runs"
    assert load("run.dir=${oc.env:WORK, /tmp}").run.dir == "/tmp"


def test_environment_value_is_not_evaluated(load, monkeypatch):
    monkeypatch.setenv("SCRATCH", "${run.seed}")
    assert load("run.dir=${oc.env:SCRATCH}").run.dir == "${run.seed}"


def test_escaped_reference_is_plain_text(load):
    assert load(r"run.dir=$\{HOME}/${run.name}").run.dir == "${HOME}/run"
    assert load(r"run.dir=$\\{HOME}/x").run.dir == r"$\{HOME}/x"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("${oc.env:HF_TOKEN}", "HF_TOKEN may not be read"),
        ("${oc.env:WORK}", "the environment has no WORK"),
        ("${oc.create:{a: 1}}", "references do not nest"),
        ("${eval:1+1}", "only ${section.key} and ${oc.env:NAME}"),
        ("${oc.decode:x}", "only ${section.key} and ${oc.env:NAME}"),
        ("${oc.env:${run.name}}", "references do not nest"),
        ("${run.nme}", "refers to run.nme, which does not exist"),
        ("${teachers.4.name}", "refers to teachers.4.name, which does not exist"),
        ("${teachers.foo.model}", "refers to teachers.foo.model, which does not exist"),
        ("${run}", "refers to run, which is a section"),
        ("${run.dir}", "the reference goes in a circle (run.dir -> run.dir)"),
        ("${run.name", "must be closed"),
        ("x-${train.epochs}", "refers to train.epochs, which is null, inside a longer text"),
    ],
)
def test_other_references_are_rejected_with_a_reason(load, monkeypatch, text, reason):
    monkeypatch.delenv("WORK", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError) as caught:
        load(f"run.dir={text}")
    (line,) = caught.value.problems
    assert line.startswith("run.dir: ")
    assert reason in line
    assert "hf_secret" not in line


def test_circle_of_two_references_is_detected(load):
    with pytest.raises(ConfigError, match="circle"):
        load("run.dir=${run.name}", "run.name=${run.dir}")
