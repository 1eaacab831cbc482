"""A run from a store is refused before its start if the store does not fit, or lacks documents; every reason at once."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

from distill_rl.config.schema import DataConfig
from distill_rl.data.batch.document_aligner import STUDENT, splitter_of
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.data.reading import files
from distill_rl.models.files import fingerprint_model, read_tokenizer, tokenizer_hash
from distill_rl.preflight import Checked, gather
from distill_rl.preflight import stores as documents
from distill_rl.store.store import TEACHER, Record, Store, describe_teacher, serialize, write_manifest
from tests.helpers.corpus import corpus_rows
from tests.helpers.models import write_tiny_model
from tests.helpers.stores import MANIFEST, make_store, record_of
from tests.helpers.tokenizers import tiny_tokenizer

TOP, ALL, SIZE = 8, 10**6, 320
EPOCH = ("train.steps=null", "train.epochs=1")


def records(rows: Sequence[dict], tokenizer: Any, *, max_length: int = ALL, split: bool = False) -> list[Record]:
    """The documents as a capture with this tokenizer would have divided them; of the targets only the shapes are right."""
    tokenization = Tokenization(tokenizer, DataConfig(max_length=max_length), format="auto")
    found = []
    for row, document in enumerate(rows):
        encoded = tokenization.encode_all({"row": row, **document})
        if split:
            pieces = splitter_of(tokenizer, max_length, {}).split(encoded, {})
            parts = [(piece.encoded.input_ids, piece.extents[STUDENT]._asdict()) for piece in pieces]
        else:
            cut = encoded.cut(max_length)
            parts = [(cut.input_ids, {"whole": not cut.truncated})]
        for tokens, extent in parts:
            record = record_of("", tokens, **extent)
            found.append(replace(record, piece=replace(record.piece, name=encoded.name)))
    return found


class Kit:
    """Stores of the teachers of `material`, and what is found about a run from them."""

    def __init__(self, material: Path, root: Path):
        self.material, self.root = material, root

    def store(self, *, teacher: str = "teacher", without: Sequence[int] = (), data: Sequence[dict] | None = None,
              max_length: int = ALL, split: bool = False, **changes: Any) -> Path:  # fmt: skip
        """A store of the documents of the run but for some rows."""
        folder, model = self.root / "store", self.material / teacher
        tokenizer = read_tokenizer(model)
        rows = corpus_rows(64) if data is None else data
        kept = [row for i, row in enumerate(rows) if i not in without]
        shutil.rmtree(folder, ignore_errors=True)
        known = {
            "entries": TOP,
            "weights": fingerprint_model(model),
            "tokenizer": tokenizer_hash(tokenizer),
            "vocabulary_size": len(tokenizer),
            "dtype": "bf16",
            "files": describe_teacher(folder, [model]),
        }
        of_rows = records(kept, tokenizer, max_length=max_length, split=split)
        make_store(folder, of_rows, **known | changes)
        return folder

    def check(self, store: Path, *overrides: str, entry: str = "", data: str = "data.jsonl", **options: Any) -> Checked:
        """What is found about a run from a store; `entry` is added to the teacher's settings."""
        config = self.root / "run.yaml"
        config.write_text(
            f"run: {{dir: {self.root}/runs}}\n"
            f"student: {{model: {self.material}/student}}\n"
            f"teachers: [{{name: big, backend: store, store: {store}{entry}}}]\n"
            f"data: {{path: {self.material}/{data}, max_length: 128}}\n"
            f"loss: {{top_k: {TOP}}}\n"
            "train: {steps: 3, global_batch_size: 8, micro_batch_size: 2}\n"
        )
        checked = gather(config, overrides, **options)
        assert all("\n" not in line for line in checked.problems)
        return checked


@pytest.fixture
def kit(material, tmp_path) -> Kit:
    return Kit(material, tmp_path)


def only(lines: Sequence[str]) -> str:
    (line,) = lines
    return line


