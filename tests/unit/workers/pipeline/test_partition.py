"""The cut of a batch into parts for several aligners: every document once, in order, in balanced parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_rl.workers.pipeline.aligner_pool import LEAST_BYTES, cut, text_bytes

texts = st.lists(st.integers(0, 300), max_size=40).map(lambda lengths: [{"row": 0, "text": "x" * n} for n in lengths])


@given(texts, st.integers(1, 9))
def test_parts_are_balanced_and_hold_each_document_once(documents, parts):
    found = cut(documents, parts, least=1)
    indices = [i for part in found for i in range(len(documents))[part]]
    assert indices == list(range(len(documents)))
    assert len(found) <= parts
    assert all(part.stop > part.start for part in found) or not documents
    sizes = [text_bytes(documents[part]) for part in found]
    largest = max(map(text_bytes, documents), default=0)
    assert max(sizes) <= sum(sizes) / max(1, min(parts, sum(sizes))) + largest


@given(texts, st.integers(1, 5))
def test_parts_get_fewer_where_there_is_little_text(documents, parts):
    assert len(cut(documents, parts, least=500)) <= max(1, text_bytes(documents) // 500)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_equal_documents_are_shared_equally(parts):
    found = cut([{"text": "y" * LEAST_BYTES}] * 12, parts)
    assert [part.stop - part.start for part in found] == [12 // parts] * parts


def test_text_is_counted_in_bytes_wherever_it_stands():
    chat = {"row": 7, "messages": [{"role": "user", "content": "äb"}, {"content": [{"text": "\ud800c"}], "n": None}]}
    assert text_bytes(chat) == len("user") + 3 + 4
