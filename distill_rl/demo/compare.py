"""The result of a trial: bits per byte of four models on the same text, and whether the teacher made a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill_rl.demo.choose import FEWEST_HELD_OUT
from distill_rl.demo.measure import Measured, Prompt
from distill_rl.observe.log import printable
from distill_rl.observe.terminal import open_console

BEFORE, TAUGHT, CONTROL, TEACHER = "student_before", "with_teacher", "without_teacher", "teacher"
ROWS = {
    TEACHER: "teacher",
    BEFORE: "student, before",
    CONTROL: "student, trained without the teacher",
    TAUGHT: "student, trained with the teacher",
}
_BAR = 24
_RESAMPLES = 2000
_SHOWN = 160
"""Characters of a sample that are shown."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Bits per byte that the teacher saved: those without it minus those with it."""

    saved: float
    low: float
    high: float
    """95 % interval, over documents."""
    documents: int
    """Held out."""

    @property
    def interval(self) -> list[float] | None:
        """None for too few documents, among which an interval is narrow by chance."""
        return [self.low, self.high] if self.documents >= FEWEST_HELD_OUT else None

    @property
    def verdict(self) -> str:
        if self.interval is None:
            held = f"{self.documents} document{'' if self.documents == 1 else 's'} held out, at least {FEWEST_HELD_OUT} needed"
            return f"Too little text to tell whether the teacher helped: {held}; give more documents."
        interval = f"(95 % interval {self.low:+.3f} to {self.high:+.3f})"
        if self.low > 0:
            return (
                f"The teacher helped: {self.saved:.3f} bits per byte fewer than the same steps without it {interval}."
            )
        if self.high < 0:
            return (
                f"The teacher did harm: {-self.saved:.3f} bits per byte more than the same steps without it {interval}."
            )
        return (
            f"No difference that this much held-out text could show: {self.saved:+.3f} bits per byte saved {interval}."
        )


def difference(taught: Measured, control: Measured, seed: int = 0) -> Difference:
    """What the teacher saved, with an interval from documents that are drawn again, with replacement, for both models alike."""
    pairs = np.array([taught.bits, control.bits, taught.num_bytes], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(pairs.shape[1], size=(_RESAMPLES, pairs.shape[1]))
    with_it, without, size = pairs[:, drawn].sum(axis=2)
    low, high = np.quantile((without - with_it) / size, (0.025, 0.975))
    return Difference(control.bits_per_byte - taught.bits_per_byte, float(low), float(high), len(taught.bits))


def print_result(
    models: Mapping[str, Measured], outcome: Difference, trainings: Mapping[str, Mapping[str, Any]]
) -> None:
    """Prints a table of bits per byte with bars, and what it says.

    Args:
        models: the models of ROWS.
        trainings: steps and seconds by model, of those that were trained.
    """
    from rich import box
    from rich.table import Table

    some = models[BEFORE]
    title = f"Bits per byte on {len(some.bits):,} held-out documents, {sum(some.num_bytes):,} bytes (less is better)"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("model", no_wrap=True)
    table.add_column("bits per byte", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("training", no_wrap=True)
    most = max(measured.bits_per_byte for measured in models.values())
    for name, label in ROWS.items():
        value, training = models[name].bits_per_byte, trainings.get(name)
        bar = "█" * max(1, round(_BAR * value / most))
        told = (
            ""
            if training is None
            else f"{training['steps']:,} step{'' if training['steps'] == 1 else 's'} in {training['seconds']:.0f} s"
        )
        table.add_row(label, f"{value:.3f}", bar, told, style="bold" if name == TAUGHT else None)
    console = open_console(110)
    console.print()
    console.print(table)
    seconds = [trainings[name]["seconds"] / max(trainings[name]["steps"], 1) for name in (TAUGHT, CONTROL)]
    cost = f" A step with the teacher took {seconds[0] / seconds[1]:.1f} times as long." if min(seconds) > 0 else ""
    print(outcome.verdict + cost)


def print_samples(prompts: Sequence[Prompt], models: Mapping[str, Measured]) -> None:
    """Prints held-out prompts, how they go on, and how each student goes on with them."""
    for i, prompt in enumerate(prompts):
        print(f"\n  prompt           {_shown(prompt.shown, end=True)}")
        print(f"  text             {_shown(prompt.reference)}")
        for name, label in ((BEFORE, "before"), (CONTROL, "without teacher"), (TAUGHT, "with teacher")):
            print(f"  {label:<16} {_shown(models[name].samples[i])}")
    print(flush=True)


def _shown(text: str, *, end: bool = False) -> str:
    """A text on one line, cut; at its beginning with `end`."""
    line = printable(" ".join(text.split()))
    if len(line) <= _SHOWN:
        return line or "(nothing)"
    return f"… {line[-_SHOWN:]}" if end else f"{line[:_SHOWN]} …"
