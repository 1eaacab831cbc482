"""The backend `hf`: batched greedy generation and log-likelihoods with Transformers."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from distill_rl.errors import ConfigError
from distill_rl.evals.backends import greedy, likelihood
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.encode import Encoder, model_folder
from distill_rl.evals.backends.prefix_sharing import SharedPrefix, abilities, group
from distill_rl.evals.suites.base import Item
from distill_rl.models.determinism import start_vector_math

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DEFAULT = Settings()


class HfBackend:
    """A model and its tokenizer, loaded offline, from safetensors, without running code of the model's folder.

    Rows of similar length share a batch, the longest first, which keeps padding small and shows at once whether the
    largest batch fits into memory. What items share in front (`Item.prefix`) is run once, and its keys and values are
    repeated over the batch, where the model's cache allows it.

    Raises:
        ConfigError: the folder is missing or holds no such model.
    """

    def __init__(self, model_dir: str | Path, settings: Settings = _DEFAULT):
        self.settings = settings
        folder = model_folder(model_dir)
        self.device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda":
            # Of torch's allocator: the CUDA context, some hundred MB, comes on top. Without an index: the current GPU.
            torch.cuda.set_per_process_memory_fraction(float(settings.gpu_share), self.device.index)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        start_vector_math()
        self._take(folder)

    def reload(self, folder: Path) -> None:
        found = model_folder(folder)
        self.close()  # two models at once need not fit
        self._take(found)

    def close(self) -> None:
        self.model: Any = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(
        self, items: Sequence[Item], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> Iterator[tuple[int, Output]]:
        rows = []
        for index, item in enumerate(items):
            ids = self.encoder.encode(item)
            room = self.encoder.room(ids)
            if room == 0:
                yield index, Output(prompt_tokens=len(ids), too_long=True)
            else:
                rows.append(greedy.Row(index, ids, max_new_tokens if room is None else min(max_new_tokens, room)))
        ending = greedy.StopDetector(self.encoder, stop)
        may_share = [len(row.ids) - 1 for row in rows]
        for batch, beginning in self._batches(rows, may_share, items, share=self.abilities.share_padded):
            if self.abilities.plain:
                yield from greedy.write(self.model, batch, beginning, ending)
            else:
                yield from greedy.generate_with_transformers(self.model, batch, ending)

    def choose(self, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        rows: list[likelihood.Row] = []
        counts = likelihood.ChoiceCollector()
        for index, item in enumerate(items):
            choices = self.encoder.choices(item)
            room = self.encoder.room(choices.context)
            if room is not None and max(len(ids) for ids in choices.continuations) > room:
                yield index, Output(prompt_tokens=len(choices.context), too_long=True)
            else:
                counts.expect(index, choices)
                rows += likelihood.rows_of(index, choices)
        may_share = [row.start - 1 for row in rows]
        for batch, beginning in self._batches(rows, may_share, items, share=self.abilities.share_aligned):
            for row, sums in zip(batch, likelihood.score(self.model, batch, beginning)):
                output = counts.add(row.index, sums)
                if output is not None:
                    yield row.index, output

    def _batches(
        self, rows: Sequence[Any], may_share: Sequence[int], items: Sequence[Item], *, share: bool
    ) -> Iterator[tuple[list[Any], SharedPrefix]]:
        """Rows to run together, and what all of them begin with."""
        ids, prefixes = [row.ids for row in rows], [items[row.index].prefix for row in rows]
        for part in group(ids, may_share, prefixes, share=share):
            beginning = SharedPrefix(self.model, ids[part.rows[0]][: part.shared])
            for batch in part.batches(self.settings.batch_size):
                yield [rows[row] for row in batch], beginning

    def _take(self, folder: Path) -> None:
        from transformers import GenerationConfig

        self.folder, self.encoder = folder, Encoder(folder)
        stored = "auto" if self.device.type == "cuda" else torch.float32
        self.model = _load(folder, _DTYPES.get(self.settings.dtype, stored)).to(self.device).eval()
        # A folder's generation_config.json may sample, search beams or penalise repetition; none of it is greedy.
        ends = self.encoder.stop_ids
        self.model.generation_config = GenerationConfig(do_sample=False, eos_token_id=list(ends), pad_token_id=ends[0])
        self.abilities = abilities(self.model)


def _load(folder: Path, dtype: torch.dtype | str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model {folder}", "transformers must load it as a causal LM", first) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    model, loading = loaded
    # transformers fills what the files lack with random numbers and only warns.
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ConfigError(f"model {folder}", "its files must hold every weight", f"without {missing}", "copy it again")
    return model
