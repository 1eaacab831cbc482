"""The quickstart's own tokenizer: byte-level BPE learnt from the tasks' words, with a one-line chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distill_rl.quickstart.tasks import DIGITS, TASKS, WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
ARROW = "=>"

# `<bos>sort: 7 3 9 1 => 1 3 7 9<eos>`. The space after the arrow belongs to the answer, as it does in its first token:
# the tokens of a question are then the first tokens of question and answer. `generation` marks what the loss is on.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' " + ARROW + "' }}{% endif %}"
    "{% endfor %}"
)

# Letters, one digit, or signs, each with the space before it; or white space.
PIECES = r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s"


def make_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """One token for every word, digit and sign of the tasks; any other text falls apart into bytes and round-trips.

    Args:
        max_length: the longest input, in tokens, of the models it is made for.
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
    trainer = trainers.BpeTrainer(
        vocab_size=2**16,  # far more than there is to merge: every piece of the corpus becomes one token
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = [*WORDS, *DIGITS, ARROW, *" ".join(TASKS).split()]
    core.train_from_iterator([text for piece in pieces for text in (piece, f" {piece}")], trainer)
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
