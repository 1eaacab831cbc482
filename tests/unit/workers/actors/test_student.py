import math

import pytest
import torch

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.types import TeacherPart
from distill_rl.workers.actors.student import StudentWorker
from distill_rl.workers.actors.teacher import Published


class Chunks:
    num_covered = 5


class Batch:
    """What is read of a batch: eight labels in all, five of them in chunks of the second teacher."""

    num_labels = 8
    teachers = (TeacherPart(), TeacherPart(Chunks))


def worker(score: str) -> StudentWorker:
    config = Config()
    config.teachers = [TeacherConfig(name=name, model=name, score=score) for name in ("near", "far")]
    return StudentWorker(0, config, 1, (None, None), 32, torch.get_num_threads())


@pytest.mark.parametrize("score", ["ce", "entropy"])
def test_scores_are_means_over_the_tokens_that_a_teacher_supervises(score):
    """The first teacher has two replicas."""
    published = [Published(score=10.0), Published(score=14.0), Published(score=20.0)]
    assert worker(score)._scores(Batch, [published[:2], published[2:]]) == [24.0 / 8, 20.0 / 5]


def test_a_lost_teacher_has_the_highest_score():
    assert worker("ce")._scores(Batch, [[], [Published(score=20.0)]]) == [math.inf, 4.0]
    assert worker("static")._scores(Batch, [[Published(), Published()], []]) == [0.0, math.inf]
    assert worker("static")._scores(Batch, [[Published()] * 2, [Published()]]) == []


def test_no_token_is_no_division_by_zero():
    class Empty:
        num_labels, teachers = 0, (TeacherPart(), TeacherPart())

    assert worker("ce")._scores(Empty, [[Published(score=0.0)]] * 2) == [0.0, 0.0]
