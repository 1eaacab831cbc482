"""What the package never does, checked in its sources, and what no input can make it do."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import distill_rl
from distill_rl.commands.evaluate import parse_models
from distill_rl.config import rules
from distill_rl.config.load import load_config, read_config
from distill_rl.config.save import to_yaml
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.observe.log import printable
from distill_rl.run import run_directory
from distill_rl.system.redact import allowed_variables

PACKAGE = Path(distill_rl.__file__).parent
NEVER = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "marshal.loads",
    "marshal.load",
    "shelve.open",
}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib"}
UNSAFE_YAML = {
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.unsafe_load_all",
    "yaml.full_load_all",
}


def breaches(source: str) -> Iterator[str]:
    """Calls that may execute their input: code, pickles, a shell."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = getattr(node, "module", None) or ""
            for name in (origin, *(alias.name for alias in node.names)):
                if name.partition(".")[0] in PICKLES:
                    yield f"{node.lineno}: imports {name}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        value = {name: node.value for name, node in keywords.items() if isinstance(node, ast.Constant)}
        if called in NEVER | UNSAFE_YAML or called.endswith("FileSystemReader"):  # torch's own unpickles
            yield f"{node.lineno}: {called}"
        if called.endswith("torch.load") and value.get("weights_only") is not True:
            yield f"{node.lineno}: torch.load without weights_only=True"
        if called.endswith(("np.load", "numpy.load")) and value.get("allow_pickle", False) is not False:
            yield f"{node.lineno}: numpy.load with pickles"
        if "trust_remote_code" in keywords and value.get("trust_remote_code") is not False:
            yield f"{node.lineno}: trust_remote_code"
        if value.get("shell"):
            yield f"{node.lineno}: a shell"


def test_package_never_executes_its_input() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    by_module = {str(module.relative_to(PACKAGE)): list(breaches(module.read_text("utf-8"))) for module in modules}
    assert len(by_module) > 100
    assert {name: lines for name, lines in by_module.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)", "exec(x)", "import pickle", "from pickle import loads", "yaml.load(x)", "torch.load(x)",
        "torch.load(x, weights_only=False)", "torch.load(x, weights_only=sure)", "np.load(x, allow_pickle=True)",
        "dcp.FileSystemReader(x)", "AutoModel.from_pretrained(x, trust_remote_code=True)", "f(trust_remote_code=config.trust)",
        "subprocess.run(x, shell=True)", "os.system(x)",
    ],
)  # fmt: skip
def test_breach_is_detected(source: str) -> None:
    assert list(breaches(source))


@pytest.mark.parametrize("source", ["torch.load(x, weights_only=True)", "re.compile(x)", "model.eval()", "np.load(x)"])
def test_safe_call_is_allowed(source: str) -> None:
    assert not list(breaches(source))


def test_configuration_cannot_name_code_to_run(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("student: {model: s, _target_: os.system}\ndata: {path: '${eval:1+1}'}\n")
    lines = read_config(file)[1].lines
    assert any("student._target_: a configuration never names code to run" in line for line in lines)
    assert any("data.path" in line and "only ${section.key} and ${oc.env:NAME}" in line for line in lines)


def test_yaml_object_tag_is_refused(tmp_path: Path) -> None:
    file, proof = tmp_path / "x.yaml", tmp_path / "ran"
    file.write_text(f"student: !!python/object/apply:os.mkdir ['{proof}']\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(file)
    assert not proof.exists()


SECRET = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY",
          "NVIDIA_API_KEY", "VLLM_API_KEY", "RAY_AUTH_TOKEN", "RAY_REDIS_PASSWORD", "DISTILL_RL_TOKEN", "MLFLOW_TRACKING_PASSWORD",
          "SLURM_JWT", "GITHUB_TOKEN", "SSH_AUTH_SOCK", "HTTPS_PROXY")  # fmt: skip
KEPT = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "TOKENIZERS_PARALLELISM",
        "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_ENDPOINT",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN_PATH", "DO_NOT_TRACK",
        "TRANSFORMERS_VERBOSITY", "DISTILL_RL_LOG", "OMP_NUM_THREADS", "SSL_CERT_FILE", "SSL_CERT_DIR")  # fmt: skip


