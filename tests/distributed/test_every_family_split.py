"""Families without a tensor-parallel plan here are split by transformers' own, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distill_rl.errors import ConfigError
from distill_rl.models import families, forward
from distill_rl.parallel.mesh import close_world, open_world
from tests.helpers import ranks
from tests.helpers.load import load_model
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo import DENSE, MIXTURES, UNSPLIT, write_family

pytestmark = pytest.mark.ranks

IDS, POSITIONS = torch.arange(3, 15)[None], torch.arange(12)[None]
FAMILIES = [name for name in [*DENSE, *MIXTURES] if not families.family_of(SimpleNamespace(model_type=name)).layer_plan]


def logits_of_teachers(tp: int, folders: list[Path]) -> dict[str, torch.Tensor | str]:
    """Whole logits on the first rank by family, or why it was refused."""
    world = open_world(rank=ranks.rank(), dp=1, tp=tp, store=ranks.store(), timeout_s=60)
    found: dict[str, torch.Tensor | str] = {}
    for folder in folders:
        try:
            teacher = load_model(folder, world, role="teacher", dtype="fp32", packing=False)
        except ConfigError as error:
            found[folder.name] = str(error)
            continue
        with torch.no_grad():
            logits = forward.logits(teacher, IDS, POSITIONS)
            found[folder.name] = logits.full_tensor() if tp > 1 else logits
    close_world(world)
    return found


def test_two_ranks_compute_what_one_does_or_refuse(tmp_path: Path) -> None:
    folders = [write_family(tmp_path / name, name) for name in FAMILIES]
    (whole,) = run_ranks(1, logits_of_teachers, 1, folders, group=False)
    first, second = run_ranks(2, logits_of_teachers, 2, folders, group=False, timeout=300)
    refused = {name for name, found in first.items() if isinstance(found, str)}
    assert refused == UNSPLIT, {name: first[name] for name in refused ^ UNSPLIT}
    assert all(first[name] == second[name] and "set parallel.tp: 1" in first[name] for name in refused)
    for name in first.keys() - refused:
        torch.testing.assert_close(first[name], whole[name], rtol=1e-3, atol=1e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023
