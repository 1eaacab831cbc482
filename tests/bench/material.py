"""Material for benchmarks, made offline: invented texts, tokenizers trained on them, random models, configurations."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_SYLLABLES = ["ka", "lo", "mi", "ter", "an", "sol", "be", "ru", "ing", "est", "und", "oo", "pre", "con", "ti", "ve"]


def invent_words(draw: random.Random, count: int, most_syllables: int = 4) -> list[str]:
    """`count` made-up words of one to `most_syllables` syllables each."""
    return ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, most_syllables))) for _ in range(count)]


def write_texts(path: Path, *, rows: int, words_per_row: int, vocabulary: int = 4000) -> list[str]:
    """Writes a JSONL file with a record `{"text": …}` per row; returns the texts, which are always the same.

    Args:
        rows: number of texts.
        words_per_row: words of a text, some of them replaced by numbers or followed by a comma.
        vocabulary: number of different words, about.
    """
    draw = random.Random(0)
    words = invent_words(draw, vocabulary)
    texts = [_invent_text(draw, words, words_per_row) for _ in range(rows)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return texts


def _invent_text(draw: random.Random, words: Sequence[str], count: int) -> str:
    """A text of `count` words drawn from `words`, joined by blanks and ended by a full stop.

    Some words are replaced by numbers, some are followed by a comma.

    Args:
        draw: the source of randomness, which the call advances.
    """
    pieces = []
    for word in draw.choices(words, k=count):
        kind = draw.random()
        if kind < 0.08:
            pieces.append(str(draw.randrange(10**6)))
        elif kind < 0.16:
            pieces.append(word + ",")
        else:
            pieces.append(word)
    return " ".join(pieces) + "."


def train_tokenizer(
    texts: Sequence[str], size: int, end: str, *, spaces_apart: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about `size` ids; `end` is its only special token, for end of text and padding.

    Args:
        spaces_apart: a space is a token of its own, and not the beginning of a word's.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if spaces_apart:
        core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), core.pre_tokenizer])
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=end)


def write_llama(folder: Path, tokenizer: PreTrainedTokenizerBase, **shape: Any) -> None:
    """Writes a Llama with random weights to `folder`, with an embedding row per id of the tokenizer.

    The weights come from torch's global generator. The tokenizer itself is not written.

    Args:
        shape: keywords of `LlamaConfig`; four heads unless they say otherwise.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{"num_attention_heads": 4, "num_key_value_heads": 4} | shape,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_pair(root: Path, *, rows: int, words_per_row: int, length: int) -> None:
    """Writes student/, teacher/ (a tokenizer of its own and a small random model each) and text.jsonl below `root`.

    Args:
        rows: documents.
        length: the most positions of the models.
    """
    texts = write_texts(root / "text.jsonl", rows=rows, words_per_row=words_per_row)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    for name, size, end in (("student", 2000, "</s>"), ("teacher", 1000, "<|end|>")):
        tokenizer = train_tokenizer(texts[:64], size, end)
        write_llama(root / name, tokenizer, **shape, max_position_embeddings=length)
        tokenizer.save_pretrained(root / name)


def write_config(
    root: Path,
    name: str,
    *,
    steps: int,
    batch: int,
    micro_batch: int,
    length: int,
    top_k: int = 16,
    lr: float = 1e-3,
    **sections: Any,
) -> Path:
    """Writes the configuration of a run to `<root>/<name>.yaml` and returns its path.

    The run is `runs/<name>`, with the models student/ and teacher/ and the data text.jsonl; all are below `root`.
    A document is one row, cut at `length`, so that all steps have the same shape.

    Args:
        root: the folder of all these.
        steps: optimizer steps.
        batch: rows per step.
        micro_batch: rows per micro-batch.
        length: the most tokens of a row.
        sections: further sections of the configuration; one that is already set is replaced as a whole.
    """
    config = {
        "run": {"name": name, "dir": f"{root}/runs"},
        "student": {"model": f"{root}/student", "dtype": "fp32"},
        "teachers": [{"name": "teacher", "model": f"{root}/teacher", "dtype": "fp32"}],
        "data": {"path": f"{root}/text.jsonl", "max_length": length, "long_documents": "cut"},
        "loss": {"top_k": top_k},
        "optimizer": {"lr": lr},
        "train": {"steps": steps, "global_batch_size": batch, "micro_batch_size": micro_batch},
        "aligner": {"workers": 1},
        "observe": {"tensorboard": False},
    }
    path = root / f"{name}.yaml"
    path.write_text(json.dumps(config | sections), "utf-8")
    return path
