import pickle

import pytest

from distill_rl import errors
from distill_rl.errors import ConfigError, DistillError, WorkerError, problems_of

TREE = {
    "ConfigError": 2,
    "DataError": 2,
    "UnreadableFile": 2,
    "AlignmentError": 1,
    "TransportError": 1,
    "WorkerError": 1,
    "CheckpointError": 2,
    "StoreError": 2,
    "NumericsError": 1,
    "GpuMemoryError": 1,
}


def test_error_tree_is_the_documented_one():
    exit_codes = {
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, DistillError) and value is not DistillError
    }
    assert exit_codes == TREE
    assert all(name in errors.__doc__ for name in TREE)


def test_message_is_one_line_of_what_rule_value_remedy():
    error = ConfigError("train.steps", "must be 1 or more", 0, "set train.steps")
    assert str(error) == "train.steps: must be 1 or more; got 0; set train.steps"
    assert "\n" not in str(ConfigError("a", "b", "two\nlines"))


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in TREE])
def test_errors_survive_pickling_with_attributes(kind):
    error = kind("what", "rule", [1], "remedy")
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.value, copy.__notes__) == (str(error), [1], ["a note"])


def test_problems_of_runs_all_checks_and_collects_config_errors():
    def refuse(*lines):
        raise ConfigError.many(lines)

    def fail():
        raise WorkerError("no input")

    problems = problems_of(lambda: refuse("first: bad"), lambda: None, lambda: refuse("second: worse", "third"))
    assert problems == ["first: bad", "second: worse", "third"]
    with pytest.raises(WorkerError, match="no input"):
        problems_of(fail)


def test_error_of_many_problems_survives_pickling():
    error = pickle.loads(pickle.dumps(ConfigError.many(["first: bad", "second: worse"])))
    assert error.problems == ("first: bad", "second: worse")
    assert str(error) == "first: bad\nsecond: worse"
    assert WorkerError("one").problems == ("one",)
