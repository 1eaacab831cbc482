"""What a sample says about a run is what the run computes, if the sample is all of its data."""

from __future__ import annotations

import json

import pytest

from distill_rl.preflight import gather
from distill_rl.run.job import prepare
from distill_rl.types import BatchInfo, Cursor, RunPaths
from distill_rl.workers.actors.aligner import AlignerWorker

ALL = ["train.global_batch_size=64", "data.max_length=48"]


def first_batch(checked, tmp_path, documents: int = 64) -> BatchInfo:
    """The summary of a batch of the first documents, made as a run makes it."""
    job = prepare(checked.opened, RunPaths(tmp_path / "run"))
    other_tokenizer = tuple(spec is not None for spec in job.cross_tokenizer_specs)
    aligner = AlignerWorker(0, checked.config, job.opened.train.kind, job.plan, other_tokenizer)
    aligner.start()
    _, aligned = aligner.align([job.opened.train[i] for i in range(documents)])
    info, *_ = aligner.assemble(0, Cursor(0, documents), aligned)
    return info


@pytest.mark.parametrize("long_documents", ["cut", "split"])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("file", ["run.yaml", "pair.yaml"])
def test_positions_of_a_step_are_those_that_it_computes(material, tmp_path, file, packing, long_documents):
    settings = [f"data.packing={packing}".lower(), f"data.long_documents={long_documents}"]
    checked = gather(material / file, [*ALL, *settings, f"run.dir={tmp_path}"])
    assert checked.problems == []
    info = first_batch(checked, tmp_path)
    # Across tokenizers, the pieces of a document end where both sides share a boundary, so they are a little shorter.
    tolerance = 0 if file == "run.yaml" else 0.1
    assert checked.facts.step.positions == pytest.approx(info.num_positions, rel=tolerance)
    assert checked.facts.step.used == pytest.approx(info.num_tokens / info.num_positions, rel=tolerance)
    (source,) = checked.facts.sources
    assert source.sample.padding == pytest.approx(1 - checked.facts.step.used)
    if file == "run.yaml":
        number = info.num_split if long_documents == "split" else info.num_truncated
        assert source.sample.too_long == number / 64 > 0
    assert source.sample.split == (long_documents == "split")


def test_every_source_has_its_own_sample(material, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"text": f"{i} " + "word " * 60}) + "\n" for i in range(64)))
    settings = [
        "data.path=null",
        f"data.sources.0={{path: {material}/data.jsonl, weight: 3}}",
        f"data.sources.1={{path: {long}}}",
    ]
    checked = gather(material / "run.yaml", [*ALL, *settings])
    short, longer = (source.sample for source in checked.facts.sources)
    assert short.too_long < longer.too_long == 1
    assert short.tokens_per_document < longer.tokens_per_document
    assert "of a sample: 100 % of the documents split" in str(checked.facts.sources[1])
    assert str(checked.facts.step).endswith("% of them with a token")


def test_joined_texts_are_counted_as_they_are_read(material):
    settings = [*ALL, "data.concatenate=true", "data.characters_per_sample=400", "data.long_documents=cut"]
    joined, apart = (gather(material / "run.yaml", options).facts for options in (settings, [*ALL, settings[-1]]))
    assert joined.sources[0].sample.too_long > 0.9
    assert joined.step.positions < 0.7 * apart.step.positions, "most of the joined texts is cut off"


@pytest.mark.parametrize("settings", [[], ["data.concatenate=true", "data.characters_per_sample=4000"]])
def test_a_step_of_sorted_data_is_an_average_one(material, tmp_path, settings):
    sorted_data = tmp_path / "sorted.jsonl"
    sorted_data.write_text("".join(json.dumps({"text": "word " * (1 + i // 20)}) + "\n" for i in range(2000)))
    whole = ["train.global_batch_size=4", "data.max_length=256", f"data.path={sorted_data}", *settings]
    checked = gather(material / "run.yaml", whole)
    assert checked.problems == []
    (source,) = checked.facts.sources
    tokens = checked.facts.step.used * checked.facts.step.positions
    assert tokens == pytest.approx(4 * source.sample.tokens_per_document, rel=0.05)
    assert source.sample.tokens_per_document > 30, "the mean of all, not of the first rows"


def test_sources_take_turns_where_a_batch_is_smaller_than_their_number(material, tmp_path):
    settings = [f"data.sources.{i}={{path: {material}/data.jsonl, weight: {i + 1}}}" for i in range(3)]
    checked = gather(
        material / "run.yaml", ["train.global_batch_size=1", "train.micro_batch_size=1", "data.path=null", *settings]
    )
    assert checked.problems == []
    assert checked.facts.step.positions > 0


def test_nothing_is_said_of_data_with_a_problem(material):
    checked = gather(material / "run.yaml", [*ALL, "data.loss_on=assistant"])
    assert checked.problems
    assert checked.facts.step is None
    assert checked.facts.sources[0].sample is None
