"""The backend `hf`: batched greedy generation and log-likelihoods with Transformers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from distill_rl.errors import ConfigError, first_line
from distill_rl.evals.backends import base
from distill_rl.models.attention import with_masks
from distill_rl.models.determinism import start_vector_math
from distill_rl.models.families import length_limit
from distill_rl.models.files import TOWER_NAMES, holds_several, read_config
from distill_rl.models.forward import row_positions, use_own_lengths

if TYPE_CHECKING:
    from distill_rl.parallel.mesh import World

AnyRow = TypeVar("AnyRow", base.PromptRow, base.ChoiceRow)


# Runs the shared prefix of several rows once, and reuses its keys and values for all of them.
#
# Shapes: R rows, P tokens of the shared prefix.

MIN_SHARED_TOKENS = 16
"""Minimum length of a shared prefix for which separate batches pay off."""


def group_by_prefix(rows: Sequence[AnyRow], *, share: bool) -> list[tuple[int, list[AnyRow]]]:
    """Groups rows with the same prefix text; returns (number of tokens that they share at their start, rows) of every group.

    The group with the longest row comes first, and in a group the longest row. A group shares the tokens that all of its
    rows have in common at the start, those of their prompts but the last ones. Rows whose group would share fewer than
    MIN_SHARED_TOKENS, or has one row only, form one group without sharing.

    Args:
        rows: in the order of their items.
        share: False puts all rows into one group without sharing.
    """
    by_prefix: dict[str, list[AnyRow]] = {}
    for row in rows:
        by_prefix.setdefault(row.prefix if share else "", []).append(row)
    unshared = by_prefix.pop("", [])
    groups = []
    for members in by_prefix.values():
        shared = min(len(base.common_start([row.ids for row in members])), min(row.start - 1 for row in members))
        if len(members) > 1 and shared >= MIN_SHARED_TOKENS:
            groups.append((shared, members))
        else:
            unshared += members
    if unshared:
        groups.append((0, unshared))
    for _, members in groups:
        members.sort(key=lambda row: (-len(row.ids), row.item_index))
    return sorted(groups, key=lambda group: -len(group[1][0].ids))


@dataclass(frozen=True, slots=True)
class CacheSupport:
    """What a model's cache supports, according to its config and class."""

    plain: bool
    """The cache holds only keys and values, so that its rows can be selected and repeated."""
    share_aligned: bool
    """Rows can continue a shared prefix directly after it. Not if the position encoding depends on the length of the
    text, because a prefix run alone then differs from the same prefix in a long text."""
    share_padded: bool
    """Rows can continue a shared prefix after padding. Not if some layers attend to the last tokens only, because such a
    window would count the padding."""


