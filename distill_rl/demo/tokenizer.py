"""The quickstart's tokenizers: byte-level BPE trained on the words of the tasks, each with a chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distill_rl.demo.recipe import DIGITS, TASKS, WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ARROW = "=>"

# `<bos>sort: 7 3 9 1 => 1 3 7 9<eos>`. The space after the arrow is part of the answer, because it is part of the answer's first
# token; so the tokens of a question are a prefix of those of question and answer. `generation` marks what the loss is on.
_ARROW_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' " + ARROW + "' }}{% endif %}"
    "{% endfor %}"
)
# `<bos>sort: 7 3 9 1 =>\n1 3 7 9<eos>`. The answer begins at a token boundary, as in most chat templates, so that it can be
# aligned completely with another template.
_LINE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' " + ARROW + "\n' }}{% endif %}"
    "{% endfor %}"
)
# `<|user|>sort: 7 3 9 1<|end|><|assistant|>1 3 7 9<|end|>`: no token before the text, a header and an end for every turn.
_TURN_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Words, single digits and groups of other signs, each with the space before it; or white space.
PIECES = r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s"
MERGED_DIGITS = DIGITS[:6]
"""Digits that are one token of `pieces` together with the space before them; before the others the space is a token."""
_WHOLE = 2**16
"""More ids than there are merges, so that every piece of the corpus becomes one token."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties in which the tokenizers differ."""

    chat_template: str
    special: tuple[str, ...]
    """Special tokens in the order of their ids, which start at 0."""
    pad: str
    eos: str
    bos: str | None = None
    vocab_size: int = _WHOLE
    """Maximum number of ids, including 256 bytes and the special tokens."""


_PIECES = Kind(
    _TURN_TEMPLATE, ("<|end|>", "<|user|>", "<|assistant|>", "<|pad|>"), pad="<|pad|>", eos="<|end|>", vocab_size=352
)
_STEMS = 400
KINDS = {
    "words": Kind(_ARROW_TEMPLATE, ("<pad>", "<bos>", "<eos>"), pad="<pad>", bos="<bos>", eos="<eos>"),
    "lines": Kind(_LINE_TEMPLATE, ("<pad>", "<bos>", "<eos>"), pad="<pad>", bos="<bos>", eos="<eos>"),
    # Words have two or three tokens, and some digits two with their space: two fifths of the chunks are 1:1.
    "pieces": _PIECES,
    # The same, but most words have one token.
    "stems": replace(_PIECES, vocab_size=_STEMS),
    # The tokens of `stems`, and the template and special tokens of `lines`.
    "stem lines": Kind(
        _LINE_TEMPLATE, ("<eos>", "<bos>", "<pad>"), pad="<pad>", bos="<bos>", eos="<eos>", vocab_size=_STEMS
    ),
}


def make_tokenizer(max_length: int, kind: str = "words") -> PreTrainedTokenizerFast:
    """A tokenizer of one of KINDS, trained here on the words of the tasks, with its chat template and padding on the
    left.

    Text that does not occur in the tasks is split into bytes, so any text round-trips. `words` and `lines` have one
    token for every word, digit and sign of the tasks, with and without a space before it. `pieces` has
    other ids, other special tokens, and several tokens per word.

    Args:
        max_length: maximum input length of its models, in tokens.
        kind: a key of KINDS.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    properties = KINDS[kind]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=properties.vocab_size,
        special_tokens=list(properties.special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(whole=properties.vocab_size == _WHOLE), trainer)
    tokens = {"bos_token": properties.bos, "eos_token": properties.eos, "pad_token": properties.pad}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{name: token for name, token in tokens.items() if token is not None},
        chat_template=properties.chat_template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=max_length,
    )


def _corpus(*, whole: bool) -> list[str]:
    """Texts on which a tokenizer is trained: `whole` makes every word, digit and sign a token, otherwise only some digits."""
    names = " ".join(TASKS).split()
    if whole:
        return [text for piece in [*WORDS, *DIGITS, ARROW, *names] for text in (piece, f" {piece}")]
    # BPE merges the most frequent pairs first: here a space and some of the digits, before any pair of letters.
    return [f" {piece}" for piece in [*WORDS, *names, *MERGED_DIGITS * 10]]
