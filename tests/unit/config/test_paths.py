from distill_rl.config.load import read_config
from distill_rl.config.paths import absolute
from distill_rl.config.schema import Config, TeacherConfig


def test_a_home_is_written_out_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    teachers = [{"model": "~/t", "cache": "~/c"}, {"store": {"path": "~/s"}}]
    config, _ = read_config({"student.model": "~/m", "data.path": "~/d", "teachers": teachers})
    home = str(tmp_path)
    assert (config.student.model, config.data.path) == (f"{home}/m", f"{home}/d")
    assert (config.teachers[0].cache, config.teachers[1].store.path) == (f"{home}/c", f"{home}/s")


def test_existing_paths_become_absolute_and_hub_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("models/s", "data", "home/t"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "suite.py").touch()
    config = Config(teachers=[TeacherConfig(model="org/name"), TeacherConfig(model="~/t", tokenizer="models/s")])
    config.student.model, config.run.dir, config.data.path = "models/s", "runs", "data/*.parquet"
    config.evaluate.suites, config.evaluate.data = ["gsm8k", "suite.py"], "data"
    config.checkpoint.resume = "latest"
    resolved = absolute(config)
    assert resolved.student.model == f"{tmp_path}/models/s"
    assert [teacher.model for teacher in resolved.teachers] == ["org/name", f"{tmp_path}/home/t"]
    assert resolved.teachers[1].tokenizer == f"{tmp_path}/models/s"
    assert resolved.run.dir == f"{tmp_path}/runs"
    assert resolved.data.path == f"{tmp_path}/data/*.parquet"
    assert resolved.evaluate.suites == ["gsm8k", f"{tmp_path}/suite.py"]
    assert resolved.evaluate.data == f"{tmp_path}/data"
    assert (resolved.student.tokenizer, resolved.data.validation.path, resolved.checkpoint.resume) == (
        None,
        None,
        "latest",
    )
    assert absolute(resolved) == resolved
