"""Loading weights from files straight into shards, and exporting shards back into files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill_rl.config.schema import StudentConfig
from distill_rl.errors import ConfigError
from distill_rl.models import forward
from distill_rl.models.export import export_model
from distill_rl.models.files import read_config, read_tokenizer
from distill_rl.models.parallelize import parallelize, tie_again
from distill_rl.models.weights import WeightFiles, read_weights, restore_buffers, skeleton, tensors_in_files
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.parallel.shards import gather_to_first, local_part, local_slices, mask_padded_columns
from tests.helpers import ranks
from tests.helpers.load import load_model
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.zoo import write_model

pytestmark = pytest.mark.ranks

VOCABULARY = 507
TOKENS = torch.arange(3, 15)[None]
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1)]


def in_world(dp: int, tp: int, replicas: int = 1) -> World:
    return open_world(rank=ranks.rank(), dp=dp, tp=tp, replicas=replicas, store=ranks.store(), timeout_s=60)


# --- round trip: load, export


def round_trip(dp: int, tp: int, replicas: int, sources: list[str], out: str) -> list[str]:
    """Loads and exports every model untrained; returns what was wrong with the shards."""
    world = in_world(dp, tp, replicas)
    problems = []
    for source in sources:
        model = load_model(source, world, role="student", dtype="bf16")
        for name, parameter in model.named_parameters():
            whole = gather_to_first(parameter)
            if (whole is None) == (world.rank == 0):
                problems.append(f"{name} was gathered on rank {world.rank}")
        export_model(model, source=source, tokenizer=read_tokenizer(source), out_dir=Path(out, Path(source).name))
    close_world(world)
    return problems


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Models whose vocabulary and norms cannot be divided evenly among the ranks."""
    folder = tmp_path_factory.mktemp("sources")
    for name, settings in (
        ("llama", {"hidden": 24, "tie": False, "dtype": "bfloat16"}),
        ("qwen3", {"tie": True, "dtype": "float32"}),
        ("qwen2", {"hidden": 24, "tie": True, "dtype": "float16"}),
        ("gpt2", {"tie": True, "dtype": "bfloat16"}),
        ("phi3", {"dtype": "bfloat16"}),
    ):
        write_model(folder / name, name, vocab_size=VOCABULARY, heads=4, **settings)
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize(
    ("dp", "tp", "replicas"), [*((dp, tp, 1) for dp, tp in LAYOUTS), (2, 1, 2), (4, 1, 2), (2, 2, 2)]
)
def test_sharded_load_and_export_give_the_same_bytes(sources, tmp_path: Path, dp: int, tp: int, replicas: int) -> None:
    assert run_ranks(dp * tp, round_trip, dp, tp, replicas, sources, str(tmp_path), group=False) == [[]] * (dp * tp)
    for source in map(Path, sources):
        wanted = load_file(source / "model.safetensors")
        exported = load_file(tmp_path / source.name / "model.safetensors")
        assert exported.keys() == wanted.keys()
        for name in wanted:
            assert exported[name].dtype == wanted[name].dtype, name
            assert torch.equal(exported[name], wanted[name]), f"{source.name}: {name}"


# --- memory


def peak_growth(dp: int, tp: int, path: str) -> tuple[int, int, int, int]:
    """Bytes: (peak growth of this process, held afterwards, largest single read, total read)."""
    world = in_world(dp, tp)
    config = read_config(path)
    model = skeleton(config, dtype=torch.float32, attention="sdpa")
    parallelize(model, world.mesh, StudentConfig(model=path, dtype="fp32"))
    files = WeightFiles(Path(path))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    model.to_empty(device="cpu")
    tie_again(model)
    restore_buffers(model)
    sizes = read_weights(model, files, tensors_in_files(model, files))
    peak = _status("VmHWM")
    held = sum(local_part(parameter).nbytes for parameter in model.parameters())
    close_world(world)
    return peak - before, held, max(sizes, default=0), sum(sizes)


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def test_no_rank_holds_more_than_its_shards_and_one_slice(tmp_path: Path) -> None:
    path = write_model(
        tmp_path, "llama-biased", vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=4
    )
    whole = (path / "model.safetensors").stat().st_size
    assert whole > 90e6
    for peak, held, largest, total in run_ranks(4, peak_growth, 4, 1, str(path), group=False):
        assert held == total  # every byte is read once
        assert held < 0.26 * whole
        assert largest <= 8192 * 512 * 4 / 4  # the embedding's shard
        # The shards, and the file's pages around what was read, which the kernel counts as this process's too.
        # A rank that held the whole model would come to twice its size.
        assert peak < 0.95 * whole


def test_tensor_parallel_ranks_read_only_their_slices(tmp_path: Path) -> None:
    path = write_model(tmp_path, "llama-biased", vocab_size=8192, hidden_size=512, intermediate_size=2048)
    whole = (path / "model.safetensors").stat().st_size
    for _, held, largest, total in run_ranks(4, peak_growth, 2, 2, str(path), group=False):
        assert held == total
        assert held < 0.26 * whole
        assert largest <= 8192 * 512 * 4 / 4


# --- what the ranks compute


