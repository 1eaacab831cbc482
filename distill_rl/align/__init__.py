"""Two tokenizations of one text: exact bytes of every token, and the chunks that both sides have.

A library of its own: it needs numpy and nothing else of this package. See docs/alignment.md.
"""

from distill_rl.align.aligner import TokenAligner
from distill_rl.align.alignment import Alignment, Tokenized
from distill_rl.align.chat import content_spans
from distill_rl.align.vocabulary import Vocabulary, common_vocabulary

__all__ = [
    "Alignment",
    "TokenAligner",
    "Tokenized",
    "Vocabulary",
    "common_vocabulary",
    "content_spans",
]
