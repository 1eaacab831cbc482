"""A driver that is killed leaves neither processes of Ray nor files for long."""

import psutil
import pytest

from tests.helpers.command import survivors, until
from tests.ray.test_cluster import folders, session

pytestmark = pytest.mark.ray


def test_the_next_session_removes_what_a_killed_one_left():
    killed = session("die after")
    assert folders(killed["pid"])
    session()
    assert not folders(killed["pid"])


def test_kill_9_of_the_driver_ends_ray_and_removes_its_files():
    killed = session("die inside")
    assert killed["started"]
    assert not survivors([psutil.Process(pid) for pid in killed["started"] if psutil.pid_exists(pid)])
    until(lambda: not folders(killed["pid"]), "the directory of Ray removed", deadline_s=10)
