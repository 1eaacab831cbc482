"""The folder of an adapter, as PEFT writes it: `PeftModel.from_pretrained(base, folder)` loads it."""

from __future__ import annotations

import shutil
from pathlib import Path

from distill_rl.models.lora.adapters import Adapter

FOLDER = "adapter"
"""Name of the adapter's folder in an export."""
_PREFIX = "base_model.model."
"""PEFT's wrappers around a model."""


def write_adapter(adapter: Adapter, folder: Path, *, base: str, revision: str | None) -> None:
    """Writes adapter_config.json and adapter_model.safetensors into a new folder.

    Tensors are fp32. Of tied embeddings that were trained both are written: PEFT gives each a copy of its own.

    Args:
        base: folder or hub name of the model that the adapter belongs to; a folder is written as an absolute path.
        revision: of a hub model.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.torch import save_file

    place = Path(base).expanduser()
    chosen = adapter.injected.chosen
    config = adapter.injected.peft_config(
        chosen.patterns,
        modules_to_save=list(chosen.whole) or None,
        base_model_name_or_path=str(place.resolve()) if place.is_dir() else base,
        revision=revision,
        inference_mode=True,
    )
    tensors = {
        f"{_PREFIX}{layer}.{part}.weight": tensor
        for layer, pair in adapter.pairs.items()
        for part, tensor in zip(("lora_A", "lora_B"), pair)
    }
    tensors |= {_PREFIX + name: tensor.clone() for name, tensor in adapter.whole.items()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")  # see `export`
