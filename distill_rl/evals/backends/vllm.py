"""The backend `vllm`: vLLM's offline engine in this process, with tensor parallelism over the visible GPUs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from distill_rl.errors import ConfigError
from distill_rl.evals.backends import base
from distill_rl.models.families import engine_length_problem, length_limit
from distill_rl.models.files import read_config, weight_files
from distill_rl.models.vllm import VllmEngine

log = logging.getLogger(__name__)

_DEFAULT = base.Settings()
_REMEDY = "lower evaluate.gpu_share (of `distill-rl eval`: raise --gpus-per-shard, or lower --shards)"


class VllmBackend(base.Backend):
    """A model in vLLM, which batches requests itself and reuses shared prefixes through its cache.

    Decoding is greedy, in the dtype that `hf` would use, from safetensors, without running code of the model's folder.
    A prompt may also be too long because it does not fit into the engine's cache.

    Raises:
        ConfigError: vllm is not installed or does not start, or the folder is missing or holds no such model.
        GpuMemoryError: a GPU has less free memory than the engine's share.
    """

    def __init__(self, model_dir: str | Path, settings: base.Settings = _DEFAULT):
        self.settings = settings
        self.folder = base.model_folder(model_dir)
        self.encoder = base.ItemEncoder(self.folder)
        self._shape = _shape_of(self.folder)
        self._start()

    def _complete(self, rows: Sequence[base.PromptRow], stops: base.StopDetector) -> Iterator[tuple[int, base.Output]]:
        """Yields completions as the engine finishes them. A caller that stops iterating aborts the remaining ones."""
        from vllm import SamplingParams

        # The stop tokens are the encoder's, whatever vllm reads from the folder.
        ends: dict[str, Any] = {"stop_token_ids": list(self.encoder.stop_ids), "ignore_eos": True}
        ends |= {"stop": list(stops.stop), "skip_special_tokens": False} if stops.stop else {"detokenize": False}
        sampling = [SamplingParams(temperature=0, max_tokens=row.max_new_tokens, **ends) for row in rows]
        for i, result in self._engine.run([row.ids for row in rows], sampling):
            row, completion = rows[i], result.outputs[0]
            output = stops.first(row, completion.token_ids)
            if output is None:  # vllm's own detokenizer found a stop text that ours does not
                output = base.Output(completion.text, len(completion.token_ids), len(row.ids))
            yield row.item_index, output

    def _score(self, rows: Sequence[base.ChoiceRow]) -> Iterator[tuple[base.ChoiceRow, Mapping[int, float], int]]:
        """Yields log-likelihoods as the engine finishes them. A caller that stops iterating aborts the remaining ones."""
        for i, result in self._engine.run([row.ids for row in rows], [_scoring(row) for row in rows]):
            yield rows[i], _sums(rows[i], result), len(rows[i].ids) - (result.num_cached_tokens or 0)

    def reload(self, folder: Path) -> None:
        """Replaces the model by that of another folder, with its tokenizer and stop tokens. The previous folder need
        not exist any more.

        The engine keeps running and takes the new weights if config, weights' shapes and tokenizer are equal.
        Otherwise, or if the embeddings are tied or loading into the running engine fails, the engine is closed and a
        new one is started.

        Raises:
            ConfigError, GpuMemoryError: as the constructor; only `close` may follow.
        """
        # Compare with what was read earlier, since the previous folder may be deleted by now.
        shape, tokenizer = self._shape, self.encoder.tokenizer
        self.folder = base.model_folder(folder)
        self.encoder, self._shape = base.ItemEncoder(self.folder), _shape_of(self.folder)
        # The engine finds stop texts with its own copy of the tokenizer, so the tokenizers must agree too.
        compatible = shape == self._shape and _decode_alike(tokenizer, self.encoder.tokenizer)
        if not (compatible and self._reload_weights()):
            self.close()
            self._start()

    def close(self) -> None:
        """Shuts the engine down, with its processes and its GPU memory; does nothing if none is running."""
        self._engine.close()

    def _start(self) -> None:
        """Starts an engine for `folder` and sets what depends on it; no engine may be running. Raises as `VllmEngine`."""
        # -1: the maximum that the model supports and the cache holds.
        arguments = {"max_model_len": -1, "enable_prefix_caching": True} | self._context()
        self._engine = VllmEngine(self.folder, self.settings, lambda _: arguments, remedy=_REMEDY)
        self.device = "cpu" if self._engine.on_cpu else "cuda"
        longest = self._engine.max_tokens
        self.positions = self.answer_positions = min(longest, self.encoder.positions or longest)

    def _context(self) -> dict[str, int]:
        """The engine's most tokens, if rotary frequencies depend on it: those of texts up to the original length are used."""
        config = read_config(self.folder, quantized=True)
        limit = length_limit(config)
        if limit is None:
            return {}
        if limit.kind == "longrope":
            log.warning("%s: prompt and answer have at most %d tokens in vLLM", self.folder, limit.length)
            return {"max_model_len": limit.length}
        rule = engine_length_problem(config, "vLLM", limit.length, limit.length)
        raise ConfigError(f"model {self.folder}", str(rule), remedy="evaluate with backend hf")

    def _reload_weights(self) -> bool:
        """Loads the weights of `folder` into the running engine, and forgets cached prefixes."""
        # With tied embeddings vllm (0.32, on CPUs) silently updates the input embedding only.
        model_config = self._engine.llm.llm_engine.model_config
        configs = model_config.hf_config, model_config.hf_text_config
        if any(getattr(config, "tie_word_embeddings", False) for config in configs):
            return False
        try:
            self._engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})
            self._engine.llm.reset_prefix_cache()
        except (NotImplementedError, RuntimeError, ValueError, AttributeError):
            return False  # the weights may be half old, half new
        return True


def _scoring(row: Any) -> Any:
    """Sampling parameters that make vllm return the log-probabilities that `_sums` needs for a `ChoiceRow`."""
    # The last tokens of the choices are candidates for the one token that follows the row. Their earlier tokens are
    # part of the row, after the context. Log-probabilities of prompt tokens keep vllm from using its prefix cache, so
    # they are requested only if there are such tokens.
    from vllm import SamplingParams

    last_tokens = list(dict.fromkeys(ids[-1] for _, ids in row.choices))
    extra = {"prompt_logprobs": 0} if len(row.ids) > row.start else {}
    return SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=last_tokens, detokenize=False, **extra)


def _sums(row: Any, result: Any) -> dict[int, float]:
    """{index of a choice: sum of its tokens' log-probabilities} of a row run with `_scoring`."""
    body = sum(result.prompt_logprobs[column][row.ids[column]].logprob for column in range(row.start, len(row.ids)))
    last = result.outputs[0].logprobs[0]
    return {i: body + last[ids[-1]].logprob for i, ids in row.choices}


def _shape_of(folder: Path) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """Equal for models that the same engine can hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return (folder / "config.json").read_bytes(), shapes


def _decode_alike(tokenizer: Any, other: Any) -> bool:
    """Whether two fast tokenizers are the same apart from truncation and padding."""
    definitions = [json.loads(entry.backend_tokenizer.to_str()) for entry in (tokenizer, other)]
    for definition in definitions:
        del definition["truncation"], definition["padding"]  # state of the last call
    return definitions[0] == definitions[1]
