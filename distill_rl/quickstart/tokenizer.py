"""The quickstart's own tokenizer: byte-level BPE learnt from the tasks' words, with a one-line chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distill_rl.quickstart.tasks import TASKS, WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"

# `sort: 7 3 9 1 => 1 3 7 9<eos>`. `generation` marks what the assistant says, which the loss is taken on.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' => ' }}{% endif %}"
    "{% endfor %}"
)

# A run of letters, or one character of any other kind. The space is a token of its own: the prompt's tokens,
# which end with one, are then always a prefix of the whole chat's tokens.
PIECES = r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+"


def make_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Learns one token for every word of the tasks; any other text falls apart into bytes and still round-trips.

    Args:
        max_length: the longest input in tokens that the models made beside it can read.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    vocabulary_text = [f"{space}{piece}" for piece in [*WORDS, *" ".join(TASKS).split(), *"0123456789", "=>"] for space in ("", " ") for _ in range(2)]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(vocabulary_text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=max_length,
    )
