from __future__ import annotations

from dataclasses import replace

import pytest

from distill_rl.config.load import read_config
from distill_rl.config.rules import problems
from distill_rl.demo import trial_setup
from distill_rl.demo.trial_setup import Known

LAPTOP = Known(
    gpus=0,
    cores=8,
    student_parameters=135_000_000,
    teacher_parameters=1_700_000_000,
    positions=8192,
    vocabulary=49_152,
    documents=20_000,
    tokens_per_document=180.0,
    chats=False,
    turns_known=True,
    minutes=5.0,
)
CARD = replace(LAPTOP, gpus=1, student_parameters=1_000_000_000, teacher_parameters=8_000_000_000)
QUICKSTART = replace(
    LAPTOP, cores=2, student_parameters=82_000, teacher_parameters=310_000, positions=256, vocabulary=310, documents=2000,
    tokens_per_document=16.0, chats=True, minutes=0.3,
)  # fmt: skip
BOOK = replace(LAPTOP, documents=20, tokens_per_document=120_000.0)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (LAPTOP, {"student.dtype": "fp32", "data.max_length": 512, "train.global_batch_size": 8, "optimizer.lr": 1e-4}),
        (CARD, {"student.dtype": "bf16", "data.max_length": 1024, "train.global_batch_size": 64, "optimizer.lr": 5e-5}),
        (QUICKSTART, {"data.max_length": 128, "train.global_batch_size": 128, "data.loss_on": "assistant",
                      "optimizer.lr": 2e-3}),
        (BOOK, {"data.max_length": 512, "train.global_batch_size": 1, "train.micro_batch_size": 1}),
        (replace(CARD, positions=300), {"data.max_length": 256}),  # rows of GPUs are padded to a multiple of 128
        (replace(CARD, positions=100), {"data.max_length": 100}),
        (replace(LAPTOP, vocabulary=40), {"loss.top_k": 40}),
        (replace(CARD, documents=40), {"train.global_batch_size": 8}),  # at most a quarter of the text
        (replace(QUICKSTART, turns_known=False), {"loss.top_k": 64}),
    ],
)  # fmt: skip
def test_settings_by_models_text_and_machine(known, expected):
    documents = trial_setup.documents_per_step(known, trial_setup.row_length(known))
    chosen = trial_setup.choose(known, next(trial_setup.fits(known, documents)))
    assert {key: chosen.get(key) for key in expected} == expected
    assert ("data.loss_on" in chosen) == (known.chats and known.turns_known)
    config, findings = read_config({"student.model": "s", "teachers": [{"model": "t"}], "data.path": "d", **chosen})
    assert config is not None
    assert findings.lines == []
    assert problems(config) == []


@pytest.mark.parametrize(
    ("known", "documents"),
    [
        (QUICKSTART, 200),  # a tenth of the text
        (
            replace(LAPTOP, tokens_per_document=10.0, documents=10**6),
            205,
        ),  # the fewest tokens: the teacher is slow here
        (CARD, 278),  # the most tokens
        (BOOK, 5),  # a quarter of a short text
        (replace(BOOK, documents=32), 8),  # the fewest that can be compared
        (replace(BOOK, documents=4000), 8),
        (replace(BOOK, documents=3), 1),
    ],
)
def test_what_is_held_out_can_be_measured_in_time(known, documents):
    assert trial_setup.held_out(known) == documents


@pytest.mark.parametrize(
    ("known", "tokens"),
    [
        (CARD, None),
        (QUICKSTART, None),
        (replace(LAPTOP, tokens_per_document=2000.0), 256),
        (BOOK, 409),  # 2048 of five documents
        (replace(BOOK, gpus=1, documents=100), 6250),
    ],
)
def test_only_the_beginning_of_long_documents_is_measured(known, tokens):
    assert trial_setup.longest_measured(known) == tokens


def test_smaller_trainings_come_last_and_divide_the_batch():
    found = list(trial_setup.fits(replace(CARD, gpus=2), 4))
    smallest = {"train.micro_batch_size": 1, "student.activation_checkpointing": True}
    apart, adapters = smallest | {"ray.placement": "disaggregated"}, smallest | {"student.lora": {}}
    assert found == [*({"train.micro_batch_size": rows} for rows in (4, 2, 1)), smallest, apart, adapters]
    eight_bits = {"teachers.0.quantization": "int8"}
    in_few_bits = [
        smallest | eight_bits,
        adapters,
        adapters | eight_bits,
        adapters | {"teachers.0.quantization": "int4", "student.quantization": "int4"},
    ]
    assert list(trial_setup.fits(replace(CARD, quantizes=True), 4))[-4:] == in_few_bits
    assert next(trial_setup.fits(LAPTOP, 8)) == {"train.micro_batch_size": 4}


@pytest.mark.parametrize("fit", trial_setup.SMALLEST, ids=repr)
def test_what_changes_the_result_is_set_and_said(fit):
    chosen = trial_setup.choose(CARD, fit)
    config, findings = read_config({"student.model": "s", "teachers": [{"model": "t"}], "data.path": "d", **chosen})
    assert config is not None
    assert findings.lines == []
    formats = (config.teachers[0].quantization, config.student.quantization)
    assert formats == (fit.get("teachers.0.quantization"), fit.get("student.quantization"))
    assert (config.student.lora is not None) == ("student.lora" in fit)
    told = [words in trial_setup.way(config) for words in ("adapters", "8 bits", "4 bits")]
    assert told == ["student.lora" in fit, formats[0] == "int8", formats[0] == "int4"]


def test_rates_fall_with_the_number_of_parameters():
    sizes = [10**power for power in range(3, 13)]
    rates = [trial_setup.learning_rate(size) for size in sizes]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (trial_setup.LR_RANGE[1], trial_setup.LR_RANGE[0])
    assert trial_setup.learning_rate(10**9, adapters=True) == 10 * trial_setup.learning_rate(10**9)


def test_every_choice_is_explained_and_what_the_user_chose_is_shown():
    settings = {"student.model": "s", "teachers": [{"model": "t"}], "data.path": "d"}
    config, _ = read_config(
        settings | trial_setup.choose(QUICKSTART, {"train.micro_batch_size": 4}),
        ["optimizer.lr=0.5", "loss.ce_weight=0", "train.micro_batch_size=2"],
    )
    assert config is not None
    text = "\n".join(trial_setup.reasons(QUICKSTART, "same", config))
    for value in (
        "same tokenizer",
        "64 likeliest",
        "assistant's turns",
        "128 tokens",
        "; 2 rows at a time",
        "0.5: ",
        "fp32",
    ):
        assert value in text
    assert "cross-entropy" not in text
    assert "hybrid, over chunks" in "\n".join(trial_setup.reasons(LAPTOP, "hybrid", config))
