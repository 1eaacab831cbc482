"""Small language models, trained within minutes on real text: a benchmark's teachers whose top-k lists have a real shape.

Legend: N tokens, V vocabulary, H hidden size, B windows, S tokens of a window.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.harness import Refused

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD_OUT = 20
"""One document in this many is not trained on."""


@dataclass(frozen=True)
class Recipe:
    """How a model is made."""

    hidden: int = 64
    layers: int = 1
    heads: int = 4
    window: int = 128
    """tokens that the model sees"""
    windows: int = 8
    """of a step"""
    negatives: int = 3000
    """draws of ids beside the right one, per step"""
    cpu_seconds: float = 40.0
    """of training"""
    early: float = 0.5
    """share of the time after which the student is taken"""
    peak_rate: float = 5e-3


class SmallLanguageModel(nn.Module):
    """A causal Transformer with tied embeddings and an output bias, which starts as the log of the unigram shares.

    Args:
        counts: [V] occurrences of every id in the training text.
    """

    def __init__(self, recipe: Recipe, counts: Tensor) -> None:
        super().__init__()
        self.recipe = recipe
        self.embedding = nn.Embedding(len(counts), recipe.hidden)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.positions = nn.Parameter(0.02 * torch.randn(recipe.window, recipe.hidden))
        layer = nn.TransformerEncoderLayer(
            recipe.hidden, recipe.heads, 4 * recipe.hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, recipe.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(recipe.hidden)
        smoothed = counts.float() + 0.1
        self.bias = nn.Parameter((smoothed / smoothed.sum()).log())

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """[B, S, H] of tokens [B, S], S at most the window."""
        length = tokens.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)
        states = self.embedding(tokens) + self.positions[:length]
        return self.norm(self.layers(states, mask=mask, is_causal=True))

    def logits(self, tokens: Tensor) -> Tensor:
        """[B, S, V] of tokens [B, S]."""
        return F.linear(self.hidden_states(tokens), self.embedding.weight, self.bias)

    def sampled_loss(self, tokens: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        """The mean cross-entropy, its partition function estimated without bias from a sample of ids.

        The ids are drawn with replacement, so id c is in the sample with probability π_c = 1 − (1 − share_c)^draws, and
        exp(z_c)/π_c, summed over the sample, has the whole sum over the vocabulary as its mean.

        Args:
            tokens, labels: int64 [B, S].
            shares: [V], the distribution to draw from.
        """
        draws = self.recipe.negatives
        states, labels = self.hidden_states(tokens).flatten(0, 1), labels.flatten()
        sample = torch.multinomial(shares, draws, replacement=True).unique()
        inclusion = -torch.expm1(draws * torch.log1p(-shares[sample]))
        others = F.linear(states, self.embedding.weight[sample], self.bias[sample] - inclusion.log())
        others = others.masked_fill(sample == labels[:, None], -torch.inf)
        right = (states * self.embedding(labels)).sum(1) + self.bias[labels]
        return (torch.logaddexp(right, others.logsumexp(1)) - right).mean()


@dataclass(frozen=True)
class Family:
    """A tokenizer, the text in its tokens, and two stages of one model's training."""

    name: str
    vocabulary: int
    held_out: list[np.ndarray]
    """int32 [n] per document"""
    teacher: SmallLanguageModel
    student: SmallLanguageModel
    """the teacher at an earlier stage"""
    facts: dict[str, Any]
    """of the training, for the record"""


def read_texts(folder: Path, patterns: Sequence[str], piece: int = 4000) -> list[str]:
    """Documents of the files below `folder` that match the patterns: of .jsonl one per line, its strings joined.

    Other files are plain text and are cut into pieces of about `piece` characters, at ends of lines.

    Raises:
        Refused: no file matches.
    """
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    if not paths:
        raise Refused(f"no file below {folder} matches {' '.join(patterns)}")
    texts: list[str] = []
    for path in paths:
        lines = path.read_text("utf-8").splitlines(keepends=True)
        if path.suffix == ".jsonl":
            texts += ["\n".join(v for v in json.loads(line).values() if isinstance(v, str)) for line in lines]
            continue
        part: list[str] = []
        for line in lines:
            part.append(line)
            if sum(map(len, part)) >= piece:
                texts.append("".join(part))
                part = []
        texts += ["".join(part)] if part else []
    return texts