def about_stores(checked: Checked) -> list[str]:
    return [note for note in checked.notes if "store" in note]


# ------------------------------------------------------------------ does it fit?


@pytest.mark.parametrize("teacher", ["teacher", "foreign"])
def test_a_store_that_has_everything_fits(kit, teacher):
    said: list[str] = []
    checked = kit.check(kit.store(teacher=teacher), *EPOCH, say=said.append)
    assert checked.problems == []
    assert about_stores(checked) == []
    assert "the documents of the run are looked up in the stores of targets" in said
    assert checked.facts.teachers[0].cross_tokenizer_loss == (None if teacher == "teacher" else "hybrid")


def test_the_teacher_is_described_by_the_store_alone(kit):
    store = kit.store()
    moved = shutil.copytree(store, kit.root / "elsewhere")
    shutil.rmtree(store)
    checked = kit.check(moved)
    assert checked.problems == []
    assert checked.config.teachers[0].model == str(moved / TEACHER)


def test_everything_that_the_store_does_not_have_is_reported_at_once(kit, tmp_path):
    other = write_tiny_model(tmp_path / "revision", vocab_size=384, hidden=64, positions=256, seed=5)
    store = kit.store()
    lines = kit.check(store, "loss.temperature=2", "loss.top_k=9", entry=f", export: logits, model: {other}").problems
    for words in (
        f"loss.temperature: must be that of {store}, 1: log-probs cannot be taken to another one; got 2.0; set loss.temp",
        f"loss.top_k: must not exceed the {TOP} entries of {store}; got 9; use {TOP} or less, or capture again",
        "teachers.0.export: the store holds topk; got logits; set teachers.0.export=topk",
        "teachers.0.store: a store holds topk or sampled, and this teacher exports logits",
        f"teachers.0.model: must be the model of {store} (org/teacher, weights ",
    ):
        assert len([line for line in lines if line.startswith(words)]) == 1, (words, lines)
    assert len(lines) == 5
    assert f"got {other}, weights {fingerprint_model(other)[:12]}" in next(line for line in lines if ".model:" in line)


def test_a_quantised_teacher_is_another_than_the_full_one(kit):
    weights = fingerprint_model(kit.material / "teacher")
    full, quantised = f", model: {kit.material}/teacher", f", model: {kit.material}/teacher, quantization: int8"
    line = only(kit.check(kit.store(), entry=quantised).problems)
    assert line.startswith("teachers.0.model: must be the model of ")
    assert f"weights {weights[:12]}); got {kit.material}/teacher, weights {weights[:12]} in int8; " in line
    store = kit.store(weights=f"{weights} in int8")
    assert kit.check(store, entry=quantised).problems == []
    assert f"weights {weights[:12]} in int8); got " in only(kit.check(store, entry=full).problems)
    assert kit.check(store).problems == []


def test_the_model_that_was_captured_may_be_named(kit):
    assert kit.check(kit.store(), entry=f", model: {kit.material}/teacher").problems == []


def test_a_smaller_top_k_is_served(kit):
    assert kit.check(kit.store(), "loss.top_k=3").problems == []


def test_probabilities_over_other_ids_are_refused(kit):
    line = only(kit.check(kit.store(vocabulary_size=319)).problems)
    assert line.startswith("teachers.0.store: has probabilities of 319 ids; this run compares 320; got ")
    assert "capture again with a file of this student" in line


def _no_manifest(store: Path) -> None:
    (store / "manifest.json").unlink()


def _open_to_others(store: Path) -> None:
    (store / "shards").chmod(0o777)


def _damaged(store: Path) -> None:
    path = Store(store).shards[0].path
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-9])


def _other_tokenizer(store: Path) -> None:
    tiny_tokenizer(seed=9).save_pretrained(store / TEACHER)


