"""The alignment benchmark, which compiles its kernels again without a cache."""

import json
from pathlib import Path

from tests.bench import align
from tests.helpers.align import SENTENCES, family


def test_it_writes_every_row_with_every_contender(tmp_path, monkeypatch, capsys):
    folders = []
    for name in ("byte_level", "spm_always"):
        family(name).save_pretrained(tmp_path / name)
        folders.append(str(tmp_path / name))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(SENTENCES[:3]) * 60, "utf-8")
    material = ["--tokenizers", *folders, "--text", str(text), "--rounds", "1", "--out", str(tmp_path / "align.json")]
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
    plain, lossy = written["beside_intersect1d"]
    assert (plain["teacher"], plain["methods"][align.PAIR]) == ("spm_always", "bytes")
    assert (lossy["teacher"], lossy["methods"][align.PAIR]) == ("wordpiece", "offsets")
    assert min(plain[state][align.PAIR] for state in ("warm", "cold")) > 0
    [lossy] = written["lossy"]
    assert (lossy["teacher"], lossy["method"]) == ("wordpiece", "dp")
    assert lossy["tokens"][0] <= 256
    assert lossy["chunks"]["1:1"] > 0
    assert min(lossy[key] for key in ("first_seconds", "first_seconds_without_cache", "milliseconds")) > 0
    assert {"cpu", "commit"} <= written["environment"].keys()
    assert "1,024" in capsys.readouterr().out
