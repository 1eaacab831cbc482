import os
from dataclasses import replace

import pytest
import torch

from distill_rl.errors import ConfigError
from distill_rl.transport.base import Place, Ring, expandable_segments, place_of
from distill_rl.transport.choose import choose, expected, make

CPU = Place("a", "cpu", 1000)
GPU = Place("a", "GPU-0", 1000, reaches=("GPU-0", "GPU-1"))
PEER = Place("a", "GPU-1", 1000, reaches=("GPU-0", "GPU-1"))
HIDDEN = Place("a", "GPU-2", 1000, reaches=("GPU-2",))
ELSEWHERE = replace(GPU, node_id="b")
EXPANDABLE = replace(GPU, expandable="PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize(
    ("writer", "readers", "name", "why"),
    [
        (CPU, [CPU], "object_store", "the teacher is on a CPU"),
        (GPU, [CPU], "object_store", "the student is on a CPU"),
        (GPU, [GPU], "cuda_ipc", "GPUs of one node"),
        (GPU, [GPU, PEER], "cuda_ipc", "GPUs of one node"),
        (GPU, [PEER, HIDDEN], "object_store", "GPU GPU-0 of the teacher and GPU GPU-2 of a student do not reach"),
        (GPU, [GPU, ELSEWHERE], "object_store", "the teacher is on node a, a student on b"),
        (GPU, [EXPANDABLE], "object_store", "PYTORCH_ALLOC_CONF turns expandable segments on"),
        (GPU, [replace(GPU, uid=1001)], "object_store", "runs as user 1000, a student as user 1001"),
    ],
)
def test_auto_takes_cuda_ipc_or_says_why_not(writer, readers, name, why):
    choice = choose("auto", writer, readers)
    assert choice.name == name
    assert why in choice.reason


@pytest.mark.parametrize(
    ("name", "readers", "why"),
    [
        ("cuda_ipc", [CPU], "the student is on a CPU; use transport=auto"),
        ("cuda_ipc", [EXPANDABLE], "PYTORCH_ALLOC_CONF turns expandable segments on"),
        ("cuda_ipc", [ELSEWHERE], "the teacher is on node a, a student on b"),
        ("cuda_ipc", [HIDDEN], "do not reach each other"),
        ("shared_memory", [PEER, ELSEWHERE], "the teacher is on node a, a student on b"),
        ("shared_memory", [replace(CPU, uid=0)], "as user 1000, a student as user 0"),
        ("local", [GPU], "works inside one process"),
    ],
)
def test_requested_transport_that_cannot_work_is_refused(name, readers, why):
    with pytest.raises(ConfigError, match=f"^transport: .*{why}"):
        choose(name, GPU, readers)


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("object_store", [ELSEWHERE]),
        ("shared_memory", [CPU, GPU]),
        ("shared_memory", [EXPANDABLE]),
        ("cuda_ipc", [PEER]),
    ],
)
def test_requested_transport_is_taken(name, readers):
    choice = choose(name, GPU, readers)
    assert (choice.name, choice.reason) == (name, "requested by name")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native, expandable_segments:true"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ""),
    ],
)
def test_variable_for_expandable_segments_is_found(settings, found):
    assert expandable_segments(settings) == found


def test_expected_transport_before_the_run(monkeypatch):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    assert expected("auto", gpus=0).name == "object_store"
    assert expected("auto", gpus=2).name == "cuda_ipc"
    assert "otherwise object_store" in expected("auto", gpus=2).reason
    assert expected("shared_memory", gpus=0).name == "shared_memory"
    with pytest.raises(ConfigError, match="cuda_ipc needs GPUs; got none"):
        expected("cuda_ipc", gpus=0)
    with pytest.raises(ConfigError, match="inside one process"):
        expected("local", gpus=0)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert expected("auto", gpus=2).name == "object_store"
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF turns them on"):
        expected("cuda_ipc", gpus=2)


def test_place_without_a_gpu():
    place = place_of(torch.device("cpu"), "node")
    assert (place.node_id, place.device, place.uid, place.reaches) == ("node", "cpu", os.getuid(), ())


@pytest.mark.parametrize("name", ["local", "shared_memory"])
def test_transport_is_made_by_name(name):
    transport = make(name, deadline_s=1, node_id="node", ring=Ring(1, 4096), source="teacher")
    offer = transport.offer(0)
    assert (transport.name, offer.source, offer.node_id) == (name, "teacher", "node")
    transport.close()


@pytest.mark.parametrize("name", ["local", "shared_memory", "object_store"])
def test_a_side_closes_the_one_whose_place_it_takes(monkeypatch, name):
    arguments = {"deadline_s": 1, "node_id": "node", "ring": Ring(1, 4096), "source": "teacher"}
    earlier, closed = make(name, **arguments), []
    close = type(earlier).close
    monkeypatch.setattr(type(earlier), "close", lambda side: (closed.append(side), close(side)))
    later = make(name, **arguments, earlier=earlier)
    assert closed == [earlier]
    later.close()


def test_unknown_name_lists_all_names():
    with pytest.raises(ConfigError, match="local, object_store, shared_memory, cuda_ipc"):
        make("pigeon", deadline_s=1)