@pytest.mark.parametrize(("harm", "words"), [
    (shutil.rmtree, ("must be a store, a folder that `distill-rl capture` has made", "no such folder")),
    (_no_manifest, ("must be a store", "no manifest.json")),
    (_open_to_others, ("only this user and root may own or change a store", "can be written by others", "cp -r")),
    (_damaged, ("cut off", "copy the store again, or delete this file")),
    (_other_tokenizer, ("teacher/tokenizer.json", "must have the sha256", "copy it again")),
], ids=["no folder", "no manifest", "open to others", "cut off", "a changed file"])  # fmt: skip
def test_a_store_that_cannot_be_used_is_refused(kit, harm, words):
    store = kit.store()
    harm(store)
    lines = kit.check(store).problems
    assert all(line.startswith("teachers.0") for line in lines), lines
    assert [line for line in lines if line.startswith("teachers.0.store: ") and all(word in line for word in words)], (
        lines
    )


# ------------------------------------------------------------------ does it have every document?


def test_missing_documents_are_counted_and_named(kit):
    without = (5, 9, 11, 60)
    line = only(kit.check(kit.store(without=without), *EPOCH).problems)
    assert line.startswith(
        f"teachers.0.store.missing: {kit.root}/store must have all documents of the run; got fail, and it "
    )
    assert "it lacks 4 of 64 documents (6.25 %); the first: row " in line
    assert line.endswith("; capture them, or set teachers.0.store.missing to skip or live")
    named = line.partition("the first: ")[2].partition(";")[0].split(", ")
    assert len(named) == 3
    assert set(named) < {f"row {row}" for row in without}


def test_a_long_look_up_says_how_far_it_is(kit, monkeypatch):
    monkeypatch.setattr("distill_rl.preflight.stores._SAY_EVERY_S", 0)
    said: list[str] = []
    kit.check(kit.store(), *EPOCH, say=said.append)
    assert [line for line in said if "are looked up" in line and "stores" not in line] == [
        f"{count} documents are looked up" for count in range(64)
    ]


def test_missing_documents_that_are_skipped_are_a_note(kit):
    checked = kit.check(kit.store(without=(5, 60)), *EPOCH, entry=", missing: skip")
    assert checked.problems == []
    _, line = about_stores(checked)  # the first is about the earlier key
    assert line.startswith("teachers.0: the store lacks 2 of 64 documents (3.12 %); the first: row ")
    assert line.endswith("; they are skipped")


def test_missing_documents_that_are_computed_are_a_note(kit):
    entry = f", missing: live, model: {kit.material}/teacher"
    checked = kit.check(kit.store(without=(5, 60)), *EPOCH, entry=entry)
    assert checked.problems == []
    _, line = about_stores(checked)
    assert line.endswith("; they are computed by the teacher")


def test_live_needs_the_model(kit):
    line = only(kit.check(kit.store(without=(5,)), entry=", missing: live").problems)
    assert line.startswith(
        "teachers.0.model: missing: live runs the teacher for what the store lacks; got missing value"
    )


def test_a_store_of_other_data_is_refused_even_if_documents_may_be_missing(kit):
    line = only(kit.check(kit.store(data=corpus_rows(8, seed=3)), entry=", missing: skip").problems)
    assert "store has none of the documents of the run; is it the store of other data?" in line


def test_only_the_documents_that_the_run_reads_are_looked_up(kit):
    line = only(kit.check(kit.store(data=[])).problems)
    assert "lacks 24 of 24 documents (100 %)" in line, "three steps of eight"
    line = only(kit.check(kit.store(data=[]), "train.steps=null", "train.epochs=3").problems)
    assert "lacks 64 of 64 documents" in line, "each once"


def test_documents_held_out_are_looked_up_too(kit):
    overrides = (*EPOCH, "data.validation.fraction=0.25", "data.validation.max_documents=10", "evaluate.every=1")
    line = only(kit.check(kit.store(data=[]), *overrides).problems)
    assert "lacks 58 of 58 documents" in line