def test_actors_see_allowed_variables_without_secrets() -> None:
    assert set(allowed_variables(dict.fromkeys((*SECRET, *KEPT), "x"))) == set(KEPT)
    assert not allowed_variables({"HF_ENDPOINT": "https://me:hunter2@mirror"})


def test_credentials_are_neither_saved_nor_printed() -> None:
    url = "https://me:hunter2@host/data.jsonl"
    config = Config()
    config.student.model, config.data.path, config.run.name = "s", url, "x"
    assert "hunter2" not in to_yaml(config)
    assert "hunter2" not in printable(ConfigError("data.path", "no such file", url))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.dir, config.run.name = str(tmp_path / "runs"), "mine"
    config.student.model = config.data.path = "x"
    return config


NO_NAMES = [
    "..",
    ".",
    "../x",
    "/tmp/x",
    "a/../../x",
    "a\\b",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "it's",
    'a"b',
    "a`b",
    "a${b}",
    "ä" * 101,
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_are_those_of_one_folder_everywhere(config: Config, name: str) -> None:
    config.run.name = name
    config.teachers = [TeacherConfig(name=name, model="x")]
    lines = rules.problems(config)
    for key in ("run.name", "teachers.0.name"):
        assert any(line.startswith(f"{key}: ") and len(line) < 400 for line in lines), lines
    with pytest.raises(ConfigError, match="--model: a name "):
        parse_models([f"{name}=x", "y"], None)


@pytest.mark.parametrize("name", ["kd", "50%j", "a b#1", "~", "null", "2024", "1:30", "ä" * 100])
def test_other_names_are_allowed(config: Config, name: str) -> None:
    config.run.name = name
    assert not [line for line in rules.problems(config) if line.startswith("run.name")]


@pytest.mark.parametrize("link", ["", "checkpoints", "export", "logs", "metrics.jsonl", "checkpoints/step-3"])
def test_run_directory_with_outside_link_is_refused(config: Config, tmp_path: Path, link: str) -> None:
    root = run_directory.paths_of(config).root
    if link:
        with run_directory.occupy(config, clean=False) as paths:
            paths.checkpoints.mkdir()
        if (root / link).is_dir():
            (root / link).rename(tmp_path / "away")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    root.parent.mkdir(exist_ok=True)
    (root / link).unlink(missing_ok=True) if link else None
    (root / link).symlink_to(outside)
    for clean, resume in ((False, None), (True, None), (False, "auto")):
        config.checkpoint.resume = resume
        (line,) = run_directory.problems(config, clean=clean)
        assert str(root / link).rstrip("/") in line
        assert "a run writes nowhere but in its directory" in line
    assert [entry.name for entry in outside.iterdir()] == ["keep"]


def test_link_within_the_run_directory_is_allowed(config: Config) -> None:
    config.checkpoint.resume = "auto"
    with run_directory.occupy(config, clean=False) as paths:
        (paths.root / "logs" / "newest").symlink_to(paths.logs.name)
    assert run_directory.problems(config, clean=False) == []


@pytest.mark.parametrize("script", sorted((PACKAGE.parent / "launch").glob("*.sbatch")), ids=lambda path: path.name)
def test_batch_script_is_offline_without_telemetry(script: Path) -> None:
    launch = PACKAGE.parent / "launch"
    called = [launch / f"{name}.sh" for name in re.findall(r"launch/([\w-]+)\.sh", script.read_text())]
    assert any("launch/environment.sh" in file.read_text() for file in (script, *called))
    environment = (launch / "environment.sh").read_text()
    for default in ("HF_HUB_OFFLINE:-1", "HF_HUB_DISABLE_TELEMETRY:-1", "RAY_USAGE_STATS_ENABLED:-0"):
        assert default in environment


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    from distill_rl.models.files import folder_problems

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (line,) = folder_problems("student.model", tmp_path)
    assert "weights must be safetensors; the folder has only pickled ones" in line