def cache_support(model: Any) -> CacheSupport:
    """Determines from a loaded model's config, class and cache layers how its rows may share a prefix and be removed
    from a batch."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    config, arguments = model.config.get_text_config(), signature(model.forward).parameters
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    takes_cache = {"past_key_values", "position_ids", "logits_to_keep"} <= arguments.keys()
    is_chunked = getattr(config, "attention_chunk_size", None) is not None
    has_plain_layers = layers <= {DynamicLayer, DynamicSlidingWindowLayer}
    plain = takes_cache and not is_chunked and not model._is_stateful and has_plain_layers
    aligned = plain and length_limit(config) is None
    return CacheSupport(plain, aligned, share_padded=aligned and DynamicSlidingWindowLayer not in layers)


class SharedPrefix:
    """The keys and values of the tokens that the rows of a group share, computed by one forward pass at construction.

    Args:
        ids: [P] token ids; empty: nothing is shared, and nothing is run.
    """

    @torch.no_grad()
    def __init__(self, model: Any, ids: Sequence[int]):
        self.length = len(ids)
        self._cache: Any = None
        if ids:
            row = torch.tensor([list(ids)], device=model.device)
            self._cache = model(input_ids=row, use_cache=True, logits_to_keep=1).past_key_values

    def cache(self, rows: int) -> Any:
        """A cache for `rows` rows that start with the prefix; None if nothing is shared. A forward pass extends it
        without changing the shared one."""
        if self._cache is None:
            return None
        cache = copy.copy(self._cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in cache.layers:
            layer.keys = layer.keys.expand(rows, -1, -1, -1)
            layer.values = layer.values.expand(rows, -1, -1, -1)
        return cache


# Greedy completions of a batch, with one forward pass per token for all rows that are not finished.
#
# Shapes: R rows of a batch, P tokens of the shared prefix, S tokens of the longest row after it, T columns so far.


@torch.no_grad()
def generate(
    model: Any, rows: Sequence[base.PromptRow], prefix: SharedPrefix, stops: base.StopDetector
) -> Iterator[tuple[int, base.Output]]:
    """Yields (`PromptRow.item_index`, output) for greedy completions of one batch, as they end.

    1. Pad the rows on the left, so that all of them continue in the same column, and mask the padding.
    2. Run the model on the new columns and append the likeliest token to each row.
    3. Yield the rows that ended, and remove them from tokens, mask, positions and cache: they cost no more work and
       never exceed the model's positions.
    4. Repeat with one new column until no row is left. When a row becomes longer than the texts of the pretraining, and
       the model's rotary frequencies depend on that, the keys in the cache are of the shorter text: all rows are run anew.

    Args:
        model: a model with a `plain` cache (`CacheSupport`).
        rows: at least one; all begin with the tokens of `prefix` and are longer.
        prefix: what the rows share; it is not changed. Its length may be 0.
        stops: decides when a row has ended.
    """
    live = [(row, list[int]()) for row in rows]  # that have not ended, with what was generated
    ids, mask = _pad([row.ids[prefix.length :] for row in rows], prefix.length, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, prefix.length :]
    cache, limit = prefix.cache(len(rows)), length_limit(model.config)
    while True:
        result = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, tokens = result.past_key_values, result.logits[:, -1].argmax(-1)
        continuing = []
        for i, token in enumerate(tokens.tolist()):
            row, written = live[i]
            written.append(token)
            output = stops.output(row, written)
            if output is None:
                continuing.append(i)
            else:
                yield row.item_index, output
        if not continuing:
            return
        if len(continuing) < len(live):
            live = [live[i] for i in continuing]
            kept = torch.tensor(continuing, device=ids.device)
            cache.reorder_cache(kept)
            tokens, mask, positions = tokens[kept], mask[kept], positions[kept]
        ids = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
        positions = positions[:, -1:] + 1
        if limit is not None and (positions == limit.length).any():
            ids, mask = _pad([[*row.ids, *more] for row, more in live], 0, model.device)
            positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), None


@torch.no_grad()
def generate_with_transformers(
    model: Any, rows: Sequence[base.PromptRow], stops: base.StopDetector
) -> Iterator[tuple[int, base.Output]]:
    """Yields (`PromptRow.item_index`, output) for the completions of one batch, like `generate` but by transformers' own
    `generate`, for models whose cache is not plain. All rows run until the last one has ended; only then is the first
    one yielded.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    ids, mask = _pad([row.ids for row in rows], 0, model.device)
    outputs: dict[int, base.Output] = {}

    class RowsEnded(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
            for i, written in enumerate(input_ids[:, ids.shape[1] :].tolist()):
                if i not in outputs and (output := stops.output(rows[i], written)) is not None:
                    outputs[i] = output
            return torch.tensor([i in outputs for i in range(len(rows))], device=input_ids.device)

    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(row.max_new_tokens for row in rows),
        use_cache=True,
        stopping_criteria=StoppingCriteriaList([RowsEnded()]),
    )
    # Generation stops only when every row has ended.
    yield from ((row.item_index, outputs[i]) for i, row in enumerate(rows))


