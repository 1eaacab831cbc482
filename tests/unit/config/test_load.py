import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distill_rl.config.load import load_config, read_config
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError

MINIMAL = "student: {model: s}\ndata: {path: d}\ntrain: {steps: 10}\n"


@pytest.fixture
def write(tmp_path):
    def _write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def complaints(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    assert all("\n" not in line for line in caught.value.problems)
    return list(caught.value.problems)


def test_omitted_settings_have_the_default(write):
    config = load_config(write(MINIMAL))
    assert isinstance(config, Config)
    assert (config.student.model, config.train.steps) == ("s", 10)
    assert config.optimizer == Config().optimizer
    assert config.teachers == []


def test_run_is_named_after_its_file(write):
    assert load_config(write(MINIMAL, "small-llama.yaml")).run.name == "small-llama"
    assert load_config(write(MINIMAL + "run: {name: mine}\n", "small-llama.yaml")).run.name == "mine"
    assert load_config(write(MINIMAL), ["run.name="]).run.name == "run"


def test_configuration_pickles(write):
    config = load_config(write(MINIMAL), ["teachers.0.model=t"])
    assert pickle.loads(pickle.dumps(config)) == config


def test_result_equals_omegaconf_merge(write):
    text = MINIMAL + "teachers:\n- {model: t, parallel: {tp: 2}}\n- {model: u, weight: 2}\noptimizer: {lr: 1e-3}\n"
    path = write(text)
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path), {"run": {"name": "run"}})
    assert load_config(path) == OmegaConf.to_object(merged)


def test_file_overrides_the_files_it_extends(write):
    write(MINIMAL + "loss: {top_k: 8, temperature: 2}\nteachers: [{model: a}, {model: b}]\n", "base/base.yaml")
    write("extends: base/base.yaml\nloss: {top_k: 16}\n", "middle.yaml")
    config = load_config(write("extends: middle.yaml\nteachers: [{model: c}]\nloss:\n", "top.yaml"))
    assert (config.loss.top_k, config.loss.temperature) == (16, 2.0)
    assert [teacher.model for teacher in config.teachers] == ["c"]
    assert config.run.name == "top"


def test_circular_extends_is_reported(write):
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    (line,) = complaints(write("extends: a.yaml\n", "top.yaml"))
    assert "circle" in line
    assert "a.yaml -> b.yaml -> a.yaml" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: nowhere.yaml\n", ["nowhere.yaml", "extended by run.yaml", "no such file"]),
        ("extends: [a, b]\n", ["extends", "path of one YAML file"]),
        ("train: {steps: 1\nloss: x\n", ["run.yaml:", "not valid YAML"]),
        ("train:\n\tsteps: 1\n", ["run.yaml:2", "not valid YAML"]),
        ("train: {steps: 1}\nloss: {}\ntrain: {steps: 2}\n", ["run.yaml:3", "duplicate key train"]),
        ("a: !!python/object/apply:os.system [true]\n", ["run.yaml:1", "not valid YAML"]),
        ("run: {dir: '${run.name'}\n", ["run.dir", "not valid YAML"]),
        ("- 1\n- 2\n", ["run.yaml", "must contain sections"]),
    ],
)
def test_unreadable_file_gives_one_line_with_its_place(write, text, expected):
    (line,) = complaints(write(text))
    assert all(part in line for part in expected), line


