import pytest

from distill_rl.workers.actors import rank


@pytest.mark.parametrize(
    ("given", "visible", "expected"),
    [
        (["3"], None, 3),  # all GPUs of the node are seen
        (["3"], "3", 0),  # Ray has hidden the others
        (["5"], "4,5", 1),  # the node itself may use two of them
        (["GPU-b"], "GPU-a, GPU-b", 1),
        ([2], None, 2),
    ],
)
def test_a_rank_takes_the_gpu_that_ray_gave_it(monkeypatch, given, visible, expected):
    monkeypatch.setattr(rank.ray, "get_gpu_ids", lambda: given)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert rank.gpu_index() == expected
