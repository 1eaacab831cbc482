"""`distill-rl train --dry-run` writes a batch script that only needs an account and a partition."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distill_rl.cli import main
from distill_rl.commands.dry_run import layout
from distill_rl.config.load import load_config
from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.run import run_directory
from distill_rl.system.environment import clone
from tests.helpers.command import environment
from tests.helpers.suites import write_recipe_data


def options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, flags=re.MULTILINE))


def assert_parses(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


def test_dry_run_writes_configuration_and_script_only(material, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a folder"
    path = material.config(folder)
    monkeypatch.chdir(folder)
    assert main(["train", "-c", str(path), "--dry-run", "--gpus-per-node", "2", "student.parallel.dp=4"]) == 0
    run = folder / "runs" / "tiny"
    assert sorted(entry.name for entry in run.iterdir()) == ["submit.sbatch", "submit.yaml"]
    assert load_config(run / "submit.yaml").student.parallel.dp == 4
    assert load_config(run / "submit.yaml").ray.address is None
    script = (run / "submit.sbatch").read_text()
    assert_parses(run / "submit.sbatch")
    sbatch_options = options(script)
    assert (sbatch_options["nodes"], sbatch_options["gpus-per-node"], sbatch_options["chdir"]) == (
        "2",
        "2",
        f'"{folder}"',
    )
    assert sbatch_options["output"] == f'"{run}/slurm-%j.log"'
    for variable, value in {"CONFIG": run / "submit.yaml", "RUN_DIR": run, "DISTILL_RL_ROOT": clone()}.items():
        line = re.search(rf"^{variable}=.*$", script, re.MULTILINE).group()
        shell = subprocess.run(["bash", "-c", f'{line}; printf %s "${variable}"'], capture_output=True, text=True)
        assert shell.stdout == str(value)
    assert f"sbatch --account=ACCOUNT --partition=PARTITION '{run}/submit.sbatch'" in capsys.readouterr().out
    # The two files do not count as an occupied run directory, and a second dry run rewrites them.
    config = load_config(path)
    assert run_directory.problems(config, clean=False) == []
    assert main(["train", "-c", str(path), "--dry-run", "--gpus-per-node", "0"]) == 0
    assert "gpus-per-node" not in options((run / "submit.sbatch").read_text())
    with run_directory.occupy(config, clean=False) as paths:
        assert paths.config.exists()
        assert (run / "submit.sbatch").exists()


def word_of_sbatch(text: str) -> str:
    """What sbatch makes of the value of an option in a script (`_get_argument` in its source)."""
    found, quote, i = "", "", 0
    while i < len(text):
        if text[i] == "\\":
            i += 1
            found += text[i]
        elif quote:
            quote, found = ("", found) if text[i] == quote else (quote, found + text[i])
        elif text[i] in "\"'":
            quote = text[i]
        elif text[i].isspace() or text[i] == "#":
            break
        else:
            found += text[i]
        i += 1
    return found


@pytest.mark.parametrize("name", ["50%j #1", "null", "~", "2024", "1:30"])
def test_any_name_and_folder_arrive_in_the_job(material, tmp_path, monkeypatch, name):
    folder = tmp_path / """100%n #1 it's "mine" '"""
    path = material.config(folder)
    path.write_text(path.read_text().replace(f"dir: {folder}/runs", "dir: my 'runs'"))
    monkeypatch.chdir(folder)
    assert main(["train", "-c", str(path), "--dry-run", "--gpus-per-node", "0", f"run.name='{name}'"]) == 0
    run = folder / "my 'runs'" / name
    script = (run / "submit.sbatch").read_text()
    assert_parses(run / "submit.sbatch")
    values = {option: word_of_sbatch(value) for option, value in options(script).items()}
    assert values["chdir"] == str(folder)
    pattern = {"%%": "%", "%j": "7"}  # of file names, in Slurm
    assert re.sub("%.", lambda match: pattern[match[0]], values["output"]) == f"{run}/slurm-7.log"
    lines = re.findall(r"^(?:RUN_DIR=|text\(\)|settings=|command=).*$", script, re.MULTILINE)
    shell = subprocess.run(
        ["bash", "-c", "\n".join([*lines, 'printf "%s\\0" "${command[@]}"'])], capture_output=True, text=True
    )
    overrides = [argument for argument in shell.stdout.split("\0") if argument.startswith("run.")]
    config = load_config(run / "submit.yaml", overrides)
    assert run_directory.paths_of(config).root == run


