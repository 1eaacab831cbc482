"""What quantised weights take; nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from distill_rl.config.facts import ModelFacts

AS_STORED: Final = "as_stored"
"""`teachers[].quantization` of a checkpoint that is quantised already."""
GROUP = 64
"""Input features that share a scale in int4; fewer where it does not divide them."""


def weight_bytes(quantization: str | None, model: ModelFacts, item: int) -> int:
    """Bytes of a teacher's weights, over all of its ranks.

    With int8 and fp8 a weight of the decoder layers takes a byte, and a row of them a scale of four; with int4 half a
    byte, and a group of them a scale of `item` bytes and one for the zero point. Embeddings and output layer keep their
    dtype.

    Args:
        quantization: of `teachers[]`; None: weights of `item` bytes.
        item: bytes per element of the dtype of the computation.
    """
    if quantization is None:
        return item * model.parameters
    if quantization == AS_STORED:
        return model.bytes_on_disk
    return item * model.tables + bytes_of_weights(quantization, model, item, max(0, model.parameters - model.tables))


def bytes_of_weights(quantization: str, model: ModelFacts, item: int, count: int) -> int:
    """Bytes of a number of weights of the decoder layers, with their scales.

    Args:
        quantization: int8, int4 or fp8.
        item: as for `weight_bytes`.
    """
    each = 0.5 + (item + 1) / GROUP if quantization == "int4" else 1 + 4 / model.hidden_size
    return int(each * count)


def made_weight_bytes(quantization: str | None, model: ModelFacts, item: int) -> int:
    """Bytes of the largest weight that a layer makes for its product; 0 for weights that are not quantised here."""
    if quantization in (None, AS_STORED):
        return 0
    return item * model.hidden_size * max(model.intermediate_size, model.hidden_size)
