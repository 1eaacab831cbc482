"""How much a teacher sends."""

from __future__ import annotations


def target_bytes_per_token(export: str, entries: int, item_size: int) -> int:
    """Bytes of the targets that a teacher sends per token, the fp32 log-prob of the label included.

    Top-k targets also have an int32 id per entry, and the mass outside the top k (fp32). Draws are an int32 id and an int16
    count per entry, and have their mean log-prob (fp32).

    Args:
        export: `teachers[].export`.
        entries: per token: the top k, the draws, the vocabulary's columns, or the width of the hidden states.
        item_size: bytes of one log-prob, logit or element of the hidden states.
    """
    if export == "topk":
        return entries * (4 + item_size) + 8
    if export == "sampled":
        return entries * (4 + 2) + 8
    return entries * item_size + 4
