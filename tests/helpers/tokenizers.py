"""Tiny byte-level BPE tokenizers, trained on seeded text when needed."""

from __future__ import annotations

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, TURN_START, TURN_END = "<s>", "</s>", "<pad>", "<|turn|>", "<|end|>"
# transformers adds <|endoftext|> to every tokenizer next to a Qwen2 model, unless the tokenizer already has it.
SPECIAL_TOKENS = (BOS, EOS, PAD, TURN_START, TURN_END, "<|endoftext|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)

_SYLLABLES = (
    "ka",
    "lo",
    "mi",
    "ter",
    "an",
    "sol",
    "be",
    "ru",
    "ing",
    "est",
    "und",
    "é",
    "-",
    "7",
    "42",
    "ß",
    "中",
    "oo",
)


def seeded_words(seed: int, count: int) -> list[str]:
    """`count` words out of 600 invented ones, the same for the same seed."""
    draw = random.Random(f"words-{seed}")
    lexicon = ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4))) for _ in range(600)]
    return draw.choices(lexicon, k=count)


def tiny_tokenizer(vocab_size: int = 320, seed: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab_size` ids (262 to about 800).

    The first ids are the special tokens `<s>`, `</s>`, `<pad>`, `<|turn|>`, `<|end|>`; none is added to a text
    automatically. The chat template writes a turn as `<|turn|>role\\ncontent<|end|>\\n`. Another seed gives other merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = seeded_words(seed, 6000)
    tokenizer.train_from_iterator([" ".join(words[i : i + 20]) for i in range(0, len(words), 20)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    if len(fast) != vocab_size:
        raise ValueError(f"cannot train {vocab_size} ids: the seeded text and the 256 bytes give {len(fast)}")
    return fast
