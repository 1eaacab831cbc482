from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.run import card as cards
from distill_rl.run.card import card_of, is_untouched
from tests.helpers.hub import card_errors

HOSTILE = "x```\n---\nlicense: mit\n# <script>alert(1)</script> `code` | [link](javascript:1)"


def make_config(**student: str) -> Config:
    config = Config(teachers=[TeacherConfig(name="big", model="runs/teacher")])
    config.run.name, config.data.path = "quickstart", "data/train.jsonl"
    config.student.model = student.get("model", "runs/student")
    return config


def test_card_shows_origin_and_scores() -> None:
    card = card_of(make_config(), step=600, data_fingerprint="f" * 64, scores={"eval/exact_match": 0.943})
    for fact in ("# quickstart", "`runs/teacher`", "`runs/student`", "`600`", "f" * 64, "0.9430", "Teacher big"):
        assert fact in card
    assert "global_batch_size: 32" in card
    assert card.endswith("```\n")


def test_yaml_header_has_base_model_only_for_hub_names() -> None:
    def header(card: str) -> dict[str, object]:
        return yaml.safe_load(card.split("---\n")[1])

    hub = header(card_of(make_config(model="meta-llama/Llama-3.2-1B"), step=1, data_fingerprint=""))
    assert hub["base_model"] == "meta-llama/Llama-3.2-1B"
    assert hub["base_model_relation"] == "finetune"
    assert hub["library_name"] == "transformers"
    assert "base_model" not in header(card_of(make_config(model="/models/llama"), step=1, data_fingerprint=""))


def test_card_without_teachers() -> None:
    config = make_config()
    config.teachers = []
    assert "no teacher (cross-entropy with the data only)" in card_of(config, step=1, data_fingerprint="")


@pytest.mark.parametrize(
    ("export", "loss", "methods", "line"),
    [
        ("topk", {}, (), "1 x KD (forward_kl, top 64, T = 1)"),
        ("topk", {"tail": "truncate", "ce_weight": 0.5}, (None,), "1 x KD (forward_kl, top 64 without the rest, T = 1) + 0.5 x CE"),
        ("logits", {}, (), "1 x KD (forward_kl, the whole vocabulary, T = 1)"),
        ("hidden", {"temperature": 2.0}, (), "1 x KD (forward_kl, the whole vocabulary, T = 2)"),
        ("sampled", {}, (), "1 x KD (forward_kl, 50 draws, T = 1)"),
        ("topk", {"divergence": "jsd", "beta": 0.1}, (), "1 x KD (jsd, beta = 0.1, top 64, T = 1)"),
        ("topk", {"dynamic_scale": "on", "ce_weight": 0.25}, (), "r x KD (forward_kl, top 64, T = 1) + CE, r = CE / KD"),
        ("topk", {}, ("hybrid",), "1 x KD (forward_kl, top 64 by hybrid across tokenizers, T = 1)"),
        ("topk", {"kd_weight": 0.0, "ce_weight": 1.0}, (), "CE with the data"),
    ],
)  # fmt: skip
def test_card_says_what_was_minimised(
    export: str, loss: dict[str, Any], methods: tuple[str | None, ...], line: str
) -> None:
    config = make_config()
    config.teachers[0].export = export  # type: ignore[assignment]
    for name, value in loss.items():
        setattr(config.loss, name, value)
    card = card_of(config, step=1, data_fingerprint="", methods=methods)
    assert f"| Loss | `{line}` |" in card
    trained = loss.get("kd_weight", 1) > 0
    assert ("Teacher big" in card) is ("distributions of `runs/teacher`" in card) is trained
    assert ("no teacher (cross-entropy with the data only)" in card) is not trained


def test_markup_in_names_is_escaped() -> None:
    config = make_config(model=HOSTILE)
    config.run.name = config.teachers[0].name = config.teachers[0].model = config.data.path = HOSTILE
    card = card_of(config, step=1, data_fingerprint=HOSTILE, scores={HOSTILE: 1.0})
    front, body = card.split("---\n", 2)[1:]
    entries = yaml.safe_load(front)
    assert set(entries) == {"library_name", "pipeline_tag", "license", "tags", "model-index", "distill_rl"}
    assert entries["license"] == "unknown"
    assert card_errors(card) == []
    outside_code = re.sub(r"(?ms)^(`{3,})yaml\n.*?^\1$", "", body)
    outside_code = re.sub(r"(?s)(?<!`)(?<!\\)(`+)(?!`)(.*?)(?<!`)\1(?!`)", "", outside_code)
    assert not re.search(r"(?<!\\)[<\[]", outside_code)
    assert [line for line in body.splitlines() if line.startswith("#")] == [
        body.splitlines()[0],
        "## Scores",
        "## Use",
        "## Licence",
        "## Configuration",
    ]


@pytest.mark.parametrize("secret", ["https://user:hunter2@host/data.jsonl"])
def test_secrets_are_not_in_the_card(secret: str) -> None:
    config = make_config()
    config.data.path = config.student.model = config.teachers[0].model = secret
    assert "hunter2" not in card_of(config, step=1, data_fingerprint="")


def test_header_is_what_the_hub_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own classes find lineage, scores, licence and data hash in it."""
    config = make_config(model="meta-llama/Llama-3.2-1B")
    config.teachers[0].model = "/models/teacher"
    config.teachers.append(TeacherConfig(name="bigger", model="org/teacher"))
    config.data.path = "org/corpus"
    scores = {
        "validation/kl_loss": 0.25,
        "validation/top1_agreement": 0.5,
        "eval/own suite": 0.75,
        "eval/bad": float("nan"),
    }
    licence = {"license": "other", "license_name": "theirs", "license_link": "https://user:hunter2@host/terms"}
    monkeypatch.setattr(cards, "licence_of", lambda model: {"org/teacher": {"license": "gemma"}}.get(model.model, {}))
    text = card_of(
        config,
        step=7,
        data_fingerprint="f" * 64,
        scores=scores,
        licence=licence,
    )
    card = ModelCard(text).data
    assert (card.base_model, card["base_model_relation"]) == ("meta-llama/Llama-3.2-1B", "finetune")
    assert card.tags == ["knowledge-distillation", "distill_rl", "teacher:org/teacher"]
    assert card.datasets == ["org/corpus"]
    assert (card.license, card.license_name, card["license_link"]) == (
        "other",
        "theirs",
        "https://<redacted>@host/terms",
    )
    results = {(one.dataset_type, one.metric_name): one.metric_value for one in card.eval_results or ()}
    assert results == {
        ("org/corpus", "validation/kl_loss"): 0.25,
        ("org/corpus", "validation/top1_agreement"): 0.5,
        ("own-suite", "score"): 0.75,
    }
    assert card["distill_rl"]["data_sha256"] == "f" * 64
    assert card["distill_rl"]["step"] == 7
    assert card_errors(text) == []
    assert "- `big (/models/teacher)`: not known" in text
    assert "- `bigger (org/teacher)`: `gemma`" in text
    assert "hunter2" not in text


def test_an_edited_card_is_recognised() -> None:
    card = card_of(make_config(), step=1, data_fingerprint="")
    assert is_untouched(card)
    assert not is_untouched(card + " ")
    assert not is_untouched(card.replace('"step": 1', '"step": 2'))
    assert not is_untouched("# A student\n")
