"""The rules of teachers that vLLM runs, as far as they can be checked without opening a file."""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.schema import Config
from distill_rl.errors import problem


def engine_problems(config: Config) -> Iterator[str]:
    """Yields problems of teachers with backend vllm, and of its settings elsewhere, one line each."""
    for i, teacher in enumerate(config.teachers):
        key = f"teachers.{i}"
        if teacher.backend == "vllm" and teacher.export != "topk":
            rule = "must be topk with backend vllm, which gives the most likely tokens of a position only"
            yield problem(f"{key}.export", rule, teacher.export, f"set {key}.export=topk, or {key}.backend=hf")
        if teacher.backend != "vllm" and teacher.gpu_share is not None:
            rule = "is a setting of backend vllm, which takes its share of a GPU at the start"
            yield problem(f"{key}.gpu_share", rule, teacher.gpu_share, "leave it out")
    engines = [teacher.name for teacher in config.running_teachers if teacher.backend == "vllm"]
    if engines and config.loss.temperature != 1:
        rule = f"must be 1: vLLM gives the log-probs of teacher {engines[0]} at temperature 1, and those of a top k "
        rule += "do not say what they are at another one"
        yield problem("loss.temperature", rule, config.loss.temperature, "set it to 1, or the backend to hf")
    if engines and config.transport == "cuda_ipc":
        rule = f"cuda_ipc shares GPU memory, and the targets of teacher {engines[0]} (backend vllm) are in host memory"
        yield problem("transport", rule, None, "set transport=auto")
