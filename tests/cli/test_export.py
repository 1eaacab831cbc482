"""`distill-rl export`: forms of the folder, and uploads to a stand-in for the hub (`tests.helpers.hub`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from distill_rl.config.load import load_config
from distill_rl.config.save import save_config
from distill_rl.config.schema import Config, DataConfig, LoraConfig, StudentConfig, TeacherConfig
from distill_rl.models.files import fingerprint_model
from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.run.card import is_untouched
from distill_rl.run.checkpoints import FROZEN, CheckpointStore, SavedState
from distill_rl.student.engine import StudentEngine
from distill_rl.types import RunPaths, TrainState
from tests.helpers import hub as stand_in
from tests.helpers.command import Ended, distill_rl_in_process, environment
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.cli

IDS = torch.arange(3, 15)[None]
_CHILD = """
import contextlib, io, json, os, sys
from distill_rl import cli
for line in sys.stdin:
    token, arguments = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    os.environ.update({"HF_TOKEN": token} if token else {})
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


def write_run(root: Path, lora: LoraConfig | None = None) -> Path:
    """A run directory with checkpoints of steps 4 and 8, of which the first has the better score, and without an export."""
    write_tiny_model(root / "student", "llama", dtype="bfloat16")
    (root / "student" / "README.md").write_text("---\nlicense: llama3.2\n---\n# Base\n")
    write_tiny_model(root / "teacher", "llama", seed=1)
    student, teacher = (
        StudentConfig(model=str(root / "student"), lora=lora),
        TeacherConfig(name="big", model=str(root / "teacher")),
    )
    config = Config(student=student, teachers=[teacher], data=DataConfig(path="corpus.jsonl"))
    config.run.name = "tiny"
    paths = RunPaths(root / "runs" / "tiny")
    save_config(config, paths.config)
    paths.metrics.write_text(
        "".join(json.dumps({"step": step, "validation/kl_loss": step / 10}) + "\n" for step in (4, 8))
    )
    fingerprints = {"data": "d" * 64}
    if lora is not None:
        fingerprints[FROZEN] = fingerprint_model(root / "student")
    store = CheckpointStore(paths.checkpoints, keep_last=2, keep_best=0, scores=paths.scores)
    world = open_world(rank=0, dp=1, tp=1)
    try:
        engine = StudentEngine(config, world, vocabulary_size=300, total_steps=8)
        for step in (4, 8):
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
            engine.step = step
            draft = store.begin(SavedState(TrainState(step), fingerprints, score=step / 10))
            engine.save(draft.student)
            store.commit(draft)
    finally:
        close_world(world)
    return paths.root


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("export"))


@torch.no_grad()
def logits_of(folder: Path) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS, use_cache=False).logits


def test_forms_of_the_folder(run: Path, tmp_path: Path) -> None:
    def export(name: str, *options: str) -> Path:
        ended = distill_rl_in_process("export", run, "--out", tmp_path / name, *options)
        assert ended.code == 0, ended.err
        return tmp_path / name

    stored, best = export("stored"), export("best", "--checkpoint", "best")
    exact, rounded = export("exact", "--dtype", "fp32"), export("rounded", "--dtype", "bf16")
    parts = export("parts", "--max-file-size", "20kB")
    tensors = load_file(exact / "model.safetensors")
    for folder in (stored, rounded):
        assert all(
            torch.equal(value, tensors[name].bfloat16())
            for name, value in load_file(folder / "model.safetensors").items()
        )
    assert json.loads((exact / "config.json").read_text())["dtype"] == "float32"
    files = sorted(parts.glob("model-*.safetensors"))
    index = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 2
    assert {path.name for path in files} == set(index.values())
    assert torch.equal(logits_of(parts), logits_of(stored))
    assert not torch.equal(logits_of(best), logits_of(stored))
    assert "| validation/kl\\_loss | 0.4000 |" in (best / "README.md").read_text()
    assert ModelCard.load(best / "README.md").data["distill_rl"]["step"] == 4


