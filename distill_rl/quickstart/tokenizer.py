"""The quickstart's own tokenizers: byte-level BPE learnt from the tasks' words, each with a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from distill_rl.quickstart.tasks import DIGITS, TASKS, WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ARROW = "=>"

# `<bos>sort: 7 3 9 1 => 1 3 7 9<eos>`. The space after the arrow belongs to the answer, as it does in its first token:
# the tokens of a question are then the first tokens of question and answer. `generation` marks what the loss is on.
_ARROW_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' " + ARROW + "' }}{% endif %}"
    "{% endfor %}"
)
# `<bos>sort: 7 3 9 1 =>\n1 3 7 9<eos>`. The answer begins where a token begins, as it does in chat templates at large, so
# that a tokenizer with another template can match all of it.
_LINE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' " + ARROW + "\n' }}{% endif %}"
    "{% endfor %}"
)
# `<|user|>sort: 7 3 9 1<|end|><|assistant|>1 3 7 9<|end|>`: no token at the start, a header and an end for every turn.
_TURN_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Letters, one digit, or signs, each with the space before it; or white space.
PIECES = r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s"
MERGED_DIGITS = DIGITS[:6]
"""digits that `pieces` has as one token with the space before them; of the others the space is a token of its own"""
_WHOLE = 2**16
"""far more ids than there is to merge: every piece of the corpus becomes one token"""


@dataclass(frozen=True, slots=True)
class Kind:
    """What one tokenizer has that another over the same text has not."""

    chat_template: str
    special: tuple[str, ...]
    """special tokens in the order of their ids, which are the first"""
    pad: str
    eos: str
    bos: str | None = None
    vocab_size: int = _WHOLE
    """ids at most, 256 bytes and the special tokens among them"""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "words": Kind(_ARROW_TEMPLATE, ("<pad>", "<bos>", "<eos>"), pad="<pad>", bos="<bos>", eos="<eos>"),
        "lines": Kind(_LINE_TEMPLATE, ("<pad>", "<bos>", "<eos>"), pad="<pad>", bos="<bos>", eos="<eos>"),
        # A word falls into two or three tokens, and so do some digits with their space: two chunks of five are 1:1.
        "pieces": Kind(
            _TURN_TEMPLATE,
            ("<|end|>", "<|user|>", "<|assistant|>", "<|pad|>"),
            pad="<|pad|>",
            eos="<|end|>",
            vocab_size=352,
        ),
        # The same, but a turn does not end in the token that a text ends in, as with Phi-3 and Llama 3.
        "turns": Kind(
            _TURN_TEMPLATE.replace("eos_token", "'<|end|>'"),
            ("<|end|>", "<|user|>", "<|assistant|>", "<|pad|>", "<|endoftext|>"),
            pad="<|pad|>",
            eos="<|endoftext|>",
            vocab_size=353,
        ),
    }
)


def make_tokenizer(max_length: int, kind: str = "words") -> PreTrainedTokenizerFast:
    """A tokenizer of one of KINDS; any text that the tasks do not have falls apart into bytes and round-trips.

    `words` and `lines` have one token for every word, digit and sign of the tasks, with the space before it and
    without; `pieces` has other ids, other special tokens, and several tokens for a word.

    Args:
        max_length: the longest input, in tokens, of the models it is made for.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = KINDS[kind]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=made.vocab_size,
        special_tokens=list(made.special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(whole=made.vocab_size == _WHOLE), trainer)
    tokens = {"bos_token": made.bos, "eos_token": made.eos, "pad_token": made.pad}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{name: token for name, token in tokens.items() if token is not None},
        chat_template=made.chat_template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=max_length,
    )


def _corpus(*, whole: bool) -> list[str]:
    names = " ".join(TASKS).split()
    if whole:
        return [text for piece in [*WORDS, *DIGITS, ARROW, *names] for text in (piece, f" {piece}")]
    # What occurs most is merged first: here a space and one of some digits, before any two letters.
    return [f" {piece}" for piece in [*WORDS, *names, *MERGED_DIGITS * 10]]
