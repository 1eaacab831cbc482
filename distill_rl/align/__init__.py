"""Aligns two tokenizations of one text: the exact bytes of every token, and the chunks that both sides contain.

A library of its own: importing it needs numpy and nothing else of this package. See docs/alignment.md.
"""

from distill_rl.align.aligner import TokenAligner
from distill_rl.align.alignment import Alignment, Tokenized
from distill_rl.align.chats import content_spans
from distill_rl.align.verify import CoverageReport, audit
from distill_rl.align.vocabulary import Vocabulary, common_vocabulary

__all__ = [
    "Alignment",
    "CoverageReport",
    "TokenAligner",
    "Tokenized",
    "Vocabulary",
    "audit",
    "common_vocabulary",
    "content_spans",
]