def test_settings_of_the_computation_and_teachers_that_are_not_here_do_not_matter(run: Path, tmp_path: Path) -> None:
    trained = shutil.copytree(run, tmp_path / "run")
    config = load_config(trained / "config.yaml")
    config.student = replace(config.student, attention="varlen", kernels="liger", compile=True)
    config.teachers = [replace(config.teachers[0], model="/no/such/teacher", export="hidden")]
    save_config(config, trained / "config.yaml")
    for root in (run, trained):
        ended = distill_rl_in_process("export", root, "--out", tmp_path / f"of-{root.name}")
        assert ended.code == 0, ended.err
    plain, other = (
        {path.name: path.read_bytes() for path in (tmp_path / f"of-{name}").iterdir() if path.name != "README.md"}
        for name in (run.name, trained.name)
    )
    assert plain == other


def test_adapters_are_not_merged_with_other_weights_than_they_were_trained_beside(tmp_path: Path) -> None:
    run, weights = write_run(tmp_path, LoraConfig(rank=2)), tmp_path / "student" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ended = distill_rl_in_process("export", run)
    assert ended.code == 2
    (line,) = ended.errors
    assert "the frozen weights of this run: must be the same as when the checkpoint was saved" in line
    assert f"restore them in {weights.parent}" in line
    weights.unlink()
    ended = distill_rl_in_process("export", run)
    assert ended.code == 2
    assert "student.model" in ended.errors[0]
    assert not (run / "export").exists()
    weights.write_bytes(content)
    assert distill_rl_in_process("export", run).code == 0


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--max-file-size", "5"), ("--max-file-size", "KB, MB, GB", "5GB")),
        (("--max-file-size", "0GB"), ("--max-file-size", "0GB")),
        (("--public",), ("--public", "--push")),
        (("--checkpoint", "6"), ("--checkpoint", "latest, best", "4, 8")),
    ],
)
def test_bad_options(run: Path, options: tuple[str, ...], shown: tuple[str, ...]) -> None:
    ended = distill_rl_in_process("export", run, *options)
    assert ended.code == 2
    (line,) = ended.errors
    assert all(text in line for text in shown), line
    assert not (run / "export").exists()


@dataclass
class Session:
    """`distill-rl` in a process that takes the stand-in for the hub, one command after the other."""

    hub: stand_in.Hub
    call: Callable[..., Ended]
    seen: int = field(default=0)

    def requests(self) -> list[str]:
        """The hub's requests since the last call of this method."""
        new, self.seen = self.hub.requests[self.seen :], len(self.hub.requests)
        return new


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory):
    home = tmp_path_factory.mktemp("home")
    with stand_in.hub() as hub:
        variables = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=environment() | variables | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )  # fmt: skip

        def call(token: str, *arguments: str | Path) -> Ended:
            child.stdin.write(json.dumps([token, list(map(str, arguments))]) + "\n")
            child.stdin.flush()
            return Ended(*json.loads(child.stdout.readline()))

        try:
            yield Session(hub, call)
        finally:
            child.stdin.close()
            child.wait(timeout=60)


