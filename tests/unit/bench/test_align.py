import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from distill_rl.bench import align
from tests.helpers.align import SENTENCES, family


@pytest.fixture
def material(tmp_path):
    folders = []
    for name in ("byte_level", "spm_always"):
        family(name).save_pretrained(tmp_path / name)
        folders.append(str(tmp_path / name))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(SENTENCES[:3]) * 60, "utf-8")
    return ["--tokenizers", *folders, "--text", str(text), "--rounds", "1", "--out", str(tmp_path / "align.json")]


def test_it_writes_every_row_with_every_contender(material, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(align, "TOKENS", 256)
    monkeypatch.setattr(align, "PADS", 100)
    monkeypatch.setattr(align, "LONG", 1024)
    family("wordpiece").save_pretrained(tmp_path / "wordpiece")
    assert align.main(["--lossy", str(tmp_path / "wordpiece"), *material]) == 0
    written = json.loads(Path(material[-1]).read_text("utf-8"))
    names = [line["row"] for line in written["results"]]
    assert names == ["English", "repeats", "100 pads of 256", "1,024 tokens"]
    assert all(line["exact"] and line["milliseconds"][align.OURS] > 0 for line in written["results"])
    assert {align.BARE, align.PAIR, align.ENCODES} <= written["results"][0]["milliseconds"].keys()
    assert written["results"][2]["tokens"][0] == 256
    assert written["projection"]["shape"][1] == family("spm_always").vocab_size
    assert written["projection"]["peak_mib"] > 10
    [lossy] = written["lossy"]
    assert (lossy["teacher"], lossy["method"]) == ("wordpiece", "dp")
    assert lossy["tokens"][0] <= 256
    assert lossy["chunks"]["1:1"] > 0
    assert min(lossy[key] for key in ("first_seconds", "first_seconds_without_cache", "milliseconds")) > 0
    assert {"cpu", "commit"} <= written["environment"].keys()
    assert "1,024" in capsys.readouterr().out


def test_without_material_it_says_what_it_needs(tmp_path, capsys):
    assert align.main([]) == 2
    assert "needs --tokenizers STUDENT TEACHER" in capsys.readouterr().err
    assert align.main(["--tokenizers", str(tmp_path), str(tmp_path), "--text", "x"]) == 2
    assert capsys.readouterr().err.endswith("tokenizer.json: no such file\n")


def test_a_walk_that_cannot_be_had_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(align.importlib.util, "find_spec", lambda name: None)
    assert align.walk() == (None, "not installed")
    monkeypatch.setattr(align.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(align.importlib, "import_module", lambda name: ModuleType(name))
    assert align.walk() == (None, "not in this version")
