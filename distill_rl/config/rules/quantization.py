"""The rules of teachers with quantised weights, as far as they can be checked without opening a file."""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import Config
from distill_rl.errors import problem


def quantization_problems(config: Config) -> Iterator[str]:
    """Yields problems of `teachers[].quantization`, and of settings that do not go with it, one line each."""
    for i, teacher in enumerate(config.teachers):
        key, value = f"teachers.{i}", teacher.quantization
        if value is None:
            continue
        if teacher.backend == "vllm":
            rule = "is a setting of backend hf; vllm reads a quantised checkpoint as its config.json says"
            yield problem(f"{key}.quantization", rule, value, f"leave it out, or set {key}.backend=hf")
        if teacher.backend == "endpoint":
            rule = "is a setting of backend hf; the server of an endpoint has loaded its model already"
            yield problem(f"{key}.quantization", rule, value, "leave it out")
        if value == AS_STORED and teacher.parallel.tp > 1:
            rule = "must be 1 with quantization as_stored: weights that are stored quantised are not split over ranks"
            yield problem(f"{key}.parallel.tp", rule, teacher.parallel.tp, "set it to 1, or use the original weights")
        if value == AS_STORED and teacher.export == "hidden":
            rule = "hidden needs the output layer of unquantised weights, which the student reads from the teacher's folder"
            yield problem(f"{key}.export", rule, None, f"set {key}.export=topk, or use the original weights")
        if config.evaluate.teachers and config.evaluate.suites:
            rule = f"evaluates teachers with all of their weights; {key}.quantization is {value}"
            yield problem("evaluate.teachers", rule, "true", "leave one of them out")
