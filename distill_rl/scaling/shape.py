"""The sizes of a decoder, and the one place that counts its parameters by them, and its floating-point operations.

`distill-rl plan` and the benchmarks ask here. What the files of a model hold is in `ModelFacts`. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from distill_rl.config.facts import ModelFacts
    from distill_rl.types import TokenRows


NOMINAL = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H20": 148e12,
    "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12,
    "A10G": 70e12, "A10": 125e12, "A30": 165e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
"""The data sheets' dense bf16 FLOP/s, by a part of the name that CUDA gives to a card; the first one that is found counts."""


def nominal_flops(card: str) -> float | None:
    """The dense bf16 FLOP/s of a card by its data sheet; None for a name that is not known."""
    return next((rate for name, rate in NOMINAL.items() if re.search(rf"\b{name}\b", card)), None)


@dataclass(frozen=True)
class Shape:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU: Llama's or Qwen3's."""

    name: str
    family: str
    """transformers' model type: llama or qwen3"""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_size: int
    columns: int
    """of the output layer"""
    tokens: int
    """ids of its tokenizer; columns beyond them are padding"""
    tied: bool
    """the output layer is the embedding table"""

    @classmethod
    def of(cls, model: ModelFacts) -> Shape:
        """The sizes of a model, taken for a decoder like Llama's; of a mixture of experts, what a token visits."""
        return cls(
            name=model.family,
            family=model.family,
            layers=model.num_layers,
            hidden=model.hidden_size,
            intermediate=model.intermediate_size,
            heads=model.num_heads,
            key_value_heads=model.num_key_value_heads,
            head_size=model.head_size,
            columns=model.vocabulary_columns,
            tokens=model.vocabulary_columns,
            tied=model.tied,
        )

    def config(self, **settings: Any) -> PretrainedConfig:
        """transformers' configuration of this shape, without special tokens unless `settings` name them."""
        from transformers import AutoConfig

        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.columns,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_size,
            tie_word_embeddings=self.tied,
            **(special | settings),
        )

    @property
    def query_and_key(self) -> int:
        """Features of queries and keys together."""
        return self.head_size * (self.heads + self.key_value_heads)

    @property
    def body_parameters(self) -> int:
        """Number of parameters in the matrices of all layers: everything that multiplies before the output layer."""
        attention = 2 * self.hidden * self.query_and_key  # query and output; key and value
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.columns

    @property
    def parameters(self) -> int:
        """Number of parameters in all stored matrices; the norms' vectors, less than 0.1 %, are left out."""
        return self.body_parameters + (1 if self.tied else 2) * self.head_parameters

    @property
    def body_flops(self) -> float:
        """FLOPs per token of the forward products of all layers with their matrices: two per parameter."""
        return 2.0 * self.body_parameters

    @property
    def head_flops(self) -> float:
        """FLOPs per token of the output layer's forward product."""
        return 2.0 * self.head_parameters

    def attention_flops(self, length: float) -> float:
        """FLOPs per token of causal attention's forward in all layers, averaged over a row of `length` tokens.

        These are two products with, on average, half of the row's positions; the projections are not included.
        """
        return self.layers * 2.0 * self.heads * self.head_size * length

    def flops_per_token(self, length: float, *, trained: bool) -> float:
        """FLOPs that the model needs per token: two per parameter that multiplies, and causal attention.

        Looking up an embedding multiplies nothing. What a kernel or activation checkpointing computes again is not
        counted.

        Args:
            length: tokens per row.
            trained: count backward too, as twice the forward.
        """
        forward = self.body_flops + self.head_flops + self.attention_flops(length)
        return forward * (3.0 if trained else 1.0)


def needed_flops(student: Shape, rows: TokenRows, *, frozen: bool) -> float:
    """FLOPs that training on rows needs: of their tokens, each of which attends to what precedes it in its document.

    Args:
        frozen: the weights have no gradient, so that backward costs as much as forward; the adapters are not counted.
    """
    used = rows.used if rows.used is not None else [rows.shape[1]] * rows.shape[0]
    tokens = sum(int(count) for count in used)
    if not tokens:
        return 0.0
    attended = sum(int(row[:count].sum()) + int(count) for row, count in zip(rows.position_ids, used))
    # On average half of a row is attended to: the mean number of attended tokens stands for rows of twice its length.
    return (2.0 if frozen else 3.0) * tokens * student.flops_per_token(2 * attended / tokens, trained=False)


def flops_per_token(student: Shape, teachers: Iterable[tuple[Shape, float]], length: int) -> float:
    """FLOPs that a run needs per token of the student: training it, and the forward passes of its teachers.

    Args:
        teachers: each with the tokens that it reads per token of the student.
        length: tokens per row, of all models.
    """
    taught = sum(ratio * teacher.flops_per_token(length, trained=False) for teacher, ratio in teachers)
    return student.flops_per_token(length, trained=True) + taught
