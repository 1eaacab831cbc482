import sys
from types import ModuleType

from tests.bench import align


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