def _pad(rows: Sequence[Sequence[int]], num_prefix: int, device: Any) -> tuple[Tensor, Tensor]:
    """Ids [R, S], padded with 0 on the left, and the mask [R, num_prefix + S] of real tokens, both int64."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[1] * num_prefix + [0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


# Log-likelihoods of the choices of items, batched.
#
# Shapes: R rows of a batch, P tokens of the shared prefix, S tokens of the longest row after it, N positions whose next
# token is scored, H hidden size, V vocabulary.


@torch.no_grad()
def score(
    model: Any, rows: Sequence[base.ChoiceRow], prefix: SharedPrefix
) -> Iterator[tuple[base.ChoiceRow, dict[int, float]]]:
    """Runs a batch; yields every row with {index of a choice: sum of its tokens' log-probabilities (natural logarithm)}.

    1. Pad the rows on the right. A causal model never attends to the right, so no mask is needed and the rows directly
       follow the shared prefix. Only a model to which the lengths of texts matter is told where the padding begins.
    2. List the N positions that predict tokens of choices: in each row from the last token of the context on.
    3. Run the model, with its head at these positions only, and take the log-softmax there in fp32.
    4. Sum the log-probabilities of each choice's tokens, in fp64.

    Args:
        rows: at least one; all begin with the tokens of `prefix`, which is shorter than every context.
    """
    suffixes = [row.ids[prefix.length :] for row in rows]
    longest = max(len(ids) for ids in suffixes)
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in suffixes], device=model.device)
    positions = [
        (i, column - prefix.length) for i, row in enumerate(rows) for column in range(row.start - 1, len(row.ids))
    ]
    cache, told = prefix.cache(len(rows)), {}
    if length_limit(model.config) is not None:
        told["position_ids"] = row_positions(model.config, [len(ids) for ids in suffixes], longest, model.device)
    with _head_only_at(model, positions) as select:
        result = model(input_ids=input_ids, past_key_values=cache, use_cache=cache is not None, **told)
    logprobs, first = select(result.logits).float().log_softmax(-1), 0
    for row in rows:
        sums = {}
        for i, ids in row.choices:
            column = torch.tensor(ids, device=logprobs.device)[:, None]
            sums[i] = float(logprobs[first : first + len(ids)].gather(1, column).sum(dtype=torch.float64))
        yield row, sums
        first += len(row.ids) - row.start + 1


@contextmanager
def _head_only_at(model: Any, positions: Sequence[tuple[int, int]]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Restricts the output layer to these (row, column); yields logits → [N, V] of them."""
    # Logits of all positions would take R·S·V numbers. Whatever a model does to its logits after the output layer, it
    # does to each position separately, so the restriction does not change them. A model without a separate output
    # layer computes all of them.
    rows, columns = torch.tensor(positions, device=model.device).T
    head = model.get_output_embeddings()
    if head is None:
        yield lambda logits: logits[rows, columns]
        return
    # Before the hooks of a layer that is split over ranks, which turn the hidden states into a DTensor.
    hook = head.register_forward_pre_hook(
        lambda _, arguments: (arguments[0][rows, columns][None], *arguments[1:]), prepend=True
    )
    try:
        yield lambda logits: logits[0]
    finally:
        hook.remove()


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DEFAULT = base.Settings()


class HfBackend(base.Backend):
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

    def __init__(self, model_dir: str | Path, settings: base.Settings = _DEFAULT, world: World | None = None):
        ranks = 1 if world is None else world.tp
        if settings.tensor_parallel != ranks:
            rule = f"the backend hf needs a rank for every part of the model; this process is one of {ranks}"
            raise ConfigError("tensor_parallel", rule, settings.tensor_parallel)
        self.settings, self._world = settings, world
        folder = base.model_folder(model_dir)
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
        folder = base.model_folder(folder)
        self.close()  # two models at once may not fit into memory
        self._load(folder)

    def close(self) -> None:
        """Drops the model and returns its GPU memory; only `reload` or another `close` may follow."""
        self.model: Any = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _complete(self, rows: Sequence[base.PromptRow], stops: base.StopDetector) -> Iterator[tuple[int, base.Output]]:
        """Yields completions, batch by batch."""
        for batch, prefix in self._batches(rows, share=self.cache_support.share_padded):
            if self.cache_support.plain:
                yield from generate(self.model, batch, prefix, stops)
            else:
                yield from generate_with_transformers(self.model, batch, stops)

    def _score(self, rows: Sequence[base.ChoiceRow]) -> Iterator[tuple[base.ChoiceRow, Mapping[int, float], int]]:
        """Yields log-likelihoods, batch by batch."""
        counted: SharedPrefix | None = None
        for batch, prefix in self._batches(rows, share=self.cache_support.share_aligned):
            for row, sums in score(self.model, batch, prefix):
                yield row, sums, len(row.ids) - (prefix.length if prefix is counted else 0)
                counted = prefix

    def _batches(self, rows: Sequence[AnyRow], *, share: bool) -> Iterator[tuple[list[AnyRow], SharedPrefix]]:
        """Yields batches of rows, the longest first, with the prefix that they share (maybe empty)."""
        for shared, members in group_by_prefix(rows, share=share):
            prefix = SharedPrefix(self.model, members[0].ids[:shared])
            for start in range(0, len(members), self.settings.batch_size):
                yield members[start : start + self.settings.batch_size], prefix

    def _load(self, folder: Path) -> None:
        from transformers import GenerationConfig

        self.folder, self.encoder = folder, base.ItemEncoder(folder)
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
        self.positions = self.answer_positions = self.encoder.positions
        limit = length_limit(self.model.config)
        if limit is not None and not self.cache_support.plain:  # transformers would keep keys of the shorter text
            self.answer_positions = limit.length


def _load_model(folder: Path, dtype: torch.dtype | str) -> Any:
    """Loads a causal LM from the safetensors of a folder onto the CPU, offline and without a progress bar."""
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
        rule = "its files must contain every weight"
        raise ConfigError(f"model {folder}", rule, f"without {missing}", "copy it again")
    use_own_lengths(model)
    return model
