"""Bits per byte against one plain forward pass in fp64 per document, without padding, windows or chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from distill_rl.config.schema import DataConfig
from distill_rl.demo import bits
from distill_rl.demo.tokenizer import make_tokenizer
from distill_rl.models.files import read_tokenizer
from tests.helpers.corpus import corpus_rows
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.helpers.zoo import write_model

VOCABULARY = 320
DOCUMENTS = [{"row": i, **row} for i, row in enumerate(corpus_rows(12, seed=3))]
DOCUMENTS += [{"row": 12, "text": "né 日本 🙂"}, {"row": 13, "text": "x"}]


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2", "olmo2"])
def model(request, tmp_path_factory):
    """Families with a known output layer, of three kinds, and one without."""
    folder = write_model(tmp_path_factory.mktemp("bits") / request.param, request.param, vocab_size=VOCABULARY)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def plain(model, document: bits.EncodedText) -> float:
    logits = model.double()(torch.from_numpy(document.ids)[None]).logits[0]
    nats = -logits.log_softmax(-1)
    return sum(float(nats[j - 1, document.ids[j]]) for j in np.flatnonzero(document.counted)) / math.log(2)


@torch.no_grad()
def test_bits_are_those_of_a_plain_forward_pass(model, monkeypatch):
    monkeypatch.setattr(bits, "BATCH_TOKENS", 96)  # several batches
    monkeypatch.setattr(bits, "CHUNK_BYTES", 4 * VOCABULARY * 7)  # seven rows of logits at once
    encoded = [bits.encode(tiny_tokenizer(), document, DataConfig()) for document in DOCUMENTS]
    got = bits.bits(model, encoded, 512)
    want = [plain(model, document) for document in encoded]
    model.float()
    assert got == pytest.approx(want, rel=1e-5)  # fp32 against fp64, over sums of up to 200 tokens
    assert min(want[:13]) > 0


def test_rows_predict_every_token_but_the_first_once():
    ids = np.arange(23)
    short = bits.EncodedText(ids[:3], ids[:3] == 2, 3)
    found = list(bits.batches([short, bits.EncodedText(ids, ids > 0, 23)], 8))
    assert len(found) == 1
    rows = [row[: row.argmax() + 1] for row in found[0].ids]  # ids ascend, and padding is 0
    assert [row.tolist() for row in rows] == [[*range(8)], [*range(8, 16)], [*range(16, 22)], [0, 1]]
    assert found[0].counted.sum(1).tolist() == [8, 8, 6, 1]
    assert found[0].targets.tolist() == [*range(1, 23), 2]
    assert found[0].documents.tolist() == [1] * 22 + [0]
    assert list(bits.batches([bits.EncodedText(ids[:1], ids[:1] > 0, 1)], 8)) == []


def test_bytes_of_a_text_are_those_of_the_predicted_tokens():
    tokenizer = make_tokenizer(64, "words")  # writes no special token before a text
    text = "apple né 日本"
    encoded = bits.encode(tokenizer, {"row": 0, "text": text}, DataConfig())
    first = tokenizer.decode(encoded.ids[:1])
    assert not encoded.counted[0]
    assert encoded.counted[1:].all()
    assert encoded.num_bytes == len(text.encode()) - len(first.encode())


def test_special_tokens_before_a_text_let_all_of_it_count():
    tokenizer = tiny_tokenizer()
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    text = "ka lo mi 日本"
    encoded = bits.encode(tokenizer, {"row": 0, "text": text}, DataConfig())
    assert encoded.ids[0] == tokenizer.bos_token_id
    assert encoded.counted.tolist() == [False, *[True] * (len(encoded.ids) - 1)]
    assert encoded.num_bytes == len(text.encode())


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_bytes_of_a_chat_do_not_depend_on_tokenizer_or_template(kind):
    chat = [{"role": "user", "content": "sort: 3 1"}, {"role": "assistant", "content": "1 3"}]
    tokenizer = make_tokenizer(64, kind)
    answers = bits.encode(tokenizer, {"row": 0, "messages": chat}, DataConfig(loss_on="assistant"))
    whole = bits.encode(tokenizer, {"row": 0, "messages": chat}, DataConfig())
    assert answers.num_bytes == 3
    assert tokenizer.decode(answers.ids[answers.counted]).strip() == "1 3" + tokenizer.eos_token
    assert whole.num_bytes == 12
    assert whole.counted[1:].all()


def test_the_models_of_a_trial_are_read_by_their_own_tokenizers(tmp_path):
    folder = write_tiny_model(tmp_path / "other", tokenizer=tiny_tokenizer(600, seed=7))
    first, second = (bits.encode(t, DOCUMENTS[0], DataConfig()) for t in (tiny_tokenizer(), read_tokenizer(folder)))
    assert len(first.ids) != len(second.ids)
    assert first.num_bytes == second.num_bytes
