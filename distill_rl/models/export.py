"""Writes a sharded model as a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distill_rl.errors import DistillError
from distill_rl.models.conversion import Fused, Match, restore
from distill_rl.models.files.headers import holds_several
from distill_rl.models.files.hub import read_config, resolve
from distill_rl.models.load import skeleton
from distill_rl.models.lora import folder as adapter_folder
from distill_rl.models.lora.adapters import Adapter, gather, injected_in
from distill_rl.models.parallelize import reshard, tie_again
from distill_rl.models.weights import WeightFiles, tensors_in_files
from distill_rl.parallel.shards import gather_to_first
from distill_rl.system.folders import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MAX_FILE_BYTES = 5 * 10**9


class ExportError(DistillError):
    """The folder cannot be written. Raised only on the rank that writes."""


def export_model(
    model: PreTrainedModel,
    *,
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    card: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes weights, config, generation config (if `source` has one), tokenizer and model card into `out_dir`.

    Collective over the model's ranks. Parameters are gathered one by one, so only rank 0 ever holds all of them. Rank 0
    returns when the complete folder has its final name, replacing an existing one; the others return as soon as they have
    sent their shards. What earlier, broken exports to `out_dir` left beside it is removed.

    Adapters are merged into the weights, which are then read from `source` again and not gathered. The folder `adapter`
    within has them as they are, for PEFT.

    Args:
        source: folder or hub name from which the model was loaded.
        card: text of README.md; None: none is written.
        revision: of a hub model.
        dtype: of the tensors in the files; None: each as in `source`. What the family keeps in fp32 stays as in `source`.
        max_file_bytes: size of a file with weights at most, unless a single tensor is larger.

    Raises:
        ExportError: on rank 0 only, if the folder cannot be written.
    """
    folder = resolve(source, revision, weights=True)
    files = WeightFiles(folder)
    reshard(model)  # a forward without backward may have left weights gathered
    adapter: Adapter | None = None
    state: dict[str, Tensor] | None = None
    if injected_in(model) is None:
        state = _gather(model, files, dtype)
    elif (adapter := gather(model)) is not None:
        state = _merged(read_config(folder), files, adapter, dtype)
    if state is None:
        return
    out_dir = Path(out_dir)
    try:
        with replacing(out_dir) as unfinished:
            _write_config(folder, unfinished, state)
            _write_weights(state, unfinished, max_file_bytes)
            if (folder / "generation_config.json").is_file():
                shutil.copyfile(folder / "generation_config.json", unfinished / "generation_config.json")
            tokenizer.save_pretrained(unfinished)
            if adapter is not None:
                place = unfinished / adapter_folder.FOLDER
                adapter_folder.write_adapter(adapter, place, base=str(source), revision=revision)
            if card is not None:
                (unfinished / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"export to {out_dir}", "must be writable, with room for the model", str(error)) from error


def _gather(model: PreTrainedModel, files: WeightFiles, dtype: torch.dtype | None) -> dict[str, Tensor] | None:
    """Returns all tensors on rank 0's CPU, and None on every other rank. Collective.

    Each has the name that it has in `files`, and that dtype if `dtype` is None; of a tied tensor's names, the first. Files of
    a bare inner model become those of the whole.
    """
    state: dict[str, Tensor] = {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = tensors_in_files(model, files)
    for name, (file_name, *_) in found.stored.items():
        whole = gather_to_first(tensors[name])
        if whole is not None:
            state[file_name if file_name in found.renamed else name] = whole.to(
                _written(model, files, dtype, name, file_name)
            )
    for group in _made_together(found):
        wholes = {name: gather_to_first(tensors[name]) for name, _ in group}
        if None not in wholes.values():
            as_dtype = _written(model, files, dtype, group[0][0], group[0][1].names[0])
            restored = restore(model, {name: whole.to(as_dtype) for name, whole in wholes.items() if whole is not None})
            state |= {name: tensor.contiguous() for name, tensor in restored.items()}
    return state or None


def _merged(
    config: PreTrainedConfig, files: WeightFiles, adapter: Adapter, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Returns all tensors, with names and dtypes as of `_gather`: those of the files, with what was trained put in.

    Of the weights that were not trained the student may hold rounded or quantised values; the files do not.
    """
    state: dict[str, Tensor] = {}
    model = skeleton(config, dtype=torch.float32, attention="eager")
    tie_again(model)
    found = tensors_in_files(model, files)
    for name, (file_name, *_) in found.stored.items():
        whole = adapter.merged(name, files.read(file_name))
        as_dtype = _written(model, files, dtype, name, file_name)
        state[file_name if file_name in found.renamed else name] = whole.to(as_dtype)
    for group in _made_together(found):
        as_dtype = _written(model, files, dtype, group[0][0], group[0][1].names[0])
        files_of_group = dict.fromkeys(file_name for _, fused in group for file_name in fused.names)
        if not any(adapter.changes(name) for name, _ in group):
            state |= {file_name: files.read(file_name).to(as_dtype) for file_name in files_of_group}
            continue
        wholes = {name: adapter.merged(name, fused.read(model, files.read, ())).to(as_dtype) for name, fused in group}
        state |= {name: tensor.contiguous() for name, tensor in restore(model, wholes).items()}
    return state


def _made_together(found: Match) -> Iterable[list[tuple[str, Fused]]]:
    """The fused tensors by converter, since one converter may make several tensors of the model."""
    made = defaultdict(list)
    for name, fused in found.fused.items():
        made[fused.first, fused.converter].append((name, fused))
    return made.values()


def _written(
    model: PreTrainedModel, files: WeightFiles, dtype: torch.dtype | None, name: str, stored: str
) -> torch.dtype:
    """The dtype in which a tensor of the model, which has the name `stored` in the files, is exported as `dtype`."""
    return files.dtype(stored) if dtype is None or _stays_fp32(model, name) else dtype


def _stays_fp32(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers computes with this tensor in fp32 in a model of any dtype, so that rounding it would show."""
    return any(re.search(rf"(?:^|\.){part}(?:\.|$)", name) for part in model._keep_in_fp32_modules_strict or ())


def _write_weights(state: dict[str, Tensor], folder: Path, max_file_bytes: int) -> None:
    """Writes the state dict as safetensors of at most `max_file_bytes` each, with an index file if there are several.

    Their mode is that of the config.json, which is there: safetensors lets only the owner read what it writes.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=max_file_bytes
    )
    for file_name, names in split.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, folder / file_name, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file_name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_config(source: Path, folder: Path, state: dict[str, Tensor]) -> None:
    """Writes the source's config.json into `folder`, without a reference to code (`auto_map`).

    Of a model with several towers it is the config of the text tower. Its `dtype` becomes that of most of the weights'
    bytes.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if holds_several(source):
        config = json.loads(read_config(source).to_json_string())
    config.pop("auto_map", None)
    config.pop("torch_dtype", None)
    config["dtype"] = str(_common_dtype(state)).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _common_dtype(state: dict[str, Tensor]) -> torch.dtype:
    """The dtype that takes the most bytes of the tensors together."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in state.values():
        sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0]
