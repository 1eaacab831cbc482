import json
import os

import pytest

from distill_rl.errors import CheckpointError
from distill_rl.run import checkpoints
from distill_rl.run.checkpoints import CheckpointStore, SavedState
from distill_rl.system.files import write_json
from distill_rl.types import Cursor, TrainState


def store_in(folder, keep_last=2, keep_best=0):
    return CheckpointStore(folder, keep_last=keep_last, keep_best=keep_best)


def save(store, step, score=None, content=b"weights"):
    state = SavedState(TrainState(step, Cursor(1, 7 * step)), {"data": "d" * 64}, score)
    draft = store.begin(state)
    (draft.student / "shard-0").write_bytes(content)
    (draft.student / "nested").mkdir()
    (draft.student / "nested" / "shard-1").write_bytes(content * 3)
    store.commit(draft)


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_newest_returns_what_was_saved(tmp_path):
    save(store_in(tmp_path), 5, score=0.25)
    checkpoint = store_in(tmp_path).newest()
    assert checkpoint.path.name == "step-5"
    assert checkpoint.state == SavedState(TrainState(5, Cursor(1, 35)), {"data": "d" * 64}, 0.25)
    assert (checkpoint.student / "nested" / "shard-1").read_bytes() == b"weights" * 3


def test_best_is_by_score_and_the_older_of_equals(tmp_path):
    store = store_in(tmp_path, keep_last=9)
    with pytest.raises(CheckpointError, match="validation/kl_loss"):
        store.best()
    for step, score in ((2, 0.5), (4, 0.25), (6, 0.25), (8, None)):
        save(store, step, score)
    assert store.best().state.train.step == 4


def test_a_run_that_has_learnt_nothing_says_so_in_its_checkpoint(tmp_path):
    store = store_in(tmp_path)
    store.commit(store.begin(SavedState(TrainState(1), learnt=False)))
    assert not store.newest().state.learnt
    assert checkpoints.newest_step(tmp_path) == 1


def test_newest_and_best_are_kept(tmp_path):
    store = store_in(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.5), (4, 0.4), (5, None)):
        save(store, step, score)
    assert steps_in(tmp_path) == [2, 4, 5]


def test_best_by_a_score_that_arrives_after_the_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=1, best_by="eval/own")
    awaited = set()
    store.awaited = lambda: awaited
    for step in (1, 2, 3):
        awaited.add(step)
        save(store, step, score=0.1 * step)  # the validation loss does not count
    assert steps_in(tmp_path) == [1, 2, 3], "a checkpoint is kept until its score is known"
    for step, score in ((1, 0.2), (2, 0.8), (3, 0.5)):
        store.scores.add(step, {"eval/own": score, "eval/other": float("nan")})
        awaited.remove(step)
    save(store, 4)
    assert steps_in(tmp_path) == [2, 4]
    again = CheckpointStore(tmp_path, keep_last=1, keep_best=1, best_by="eval/own")
    save(again, 5)
    assert steps_in(tmp_path) == [2, 5], "scores are on disk"


