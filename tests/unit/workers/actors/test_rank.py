import pytest

from distill_rl.workers.actors import rank


@pytest.mark.parametrize(
    ("assigned", "visible", "expected"),
    [
        (["3"], None, 3),  # all GPUs of the node are visible
        (["3"], "3", 0),  # Ray has hidden the others
        (["5"], "4,5", 1),  # the node's processes see only two of its GPUs
        (["GPU-b"], "GPU-a, GPU-b", 1),
        ([2], None, 2),
    ],
)
def test_rank_uses_the_gpu_that_ray_assigned(monkeypatch, assigned, visible, expected):
    monkeypatch.setattr(rank.ray, "get_gpu_ids", lambda: assigned)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert rank.gpu_index() == expected
