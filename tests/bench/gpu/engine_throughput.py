"""Tokens per second of a teacher and a student engine in one process on one GPU, beside what the cost model predicts.

Real shapes, random weights, full rows: a student of the shape of Llama-3.2-1B learns from a teacher of the shape of
Qwen3-4B, with another vocabulary, and from one of the shape of Llama-3.1-8B. The teacher runs over the whole batch,
then the student takes its step; nothing overlaps, as on one card nothing can. There is no driver, no aligner and no
transport but a copy into slots; the engines need torch, transformers, numpy and safetensors only.

The total is timed without instruments. A second pass times the phases by events between them. MFU is what the models
need, forward and backward, over the rate of a large matrix product measured just before (`mfu`), and over the card's
nominal one.

`--device cpu --tiny` is the same with tiny models, to see that it works; figures of a CPU are no record.
"""

from __future__ import annotations

import gc
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from distill_rl.parallel.mesh import World
from distill_rl.scaling.model import PHASES, Card, Step, microseconds
from distill_rl.system.gpu_memory import is_out_of_memory
from tests.bench import harness
from tests.bench.gpu.cost_model import measure_card, parts
from tests.bench.gpu.engines import Engines, one_rank, phase_seconds
from tests.bench.gpu.shapes import PAIRS, TINY_PAIRS, Pair
from tests.bench.gpu.timing import synchronize

WARM_UP, MOST_STEPS, PROFILED = 2, 10, 2
"""Steps before timing, timed at most, and timed by phase."""
TINY = Step(rows=4, micro_batch=2, length=32, top_k=8)


def measure(
    device: torch.device,
    tiny: bool,
    budget_s: float,
    *,
    step: Step | None = None,
    pairs: Iterable[str] = tuple(PAIRS),
) -> dict[str, Any]:
    """Measures every pair in turn; if one cannot be measured, its `status` says why and the others go on.

    Args:
        device: where both engines live.
        tiny: the pairs in tiny sizes, as always on a CPU.
        budget_s: seconds for all pairs together, shared among them; it decides how many steps are timed.
        step: rows, micro-batch, length and top-k; None: the default sizes.
        pairs: names in `PAIRS`.

    Returns:
        `card`: the rates measured first; `step`: the sizes; `pairs`: by name, each with its description as `pair`, a
        `status` ("ok", "out of memory", "no time left", or "failed: …" with the `traceback` beside it) and, if that is
        ok, the figures of `_measure_pair`.
    """
    deadline = time.monotonic() + budget_s
    tiny = tiny or device.type != "cuda"
    step = step or (TINY if tiny else Step())
    names = list(pairs)
    card = measure_card(device)
    found: dict[str, Any] = {}
    with one_rank(device) as world:
        for i, name in enumerate(names):
            pair = (TINY_PAIRS if tiny else PAIRS)[name]
            share = (deadline - time.monotonic()) / (len(names) - i)
            found[name] = {"pair": pair.name, **_try_pair(pair, step, card, world, share)}
            gc.collect()  # here, where the frames that held the engines are gone
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return {"card": asdict(card) | {"attention": list(card.attention)}, "step": asdict(step), "pairs": found}


def _try_pair(pair: Pair, step: Step, card: Card, world: World, budget_s: float) -> dict[str, Any]:
    """Figures of a pair with `status: ok`, or only a status if it cannot be measured.

    That is "out of memory", "no time left", or "failed: " and the error, with its `traceback`; the error is not raised.

    Args:
        budget_s: seconds left for this pair.
    """
    if budget_s <= 0:
        return {"status": "no time left"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            return {"status": "ok", **_measure_pair(pair, step, card, world, Path(folder), budget_s)}
    except Exception as error:
        if is_out_of_memory(error) or is_out_of_memory(error.__cause__):
            return {"status": "out of memory"}
        line = traceback.format_exception_only(error)[-1].strip()
        return {"status": f"failed: {line}", "traceback": traceback.format_exc()}


def _measure_pair(pair: Pair, step: Step, card: Card, world: World, folder: Path, budget_s: float) -> dict[str, Any]:
    """Figures of one pair; times in µs are per token of the student's batch.

    Half of the budget that is left after loading and warm-up goes to the timed steps: at least one, at most
    `MOST_STEPS`. `PROFILED` further steps are then timed by phase.

    Args:
        folder: an empty directory for the models.
        budget_s: seconds for this pair.

    Raises:
        ArithmeticError: the last timed step's loss is not finite.
    """
    device, start = world.device, time.monotonic()
    engines = Engines(pair, step, world, folder, WARM_UP + MOST_STEPS + PROFILED)
    synchronize(device)
    loading = time.monotonic() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP):
        once = time.monotonic()
        metrics = engines.step()
        synchronize(device)
        once = time.monotonic() - once
    left = budget_s - (time.monotonic() - start)
    steps = max(1, min(MOST_STEPS, int(left / 2 / once)))
    start = time.perf_counter()
    for _ in range(steps):
        metrics = engines.step()
    synchronize(device)
    seconds = (time.perf_counter() - start) / steps
    loss = metrics["train/loss"].value
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    figures = _figures(pair, step, card, seconds, phase_seconds(engines, device, PROFILED))
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "loss_over": "tokens" if pair.one_tokenizer else "chunks (hybrid), made up, with a made-up projection",
        "loading_seconds": round(loading, 1),
        "steps": steps,
        "labelled_tokens_per_step": int(metrics["train/tokens"].value),
        "loss": loss,
        "peak_gib": None if memory is None else round(memory, 2),
        **figures,
    }


