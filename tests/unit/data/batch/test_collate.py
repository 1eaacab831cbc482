"""Documents → rows: ids, labels and positions, divided evenly for the student and the teachers."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.config.schema import Config, DataConfig, ParallelConfig, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding, pad_id
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.tokenization import Encoded, Tokenization
from distill_rl.types import IGNORE_INDEX, Cursor, DocumentBatch
from tests.helpers.corpus import corpus_rows
from tests.helpers.rows import laid_out
from tests.helpers.tokenizers import tiny_tokenizer

PAD = 2
ONE = BatchSharding(1, 1)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def documents(rows: list[dict], index: int = 0) -> DocumentBatch:
    return DocumentBatch(index, tuple({"row": i, **row} for i, row in enumerate(rows)), Cursor(0, len(rows)))


def plan(*, packing: bool = True, max_length: int = 64, student: BatchSharding = ONE, teachers=()) -> BatchPlan:
    return BatchPlan(student, tuple(teachers), max_length, packing, PAD)


def encoded(ids: list[int], mask: list[bool] | None = None) -> Encoded:
    return Encoded(np.asarray(ids, np.int32), np.asarray(mask if mask else [True] * len(ids), bool), False)


def test_pad_id_falls_back_to_eos_then_zero():
    tokenizer = tiny_tokenizer()
    assert pad_id(tokenizer) == tokenizer.pad_token_id == PAD
    tokenizer.pad_token = None
    assert pad_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert pad_id(tokenizer) == 0


class TestLayOut:
    def test_packed_rows_by_hand(self):
        rows = laid_out(
            [encoded([5, 6, 7]), encoded([8] * 7), encoded([9, 10], [True, False]), encoded([11])], plan(max_length=8)
        )
        ignored = IGNORE_INDEX
        assert rows.input_ids.tolist() == [[5, 6, 7, 9, 10, 11, PAD, PAD], [8] * 7 + [PAD]]
        assert rows.labels.tolist() == [
            [6, 7, ignored, ignored, ignored, ignored, ignored, ignored],
            [8, 8, 8, 8, 8, 8, ignored, ignored],
        ]
        assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]
        assert {array.dtype for array in (rows.input_ids, rows.labels, rows.position_ids)} == {np.dtype(np.int32)}

    def test_padded_rows_by_hand(self):
        rows = laid_out([encoded([5, 6, 7]), encoded([9, 10])], plan(packing=False))
        assert rows.input_ids.tolist() == [[5, 6, 7] + [PAD] * 5, [9, 10] + [PAD] * 6]
        assert rows.labels.tolist() == [[6, 7] + [IGNORE_INDEX] * 6, [10] + [IGNORE_INDEX] * 7]
        assert rows.position_ids.tolist() == [list(range(8))] * 2

    @pytest.mark.parametrize(
        ("longest", "limit", "on_cpu", "on_gpu"),
        [
            (1, 64, 8, 128),
            (8, 64, 8, 128),
            (9, 64, 16, 128),
            (13, 13, 16, 128),
            (129, 192, 136, 256),
            (256, 256, 256, 256),
        ],
    )
    @pytest.mark.parametrize("packing", [True, False])
    def test_row_width_is_a_multiple_for_the_device(self, longest, limit, on_cpu, on_gpu, packing):
        layout = plan(packing=packing, max_length=limit)
        documents = [encoded([5] * longest)]
        assert laid_out(documents, layout).shape == (1, on_cpu)
        assert laid_out(documents, layout.for_device(on_gpu=True)).shape == (1, on_gpu)
        assert layout.for_device(on_gpu=False) == layout

    def test_packing_does_not_depend_on_the_device(self):
        layout = plan(max_length=13)
        documents = [encoded([5 + size] * size) for size in (7, 7, 6, 6, 13, 3)]
        narrow, wide = (laid_out(documents, layout.for_device(on_gpu=gpu)) for gpu in (False, True))
        assert (narrow.shape, wide.shape) == ((4, 16), (4, 128))
        for name in ("input_ids", "labels", "position_ids"):
            assert np.array_equal(getattr(narrow, name), getattr(wide, name)[:, :16])
        assert (wide.labels[:, 16:] == IGNORE_INDEX).all()

    def test_empty_documents_do_not_restart_positions(self):
        rows = laid_out([encoded([5, 6, 7]), encoded([]), encoded([9])], plan(max_length=8))
        assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
        rows = laid_out([encoded([5, 6, 7]), encoded([])], plan(max_length=8))
        assert rows.position_ids.tolist() == [list(range(8))]

    def test_documents_without_labels_keep_their_rows(self):
        rows = laid_out([encoded([]), encoded([5]), encoded([6, 7], [True, False])], plan(packing=False))
        assert rows.input_ids[:, 0].tolist() == [PAD, 5, 6]
        assert (rows.labels == IGNORE_INDEX).all()
        assert laid_out([encoded([])], plan()).shape == (1, 8)

    def test_number_of_rows_divides_for_student_and_teachers(self):
        layout = plan(packing=False, student=BatchSharding(2, 2), teachers=[BatchSharding(3, 1), BatchSharding(1, 8)])
        assert layout.row_multiple == 24
        rows = laid_out([encoded([5, 6])] * 5, layout)
        assert rows.shape[0] == 24
        assert (rows.input_ids[5:] == PAD).all()
        assert (rows.labels[5:] == IGNORE_INDEX).all()
        assert (rows.position_ids[5:] == np.arange(8)).all()


class TestBuildBatch:
    def build(self, tokenizer, layout, rows=20, messages=False, loss_on="all", max_length=64):
        tokenization = Tokenization(
            tokenizer, DataConfig(loss_on=loss_on, max_length=max_length, stops="none"), format="auto"
        )
        return BatchBuilder(tokenization, layout).build(documents(corpus_rows(rows, 1, messages), index=3))

    @pytest.mark.parametrize("packing", [True, False])
    def test_info_counts_the_rows(self, tokenizer, packing):
        info, (part,), _ = self.build(tokenizer, plan(packing=packing))
        lengths = [len(tokenizer(row["text"]).input_ids) + 1 for row in corpus_rows(20, 1)]
        assert max(lengths) > 64 > min(lengths)
        assert info.num_documents == 20
        assert info.num_tokens == sum(min(length, 64) for length in lengths)
        assert info.num_labels == sum(min(length, 64) - 1 for length in lengths)
        assert info.num_truncated == sum(length > 64 for length in lengths)
        assert info.num_rows == part.rows.shape[0]
        assert (info.index, info.cursor) == (3, Cursor(0, 20))
        assert (part.index, part.first_row, part.num_labels) == (3, 0, info.num_labels)
        assert np.count_nonzero(part.rows.labels != IGNORE_INDEX) == info.num_labels
        assert info.seconds > 0

    def test_parts_are_contiguous_runs_of_the_same_rows(self, tokenizer):
        layout = plan(student=BatchSharding(2, 2), teachers=[BatchSharding(1, 3), BatchSharding(3, 1)])
        info, student, teachers = self.build(tokenizer, layout)
        assert info.num_rows % 12 == 0
        assert [len(student), *(len(parts) for parts in teachers)] == [2, 1, 3]
        wholes = []
        for parts in (student, *teachers):
            size = info.num_rows // len(parts)
            assert [part.first_row for part in parts] == [rank * size for rank in range(len(parts))]
            assert {part.num_labels for part in parts} == {info.num_labels}
            wholes.append(
                [
                    np.concatenate([getattr(part.rows, name) for part in parts])
                    for name in ("input_ids", "labels", "position_ids")
                ]
            )
        for whole in wholes[1:]:
            assert all(np.array_equal(array, expected) for array, expected in zip(whole, wholes[0]))

    def test_student_rows_do_not_depend_on_teachers(self, tokenizer):
        _, with_teacher, _ = self.build(tokenizer, plan(teachers=[BatchSharding(1, 1)]))
        _, without, teachers = self.build(tokenizer, plan())
        assert teachers == []
        assert np.array_equal(with_teacher[0].rows.input_ids, without[0].rows.input_ids)

    def test_assistant_loss_labels_only_assistant_turns(self, tokenizer):
        chats = corpus_rows(20, 1, messages=True)
        info, (part,), _ = self.build(
            tokenizer, plan(max_length=4096), messages=True, loss_on="assistant", max_length=4096
        )
        turns = [m["content"] + "<|end|>" for chat in chats for m in chat["messages"] if m["role"] == "assistant"]
        trained = part.rows.labels[part.rows.labels != IGNORE_INDEX]
        assert info.num_labels == len(trained) == sum(len(tokenizer(turn).input_ids) for turn in turns)
        # First fit reorders documents, so turns are compared as a collection.
        assert sorted(tokenizer.decode(trained).split("<|end|>")) == sorted("".join(turns).split("<|end|>"))

    def test_plan_follows_the_config(self):
        config = Config()
        config.student.parallel = ParallelConfig(dp=2, tp=2)
        config.train.micro_batch_size, config.train.global_batch_size = 3, 420
        config.teachers = [
            TeacherConfig(model="a"),
            TeacherConfig(model="b", parallel=ParallelConfig(dp=5), micro_batch_size=7, max_length=192),
        ]
        config.data.max_length, config.data.packing = 128, False
        built = BatchPlan.from_config(config, 9)
        assert built == BatchPlan(
            BatchSharding(2, 3),
            (BatchSharding(1, 3), BatchSharding(5, 7)),
            128,
            False,
            9,
            rows_per_sub_batch=420,
            teacher_lengths=(128, 192),
        )
        assert built.row_multiple == 210
        config.loss.kd_weight = 0.0
        assert BatchPlan.from_config(config, 9).teachers == (), "no teacher runs"
