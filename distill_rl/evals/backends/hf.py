"""The backend `hf`: batched greedy generation and log-likelihoods with Transformers."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distill_rl.errors import ConfigError, first_line
from distill_rl.evals.backends import greedy, likelihood
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.encode import Encoder, model_folder
from distill_rl.evals.backends.prefix_sharing import SharedPrefix, cache_support, group_by_prefix
from distill_rl.evals.suites.base import Item
from distill_rl.models.attention import with_masks
from distill_rl.models.determinism import start_vector_math
from distill_rl.models.families import length_limit
from distill_rl.models.files.headers import TOWER_NAMES, holds_several
from distill_rl.models.files.hub import read_config
from distill_rl.models.rotary import use_own_lengths

if TYPE_CHECKING:
    from distill_rl.parallel.mesh import World

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DEFAULT = Settings()


class HfBackend:
    """A model and its tokenizer, loaded offline, from safetensors, without running code of the model's folder.

    Rows of similar length share a batch, the longest rows first: this keeps padding low and shows at once whether the
    largest batch fits into memory. If the model's cache allows it, the prefix that items share (`Item.prefix`) runs
    once, and its keys and values are repeated over the batch. The limit of GPU memory (`Settings.gpu_share`) and the
    number of threads apply to torch in the whole process.

    With tensor parallelism every rank has a backend, and all ranks must make the same calls with the same arguments.
    They get the same results, because the logits are gathered on every rank before a token is chosen.

    Args:
        model_dir: the model's folder.
        settings: its `tensor_parallel` must be the number of ranks.
        world: the ranks over which the model is split; None: it is whole.

    Raises:
        ConfigError: the folder is missing or holds no such model, the model cannot be split, or the number of ranks is
            another one.
    """

    def __init__(self, model_dir: str | Path, settings: Settings = _DEFAULT, world: World | None = None):
        ranks = 1 if world is None else world.tp
        if settings.tensor_parallel != ranks:
            rule = f"the backend hf needs a rank for every part of the model; this process is one of {ranks}"
            raise ConfigError("tensor_parallel", rule, settings.tensor_parallel)
        self.settings, self._world = settings, world
        folder = model_folder(model_dir)
        if world is None:
            self.device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        else:
            self.device = world.device
        if self.device.type == "cuda":
            # This limits torch's allocator; the CUDA context takes some hundred MB more. Without an index, the limit
            # holds for the current GPU.
            torch.cuda.set_per_process_memory_fraction(float(settings.gpu_share), self.device.index)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        start_vector_math()
        self._load(folder)

    def reload(self, folder: Path) -> None:
        """Replaces the model by that of another folder, with its tokenizer and stop tokens; the old one is freed first.

        Raises:
            ConfigError: as the constructor. If the folder itself is refused, the old model stays; otherwise only
                `close` may follow.
        """
        folder = model_folder(folder)
        self.close()  # two models at once may not fit into memory
        self._load(folder)

    def close(self) -> None:
        """Drops the model and returns its GPU memory; only `reload` or another `close` may follow."""
        self.model: Any = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(
        self, items: Sequence[Item], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> Iterator[tuple[int, Output]]:
        """Yields greedy completions, batch by batch: (index into `items`, output) for every item. Items that are too
        long to run come first, with `Output.too_long`.

        A completion ends at a stop token, at a text in `stop`, which it does not contain, or at the limit of
        `max_new_tokens` or of the model's positions.

        Raises:
            DataError: at the first step, a chat that the tokenizer's template rejects, or an empty prompt.
        """
        limit, positions = length_limit(self.model.config), self.encoder.positions
        if limit is not None and not self.cache_support.plain:  # transformers would keep keys of the shorter text
            positions = limit.length
        rows, too_long = greedy.prompt_rows(self.encoder, items, max_new_tokens, positions)
        yield from too_long
        stops = greedy.StopDetector(self.encoder, stop)
        max_shared = [len(row.ids) - 1 for row in rows]
        for batch, prefix in self._batches(rows, max_shared, items, share=self.cache_support.share_padded):
            if self.cache_support.plain:
                yield from greedy.generate(self.model, batch, prefix, stops)
            else:
                yield from greedy.generate_with_transformers(self.model, batch, stops)

    def choose(self, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        """Yields the log-likelihoods of every item's `choices`, batch by batch: (index into `items`, output) for every
        item. Items that are too long to run come first, with `Output.too_long`.

        Raises:
            DataError: as `generate`, or a choice that adds no token to its prompt.
        """
        collector = likelihood.ChoiceCollector()
        rows, too_long = collector.prepare(self.encoder, items, self.encoder.positions)
        yield from too_long
        max_shared = [row.start - 1 for row in rows]
        counted: SharedPrefix | None = None
        for batch, prefix in self._batches(rows, max_shared, items, share=self.cache_support.share_aligned):
            for row, sums in zip(batch, likelihood.score(self.model, batch, prefix)):
                run = len(row.ids) if prefix is not counted else len(row.ids) - prefix.length
                counted = prefix
                output = collector.add(row.item_index, sums, run)
                if output is not None:
                    yield row.item_index, output

    def _batches(
        self, rows: Sequence[Any], max_shared: Sequence[int], items: Sequence[Item], *, share: bool
    ) -> Iterator[tuple[list[Any], SharedPrefix]]:
        """Yields batches of at most `settings.batch_size` rows, each with the prefix that its rows share (of length 0
        if they share nothing).

        Rows are grouped by `prefix_sharing.group_by_prefix`; within a group the longest rows come first. Runs the model
        on a group's prefix before the group's first batch.

        Args:
            rows: objects with `ids` and `item_index`; every one occurs once.
            max_shared: per row, how many of its first tokens may be shared.
            items: those that `item_index` refers to.
            share: False: nothing is shared.
        """
        ids, prefixes = [row.ids for row in rows], [items[row.item_index].prefix for row in rows]
        for group in group_by_prefix(ids, max_shared, prefixes, share=share):
            prefix = SharedPrefix(self.model, ids[group.rows[0]][: group.shared])
            for batch in group.batches(self.settings.batch_size):
                yield [rows[row] for row in batch], prefix

    def _load(self, folder: Path) -> None:
        """Loads tokenizer and model of a checked folder onto the device, ready for inference, and sets `folder`,
        `encoder`, `model` and `cache_support`. The generation config of the folder is replaced by plain greedy
        decoding.

        Raises:
            ConfigError: the folder cannot be loaded.
        """
        from transformers import GenerationConfig

        self.folder, self.encoder = folder, Encoder(folder)
        dtype = _DTYPES.get(self.settings.dtype, None if self.device.type == "cuda" else torch.float32)
        if self._world is None:
            self.model = _load_model(folder, dtype or "auto").to(self.device).eval()
        else:
            from distill_rl.models.load import load_to_generate

            self.model = load_to_generate(folder, self._world, dtype=dtype)
        # A folder's generation_config.json may enable sampling, beam search or penalties; greedy decoding uses none.
        ends = self.encoder.stop_ids
        self.model.generation_config = GenerationConfig(do_sample=False, eos_token_id=list(ends), pad_token_id=ends[0])
        self.cache_support = cache_support(self.model)


def _load_model(folder: Path, dtype: torch.dtype | str) -> Any:
    """Loads a causal LM from the safetensors of a folder onto the CPU, offline and without a progress bar.

    Args:
        dtype: of the weights; "auto": as stored.

    Raises:
        ConfigError: transformers cannot load it, or the files lack weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    several = holds_several(folder)
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        config = read_config(folder) if several else AutoConfig.from_pretrained(folder, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            attn_implementation=with_masks(config).implementation,
            **({"config": config, "key_mapping": TOWER_NAMES} if several else {}),
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"model {folder}", "transformers must load it as a causal LM", first_line(error)) from error
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    model, loading = loaded
    # transformers initialises missing weights at random, with no more than a warning.
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ConfigError(
            f"model {folder}", "its files must contain every weight", f"without {missing}", "copy it again"
        )
    use_own_lengths(model)
    return model