def load(folder: Path, name: str, texts: Sequence[str], models: Path, recipe: Recipe) -> Family:
    """The family of the tokenizer `folder`/tokenizer.json, trained unless `models` has it already.

    The file's name in `models` has a hash of the tokenizer, the texts and the recipe.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    digest = hashlib.sha256(path.read_bytes() + json.dumps([list(texts), asdict(recipe)]).encode()).hexdigest()[:12]
    kept = models / f"{name}-{digest}.pt"
    training, held_out = _tokenise(tokenizer, texts)
    if not kept.exists():
        models.mkdir(parents=True, exist_ok=True)
        torch.save(_train(recipe, vocabulary, training), kept)
    saved = torch.load(kept, weights_only=True)
    counts = torch.zeros(vocabulary)
    stages = []
    for stage in ("teacher", "student"):
        model = SmallLanguageModel(recipe, counts)
        model.load_state_dict(saved[stage])
        stages.append(model.eval())
    facts = {"training_tokens": sum(map(len, training)), "held_out_tokens": sum(map(len, held_out)), **saved["facts"]}
    return Family(name, vocabulary, held_out, stages[0], stages[1], facts)


def _tokenise(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The documents' tokens, int32 [n] each: those for training, and those held out."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    tokens = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
    training = [each for i, each in enumerate(tokens) if i % HELD_OUT and len(each) > 1]
    return training, [each for each in tokens[::HELD_OUT] if len(each) > 1]


def _batches(recipe: Recipe, stream: np.ndarray) -> Iterator[Tensor]:
    """[B, S + 1] windows at random places of the stream, without end."""
    draw = np.random.default_rng(0)
    while True:
        starts = draw.integers(0, len(stream) - recipe.window, recipe.windows)
        yield torch.from_numpy(np.stack([stream[start : start + recipe.window + 1] for start in starts])).long()


def _train(recipe: Recipe, vocabulary: int, documents: Sequence[np.ndarray]) -> dict[str, Any]:
    """State of the model at the end (`teacher`) and at an earlier stage (`student`), and `facts` of the training.

    Trained are the rows of ids that occur, of which there are far fewer than V. The others keep random embeddings and
    the bias that they start with, a probability below that of an id seen once.
    """
    torch.manual_seed(0)
    stream = np.concatenate(documents)
    counts = torch.from_numpy(np.bincount(stream, minlength=vocabulary))
    active = counts.nonzero()[:, 0]
    place = np.zeros(vocabulary, np.int64)
    place[active.numpy()] = np.arange(len(active))
    whole, model = SmallLanguageModel(recipe, counts), SmallLanguageModel(recipe, counts[active])
    shares = counts[active].double() ** 0.75
    shares /= shares.sum()
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.peak_rate, betas=(0.9, 0.98))

    def state() -> dict[str, Tensor]:
        """A copy of the model, with rows for the whole vocabulary."""
        named = {name: value.clone() for name, value in whole.state_dict().items()}
        for name, value in model.state_dict().items():
            if name in ("embedding.weight", "bias"):
                named[name][active] = value
            else:
                named[name] = value.clone()
        return named

    begin, steps, student = time.process_time(), 0, None
    losses: list[float] = []
    batches = _batches(recipe, place[stream])
    while (done := (time.process_time() - begin) / recipe.cpu_seconds) < 1:
        if student is None and done >= recipe.early:
            student = state()
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * min(1, (steps + 1) / 20, 1.05 - done)
        batch = next(batches)
        loss = model.sampled_loss(batch[:, :-1], batch[:, 1:], shares.float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        steps += 1
    facts = {
        "vocabulary": vocabulary,
        "ids_in_the_training_text": len(active),
        "parameters": sum(each.numel() for each in whole.parameters()),
        "steps": steps,
        "loss": round(float(np.mean(losses[-20:])), 3),
    }
    return {"teacher": state(), "student": student or state(), "facts": facts}


@torch.no_grad()
def log_probabilities(model: SmallLanguageModel, tokens: np.ndarray) -> Tensor:
    """fp32 [n, V] after each of the tokens int32 [n], which are read in windows without overlap."""
    window = model.recipe.window
    parts = [torch.from_numpy(tokens[start : start + window]).long() for start in range(0, len(tokens), window)]
    return torch.cat([model.logits(part[None])[0].log_softmax(-1) for part in parts])


def top_k(logprobs: Tensor, labels: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """The targets of the rows of `logprobs` [n, V] in their wire form; `labels` int [n] are the actual next tokens."""
    values, ids = logprobs.topk(k)
    rest = torch.log1p(-values.double().exp().sum(1).clamp(max=1 - 1e-9)).float()
    label = logprobs.gather(1, torch.from_numpy(labels).long()[:, None])[:, 0]
    named = {"ids": ids.int(), "logprobs": values, "rest_logprob": rest, "label_logprob": label}
    return {name: tensor.numpy() for name, tensor in named.items()}