@pytest.mark.parametrize(
    ("token", "name", "shown"),
    [
        ("", "me/student", ("needs a login", "hf auth login", "HF_TOKEN")),
        (stand_in.WRITE, "student", ("--push", "OWNER/NAME", "student")),
        (stand_in.WRITE, "me/a/b", ("--push", "OWNER/NAME", "me/a/b")),
        (stand_in.WRITE, "me/-student", ("--push", "OWNER/NAME")),
        ("hf_unknown_" + 24 * "u", "me/student", ("does not know this login", "hf auth login")),
        (stand_in.READ, "me/student", ("may write", "hf auth login")),
        (stand_in.WRITE, "stranger/model", ("me cannot write", "stranger", "me, lab")),
        (stand_in.CUT, "me/student", ("the hub must answer", "check the network")),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written_or_sent(
    run: Path, session: Session, token: str, name: str, shown: tuple[str, ...]
) -> None:
    session.requests()
    ended = session.call(token, "export", run, "--push", name)
    assert ended.code == 2, ended
    (line,) = ended.errors
    assert all(text in line for text in shown), line
    assert "hf_" not in line
    assert not (run / "export").exists()
    assert not [request for request in session.requests() if not request.startswith("GET ")]


def test_pushes(tmp_path: Path, session: Session) -> None:
    """One run's pushes in a row: a new repository, the same again with another checkpoint, an edited card, failures."""
    run, hub, session_call = write_run(tmp_path), session.hub, session.call
    pushed = session_call(stand_in.WRITE, "export", run, "--push", "me/student")
    assert pushed.code == 0, pushed.err
    assert f"{hub.address}/me/student (private" in pushed.out
    repo, folder = hub.repos["me/student"], run / "export"
    assert repo.private
    assert [commit["summary"] for commit in repo.commits] == [f"Step 8 of {run.name}"]
    assert [commit["deleted"] for commit in repo.commits] == [[]]
    assert repo.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= repo.files.keys()
    card = ModelCard(repo.files["README.md"].decode()).data
    assert (card.license, card["distill_rl"]["step"]) == ("llama3.2", 8)

    # The export is there already: only its card is new, and nothing that is not of the export is uploaded.
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    (folder / "notes.json").write_text("private")
    (folder / "vocab.json").symlink_to(run / "config.yaml")
    again = session_call(
        stand_in.WRITE, "export", run, "--push", "lab/open", "--public", "--license", "My Own Licence 2"
    )
    assert again.code == 0, again.err
    assert "holds step 8 already" in again.out
    assert weights.stat().st_mtime_ns == written
    opened = hub.repos["lab/open"]
    assert not opened.private
    assert opened.files.keys() == repo.files.keys()
    card = ModelCard(opened.files["README.md"].decode()).data
    assert (card.license, card.license_name) == ("other", "my-own-licence-2")

    # Another checkpoint in other files takes the place of the weights in the repository.
    options = ("--checkpoint", "best", "--max-file-size", "20KB", "--out", tmp_path / "best")
    best = session_call(stand_in.WRITE, "export", run, "--push", "me/student", *options)
    assert best.code == 0, best.err
    assert [commit["deleted"] for commit in repo.commits] == [[], ["model.safetensors"]]
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in repo.files.items():
        (copy / name).write_bytes(content)
    assert torch.equal(logits_of(copy), logits_of(tmp_path / "best"))
    assert not torch.equal(logits_of(copy), logits_of(folder))

    repeated = session_call(stand_in.WRITE, "export", run, "--push", "me/student", *options)
    assert repeated.code == 0, repeated.err
    assert "holds step 4 already" in repeated.out
    other = session_call(stand_in.WRITE, "export", run, "--push", "me/student", *options[2:])
    assert other.code == 2
    assert "must be a new or empty folder" in other.err

    refused = session_call(stand_in.WRITE, "export", run, "--push", "me/student", "--public")
    assert refused.code == 2
    assert "exists and is private" in refused.err

    # A card that somebody has edited is theirs.
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("# tiny", "# My student"))
    assert not is_untouched(readme.read_text())
    relicensed = session_call(stand_in.WRITE, "export", run, "--push", "me/student", "--license", "mit")
    assert relicensed.code == 2
    assert "edited by hand" in relicensed.err
    assert session_call(stand_in.WRITE, "export", run, "--push", "me/student").code == 0
    assert b"# My student" in repo.files["README.md"]

    before = dict(repo.files)
    failed = session_call(stand_in.FAIL, "export", run, "--push", "me/student", "--checkpoint", "4")
    assert failed.code == 1
    (line,) = failed.errors
    assert f"upload to {hub.address}/me/student" in line
    assert repo.files == before
    assert logits_of(folder).isfinite().all(), "the folder is complete"


def test_adapters_are_pushed_with_their_folder_and_do_not_outlive_them(tmp_path: Path, session: Session) -> None:
    adapted, plain = write_run(tmp_path / "adapted", LoraConfig(rank=2)), write_run(tmp_path / "plain")
    assert session.call(stand_in.WRITE, "export", adapted, "--push", "me/adapted").code == 0
    repo, folder = session.hub.repos["me/adapted"], adapted / "export"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    adapter = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert repo.files.keys() == files
    assert adapter < files
    assert session.call(stand_in.WRITE, "export", plain, "--push", "me/adapted").code == 0
    assert set(repo.commits[-1]["deleted"]) == adapter
    assert repo.files.keys() == files - adapter