def test_missing_file_folder_and_bad_bytes_give_one_line(tmp_path):
    assert "no such file" in complaints(tmp_path / "absent.yaml")[0]
    assert "is a folder" in complaints(tmp_path)[0]
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"run: {name: ok}\ndata: {path: \xff}\n")
    assert complaints(bad) == [f"{bad}:2: not valid UTF-8; save the file as UTF-8"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.step=3", "train.step: unknown key; did you mean train.steps?"),
        ("learning_rate=3", "learning_rate: unknown key; did you mean optimizer.lr?"),
        ("xyzzy=3", "xyzzy: unknown key; keys here: run, student, teachers,"),
        ("lr=3", "lr: unknown key; did you mean optimizer.lr?"),
        ("top_k=3", "top_k: unknown key; did you mean loss.top_k?"),
        ("topk_logits_k=3", "topk_logits_k: unknown key; did you mean loss.top_k?"),
        ("use_ipc=true", "use_ipc: unknown key; did you mean transport?"),
        ("teachers.0.wieght=3", "teachers.0.wieght: unknown key; did you mean teachers.0.weight?"),
        (
            "teachers.1={model: u, gpu_shares: 0.3}",
            "teachers.1.gpu_shares: unknown key; did you mean teachers.1.vllm.gpu_share?",
        ),
        (
            "teachers.1={model: u, endpoint: {tokenizer: t}}",
            "teachers.1.endpoint.tokenizer: unknown key; did you mean teachers.1.tokenizer?",
        ),
        (
            "teachers.1={model: u, vllm: {tp: 2}}",
            "teachers.1.vllm.tp: unknown key; did you mean teachers.1.parallel.tp?",
        ),
        ("teachers.1={model: u, path: s}", "teachers.1.path: unknown key; did you mean teachers.1.store.path?"),
        ("teachers.1={model: u, endpoint: {timeout: 3}}", "teachers.1.endpoint.timeout: unknown key; keys here: url,"),
        ("student.parallel.ddp=3", "student.parallel.ddp: unknown key; did you mean student.parallel.dp?"),
        ("data._target_=os.system", "data._target_: a configuration never names code to run; remove it"),
        ("train.steps=many", "train.steps: must be a whole number or null; got 'many'; for example train.steps=8"),
        ("train.steps=1.5", "train.steps: must be a whole number or null; got 1.5;"),
        ("train.steps=true", "train.steps: must be a whole number or null; got true;"),
        ("train.epochs=.nan", "train.epochs: must be a finite number; got nan"),
        ("optimizer.lr=fast", "optimizer.lr: must be a number; got 'fast'; for example optimizer.lr=2e-05"),
        ("optimizer.lr=null", "optimizer.lr: must be a number; got null;"),
        (
            "optimizer.betas=0.9",
            "optimizer.betas: must be a list of numbers; got 0.9; for example optimizer.betas=[0.9",
        ),
        ("optimizer.betas.1=x", "optimizer.betas.1: must be a number; got 'x'"),
        ("data.packing=3", "data.packing: must be true or false; got 3; for example data.packing=true"),
        (
            "student={parallel: 3}",
            "student.parallel: must be a section with the keys dp, tp, replicas, sp; got 3; indent its keys",
        ),
        ("teachers.0=llama", "teachers.0: must be a section with the keys name, model"),
        ("teachers=3", "teachers: must be a list of sections; got 3"),
        (
            "loss.tail=bukket",
            "loss.tail: must be one of bucket, truncate, renormalize; got 'bukket'; did you mean bucket?",
        ),
        ("loss.tail=7", "loss.tail: must be one of bucket, truncate, renormalize; got '7'"),
        ("student.model=???", "student.model: missing value; set it in the file or add student.model=PATH"),
        ("train.steps=???", "train.steps: missing value; set it in the file or add train.steps=8"),
        ("student.lora=???", "student.lora: missing value; set it in the file or add student.lora={}"),
        ("student.quantization=???", "student.quantization: missing value; set it in the file or add student.quantiz"),
        (
            "optimizer.betas=[0.9,'???']",
            "optimizer.betas.1: missing value; set it in the file or add optimizer.betas.1=0.",
        ),
        (
            "evaluate.suites=['???']",
            "evaluate.suites.0: missing value; set it in the file or add evaluate.suites.0=PATH",
        ),
        ("student.dtype=null", "student.dtype: must be one of fp32, bf16; got 'null'"),
        ("evaluate.suites=[1]", "evaluate.suites.0: must be text; got 1; put it in quotes"),
        ("foo", "foo: an override is written key=value; for example train.steps=100"),
        ("=3", "=3: an override is written key=value"),
        ("a..b=3", "a..b=3: an override is written key=value"),
        ("teachers.7.model=x", "teachers.7.model: teachers has 1 entry; the next one to add is teachers.1"),
        ("teachers.first.model=x", "teachers.first.model: teachers is a list; its entries are numbered from 0"),
        ("teachers.²=1", "teachers.²: teachers is a list; its entries are numbered from 0"),
        ("student.model.size=x", "student.model.size: student.model is a single value and has no parts"),
        ("run.dir=${oc.env:AWS_SECRET}", "run.dir: AWS_SECRET may not be read from a configuration"),
    ],
)
def test_bad_override_gives_one_line_with_full_path(write, override, expected):
    (line,) = complaints(write(MINIMAL + "teachers: [{model: t}]\n"), [override])
    assert line.startswith(expected), line


def test_number_instead_of_text_suggests_quotes(write):
    (line,) = complaints(write(MINIMAL + "run: {name: 007}\n"))
    assert line == 'run.name: must be text; got 007; put it in quotes: name: "007"'


