import pytest

from distill_rl.config.load import load_config, merge
from distill_rl.errors import ConfigError

TEXT = """
student: {model: s}
teachers: [{model: a}, {model: b, weight: 3}]
data: {path: d}
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return lambda *overrides: load_config(path, overrides)


def test_numbered_list_entry_is_changed_in_place(load):
    config = load("teachers.1.model=c", "teachers.0.parallel.tp=2")
    assert [(t.model, t.weight, t.parallel.tp) for t in config.teachers] == [("a", 1.0, 2), ("c", 3.0, 1)]


def test_number_after_the_last_appends_an_entry(load):
    config = load("teachers.2.model=c", "teachers.3.model=d", "evaluate.suites.0=exact_match")
    assert [t.model for t in config.teachers] == ["a", "b", "c", "d"]
    assert config.evaluate.suites == ["exact_match"]


def test_changed_entry_keeps_the_other_default_entries(load):
    assert load("optimizer.betas.1=0.98").optimizer.betas == [0.9, 0.98]
    assert load("optimizer.betas=[0.8,0.7]").optimizer.betas == [0.8, 0.7]


def test_last_override_of_a_key_wins(load):
    assert load("train.steps=1", "train.steps=2").train.steps == 2


def test_section_as_a_mapping_is_merged(load):
    config = load("student={parallel: {dp: 2}}")
    assert (config.student.model, config.student.parallel.dp, config.student.parallel.tp) == ("s", 2, 1)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("007", "007"),
        ("2024-01-01", "2024-01-01"),
        ("true", "true"),
        ("1e3", "1e3"),
        ("a=b: c # d", "a=b: c # d"),
        ("'quoted # text'", "quoted # text"),
        ('"007"', "007"),
        ("[x", "[x"),
        (" x ", "x"),
        ("", ""),
    ],
)
def test_text_setting_is_taken_as_typed(load, override, value):
    assert load(f"run.dir={override}").run.dir == value


@pytest.mark.parametrize("text", ["null", "~", ""])
def test_optional_text_can_be_reset_to_null(load, text):
    assert load("checkpoint.resume=latest", f"checkpoint.resume={text}").checkpoint.resume is None


@pytest.mark.parametrize(
    ("override", "value"),
    [("1e-5", 1e-5), ("3", 3.0), ("1_000", 1000.0), ("-0.5", -0.5)],
)
def test_number_is_read_as_yaml(load, override, value):
    lr = load(f"optimizer.lr={override}").optimizer.lr
    assert lr == value
    assert isinstance(lr, float)


def test_merge_replaces_lists_and_ignores_empty_sections():
    below = {"a": {"x": 1, "y": [1, 2]}, "b": 1}
    assert merge(below, {"a": {"y": [3]}, "b": None, "c": {}}) == {"a": {"x": 1, "y": [3]}, "b": None, "c": {}}
    assert merge(below, {"a": None}) == below
    assert below == {"a": {"x": 1, "y": [1, 2]}, "b": 1}


def test_section_that_may_be_null_is_made_by_its_parts_and_unmade_by_null(load, tmp_path):
    assert load().student.lora is None
    assert load("student.lora={}").student.lora.rank == 16
    lora = load("student.lora.rank=4", "student.lora.targets.0=q_proj", "student.lora.targets.1=v_proj").student.lora
    assert (lora.rank, lora.scale, lora.targets) == (4, 2.0, ["q_proj", "v_proj"])
    assert load("student.lora.rank=4", "student.lora=null").student.lora is None
    assert load("student.lora.rank=4", "student={lora: null}").student.lora is None
    (tmp_path / "above.yaml").write_text("extends: below.yaml\nstudent: {lora: null}\n")
    (tmp_path / "below.yaml").write_text(TEXT.replace("{model: s}", "{model: s, lora: {rank: 4}}"))
    assert load_config(tmp_path / "below.yaml").student.lora.rank == 4
    assert load_config(tmp_path / "above.yaml").student.lora is None


def test_section_of_a_wrong_type_is_reported_once(load):
    with pytest.raises(ConfigError) as refused:
        load("student.lora=true")
    (line,) = refused.value.problems
    assert line.startswith(
        "student.lora: must be a section with the keys rank, alpha, dropout, targets, modules_to_save"
    )
