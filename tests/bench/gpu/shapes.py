"""Sizes of the models that benchmarks use. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from distill_rl.scaling.shape import Shape, flops_per_token

LLAMA_1B = Shape("Llama-3.2-1B", "llama", 16, 2048, 8192, 32, 8, 64, 128_256, 128_256, tied=True)
LLAMA_8B = Shape("Llama-3.1-8B", "llama", 32, 4096, 14_336, 32, 8, 128, 128_256, 128_256, tied=False)
QWEN3_4B = Shape("Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 8, 128, 151_936, 151_669, tied=True)

TINY_STUDENT = Shape("tiny Llama", "llama", 2, 32, 64, 4, 2, 8, 640, 640, tied=True)
TINY_LLAMA = Shape("tiny untied Llama", "llama", 3, 48, 96, 4, 2, 12, 640, 640, tied=False)
TINY_QWEN3 = Shape("tiny Qwen3", "qwen3", 2, 32, 64, 4, 2, 16, 720, 700, tied=True)


@dataclass(frozen=True)
class Pair:
    """A student and the teacher that it learns from."""

    student: Shape
    teacher: Shape

    @property
    def name(self) -> str:
        return f"{self.student.name} ← {self.teacher.name}"

    @property
    def one_tokenizer(self) -> bool:
        """Whether both have equally many tokens, which stands for the same tokenizer here."""
        return self.student.tokens == self.teacher.tokens

    def flops_per_token(self, length: int) -> float:
        """FLOPs per token of training the student and of the teacher's forward pass over as many tokens."""
        return flops_per_token(self.student, [(self.teacher, 1.0)], length)


PAIRS = {"qwen3-4b": Pair(LLAMA_1B, QWEN3_4B), "llama-8b": Pair(LLAMA_1B, LLAMA_8B)}
"""By the teacher's name on the command line."""
TINY_PAIRS = {"qwen3-4b": Pair(TINY_STUDENT, TINY_QWEN3), "llama-8b": Pair(TINY_STUDENT, TINY_LLAMA)}
"""The same kinds of pairs in the smallest sizes, to see that a benchmark works."""