def test_all_epochs_of_a_mixture_are_looked_up(kit):
    """The first epoch reads the short source several times and the long one in part."""
    for name, seed, count in (("long", 0, 64), ("short", 1, 8)):
        text = "".join(json.dumps(row) + "\n" for row in corpus_rows(count, seed=seed))
        (kit.root / f"{name}.jsonl").write_text(text)
    store = kit.store(data=[*corpus_rows(8, seed=1)])
    sources = f"data.sources=[{{path: {kit.root}/long.jsonl}}, {{path: {kit.root}/short.jsonl}}]"
    counts = []
    for epochs in (1, 2):
        overrides = ("data.path=null", sources, "train.steps=null", f"train.epochs={epochs}")
        line = only(kit.check(store, *overrides).problems)
        counts.append(line.partition("lacks ")[2].partition(" documents")[0])
    assert counts == ["36 of 44", "64 of 72"], "half of 72 and of 144 places, and never more than there are"


@pytest.mark.parametrize("long", ["cut", "split"])
@pytest.mark.parametrize("teacher", ["teacher", "foreign"])
def test_whole_documents_serve_shorter_rows(kit, long, teacher):
    overrides = (*EPOCH, "data.max_length=24", f"data.long_documents={long}")
    assert kit.check(kit.store(teacher=teacher), *overrides).problems == []


def test_a_longer_beginning_serves_a_shorter_one(kit):
    store = kit.store(max_length=40)
    assert kit.check(store, *EPOCH, "data.max_length=24", "data.long_documents=cut").problems == []
    line = only(kit.check(store, *EPOCH, "data.max_length=48", "data.long_documents=cut").problems)
    longer = sum(len(record.tokens) > 40 for record in records(corpus_rows(64), tiny_tokenizer()))
    assert f"lacks {longer} of 64 documents" in line


def test_pieces_are_looked_up_one_by_one(kit):
    store = kit.store(max_length=24, split=True)
    assert kit.check(store, *EPOCH, "data.max_length=24", "data.long_documents=split").problems == []
    line = only(kit.check(store, *EPOCH, "data.max_length=25", "data.long_documents=split").problems)
    lengths = [len(record.tokens) for record in records(corpus_rows(64), tiny_tokenizer())]
    longer = sum(length > 24 and length != 26 for length in lengths)  # 26 are pieces of 24 and 2 with either
    assert f"lacks {longer} of 64 documents" in line


@pytest.mark.parametrize("teacher", ["teacher", "foreign"])
def test_chats_are_found_by_what_the_teachers_template_writes(kit, teacher):
    chats = corpus_rows(64, messages=True)
    overrides = (*EPOCH, "data.max_length=256")
    store = kit.store(teacher=teacher, data=chats)
    assert kit.check(store, *overrides, data="chat.jsonl").problems == []
    store = kit.store(teacher=teacher, data=chats, without=(7,))
    line = only(kit.check(store, *overrides, data="chat.jsonl").problems)
    assert "lacks 1 of 64 documents (1.56 %); the first: row 7;" in line


def test_a_text_in_another_form_is_not_taken_for_one_that_is_stored(kit):
    """Its name is the same, its tokens are not."""
    composed = [{"text": f"{i}: caf\u00e9 na\u00efve"} for i in range(16)]
    decomposed = [{"text": normalize("NFD", row["text"])} for row in composed]
    path = kit.root / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in decomposed))
    settings = (*EPOCH, f"data.path={path}")
    assert kit.check(kit.store(data=decomposed), *settings).problems == []
    assert "lacks 16 of 16 documents" in only(kit.check(kit.store(data=composed), *settings).problems)


@pytest.mark.parametrize("first", [4, 256])
def test_names_tell_nothing_if_the_tokens_at_the_start_are_others(kit, monkeypatch, first):
    """As with a tokenizer that ends a text in another token."""
    monkeypatch.setattr(documents, "_SURELY", first)
    folder = kit.store()
    (shard,) = Store(folder).shards
    others = [Record(shard.piece(i), shard.tokens(i)[::-1].copy(), shard.targets(i)) for i in range(len(shard))]
    shard.path.write_bytes(serialize(others))
    assert "lacks 24 of 24 documents (100 %)" in only(kit.check(folder).problems)