def test_what_slurm_cannot_be_told_is_rejected(material, tmp_path, monkeypatch, capsys):
    path = material.config(tmp_path)
    folder = tmp_path / "a\\b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["train", "-c", str(path), "--dry-run", f'run.dir="{tmp_path}\\n#SBATCH --account=other"']) == 2
    directory, working = sorted(capsys.readouterr().err.splitlines(), key=lambda line: "working" in line)
    assert "run.dir: must have neither control characters nor backslashes" in directory
    assert "the working directory: must have neither" in working


@pytest.mark.parametrize("in_a_job", [False, True])
def test_variables_of_a_job_are_rejected(material, tmp_path, monkeypatch, capsys, in_a_job):
    """They would be those of the shell that writes the script."""
    path = material.config(tmp_path)
    path.write_text(path.read_text().replace(f"dir: {tmp_path}/runs", f"dir: '${{oc.env:TMPDIR,{tmp_path}}}/runs'"))
    values = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "mine", "TMPDIR": str(tmp_path)}
    for variable, value in values.items():
        monkeypatch.setenv(variable, value) if in_a_job else monkeypatch.delenv(variable, raising=False)
    overrides = ["run.name=kd-${oc.env:SLURM_JOB_ID,1}", "student.revision=${oc.env: SLURM_JOB_NAME,x}"]
    assert main(["train", "-c", str(path), "--dry-run", *overrides]) == 2
    lines = capsys.readouterr().err
    for key, variable in (
        ("run.name", "SLURM_JOB_ID"),
        ("student.revision", "SLURM_JOB_NAME"),
        ("run.dir", "TMPDIR"),
    ):
        assert f"{key}: {variable} is the job's own" in lines
    assert not list(tmp_path.glob("runs/*/submit.sbatch"))


def test_all_problems_are_reported_and_nothing_is_written(material, tmp_path, capsys):
    path = material.config(tmp_path)
    arguments = ["train", "-c", str(path), "--dry-run", "--gpus-per-node", "-1", "student.model=/no/such"]
    assert main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert any("--gpus-per-node: must be 0 or more; got -1" in line for line in errors)
    assert any("student.model" in line for line in errors)
    assert main(["train", "-c", str(path), "--dry-run", "--clean"]) == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("per_node", "code"), [("1", 2), ("2", 0)])
def test_one_node_transport_is_rejected_between_nodes(material, tmp_path, capsys, per_node, code):
    settings = ["ray.placement=disaggregated", "transport=shared_memory"]
    path = material.config(tmp_path)
    assert main(["train", "-c", str(path), "--dry-run", "--gpus-per-node", per_node, *settings]) == code
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if "transport: shared_memory works inside one node" in line] == errors
    assert bool(errors) == bool(code)


def test_occupied_directory_is_rejected_unless_resumed(material, tmp_path, capsys):
    path = material.config(tmp_path)
    config = load_config(path)
    with run_directory.occupy(config, clean=False) as paths:
        paths.metrics.write_text("{}\n")
        before = paths.config.read_text()
    assert main(["train", "-c", str(path), "--dry-run"]) == 2
    assert "the run directory is in use" in capsys.readouterr().err
    assert main(["train", "-c", str(path), "--dry-run", "--resume", "auto", "train.steps=9"]) == 0
    assert paths.config.read_text() == before
    assert load_config(paths.root / "submit.yaml").train.steps == 9
    assert load_config(paths.root / "submit.yaml").checkpoint.resume is None


