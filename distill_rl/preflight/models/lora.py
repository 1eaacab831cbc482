"""What `student.lora` makes of the student: layers with adapters, and how many parameters are trained."""

from __future__ import annotations

from dataclasses import replace

from distill_rl.config.facts import Facts, ModelFacts
from distill_rl.config.schema import Config
from distill_rl.models.files.hub import resolve
from distill_rl.preflight.models.opened import Findings, Opened


def look_at_adapters(config: Config, student: Opened, findings: Findings) -> None:
    """Adds what is trained to the student's facts; names that no layer has are added to the findings.

    Nothing without adapters, and nothing if the student's config could not be read.
    """
    from distill_rl.models.files.headers import read_headers
    from distill_rl.models.lora import survey

    lora, folder = config.student.lora, student.folder
    if lora is None or folder is None or student.config is None:
        return
    headers = {} if student.facts is None else read_headers(folder)
    shapes = {name: tuple(entry["shape"]) for name, entry in headers.items()}
    found = findings.attempt("student.lora", lambda: survey(folder, lora, shapes))
    if student.facts is not None and found is not None:
        student.facts = replace(student.facts, lora=found)


def with_adapters(config: Config, facts: ModelFacts, checked: Facts) -> ModelFacts:
    """The facts of the student with what is trained, which the checks have found if the model was on this machine."""
    from distill_rl.models.lora import survey

    lora = config.student.lora
    if lora is None:
        return facts
    if checked.student is not None and checked.student.lora is not None:
        return replace(facts, lora=checked.student.lora)
    return replace(facts, lora=survey(resolve(config.student.model, config.student.revision), lora))


def trained_weights(config: Config) -> str:
    """What a run trains, in words: a resumed run must train the same."""
    lora = config.student.lora
    if lora is None:
        return "all weights"
    targets = "all linear layers" if lora.targets is None else ", ".join(sorted(lora.targets))
    whole = f", and {', '.join(sorted(lora.modules_to_save))} whole" if lora.modules_to_save else ""
    base = f", beside weights in {config.student.quantization}" if config.student.quantization else ""
    return f"LoRA of rank {lora.rank}, alpha {lora.scale * lora.rank:g}, on {targets}{whole}{base}"
