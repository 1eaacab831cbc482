"""A `PromptScorer` on vLLM's offline engine: token ids in, the log-probabilities of its prompt positions out.

vLLM computes the logits of a prefill step, [tokens, vocabulary], and their fp32 log-softmax at once, and does not count
them when it divides the GPU's memory. So the tokens of a step are bounded (`max_num_batched_tokens`), longer prompts are
read in chunks, and memory for one step is left free. Prompts share no prefixes, and log-probabilities of prompt tokens
forbid reading the prefix cache, so it is off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import WorkerError
from distill_rl.models.files import read_config, resolve
from distill_rl.models.vllm import GPU_FRACTION, EngineSettings, VllmEngine
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.teacher.base import Scores

_STEP_LOGPROBS = 2**30, 2**28
"""The most bytes that the fp32 log-probabilities of a step may take, on GPUs and on CPUs."""
_STEP_SHARE = 32
"""On GPUs also at most this part of the engine's memory."""
_STEP_COPIES = 3
"""What a step holds at its peak, in multiples of its fp32 log-probabilities: logits, a gathered copy of them, log-probs."""
_MOST_TOKENS, _MOST_PROMPTS = 8192, 256
"""Of a step. vLLM needs at least a token for every prompt."""


class VllmScorer:
    """The engine of one replica of a teacher; the GPUs that this process sees are its own.

    Args:
        gpu_share: fraction of each GPU's memory; the engine allocates nine tenths of it at its start, and keeps them.
        threads: of each of the engine's processes.

    Raises:
        ConfigError, GpuMemoryError: as for `VllmEngine`; or the model's folder cannot be read.
    """

    @gpu_phase("engine load")
    def __init__(self, config: Config, teacher: TeacherConfig, *, gpu_share: float = 1.0, threads: int = 0):
        folder = resolve(teacher.model, teacher.revision, weights=True)
        model, longest = read_config(folder, quantized=True), config.length_of(teacher)
        if longest >= getattr(model, "max_position_embeddings", longest + 1):
            # vLLM refuses `max_model_len` beyond the positions. The one token beyond them is generated, but never read.
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        settings = EngineSettings(teacher.dtype, teacher.parallel.tp, gpu_share, threads)
        sizes = {"columns": model.vocab_size, "longest": longest, "top_k": config.loss.top_k}
        further = partial(scoring_arguments, gpu_share=gpu_share, **sizes)
        self._name = teacher.name
        self._engine = VllmEngine(folder, settings, further, remedy="lower teachers[].vllm.gpu_share")

    def score(self, prompts: Sequence[np.ndarray], k: int) -> Iterator[tuple[int, Scores]]:
        """As of `PromptScorer`. All prompts are queued at once; those left are aborted if the caller stops iterating.

        Raises:
            WorkerError: vLLM answers in a form that this version does not know.
            GpuMemoryError: a step needs more than the engine has left free.
        """
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=k, flat_logprobs=True, detokenize=False)
            for _ in prompts
        ]
        with (
            gpu_phase("engine step"),
            closing(self._engine.run([prompt.tolist() for prompt in prompts], sampling)) as results,
        ):
            for i, result in results:
                yield i, scores_of(result.prompt_logprobs, prompts[i], k, self._name)

    def close(self) -> None:
        """Shuts the engine down, with its processes; does nothing the second time."""
        self._engine.close()


def scoring_arguments(
    smallest_gpu: int | None, *, gpu_share: float, columns: int, longest: int, top_k: int
) -> dict[str, Any]:
    """vLLM's arguments for scoring, besides those of every engine.

    Args:
        smallest_gpu: bytes; None on CPUs.
        gpu_share: fraction of it that the engine may use.
        columns: of the model's output layer.
        longest: prompt, in tokens.
        top_k: entries per position.
    """
    on_gpu, on_cpu = _STEP_LOGPROBS
    most = on_cpu if smallest_gpu is None else min(on_gpu, int(gpu_share * smallest_gpu) // _STEP_SHARE)
    tokens = max(1, min(most // (4 * columns), _MOST_TOKENS))
    arguments = {
        "max_model_len": longest + 1,  # vLLM always generates a token
        "max_num_batched_tokens": tokens,
        "max_num_seqs": min(tokens, _MOST_PROMPTS),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "max_logprobs": top_k,
        "logprobs_mode": "raw_logprobs",
        "skip_tokenizer_init": True,  # only ids go in and out
    }
    if smallest_gpu is not None:  # what vLLM does not count stays free
        uncounted = _STEP_COPIES * 4 * columns * tokens
        arguments["gpu_memory_utilization"] = GPU_FRACTION * gpu_share - uncounted / smallest_gpu
    return arguments


def scores_of(flat: Any, prompt: np.ndarray, k: int, name: str) -> Scores:
    """The scores in vLLM's `FlatLogprobs` of a prompt of L tokens.

    Position p + 1 has k + 1 entries: first the token that does follow position p, then the k most likely ones in order,
    whether or not that token is among them. The first position has none.

    Raises:
        WorkerError: the entries are others.
    """
    positions = len(prompt) - 1
    ids = np.array(flat.token_ids, np.int32)
    if len(flat) != len(prompt) or len(ids) != positions * (k + 1):
        rule = f"vllm must answer {k + 1} log-probs for each of {positions} tokens"
        raise WorkerError(f"teacher {name}", rule, f"{len(ids)} for {len(flat) - 1}", "use the vllm of the extra")
    ids = ids.reshape(positions, k + 1)
    logprobs = np.array(flat.logprobs, np.float32).reshape(positions, k + 1)
    if not np.array_equal(ids[:, 0], prompt[1:]):
        rule = "vllm must answer about the tokens that were sent"
        raise WorkerError(f"teacher {name}", rule, "others", "use the vllm of the extra")
    return Scores(ids[:, 1:], logprobs[:, 1:], logprobs[:, 0])