def test_scores_of_steps_that_are_trained_again_are_forgotten(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    for step in (2, 4, 6):
        store.scores.add(step, {"validation/kl_loss": 0.5 / step, "validation/nll_loss": float("inf")})
        save(store, step)
    store.abandon_after(4)
    assert [store.scores.get(step, "validation/kl_loss") for step in (2, 4, 6)] == [0.25, 0.125, None]
    assert store.scores.get(4, "validation/nll_loss") is None
    (tmp_path / "scores.json").write_text("[damaged")
    assert CheckpointStore(tmp_path, keep_last=2, keep_best=1).scores.get(4, "validation/kl_loss") is None


def test_dropped_draft_leaves_nothing_behind(tmp_path):
    store = store_in(tmp_path)
    save(store, 1)
    draft = store.begin(SavedState(TrainState(2)))
    (draft.student / "half").write_bytes(b"half")
    store.drop(draft)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert store.newest().state.train.step == 1


def test_folder_of_killed_save_is_ignored_then_removed(tmp_path):
    store = store_in(tmp_path)
    save(store, 1)
    (tmp_path / ".tmp-step-9-abcd" / "student").mkdir(parents=True)
    assert store.newest().state.train.step == 1
    save(store, 2)
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("name", ["student/shard-0", "student/nested/shard-1", "state.json", "MANIFEST.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_damaged_checkpoint_is_named_and_skipped(tmp_path, name, harm):
    store = store_in(tmp_path)
    save(store, 1)
    save(store, 2)
    file = tmp_path / "step-2" / name
    content = bytearray(file.read_bytes())
    if harm == "remove":
        file.unlink()
    elif harm in ("cut", "empty"):
        file.write_bytes(content[: len(content) // 2] if harm == "cut" else b"")
    else:
        content[0] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        checkpoints.read(tmp_path / "step-2")
    warnings = []
    assert checkpoints.find(store, "auto", warnings.append).state.train.step == 1
    (line,) = warnings
    assert name in line
    assert "step-1 is taken instead" in line


def test_every_flipped_bit_of_manifest_is_detected(tmp_path):
    store = store_in(tmp_path)
    save(store, 1)
    save(store, 2)
    manifest = tmp_path / "step-2" / "MANIFEST.json"
    content = manifest.read_bytes()
    for position in range(len(content)):
        manifest.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        assert store.newest(lambda line: None).state.train.step == 1


def test_auto_starts_afresh_beside_half_written_folders(tmp_path):
    for name in (".tmp-step-4-abcd", ".tmp-pruned-step-2-abcd"):
        (tmp_path / name / "student").mkdir(parents=True)
    assert checkpoints.find(store_in(tmp_path), "auto") is None


@pytest.mark.parametrize("resume", ["auto", "latest"])
def test_only_damaged_checkpoints_refuse_a_fresh_start(tmp_path, resume):
    store = store_in(tmp_path)
    for step in (1, 2):
        save(store, step)
        (tmp_path / f"step-{step}" / "student" / "shard-0").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.find(store, resume)
    assert [name in problem for name, problem in zip(("step-2", "step-1", "--clean"), caught.value.problems)] == [
        True
    ] * 3


@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("name", [".", "student", "student/shard-0", "MANIFEST.json"])
def test_checkpoint_writable_by_others_is_refused(tmp_path, name, mode):
    save(store_in(tmp_path), 1)
    (tmp_path / "step-1" / name).chmod(mode)
    with pytest.raises(CheckpointError, match=r"can be written by others .*chmod -R go-w") as caught:
        checkpoints.read(tmp_path / "step-1")
    assert ("the folder" if name == "." else name) in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("name", [".", "student/shard-0"])
def test_checkpoint_of_another_user_is_refused(tmp_path, name):
    save(store_in(tmp_path), 1)
    os.chown(tmp_path / "step-1" / name, 54321, 54321)
    with pytest.raises(CheckpointError, match="belongs to user 54321"):
        checkpoints.read(tmp_path / "step-1")


@pytest.mark.parametrize("name", ["student", "student/shard-0", "MANIFEST.json"])
def test_link_in_checkpoint_is_refused(tmp_path, name):
    save(store_in(tmp_path / "run"), 1)
    entry = tmp_path / "run" / "step-1" / name
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name} is a link"):
        checkpoints.read(tmp_path / "run" / "step-1")


def test_step_link_is_skipped_unless_named_explicitly(tmp_path):
    save(store_in(tmp_path / "other"), 9)
    run = store_in(tmp_path / "run")
    save(run, 1)
    (tmp_path / "run" / "step-9").symlink_to(tmp_path / "other" / "step-9")
    warnings = []
    assert run.newest(warnings.append).state.train.step == 1
    assert f"it leads to {tmp_path / 'other' / 'step-9'}" in warnings[0]
    assert checkpoints.find(run, str(tmp_path / "run" / "step-9")).state.train.step == 9


def test_run_folder_may_be_reached_through_a_link(tmp_path):
    save(store_in(tmp_path / "run"), 3)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for folder in ("run", "link"):
        for within in ("run", "link"):
            checkpoint = checkpoints.read(tmp_path / folder / "step-3", within=tmp_path / within)
            assert checkpoint.state.train.step == 3
    assert store_in(tmp_path / "link").newest().state.train.step == 3


def test_special_file_is_refused_before_it_is_opened(tmp_path):
    """Opening this manifest, a FIFO, would block for ever."""
    save(store_in(tmp_path), 1)
    manifest = tmp_path / "step-1" / "MANIFEST.json"
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json is a special file"):
        checkpoints.read(tmp_path / "step-1")


@pytest.mark.parametrize("opened", [".", ".."])
def test_parent_folder_writable_by_others_is_refused(tmp_path, opened):
    store = store_in(tmp_path / "run" / "checkpoints")
    save(store, 1)
    save(store, 2)
    place = (tmp_path / "run" / "checkpoints" / opened).resolve()
    place.chmod(0o775)
    with pytest.raises(CheckpointError, match=rf"{place}: must be .*mode 0775.*chmod go-w {place}") as caught:
        checkpoints.find(store, "auto")
    assert len(caught.value.problems) == 2, "one line for the folder, one saying that no checkpoint is left"
    place.chmod(0o1777)
    assert checkpoints.find(store, "auto").state.train.step == 2
    place.chmod(0o755)
    tmp_path.chmod(0o775)  # folders further up are not checked
    assert checkpoints.find(store, "auto").state.train.step == 2


def test_checkpoint_is_closed_to_others_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        save(store_in(tmp_path), 1)
    finally:
        os.umask(before)
    assert store_in(tmp_path).newest().state.train.step == 1


def test_too_little_space_refuses_to_begin_a_save(tmp_path):
    store = store_in(tmp_path)
    save(store, 1)
    saved = sum(file.stat().st_size for file in (tmp_path / "step-1").rglob("*") if file.is_file())
    manifest = tmp_path / "step-1" / "MANIFEST.json"
    assert store.begin(SavedState(TrainState(2))).num_bytes == saved - manifest.stat().st_size
    store.clean_up()
    huge = store_in(tmp_path / "fresh")
    with pytest.raises(CheckpointError, match=rf"needs {2**70} bytes of free space; got \d+ bytes; free some space"):
        huge.begin(SavedState(TrainState(1)), lambda: 2**70)
    assert list((tmp_path / "fresh").iterdir()) == []


def test_nothing_is_pruned_before_the_commit(tmp_path):
    store = store_in(tmp_path, keep_last=1)
    save(store, 1)
    draft = store.begin(SavedState(TrainState(2)))
    (draft.student / "shard-0").write_bytes(b"weights")
    assert steps_in(tmp_path) == [1]
    store.commit(draft)
    assert steps_in(tmp_path) == [2]


def test_clean_up_undoes_a_killed_replacement(tmp_path):
    store = store_in(tmp_path)
    save(store, 1)
    (tmp_path / "step-1").rename(tmp_path / ".tmp-old-step-1-abcd")
    (tmp_path / ".tmp-pruned-step-0-abcd").mkdir()
    store.clean_up()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert store.newest().state.train.step == 1


def test_later_steps_are_set_aside_on_resume(tmp_path):
    store = store_in(tmp_path, keep_last=1)
    for step in (4, 8):
        save(store_in(tmp_path, keep_last=9), step)
    store.abandon_after(4)
    assert store.newest().state.train.step == 4
    save(store, 5)
    assert steps_in(tmp_path) == [5]
    assert [path.name[:17] for path in tmp_path.glob("abandoned-*")] == ["abandoned-step-8-"]


def test_newer_manifest_format_is_refused(tmp_path):
    save(store_in(tmp_path), 1)
    manifest = tmp_path / "step-1" / "MANIFEST.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"format 99.*update distill_rl"):
        checkpoints.read(tmp_path / "step-1")


def test_older_manifest_without_own_hash_is_read(tmp_path):
    save(store_in(tmp_path), 1)
    manifest = tmp_path / "step-1" / "MANIFEST.json"
    content = json.loads(manifest.read_text())
    del content["sha256"]
    write_json(manifest, content)
    assert checkpoints.read(tmp_path / "step-1").state.train.step == 1


def test_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.find(store_in(tmp_path), str(tmp_path))


@pytest.mark.parametrize("hostile", ["../outside", "/etc/hostname"])
def test_manifest_cannot_name_files_outside_its_folder(tmp_path, hostile):
    save(store_in(tmp_path / "run"), 1)
    manifest = tmp_path / "run" / "step-1" / "MANIFEST.json"
    (tmp_path / "run" / "outside").write_text("x")
    content = json.loads(manifest.read_text())
    content["files"][hostile] = {"size": 1, "sha256": ""}
    write_json(manifest, checkpoints.sealed(content))
    with pytest.raises(CheckpointError, match="outside"):
        checkpoints.read(tmp_path / "run" / "step-1")


def test_file_missing_from_manifest_is_refused(tmp_path):
    save(store_in(tmp_path), 1)
    (tmp_path / "step-1" / "student" / "stray.pkl").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"stray\.pkl"):
        checkpoints.read(tmp_path / "step-1")


@pytest.mark.parametrize(("resume", "step"), [(None, None), ("auto", None)])
def test_fresh_start_without_resume_or_checkpoint(tmp_path, resume, step):
    assert checkpoints.find(store_in(tmp_path), resume) is step


def test_latest_without_checkpoint_names_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match="--clean"):
        checkpoints.find(store_in(tmp_path), "latest")


def test_changed_data_is_refused_with_both_hashes():
    with pytest.raises(CheckpointError) as caught:
        checkpoints.require_same({"data": "a" * 64, "tokenizer": "b" * 64}, {"data": "c" * 64, "tokenizer": "b" * 64})
    assert "aaaaaaaaaaaaaaaa" in str(caught.value)
    assert "cccccccccccccccc" in str(caught.value)
    assert len(caught.value.problems) == 1


def test_all_hashes_of_a_fingerprint_are_shown():
    with pytest.raises(CheckpointError) as caught:
        checkpoints.require_same(
            {"tokenizer pair": f"tokenizer {'a' * 64}, projection {'b' * 64}"},
            {"tokenizer pair": f"tokenizer {'a' * 64}, projection {'c' * 64}"},
        )
    assert f"projection {'c' * 16}, saved" in str(caught.value)
    assert f"projection {'b' * 16};" in str(caught.value)


def test_former_name_of_a_tokenizer_pair_is_accepted(tmp_path):
    store = store_in(tmp_path)
    draft = store.begin(SavedState(TrainState(1), {"crossing to teacher big": "a" * 64}))
    store.commit(draft)
    saved = store.newest().state.fingerprints
    checkpoints.require_same(saved, {"tokenizer pair with teacher big": "a" * 64})


def test_saving_a_step_again_replaces_it(tmp_path):
    store = store_in(tmp_path)
    save(store, 3, content=b"old")
    save(store, 3, content=b"new")
    assert (store.newest().student / "shard-0").read_bytes() == b"new"