@pytest.mark.parametrize(("text", "line"), [
    ("train: {steps: 010}", "train.steps: YAML reads a number that begins with 0 as octal, this one as 8; got 010; write 10 or 8"),
    ("train: {steps: -0_17}", "train.steps: YAML reads a number that begins with 0 as octal, this one as -15; got -0_17; write -17 or -15"),
    ("train: {minutes: 1:30}", "train.minutes: YAML reads a number with colons in base 60, this one as 90; got 1:30; write one number"),
    ("train: {minutes: 1:30:00}", "train.minutes: YAML reads a number with colons in base 60, this one as 5400; got 1:30:00"),
    ("optimizer: {lr: 1:30.5}", "optimizer.lr: YAML reads a number with colons in base 60, this one as 90.5; got 1:30.5"),
    ("optimizer: {betas: [0.9, 010]}", "optimizer.betas.1: YAML reads a number that begins with 0"),
    ("x: &x {steps: 010}\ntrain: {<<: *x}", "train.steps: YAML reads a number that begins with 0"),
    ("train: &x {steps: 9}\nloss: {top_k: 010}", "loss.top_k: YAML reads a number that begins with 0"),
    ("loss: {tail: 010}", "loss.tail: YAML reads a number that begins with 0"),
    ("data: {revision: 0123}", 'data.revision: must be text or null; got 0123; put it in quotes: revision: "0123"'),
    ("data: {revision: 1.10}", 'data.revision: must be text or null; got 1.10; put it in quotes: revision: "1.10"'),
    ("data: {split: no}", 'data.split: must be text; got no; put it in quotes: split: "no"'),
    ("data: {text_key: 1_000}", 'data.text_key: must be text; got 1_000; put it in quotes: text_key: "1_000"'),
    ("run: {name: 1:30}", 'run.name: must be text; got 1:30; put it in quotes: name: "1:30"'),
    ("data: {loss_roles: [0x1F]}", 'data.loss_roles.0: must be text; got 0x1F; put it in quotes: "0x1F"'),
    ("train: {steps: 1e3}", "train.steps: must be a whole number or null; got 1e3"),
])  # fmt: skip
def test_numbers_are_shown_as_they_are_written_and_old_ones_refused(write, text, line):
    lines = complaints(write(f"student: {{model: s}}\n{text}\n"))
    (found,) = [found for found in lines if found.startswith(line.partition(":")[0])]
    assert found.startswith(line)


def test_values_of_conditions_are_numbers_as_they_are_written(write):
    where = "{domain: [010, 7], 0123: x, length: 1:30}"
    entry = f"teachers: [{{model: t, where: {where}}}]\n"
    assert [line.partition(";")[0] for line in complaints(write(MINIMAL.replace("teachers: []\n", "") + entry))] == [
        "teachers.0.where.domain.0: YAML reads a number that begins with 0 as octal, this one as 8",
        "teachers.0.where.83: the name must be text",
        "teachers.0.where.length: YAML reads a number with colons in base 60, this one as 90",
    ]


@pytest.mark.parametrize(
    ("file", "override", "wrong"),
    [
        ("steps: 010", "", True),
        ("steps: 9", "train.steps=010", True),
        ("steps: 010", "train.steps=9", False),
        ("steps: 9", "train={steps: 010}", True),
        ("steps: 010", "train={steps: 9}", False),
        ("steps: 017", "train.steps=0x1F", False),
        ("steps: 00", "train.steps=007", False),
    ],
)
def test_only_the_value_that_counts_is_refused(write, file, override, wrong):
    base = write("train: {epochs: 010, steps: 017}\n", "base.yaml")
    path = write(f"extends: {base.name}\nstudent: {{model: s}}\ndata: {{path: d}}\ntrain: {{epochs: 1, {file}}}\n")
    _, findings = read_config(path, [override] if override else [])
    assert [line.partition(";")[0] for line in findings.lines] == [
        "train.steps: YAML reads a number that begins with 0 as octal, this one as 8"
    ][: int(wrong)]


def test_a_file_that_is_not_there_has_a_neighbour(write, tmp_path):
    write(MINIMAL, "training.yaml")
    (line,) = complaints(tmp_path / "trainign.yaml")
    assert line == f"{tmp_path}/trainign.yaml: no such file; did you mean {tmp_path}/training.yaml?"
    (line,) = complaints(write(MINIMAL + "extends: trainings.yaml\n", "mine.yaml"))
    assert line.endswith(f"did you mean {tmp_path}/training.yaml?")


