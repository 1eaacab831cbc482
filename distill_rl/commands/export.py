"""distill-rl export: writes a checkpoint as a Hugging Face folder and uploads it, in this process, without Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.errors import CheckpointError, ConfigError
from distill_rl.observe.log import say
from distill_rl.run import checkpoints
from distill_rl.types import RunPaths

if TYPE_CHECKING:
    from distill_rl.config.schema import Config, StudentConfig
    from distill_rl.run.checkpoints import Checkpoint

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass(frozen=True, slots=True)
class _Export:
    """What is to be in the folder, and where that is."""

    paths: RunPaths
    config: Config
    folder: Path
    dtype: str
    """`as_stored`, `fp32` or `bf16`."""
    max_file_bytes: int | None
    """None: the default of `export_model`."""
    licence: str | None

    def card(self, step: int, data_fingerprint: str) -> str:
        """The text of the model card."""
        from distill_rl.models.files import licence
        from distill_rl.run.card import card_of, measured_at

        given = None if self.licence is None else licence(self.licence)
        scores = measured_at(self.paths, step)
        return card_of(
            self.config, step=step, data_fingerprint=data_fingerprint, scores=scores, dtype=self.dtype, licence=given
        )


def export(
    run: Path,
    *,
    checkpoint: str,
    out: Path | None,
    dtype: str = "as_stored",
    max_file_size: str | None = None,
    push: str | None = None,
    public: bool = False,
    licence: str | None = None,
) -> int:
    """Writes the model of one checkpoint, resharded to a single process, with its tokenizer and model card; returns 0.

    With `push` it also uploads the folder. Then a folder that holds this export already is not written again, only its model
    card is, which an evaluation may have come after; unless somebody has edited that.

    Args:
        run: the run directory.
        checkpoint: `latest`; `best`, by checkpoint.best_by; or a step (`120`, `step-120`).
        out: new or empty folder, or with `push` one that holds this export; None: `export` of the run directory, which is
            replaced.
        dtype: of the weights: `fp32`, `bf16`, or `as_stored`, as in the student's files.
        max_file_size: of a file with weights, such as `5GB` or `200MB`.
        push: repository on the Hugging Face hub, as OWNER/NAME.
        public: whether everybody may read that.
        licence: of the model; None: that of the student that was trained.

    Raises:
        ConfigError: not a run directory, an output folder that is not empty, or a repository that cannot be pushed to. The
            last is found out before anything is exported.
        CheckpointError: the checkpoint does not exist or is damaged, or its adapters were trained beside other weights.
        PublishError: the upload failed; the folder is complete.
    """
    from distill_rl.config.load import load_config
    from distill_rl.models.export import open_repository
    from distill_rl.models.export import push as upload

    paths = RunPaths(run)
    if not paths.config.is_file():
        remedy = "give the folder that distill-rl train wrote"
        raise ConfigError(f"{run}", "must be a run directory with a config.yaml", remedy=remedy)
    if public and push is None:
        raise ConfigError("--public", "is about --push OWNER/NAME", remedy="give both, or neither")
    size = None if max_file_size is None else _bytes(max_file_size)
    wanted = _Export(paths, load_config(paths.config, []), out or paths.export, dtype, size, licence)
    step = None if push is None else _step_in_folder(wanted, checkpoint)
    if step is None and out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}", "the output must be a new or empty folder", remedy="choose another --out")
    repository = None if push is None else open_repository(push, public=public)
    if step is None:
        source = _find(wanted, checkpoint)
        _require_frozen(wanted.config.student, source)
        step = _write(wanted, source)
        say(f"exported  {wanted.folder} (step {step})")
    else:
        _renew_card(wanted, step)
    if repository is not None:
        commit = upload(wanted.folder, repository, message=f"Step {step} of {wanted.config.run.name or 'a run'}")
        say(f"pushed    {repository.address} ({'private' if repository.private else 'public'}, commit {commit[:8]})")
    return 0


def _require_frozen(student: StudentConfig, source: Checkpoint) -> None:
    """Checks that the weights to which adapters are added are those beside which they were trained, as far as it says."""
    from distill_rl.models.files import fingerprint_model, folder_problems, resolve

    name = checkpoints.FROZEN
    saved = source.state.fingerprints.get(name)
    if saved is None or not student.has_adapters:
        return
    folder = resolve(student.model, student.revision, weights=True)
    ConfigError.raise_all(folder_problems("student.model", folder))
    checkpoints.require_same({name: saved}, {name: fingerprint_model(folder)}, remedy=f"restore them in {folder}")


def _write(wanted: _Export, source: Checkpoint) -> int:
    import torch

    from distill_rl.models.export import MAX_FILE_BYTES
    from distill_rl.models.files import tokenizer_of, vocabulary_size
    from distill_rl.parallel.mesh import close_world, open_world
    from distill_rl.student.engine import StudentEngine

    step = source.state.train.step
    config = _to_export(wanted.config)
    tokenizer = tokenizer_of(config.student)
    dtypes = {"as_stored": None, "fp32": torch.float32, "bf16": torch.bfloat16}
    form = {"dtype": dtypes[wanted.dtype], "max_file_bytes": wanted.max_file_bytes or MAX_FILE_BYTES}
    world = open_world(rank=0, dp=1, tp=1)
    try:
        engine = StudentEngine(config, world, vocabulary_size=vocabulary_size(tokenizer), total_steps=max(step, 1))
        engine.load(source.student)
        engine.export(wanted.folder, tokenizer, wanted.card(step, source.state.fingerprints["data"]), **form)
    finally:
        close_world(world)
    return step


def _to_export(config: Config) -> Config:
    """The configuration of a run without what decides how, where and beside whom its student is computed."""
    from distill_rl.config.schema import ParallelConfig

    # Weights that are not trained come from the student's files.
    student = replace(
        config.student, parallel=ParallelConfig(), quantization=None, attention="auto", kernels="torch", compile=False
    )
    return replace(config, student=student, teachers=[])


def _step_in_folder(wanted: _Export, checkpoint: str) -> int | None:
    """The step of the export that the folder holds, if that is what is wanted; None if it has to be exported."""
    from distill_rl.models.files import card_header, weight_problems
    from distill_rl.run.card import OWN

    held = card_header(wanted.folder).get(OWN)
    if not isinstance(held, dict) or weight_problems("export", wanted.folder):
        return None
    if wanted.max_file_bytes is not None and _exceeds(wanted.folder, wanted.max_file_bytes):
        return None
    asked: int | None = -1
    if checkpoint == "latest":
        asked = checkpoints.newest_step(wanted.paths.checkpoints)
    elif checkpoint == "best":
        asked = _store(wanted).best().state.train.step
    elif (number := checkpoint.removeprefix("step-")).isdecimal():
        asked = int(number)
    step = held.get("step")
    matches = isinstance(step, int) and held.get("dtype") == wanted.dtype and asked in (step, None)
    return step if matches else None


def _exceeds(folder: Path, size: int) -> bool:
    """Whether a file of several tensors is larger than `size`."""
    from safetensors import safe_open

    large = (file for file in folder.glob("*.safetensors") if file.stat().st_size > size)
    return any(len(safe_open(file, framework="np").keys()) > 1 for file in large)


def _renew_card(wanted: _Export, step: int) -> None:
    """Brings the model card of a finished export up to date. One that somebody has edited is left as it is."""
    from distill_rl.models.files import card_header
    from distill_rl.run.card import OWN, is_untouched
    from distill_rl.system.files import write_atomic

    file = wanted.folder / "README.md"
    if is_untouched(file.read_text(encoding="utf-8")):
        write_atomic(file, wanted.card(step, str(card_header(wanted.folder)[OWN].get("data_sha256"))))
    elif wanted.licence is not None:
        remedy = "write the licence into its header, and leave out --license"
        raise ConfigError("--license", f"{file} was edited by hand and is not rewritten", wanted.licence, remedy)
    say(f"export    {wanted.folder} holds step {step} already")


def _find(wanted: _Export, checkpoint: str) -> Checkpoint:
    """The checkpoint of a step (`120`, `step-120`), the newest valid one for `latest`, or the `best`."""
    folder = wanted.paths.checkpoints
    if checkpoint == "best":
        return _store(wanted).best()
    if checkpoint != "latest":
        path = folder / f"step-{checkpoint.removeprefix('step-')}"
        if not path.exists() and (steps := checkpoints.steps(folder)):
            rule = f"must be latest, best, or one of the run's checkpoints ({', '.join(map(str, steps))})"
            raise CheckpointError("--checkpoint", rule, checkpoint)
        return checkpoints.read(path)
    if newest := _store(wanted).newest():
        return newest
    raise CheckpointError(f"{folder}", "must hold a valid checkpoint", "none")


def _store(wanted: _Export) -> checkpoints.CheckpointStore:
    best_by = wanted.config.checkpoint.best_by
    return checkpoints.CheckpointStore(
        wanted.paths.checkpoints, keep_last=1, keep_best=0, best_by=best_by, scores=wanted.paths.scores
    )


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]b)", text.strip().lower())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise ConfigError("--max-file-size", "must be a number with KB, MB, GB or TB", text, "for example 5GB")
    return size
