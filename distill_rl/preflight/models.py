"""Checks of the models: sizes, attention, width of the rows, classes, adapters and weights that are stored quantised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from distill_rl.config.facts import row_width, width_multiple
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError, problem
from distill_rl.models import adapters, attention, families, files
from distill_rl.models.classes import examine, survey
from distill_rl.run.opened import OpenedModel, OpenedRun, OpenedTeacher, RunFindings


def look_at_adapters(run: OpenedRun, findings: RunFindings) -> None:
    """Adds what is trained to the student's facts; names that no layer has are added to the findings.

    Nothing without adapters, and nothing if the student's config could not be read.
    """
    student, folder = run.student, run.student.folder
    if folder is None or student.config is None:
        return
    found = findings.attempt(adapters.KEY, lambda: survey(folder, run.config.student, student.shapes))
    if student.facts is not None and found is not None:
        student.facts = replace(student.facts, adapters=found)


def fit_problems(run: OpenedRun, *, gpus: int) -> Iterator[str]:
    """Yields settings that exceed a model, one line each.

    These are rows too long for its positions, a `parallel.tp`, its own or that of the evaluator, over which it cannot be
    split, a `parallel.sp` over which its heads cannot, and a tokenizer with more ids than the model has embedding rows.
    A model without a readable configuration is skipped.

    Args:
        gpus: number visible on this machine.
    """
    config = run.config
    evaluate = config.evaluate
    for model in run.models:
        if model.config is None:
            continue
        yield from width_problems(config, model, gpus=gpus)
        tp, origin = model.settings.parallel.tp, model.settings.origin
        if tp > 0:
            lines = families.split_problems(model.config, tp, backend=origin.package or "hf", setting="parallel.tp")
            yield from (f"{model.key}.parallel.tp: {text}" for text in lines)
            sp = model.settings.parallel.sp
            if sp > 0 and not origin.engine:
                yield from families.sequence_parallel_problems(model.config, sp, tp, f"{model.key}.parallel.sp")
                yield from attention.spread_problems(model.config, f"{model.key}.parallel.sp") if sp > 1 else ()
        split = evaluate.parallel.tp
        if split > 1 and evaluate.suites and (model.key == "student" or evaluate.teachers):
            key, backend = "evaluate.parallel.tp", evaluate.backend
            lines = families.split_problems(model.config, split, backend=backend, setting=key)
            yield from (f"{key}: {model.name}: {text}" for text in lines)
        if evaluate.suites and evaluate.engine and (model.key == "student" or evaluate.teachers):
            limit = families.length_limit(model.config)
            if limit is not None and limit.kind == "dynamic":
                rule = families.engine_length_problem(model.config, evaluate.engine, limit.length, limit.length)
                yield problem("evaluate.backend", f"{model.name}: {rule}", evaluate.backend, "set evaluate.backend=hf")
        if model.key == "student" and config.loss.fused == "on":
            yield from families.fused_loss_problems(model.config)
        needed, columns = model.vocabulary_size, model.config.vocab_size
        if needed is not None and columns < needed:
            rule = f"the model has fewer embedding rows ({columns}) than its tokenizer has ids ({needed})"
            yield problem(f"{model.key}.model", rule, None, "give the tokenizer that belongs to the model")


def attention_problems(config: Config, models: Sequence[OpenedModel], *, gpus: int) -> Iterator[str]:
    """Yields what the requested attention of each model lacks, one line each.

    `sdpa` and `flash_attention_2` must compute what the model's configuration asks of attention. `flash_attention_2` and
    `varlen` need a GPU, which is not looked for if the run joins a cluster; `flash_attention_2` also needs its package
    and another dtype than fp32, `varlen` a kernel that suits the model.

    Args:
        gpus: number visible on this machine. Those of a cluster are not known before it is joined.
    """
    for model in models:
        key, asked, dtype = f"{model.key}.attention", model.settings.attention, model.settings.dtype
        remedy = f"set {key}=auto"
        if model.settings.origin.engine:
            continue
        if model.config is not None and model.settings.parallel.sp == 1 and asked not in ("auto", "varlen"):
            yield from (problem(key, rule, asked, remedy) for rule in attention.lacks(asked, model.config))
        if asked not in ("varlen", "flash_attention_2"):
            continue
        no_gpu = config.ray.address is None and not gpus
        if no_gpu:
            yield problem(key, "needs a GPU; none is visible", asked, remedy)
        if asked == "flash_attention_2":
            if not attention.installed("flash_attn"):
                rule = "needs the package flash_attn, which is not installed"
                yield problem(key, rule, asked, f"pip install flash-attn, or {remedy}")
            elif (broken := attention.importable("flash_attn")) is not None:
                rule = f"needs the package flash_attn, which is installed but cannot be imported ({broken})"
                yield problem(key, rule, asked, f"install the build for this torch and CUDA, or {remedy}")
            if dtype == "fp32":
                setting = f"{model.key}.dtype"
                yield problem(key, f"needs {setting}: bf16", asked, f"{remedy}, or {setting}=bf16")
            continue
        training = model.key == "student"
        by_kernel = [
            list(attention.obstacles(name, model.config, dtype=dtype, training=training)) for name in attention.VARLEN
        ]
        if all(by_kernel) and not no_gpu:  # no kernel works; report torch's, which needs no extra package
            yield from (problem(key, rule, asked, remedy) for rule in by_kernel[-1])


def width_problems(config: Config, model: OpenedModel, *, gpus: int) -> Iterator[str]:
    """Yields at most one problem: a model has too few positions for `data.max_length`, or for such rows when padded.

    The padding matters only if positions beyond the last may be an error: in a table of learned positions, or in a
    family that is not tested. An engine never sees padding. A model that states no number of positions has no problem.

    Args:
        gpus: number of GPUs; the padded width differs with and without.
    """
    limit = None if model.config is None else families.length_limit(model.config)
    positions = getattr(model.config, "max_position_embeddings", None) if limit is None else limit.longest
    if positions is None:
        return
    setting, longest = _longest_row(config, model)
    if longest > positions:
        rule = f"must not exceed the {positions} positions of {model.name}"
        yield problem(setting, rule, longest, f"use {positions} or less")
        return
    if engine := model.settings.origin.engine:
        if broken := families.engine_length_problem(model.config, engine, longest, longest + 1):
            usable = f"use {setting}={limit.length - 1}, or " if limit is not None and limit.kind == "longrope" else ""
            key = f"{model.key}.backend"
            yield problem(key, broken, model.settings.origin.package, f"{usable}set {key}=hf")
        return
    family, on_gpu = families.family_of(model.config), gpus > 0
    divisor = config.width_divisor
    width = row_width(longest, on_gpu=on_gpu, divisor=divisor)
    if width > positions and (family.learned_positions or not family.proven):
        multiple = width_multiple(divisor, on_gpu=on_gpu)
        rule = f"rows of {longest} tokens are padded to {width} positions, a multiple of {multiple}; {model.name} has {positions}"
        largest = positions // multiple * multiple
        yield problem(setting, rule, None, f"use {largest} or less" if largest else "take another model")


def _longest_row(config: Config, model: OpenedModel) -> tuple[str, int]:
    """The setting that says how many document tokens a row of a model holds at most, and its value."""
    if isinstance(model.settings, TeacherConfig) and model.settings.max_length is not None:
        return f"{model.key}.max_length", model.settings.max_length
    return "data.max_length", config.data.max_length


def class_problems(config: Config, models: Sequence[OpenedModel], *, gpus: int) -> Iterator[str]:
    """Yields what the classes of the models have against the settings and the files, one line each.

    These are an attention that transformers does not have for the family, documents in one row that the family cannot
    keep apart, and tensors that are missing, left over, of another shape, or tied and yet different. A Llama-like model whose tensors are
    plainly whole is not asked, because importing its class takes seconds. Nor is one that an engine runs, with its own class, or one
    whose weights are quantised, which only the quantiser can compare; but the rows of that must not be too long either.

    Args:
        gpus: number visible on this machine.
    """
    packing, findings = config.data.packing, RunFindings()
    for model in models:
        if model.config is None or model.settings.origin.engine:
            continue
        limit = attention.packed_limit(model.config) if packing else None
        setting, longest = _longest_row(config, model)
        if limit is not None and longest > limit[0]:
            counts = f"{model.name} counts positions from the start of a row"
            rule = f"{counts}, wherever packed documents begin ({limit[1]})"
            yield problem("data.packing", rule, "true", f"set data.packing=false, or {setting}={limit[0]} or less")
        if model.folder is None or files.method_of(model.config):
            continue
        if shapes := model.shapes:
            yield from files.dtype_problems(f"{model.key}.model", model.headers)
        if shapes and files.plainly_whole(model.config, shapes):
            if model.config.tie_word_embeddings and "lm_head.weight" in shapes:
                tables = ("model.embed_tokens.weight", "lm_head.weight")
                yield from files.tied_problems(f"{model.key}.model", model.folder, [tables])
            continue
        kinds = files.stateful_layers(model.config)
        stateful = f"{model.name} has {', '.join(kinds)} layers, which carry a state"
        if packing and kinds:
            rule = f"{stateful} from one packed document to the next"
            yield problem("data.packing", rule, "true", "set data.packing=false")
        if model.settings.parallel.sp > 1 and kinds:
            rule = f"must be 1: {stateful} from token to token"
            yield problem(f"{model.key}.parallel.sp", rule, model.settings.parallel.sp, "leave it out")
        look = partial(
            examine,
            model.key,
            model.folder,
            attention=_implementation(model, packing=packing, gpus=gpus),
            packing=packing and not kinds,  # of these layers the line above says it
            weights=bool(shapes),
            automatic=model.settings.attention == "auto",
        )
        yield from findings.attempt(f"{model.key}.model", look) or ()
    yield from findings.problems


def packing_notes(config: Config, models: Sequence[OpenedModel]) -> Iterator[str]:
    """Yields at most one line: families of which only a worker finds out that they keep packed documents apart."""
    if not config.data.packing:
        return
    packed = [model.config for model in models if model.config and not model.settings.origin.engine]
    if types := [config.model_type for config in packed if not families.family_of(config).proven]:
        tried = "whether packed documents see each other is tried when the weights are loaded"
        then = "the run ends there if they do (then set data.packing=false)"
        yield f"data.packing: no test covers {' and '.join(dict.fromkeys(types))}; {tried}, and {then}"


def _implementation(model: OpenedModel, *, packing: bool, gpus: int) -> str:
    """Transformers' name of the attention that a worker will choose; `eager` where the settings are refused anyway."""
    settings = model.settings
    if settings.attention == "flash_attention_2" and attention.importable("flash_attn") is not None:
        return "eager"
    try:
        no_kernel, spread = None if gpus else attention.ON_CPU, settings.parallel.sp > 1
        return attention.choose(
            settings, model.config, packing=packing, no_kernel=no_kernel, spread=spread
        ).implementation
    except ConfigError:
        return "eager"


def stored_problems(teachers: Sequence[OpenedTeacher], *, gpus: int) -> Iterator[str]:
    """Yields what is against loading a teacher as it is stored, one line each.

    Whether its method works on a GPU that this process does not look at is found out when it is loaded, before step 1.

    Args:
        teachers: the running ones.
        gpus: number visible on this machine.
    """
    for opened in teachers:
        settings, key = opened.settings, f"{opened.key}.quantization"
        if settings.quantization != AS_STORED or not settings.origin.runs_model or opened.config is None:
            continue
        assert opened.folder is not None
        if rule := files.as_stored_problem(opened.config, opened.folder, tp=1):
            yield problem(key, rule, AS_STORED, f"set {key}=int8, int4, fp8 or null")
            continue
        method = files.method_of(opened.config) or ""
        if missing := files.missing_packages(method, on_gpu=gpus > 0):
            rule = f"{method} weights need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
            yield problem(key, rule, AS_STORED, f"pip install {' '.join(missing)}")
