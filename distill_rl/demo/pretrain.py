"""Makes the quickstart's models: initialises both, and trains the teacher on the tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from typing import TYPE_CHECKING, Any

from distill_rl.demo.recipe import ListProblem, ModelSizes, Recipe, training_row
from distill_rl.observe.log import ProgressBar
from distill_rl.types import IGNORE_INDEX

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def new_model(shape: ModelSizes, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A Llama with random weights, which `seed` determines for a given config; fp32, on the CPU. The caller's random
    state is left unchanged.

    Args:
        recipe: positions and initialiser range.
        tokenizer: determines the vocabulary size and the ids of bos, eos and padding.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=recipe.positions,
        initializer_range=recipe.initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def train_teacher(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Iterator[ListProblem], recipe: Recipe
) -> None:
    """Trains the teacher in place with cross-entropy on the answers, each problem once, and shows progress on stderr.

    Takes `teacher_steps` batches of `teacher_batch` problems from `problems`, and leaves the model in evaluation mode.
    Uses one thread, so that a seed gives the same teacher on any number of cores.
    """
    import torch
    from rich.console import Console

    optimizer = torch.optim.AdamW(teacher.parameters(), lr=recipe.teacher_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(step, recipe))
    teacher.train()
    bar = ProgressBar("teacher", recipe.teacher_steps, console=Console(stderr=True))
    with closing(bar), ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for step in range(recipe.teacher_steps):
            input_ids, labels = encode(tokenizer, list(islice(problems, recipe.teacher_batch)))
            # Padding is on the right, where causal attention never sees it, so no attention mask is needed.
            logits = teacher(input_ids=input_ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.update(step + 1, [f"loss {loss.item():.3f}"])
    teacher.eval()


def encode(tokenizer: PreTrainedTokenizerBase, problems: list[ListProblem]) -> tuple[Tensor, Tensor]:
    """Input ids and labels of chats made of the problems, both int64 [R, S], padded on the right to the longest row.

    Labels are shifted, so that position s predicts labels[s]; they are the tokens of the answer, including its
    end-of-text token, and IGNORE_INDEX elsewhere. `problems` must not be empty.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows, answers = [], []
    for problem in problems:
        chat = training_row(problem)["messages"]
        row: Any = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        rows.append(torch.tensor(row["input_ids"]))
        answers.append(torch.where(torch.tensor(row["assistant_masks"]) > 0, rows[-1], IGNORE_INDEX))
    input_ids = pad_sequence(rows, batch_first=True, padding_value=int(tokenizer.pad_token_id))
    labels = pad_sequence(answers, batch_first=True, padding_value=IGNORE_INDEX)
    return input_ids, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _learning_rate(step: int, recipe: Recipe) -> float:
    return min(1.0, (step + 1) / recipe.teacher_warmup) * 0.5 * (1 + math.cos(math.pi * step / recipe.teacher_steps))