def test_with_roles_to_train_on_the_same_documents_are_found(kit):
    store = kit.store(data=corpus_rows(64, messages=True))
    overrides = (*EPOCH, "data.max_length=256", "data.loss_on=assistant")
    assert kit.check(store, *overrides, data="chat.jsonl").problems == []


def test_what_compressed_data_lack_is_said_not_to_be_known(kit, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(kit.root / "cache"))
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    path = kit.root / "data.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in corpus_rows(64))
    store = kit.store(data=[])
    checked = kit.check(store, *EPOCH, f"data.path={path}", download=False)
    assert checked.problems == []
    assert "teachers: which documents a store lacks is not known before compressed data are converted" in checked.notes
    assert "lacks 64 of 64 documents" in only(kit.check(store, *EPOCH, f"data.path={path}").problems)


# ------------------------------------------------------------------ caches


@pytest.fixture
def cached(kit) -> Callable[..., Checked]:
    """What is found about a run of the teacher with a cache."""

    def check(folder: Path, *overrides: str) -> Checked:
        return gather(kit.material / "run.yaml", [f"teachers.0.cache={folder}", f"run.dir={kit.root}/runs", *overrides])

    return check


def test_a_cache_need_not_exist_and_may_be_of_this_teacher(kit, cached):
    assert cached(kit.root / "new").problems == []
    assert not (kit.root / "new").exists()
    assert cached(kit.store(without=(5,))).problems == []


def test_a_cache_of_other_targets_is_refused_with_every_difference(kit, cached, tmp_path):
    store = kit.store()
    other = write_tiny_model(tmp_path / "revision", vocab_size=384, hidden=64, positions=256, seed=5)
    line = only(cached(store, f"teachers.0.model={other}", "loss.top_k=9", "teachers.0.wire_dtype=fp16").problems)
    assert line.startswith(
        f"teachers.0.cache: one store holds the targets of one teacher, taken in one way; got {store} ("
    )
    mine, theirs = (fingerprint_model(folder)[:12] for folder in (kit.material / "teacher", other))
    for words in (
        f"entries per token (loss.top_k or loss.draws) {TOP} here, 9 there",
        "teachers[].wire_dtype fp32 here, fp16 there",
        f"the teacher's weights {mine} here, {theirs} there",
        "name another folder",
    ):
        assert words in line


def test_a_cache_holds_the_ids_that_all_teachers_share(kit, cached, tmp_path):
    more = tiny_tokenizer()
    more.add_tokens(["<more>"])
    for name in ("student", "teacher"):
        write_tiny_model(tmp_path / name, tokenizer=more, vocab_size=384, positions=256)
    teachers = f"teachers=[{{name: a, model: {tmp_path}/teacher}}, {{name: b, model: {kit.material}/student}}]"
    store = kit.store(teacher=f"{tmp_path}/teacher", vocabulary_size=len(more) - 1, wire_dtype="fp32")
    checked = cached(store, teachers, f"teachers.0.cache={store}", f"student.model={tmp_path}/student")
    assert checked.problems == []
    line = only(cached(store, f"teachers.0.model={tmp_path}/teacher", f"student.model={tmp_path}/student").problems)
    assert f"ids that are compared {len(more) - 1} here, {len(more)} there" in line


def test_a_damaged_cache_is_refused(kit, cached):
    write_manifest(kit.root / "store", MANIFEST)
    text = (kit.root / "store" / "manifest.json").read_text()
    (kit.root / "store" / "manifest.json").write_text(text.replace("1.0", "2.0"))
    line = only(cached(kit.root / "store").problems)
    assert line.startswith("teachers.0.cache: ")
    assert "does not match its checksum" in line