def _figures(pair: Pair, step: Step, card: Card, seconds: float, phases: dict[str, float]) -> dict[str, Any]:
    """Speed of a pair, its share of the card's matrix-product rate, and measured and predicted µs per token by phase.

    Args:
        card: with the rates measured before, from which times are predicted.
        seconds: per step, timed as a whole.
        phases: seconds per step of each phase.
    """
    flops = pair.flops_per_token(step.length) * step.tokens / seconds
    predicted = microseconds(parts(pair, step, card), card, by="phase")
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": step.tokens / seconds,
        "model_flops_per_second": flops,
        "mfu": flops / card.matmul,
        "mfu_nominal": None if card.nominal is None else flops / card.nominal,
        "microseconds": _compared(1e6 * seconds / step.tokens, sum(predicted.values())),
        "phases": {name: _compared(1e6 * phases[name] / step.tokens, predicted[name]) for name in PHASES},
    }


def _compared(measured: float, predicted: float) -> dict[str, float]:
    """Measured and predicted time, and their ratio."""
    return {"measured": measured, "predicted": predicted, "ratio": measured / predicted}


def problems(measured: Mapping[str, Any]) -> list[str]:
    """One line, its name and status, for each pair that could not be measured; empty if all could."""
    return [f"{name}: {pair['status']}" for name, pair in measured["pairs"].items() if pair["status"] != "ok"]


def report(measured: dict[str, Any]) -> str:
    """What `measure` returned as text for people: the card's rates, then a block per pair."""
    card, step = measured["card"], measured["step"]
    lines = [
        f"{card['name']}: copies {card['bandwidth'] / 1e12:.3g} TB/s, matrix product {card['matmul'] / 1e12:.3g} TFLOP/s; "
        f"{step['rows']} rows of {step['length']} tokens, micro-batches of {step['micro_batch']}, top {step['top_k']}"
    ]
    for found in measured["pairs"].values():
        lines += ["", *_pair_lines(found)]
    return "\n".join(lines)


def _pair_lines(found: dict[str, Any]) -> list[str]:
    """One pair's figures as lines of text: a headline, speed and memory, then measured and predicted time by phase.

    A pair that could not be measured is one line with its status.

    Args:
        found: what `_try_pair` returned, with the pair's name as `pair`.
    """
    if found["status"] != "ok":
        return [f"{found['pair']}: {found['status']}"]
    memory = "" if found["peak_gib"] is None else f", peak {found['peak_gib']:.1f} GiB"
    nominal = "" if found["mfu_nominal"] is None else f" ({found['mfu_nominal']:.1%} of nominal)"
    lines = [
        f"{found['pair']}, loss over {found['loss_over']}",
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['seconds_per_step']:.3f} s per step, MFU {found['mfu']:.1%}"
        f"{nominal}{memory}; {found['steps']} steps, loaded in {found['loading_seconds']:.1f} s",
        f"{'µs per token':<24}{'measured':>10}{'predicted':>11}{'ratio':>8}",
    ]
    rows = {**found["phases"], "all, timed by itself": found["microseconds"]}
    return lines + [
        f"{name:<24}{row['measured']:>10.2f}{row['predicted']:>11.2f}{row['ratio']:>8.2f}" for name, row in rows.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Measures one or all pairs, prints the figures and writes them.

    Returns the exit code: 1 if a pair's status is "failed: …" (out of memory and no time left do not count), 2 with a
    line on standard error for options that do not fit the machine or each other, otherwise 0.
    """
    parser = harness.parser(__doc__)
    harness.add_sizes(parser, {"cuda": asdict(Step()), "cpu": asdict(TINY)})
    parser.add_argument("--tiny", action="store_true", help="tiny models, as on a CPU, which takes no others")
    parser.add_argument("--pair", choices=tuple(PAIRS), help="by its teacher; default: all")
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS", help="for everything; %(default)s")
    options = parser.parse_args(argv)
    default = asdict(TINY if options.tiny else Step())
    step = Step(**{name: getattr(options, name) or size for name, size in default.items()})
    problem = ""
    if options.device == "cuda" and not torch.cuda.is_available():
        problem = "no CUDA device; --device cpu --tiny runs its small twin"
    elif options.device == "cpu" and not options.tiny:
        problem = "models of real shape need a GPU; add --tiny"
    elif min(asdict(step).values()) < 1 or step.rows % step.micro_batch:
        problem = f"--rows must be a multiple of --micro-batch, and all sizes positive; got {asdict(step)}"
    if problem:
        print(f"engine_throughput: error: {problem}", file=sys.stderr)
        return 2
    pairs = [options.pair] if options.pair else PAIRS
    measured = measure(torch.device(options.device), options.tiny, options.budget, step=step, pairs=pairs)
    print(report(measured))
    failed = any(pair["status"].startswith("failed") for pair in measured["pairs"].values())
    return harness.finish("engine_throughput", measured, options.out, device=options.device) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