def test_secret_and_resume_step_are_rejected(material, tmp_path, capsys):
    path = material.config(tmp_path)
    secret = "sk-ant-api03-Xy9_kQ2-abcDEF0123456789-ghiJKL"
    shutil.copytree(f"{material.root}/student", tmp_path / secret)
    hostile = f"student.model={tmp_path}/{secret}"
    assert main(["train", "-c", str(path), "--dry-run", hostile]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must not hold a secret" in line
    assert "sk-ant" not in line
    assert main(["train", "-c", str(path), "--dry-run", hostile, "train.steps=-1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2, "the secret is reported together with other problems"
    assert main(["train", "-c", str(path), "--dry-run", "--resume", str(tmp_path / "step-3")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"from the newest checkpoint of its run directory only; got --resume {tmp_path}/step-3" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("placement", "per_node", "expected"),
    [
        ("colocated", 8, (2, 8)),
        ("colocated", 16, (1, 16)),
        ("colocated", 32, (1, 16)),
        ("disaggregated", 8, (3, 8)),
        ("colocated", 0, (1, 0)),
    ],
)
def test_layout_matches_the_placement(placement, per_node, expected):
    config = Config()
    config.ray.placement = placement
    config.student.parallel = ParallelConfig(dp=2, tp=4)
    config.teachers = [TeacherConfig(parallel=ParallelConfig(dp=4, tp=4))]
    assert layout(config, per_node) == expected


@pytest.mark.parametrize(
    ("backend", "tp", "expected"), [("hf", 1, (1, 2)), ("hf", 2, (1, 2)), ("hf", 4, (1, 4)), ("vllm", 4, (1, 6))]
)
def test_layout_has_room_for_the_evaluator(backend, tp, expected):
    config = Config()
    config.student.parallel = ParallelConfig(dp=2)
    config.evaluate.suites, config.evaluate.backend, config.evaluate.parallel.tp = ["mmlu"], backend, tp
    assert layout(config, 8) == expected
    config.evaluate.suites = []
    assert layout(config, 8) == (1, 2)


@pytest.mark.parametrize(
    ("example", "teacher", "nodes"), [("same-tokenizer", "teacher", "1"), ("cross-tokenizer", "foreign", "2")]
)
def test_examples_request_the_machine_of_their_recipe(material, tmp_path, example, teacher, nodes):
    (tmp_path / "sbatch").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    models = [f"student.model={material.root}/student", f"teachers.0.model={material.root}/{teacher}"]
    small = ["data.max_length=64", "loss.top_k=16", "schedule.warmup_steps=0", "checkpoint.keep_best=0", "train.global_batch_size=16",
             "student.parallel.tp=1", "teachers.0.parallel.tp=1", "train.steps=2"]  # fmt: skip
    ranks = [f"student.parallel.dp={8 * int(nodes)}", f"teachers.0.parallel.dp={8 * int(nodes)}"]
    variables = environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ACCOUNT": "me", "PARTITION": "gpu"}
    write_recipe_data(tmp_path / "evals")
    script = clone() / "launch" / "examples" / f"{example}.sh"
    done = subprocess.run(
        ["bash", script, *models, *small, *ranks, f"data.path={material.root}/corpus.jsonl"],
        capture_output=True, text=True, env=variables | {"RUNS": str(tmp_path / "runs")}, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (submitted,) = (tmp_path / "runs").glob("*/submit.sbatch")
    assert done.stdout.splitlines()[-3:] == ["--account=me", "--partition=gpu", str(submitted)]
    assert_parses(submitted)
    assert (options(submitted.read_text())["nodes"], options(submitted.read_text())["gpus-per-node"]) == (nodes, "8")


SLURM = """
slurm:
  account: me
  partition: gpu,spare
  qos: long
  time: "02:00:00"
  nodes: 3
  gpus_per_node: 4
  cpus_per_task: 16
  mem: 200G
  exclusive: false
  constraint: "fast&ib"
  reservation: week
  mail_user: me@here
  mail_type: END,FAIL
  comment: a study, part 2
  signal_s: 300
  requeue: chain
  setup: ["module load 'cuda/12'", "export A=b"]
  container: apptainer exec --nv image.sif
  extra: ["--licenses=scratch:1"]
"""


def test_the_section_slurm_is_the_job(material, tmp_path, monkeypatch, capsys):
    path = material.config(tmp_path)
    path.write_text(path.read_text() + SLURM)
    assert main(["train", "-c", str(path), "--dry-run", "student.parallel.dp=2"]) == 0
    run = tmp_path / "runs" / "tiny"
    assert f"submit    sbatch {run}/submit.sbatch" in capsys.readouterr().out
    script = (run / "submit.sbatch").read_text()
    assert_parses(run / "submit.sbatch")
    expected = {
        "account": "me", "partition": "gpu,spare", "qos": "long", "time": "02:00:00", "nodes": "3", "gpus-per-node": "2",
        "cpus-per-task": "16", "mem": "200G", "constraint": "fast&ib", "reservation": "week", "mail-user": "me@here",
        "mail-type": "END,FAIL", "comment": '"a study, part 2"', "signal": "B:USR1@300", "job-name": "tiny",
        "licenses": "scratch:1", "ntasks-per-node": "1", "open-mode": "append",
    }  # fmt: skip
    found = options(script)
    assert {name: found.get(name) for name in expected} == expected
    assert "#SBATCH --exclusive" not in script
    before, after = script.split("set -euo pipefail\n", 1)
    assert before.index("module load 'cuda/12' || {") < before.index("export A=b || {")
    assert "\nREQUEUE=chain" in after + before
    assert "\nCONTAINER='apptainer exec --nv image.sif'" in before
    assert '\nVENV="${VENV:-}"' in before, "the image has an interpreter of its own"
    assert load_config(run / "submit.yaml").slurm.qos == "long"


def test_the_interpreter_that_wrote_the_script_runs_it(material, tmp_path):
    path = material.config(tmp_path)
    assert main(["train", "-c", str(path), "--dry-run", "--gpus-per-node", "0"]) == 0
    assert f"\nVENV={sys.prefix}\n" in (tmp_path / "runs" / "tiny" / "submit.sbatch").read_text()


def test_every_problem_of_the_section_is_one_line(material, tmp_path, capsys):
    path = material.config(tmp_path)
    section = {
        "mem: 200 GB": "slurm.mem: must be a number with K, M, G or T; got 200 GB",
        "mem_per_cpu: 2G": "slurm.mem: excludes slurm.mem_per_cpu",
        "gres: gpu:8": "slurm.gres: excludes slurm.gpus_per_node",
        "gpus_per_node: 8": "slurm.gres: excludes slurm.gpus_per_node",
        'time: "2"': "slurm.time: must be more than slurm.signal_s=120",
        "mail_type: SOON": "slurm.mail_type: must be of ",
        "qos: 'a\"b'": "slurm.qos: must have neither backslashes nor double quotes",
        "extra: [--signal=USR1, -n 3, --qos=x]": "slurm.extra.0: --signal is set by the batch script",
        "account: ''": "slurm.account: must be one line of text",
        'setup: ["a\\nb"]': "slurm.setup.0: must be one line of text",
    }
    path.write_text(path.read_text() + "slurm:\n" + "".join(f"  {line}\n" for line in section))
    assert main(["train", "-c", str(path), "--dry-run"]) == 2
    errors = capsys.readouterr().err.splitlines()
    for line in (
        *section.values(),
        "slurm.extra.1: must be a long option of sbatch",
        "slurm.extra.2: --qos has a setting of its own",
    ):
        assert sum(line in error for error in errors) == 1, (line, errors)
    assert len(errors) == len({*section.values()}) + 2
    assert not (tmp_path / "runs").exists()
    assert (
        main(["train", "-c", str(material.config(tmp_path)), "--dry-run", "slurm.patition=x", "slurm.time='soon'"]) == 2
    )
    assert "slurm.patition" in capsys.readouterr().err


def test_too_few_nodes_are_refused(material, tmp_path, capsys):
    path = material.config(tmp_path)
    settings = ["student.parallel.dp=4", "slurm.gpus_per_node=2", "slurm.nodes=1"]
    assert main(["train", "-c", str(path), "--dry-run", *settings]) == 2
    assert "slurm.nodes: must be 2 or more, for the GPUs that the run needs; got 1" in capsys.readouterr().err


def run_script(script: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a batch script as Slurm does, with a launcher and an interpreter that print their arguments and the run directory."""
    (folder / "launch").mkdir(exist_ok=True)
    (folder / "launch" / "ray_cluster.sh").write_text('printf "%s\\n" "$RUN_DIR" "$@"')
    for name in ("environment.sh", "eval.sh"):
        (folder / "launch" / name).touch()
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("python", "python3"):
        (folder / "bin" / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    text = re.sub(r"^(DISTILL_RL_ROOT|VENV)=.*$", rf"\1='{folder}'", script.read_text(), flags=re.MULTILINE)
    (folder / "script").write_text(text)
    env = {name: value for name, value in environment().items() if name not in ("RUN_DIR", "CONFIG", "OUT")}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"} | variables
    done = subprocess.run(["bash", folder / "script"], env=env | job, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("folder", ["plain", "R&D's"])
def test_an_array_has_a_run_for_every_combination(material, tmp_path, capsys, folder):
    path, run = material.config(tmp_path / folder), tmp_path / folder / "runs" / "tiny"
    arrays = ["--array", "run.seed=0,1", "--array", "optimizer.lr=1e-3,1e-2"]
    command = ["train", "-c", str(path), "--dry-run", "--gpus-per-node", "0", *arrays, "--then", "eval"]
    suites = write_recipe_data(tmp_path / "evals") or ["evaluate.suites=[gsm8k]", f"evaluate.data={tmp_path}/evals"]
    assert main([*command, *suites]) == 0
    out = capsys.readouterr().out
    assert "array     4 runs: seed-0_lr-1e-3, seed-0_lr-1e-2, seed-1_lr-1e-3, seed-1_lr-1e-2" in out
    script, follows = (shlex.quote(f"{run}/{name}.sbatch") for name in ("submit", "evaluate"))
    assert f"job=$(sbatch --parsable --account=ACCOUNT --partition=PARTITION {script}) && sbatch " in out
    assert f"--dependency=aftercorr:$job {follows}" in out
    script = (run / "submit.sbatch").read_text()
    assert options(script)["array"] == "0-3"
    assert options(script)["output"].strip('"') == f"{run}/slurm-%A_%a.log"
    assert load_config(run / "submit.yaml").evaluate.suites == [], "the second job asks them"
    trained = run_script(run / "submit.sbatch", tmp_path, SLURM_ARRAY_TASK_ID="2").stdout.splitlines()
    assert str(run / "seed-1_lr-1e-3") in trained
    assert {"run.name='seed-1_lr-1e-3'", "run.seed=1", "optimizer.lr=1e-3"} <= {*trained}
    asked = run_script(run / "evaluate.sbatch", tmp_path, SLURM_ARRAY_TASK_ID="3").stdout.splitlines()
    assert asked[:5] == ["-m", "distill_rl", "eval", "--model", f"student={run}/seed-1_lr-1e-2/export"]
    assert asked[asked.index("--out") + 1] == f"{run}/seed-1_lr-1e-2/evals"
    assert asked[asked.index("--suites") + 1] == "gsm8k"


def test_a_run_directory_that_sbatch_is_given_counts(material, tmp_path):
    path = material.config(tmp_path)
    assert main(["train", "-c", str(path), "--dry-run", "--gpus-per-node", "0"]) == 0
    lines = run_script(tmp_path / "runs" / "tiny" / "submit.sbatch", tmp_path, RUN_DIR=str(tmp_path / "other")).stdout
    assert str(tmp_path / "other") in lines.splitlines()
    assert "run.name='other'" in lines.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "--array", "run.seed"], "--array: must be KEY=VALUE,VALUE,…; got run.seed"),
        (["--dry-run", "--array", "run.seed=0,0"], "--array: must give every run a name of its own"),
        (["--dry-run", "--array", "data.path=/a/b,c"], "--array: names a run after its values, and a name must be"),
        (["--dry-run", "--array", "train.micro_batch_size=0,2"], "train.micro_batch_size: must be 1 or more; got 0"),
        (["--dry-run", "--array", "student.parallel.dp=1,2"], "--array: all runs must need as many nodes and GPUs"),
        (["--dry-run", "--then", "eval"], "--then eval: needs evaluate.suites and evaluate.data"),
        (["--then", "eval"], "--then: has no effect without --dry-run"),
        (["--array", "run.seed=0,1"], "--array: has no effect without --dry-run"),
    ],
)
def test_what_no_array_can_be_is_one_line(material, tmp_path, capsys, arguments, message):
    assert main(["train", "-c", str(material.config(tmp_path)), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_gets_a_script(tmp_path, capsys):
    out = tmp_path / "my results"
    command = ["eval", "--model", "a model", "--suites", "gsm8k", "--data", "evals", "--out", str(out), "--limit", "5"]
    assert main([*command, "--dry-run", "--slurm", "account=me", "time=00:30:00", "mem=20G"]) == 0
    assert f"submit    sbatch --partition=PARTITION '{out}/submit.sbatch'" in capsys.readouterr().out
    script = (out / "submit.sbatch").read_text()
    assert_parses(out / "submit.sbatch")
    assert {name: options(script).get(name) for name in ("account", "time", "mem")} == {
        "account": "me", "time": "00:30:00", "mem": "20G"
    }  # fmt: skip
    asked = run_script(out / "submit.sbatch", tmp_path).stdout.splitlines()
    assert asked[:9] == ["-m", "distill_rl", "eval", "--model", "a model", "--suites", "gsm8k", "--data", "evals"]
    assert asked[asked.index("--limit") + 1] == "5"
    assert main([*command, "--dry-run", "--slurm", "acount=me", "mem=much"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert main([*command, "--slurm", "account=me"]) == 2


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        (["--shards", "4"], "4"),
        (["--shards", "16"], "8"),
        (["--shards", "0"], "1"),
        (["--tp", "4"], "4"),
        (["--tp", "2", "--shards", "3"], "6"),
        (["--gpus-per-shard", "0.5", "--shards", "3"], "2"),
        (["--tp", "4", "--slurm", "gpus_per_node=0"], None),
        (["--tp", "4", "--shards", "4"], "--tp: 4 copies of 4 GPUs must fit into a node, which has 8; got 4"),
        (["--gpus-per-shard", "2", "--slurm", "gpus_per_node=1"], "--gpus-per-shard: 1 copy of 2 GPUs must fit"),
    ],
)
def test_an_evaluation_asks_for_the_gpus_of_its_copies(tmp_path, capsys, asked, gpus):
    command = ["eval", "--model", "m", "--suites", "gsm8k", "--data", "evals", "--out", str(tmp_path / "out")]
    code = main([*command, "--dry-run", *asked])
    if code == 0:
        assert options((tmp_path / "out" / "submit.sbatch").read_text()).get("gpus-per-node") == gpus
        return
    (line,) = capsys.readouterr().err.splitlines()
    assert gpus in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("node", "split", "gpus"), [(8, 2, "2"), (0, 2, None), (8, 1, "1"), (1, 2, "")])
def test_an_evaluation_after_a_run_asks_for_those_that_the_model_is_split_over(
    material, tmp_path, capsys, node, split, gpus
):
    suites = write_recipe_data(tmp_path / "evals") or ["evaluate.suites=[gsm8k]", f"evaluate.data={tmp_path}/evals"]
    command = [
        "train",
        "-c",
        str(material.config(tmp_path)),
        "--dry-run",
        "--gpus-per-node",
        str(node),
        "--then",
        "eval",
    ]
    code = main([*command, *suites, f"evaluate.parallel.tp={split}"])
    run = tmp_path / "runs" / "tiny"
    if gpus == "":
        assert code == 2
        assert "evaluate.parallel.tp: 1 copy of 2 GPUs must fit into a node, which has 1" in capsys.readouterr().err
        assert not run.exists()
        return
    assert code == 0
    assert options((run / "evaluate.sbatch").read_text()).get("gpus-per-node") == gpus