def test_all_problems_are_reported_at_once(write):
    text = "student: {dtype: fp8, modle: x}\nteachers:\n- {model: t}\n- {weight: heavy}\ndata: {path: d}\nfoo: 1\n"
    lines = complaints(write(text), ["train.steps=x", "teachers.9.model=y"])
    assert [line.partition(":")[0] for line in lines] == [
        "teachers.9.model",
        "foo",
        "student.modle",
        "student.model",
        "student.dtype",
        "teachers.1.model",
        "teachers.1.weight",
        "train.steps",
    ]


def test_names_that_no_file_can_have_are_refused_all_at_once(write):
    long = "n" * 300
    config, findings = read_config(
        write(f"student: {{model: a/{long}}}\ndata: {{path: {long}/*.jsonl}}\nevaluate: {{data: /{long}}}\n"),
        [f"run.dir={long}/x", f"projection.path={'ä' * 128}"],
    )
    assert config.evaluate.data is None
    keys = ("student.model", "data.path", "evaluate.data", "run.dir", "projection.path")
    assert sorted(line.partition(":")[0] for line in findings.lines) == sorted(keys)
    assert all("a name in a path may have 255 bytes" in line and len(line) < 200 for line in findings.lines)


def test_home_of_an_unknown_user_is_refused(write):
    keys = ("student.model", "data.path", "checkpoint.resume", "run.dir")
    lines = complaints(
        write(MINIMAL), [*(f"{key}=~no-such-user/x" for key in keys), "evaluate.suites=[~no-such-user/x]"]
    )
    rule = "must not begin with the home of an unknown user; got ~no-such-user/x; write out the folder"
    assert lines == [f"{key}: {rule}" for key in (*keys, "evaluate.suites")]


def test_setting_with_a_problem_keeps_its_default(write):
    config, findings = read_config(write(MINIMAL), ["train.micro_batch_size=x", "train.step=3", "loss.top_k=5"])
    assert config is not None
    assert (config.train.micro_batch_size, config.loss.top_k) == (Config().train.micro_batch_size, 5)
    assert len(findings.lines) == 2
    assert {"train.micro_batch_size", "train.step", "train.steps"} <= findings.keys


def test_text_in_the_place_of_a_section_leaves_a_section(write):
    config, findings = read_config(write(MINIMAL), ["data=7", "teachers=[llama]"])
    assert [line.partition(":")[0] for line in findings.lines] == ["teachers.0", "data"]
    assert (config.data.path, config.teachers[0].model) == ("???", "???")
    assert {"data.path", "teachers.0.model"} <= findings.keys


def test_unquoted_off_is_a_choice_not_a_boolean(write):
    config = load_config(write(MINIMAL + "loss: {dynamic_scale: off}\n"))
    assert config.loss.dynamic_scale == "off"
    assert load_config(write(MINIMAL), ["loss.dynamic_scale=on"]).loss.dynamic_scale == "on"


def test_loading_imports_no_heavy_library(write):
    code = (
        "import sys; from distill_rl.config.load import load_config; from distill_rl.config.rules import problems; "
        f"problems(load_config({str(write(MINIMAL))!r})); "
        "print(sorted({'torch', 'transformers', 'ray', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_values_need_no_file_and_are_those_of_yaml(write):
    settings = {
        "student": {"model": Path("s")},
        "data.path": "d",
        "train": {"steps": 10},
        "optimizer.betas": (0.9, 0.98),
    }
    config, findings = read_config(settings)
    assert findings.lines == []
    assert config == load_config(write(MINIMAL, "distill.yaml"), ["optimizer.betas=[0.9, 0.98]"])


def test_python_values_are_merged_into_a_file_and_come_after_overrides(write):
    given = {"train": {"micro_batch_size": 4}}
    config, findings = read_config(write(MINIMAL), ["train.micro_batch_size=2", "train.global_batch_size=8"], given)
    assert findings.lines == []
    assert (config.train.steps, config.train.micro_batch_size, config.train.global_batch_size) == (10, 4, 8)
    assert given == {"train": {"micro_batch_size": 4}}


def test_python_values_are_checked_all_at_once():
    _, findings = read_config({"trian": {"steps": 1}, "train": {"step": 3}, 5: 1, "optimizer.lr": "big"})
    lines = "\n".join(findings.lines)
    assert "trian: unknown key; did you mean train?" in lines
    assert "train.step: unknown key; did you mean train.steps?" in lines
    assert "5: the name of a setting is a text; for example train, or train.steps" in lines
    assert "optimizer.lr: must be a number; got 'big'" in lines