def teachers(dp: int, tp: int, paths: list[str], vocabulary: int) -> list[tuple[Tensor, Tensor, bool]]:
    """Per model: (masked logits in one piece, the same by chunks of tokens, whether the parameters are split)."""
    world = in_world(dp, tp)
    results = []
    for path in paths:
        model = load_model(path, world, role="teacher", dtype="fp32")
        with torch.no_grad():
            whole = mask_padded_columns(forward.logits(model, TOKENS, POSITIONS), vocabulary)
            hidden = forward.body(model, TOKENS, POSITIONS).flatten(0, 1)
            chunks = [mask_padded_columns(forward.head(model, part), vocabulary) for part in hidden.split(5)]
        split = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
        is_part = split < 0.6 * sum(p.numel() for p in model.parameters())
        results.append((_whole(whole)[0], torch.cat([_whole(chunk) for chunk in chunks]), is_part))
    close_world(world)
    return results


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1)])
def test_a_teacher_is_split_by_tp_only_and_keeps_its_logits(tmp_path: Path, dp: int, tp: int) -> None:
    from transformers import AutoModelForCausalLM

    vocabulary = 501
    models = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral-window": {}, "phi3": {}, "gpt2": {"positions": 32}}
    paths = [
        str(write_model(tmp_path / name, name, vocab_size=VOCABULARY, **settings)) for name, settings in models.items()
    ]
    results = run_ranks(2, teachers, dp, tp, paths, vocabulary, group=False)
    for i, path in enumerate(paths):
        plain = AutoModelForCausalLM.from_pretrained(path).eval()
        with torch.no_grad():
            parts = [plain(input_ids=ids, use_cache=False).logits[0] for ids in TOKENS.split([5, 7], dim=1)]
        wanted = torch.cat(parts)
        wanted[:, vocabulary:] = -torch.inf
        for rank in range(2):
            whole, by_chunks, is_part = results[rank][i]
            assert is_part == (tp == 2)
            torch.testing.assert_close(whole, wanted, rtol=0, atol=5e-6)
            torch.testing.assert_close(by_chunks, wanted, rtol=0, atol=5e-6)


def masked(vocabularies: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(logits, gradient of the weight, local shape) of a masked, unevenly sharded head for each vocabulary size."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    results = []
    for vocabulary in vocabularies:
        torch.manual_seed(0)
        weight = distribute_tensor(torch.randn(11, 4), mesh, [Shard(0)]).requires_grad_()
        hidden = torch.randn(3, 4)
        logits = torch.nn.functional.linear(DTensor.from_local(hidden, mesh), weight)
        assert mask_padded_columns(logits, vocabulary) is logits
        logits.full_tensor().log_softmax(-1)[:, 1].sum().backward()
        results.append(
            (logits.full_tensor().detach(), weight.grad.full_tensor(), torch.tensor(logits.to_local().shape))
        )
    return results


def test_padding_is_masked_on_any_rank() -> None:
    vocabularies = [11, 10, 7, 3]
    results = run_ranks(4, masked, vocabularies)
    assert [int(result[0][2][-1]) for result in results] == [3, 3, 3, 2]
    for i, vocabulary in enumerate(vocabularies):
        torch.manual_seed(0)
        weight = torch.randn(11, 4, requires_grad=True)
        wanted = torch.randn(3, 4) @ weight[:vocabulary].T
        wanted.log_softmax(-1)[:, 1].sum().backward()
        for result in results:
            logits, gradient, _ = result[i]
            torch.testing.assert_close(logits[:, :vocabulary], wanted.detach())
            assert (logits[:, vocabulary:] == -torch.inf).all()
            torch.testing.assert_close(gradient, weight.grad)


# --- refusals


def load_only(dp: int, tp: int, path: str) -> None:
    world = in_world(dp, tp)
    try:
        load_model(path, world, role="student", dtype="fp32")
    finally:
        close_world(world)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("opt", {}, "opt has no tensor-parallel plan"),
        ("gpt2", {"hidden": 33, "heads": 3}, r"33 attention features cannot be split .* 33 = 16 \* 2 \+ 1"),
        ("llama", {"heads": 4, "kv_heads": 1}, r"1 key-value heads cannot be split .* 1 = 0 \* 2 \+ 1"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_on_every_rank(
    tmp_path: Path, name: str, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(2, load_only, 1, 2, str(write_model(tmp_path, name, **settings)), group=False)
    assert isinstance(caught.value.cause, ConfigError)


def slices(dp: int, tp: int, rows: int) -> list[tuple[int, int]]:
    """A [rows, 2] parameter that FSDP2 and TP both split: [(local elements, whether right), (-1, whether it gathers)]."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    world = in_world(dp, tp)
    module = torch.nn.Linear(2, rows, bias=False)
    values = torch.arange(2.0 * rows).reshape(rows, 2)
    module.weight = torch.nn.Parameter(distribute_tensor(values, world.mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=world.mesh["dp"])
    where = local_slices(module.weight)
    local = module.weight.to_local().detach()
    results = [(int(local.numel()), int(torch.equal(local, values[where])))]
    gathered = gather_to_first(module.weight)
    results.append((-1, int(gathered is None or torch.equal(gathered, values))))
    close_world(world)
    return results


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 13])
def test_a_dimension_split_by_fsdp_and_tp_is_gathered_whole(rows: int) -> None:
    results = run_ranks(4, slices, 2, 2, rows, group=False)
    assert all(equal for result in results for _, equal in result)
    assert sum(result[0][0] for result in results) == 2 * rows
