from distill_rl.config.paths import absolute
from distill_rl.config.schema import Config, TeacherConfig


def test_what_is_there_becomes_absolute_and_names_on_a_hub_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("models/s", "data", "home/t"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "suite.py").touch()
    config = Config(teachers=[TeacherConfig(model="org/name"), TeacherConfig(model="~/t", tokenizer="models/s")])
    config.student.model, config.run.dir, config.data.path = "models/s", "runs", "data/*.parquet"
    config.evaluate.suites, config.evaluate.data = ["gsm8k", "suite.py"], "data"
    config.checkpoint.resume = "latest"
    found = absolute(config)
    assert found.student.model == f"{tmp_path}/models/s"
    assert [teacher.model for teacher in found.teachers] == ["org/name", f"{tmp_path}/home/t"]
    assert found.teachers[1].tokenizer == f"{tmp_path}/models/s"
    assert found.run.dir == f"{tmp_path}/runs"
    assert found.data.path == f"{tmp_path}/data/*.parquet"
    assert found.evaluate.suites == ["gsm8k", f"{tmp_path}/suite.py"]
    assert found.evaluate.data == f"{tmp_path}/data"
    assert (found.student.tokenizer, found.data.validation.path, found.checkpoint.resume) == (None, None, "latest")
    assert absolute(found) == found
