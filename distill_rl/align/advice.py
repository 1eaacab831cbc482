"""Which cross-tokenizer loss suits a pair of tokenizers.

Alone, `hybrid` and `alm` teach better than every other method. On real text `hybrid` is the better one where 87 % of the chunks are
1:1, and `alm` where 47 % are; where few answers are likely they tie (docs/results.md).
"""

from __future__ import annotations

from dataclasses import dataclass

FEW_SINGLES = 0.6
"""Below this share of 1:1 chunks `hybrid` too often teaches a piece of the teacher's as a token of its own. Between the two shares measured."""


@dataclass(frozen=True, slots=True)
class Advice:
    loss: str
    """A value of `loss.cross_tokenizer`; `none` if there is nothing to compare."""
    reason: str
    """Why, as a clause."""

    def __str__(self) -> str:
        return f"loss.cross_tokenizer={self.loss}: {self.reason}"


def advise(one_to_one_share: float, num_chunks: int, num_common: int) -> Advice:
    """The loss that suits a pair of tokenizers.

    Args:
        one_to_one_share: of the chunks, those of one token on either side, from 0 to 1.
        num_chunks: of the texts that were aligned.
        num_common: ids that the vocabularies have in common.
    """
    if not num_chunks:
        return Advice("none", "no text could be aligned, so there is nothing to distil")
    if not num_common:
        return Advice("alm", "no token of the two vocabularies spells the same, so only whole chunks can be compared")
    share = f"{one_to_one_share:.1%} of the chunks are 1:1"
    if one_to_one_share < FEW_SINGLES:
        return Advice(
            "alm", f"only {share}, so whole chunks say more than single tokens; xtoken beside labels may teach more"
        )
    return Advice(
        "hybrid", f"{share} and compare {num_common:,} common tokens; the others are compared as whole chunks"
    )
