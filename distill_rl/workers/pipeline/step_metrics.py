"""What a step's metrics say of alignment, teachers and transport, from what the workers returned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from distill_rl.config.facts import running_teachers
from distill_rl.config.schema import Config
from distill_rl.observe.metrics import Metric
from distill_rl.types import AlignmentInfo, BatchInfo
from distill_rl.workers.actors.teacher import TeacherStats


def describe_transport(
    config: Config,
    taught: Sequence[Sequence[Sequence[TeacherStats]]],
    occupancy: Mapping[str, float],
    lost: Collection[str] = (),
) -> dict[str, Metric]:
    """Times and bytes of one batch.

    Args:
        taught: sub-batch by sub-batch, per running teacher what each replica measured.
        occupancy: by teacher the largest share of its ring in use.
        lost: teachers that the run goes on without, of which nothing is told.
    """
    teachers = running_teachers(config)
    if not teachers:
        return {}
    everything = [each for sub_batch in taught for teacher in sub_batch for each in teacher]
    num_bytes = sum(each.num_bytes for each in everything)
    positions = sum(each.num_positions for each in everything)
    metrics = {
        "transport/bytes": Metric(float(num_bytes), "sum"),
        "transport/bytes_per_token": Metric(num_bytes / max(positions, 1), "mean", positions),
    }
    for number, teacher in enumerate(teachers):
        if teacher.name in lost:
            continue
        suffix = f"/{teacher.name}" if len(teachers) > 1 else ""
        metrics[f"transport/slot_occupancy{suffix}"] = Metric(occupancy[teacher.name], "max")
        replicas = list(zip(*(sub_batch[number] for sub_batch in taught)))
        for part in ("forward", "publish"):
            slowest = max(sum(getattr(each, f"{part}_s") for each in replica) for replica in replicas)
            metrics[f"timing/{teacher.name}/{part}"] = Metric(slowest, "max")
    return metrics


def describe_alignment(info: BatchInfo, queue: int = 0) -> dict[str, Metric]:
    """
    Args:
        queue: batches that the aligners had yet to answer when the student was ready for this one.
    """
    metrics = {
        "align/documents": Metric(info.num_documents, "sum"),
        "align/truncated": Metric(info.num_truncated, "sum"),
        "align/tokens": Metric(info.num_tokens, "sum"),
        "align/rows": Metric(info.num_rows, "sum"),
        "align/queue": Metric(queue, "max"),
        "timing/aligner/align": Metric(info.seconds, "max"),
    }
    for found in info.alignments:
        metrics |= _describe_pair(found, info, f"/{found.teacher}" if len(info.alignments) > 1 else "")
    return metrics


def _describe_pair(found: AlignmentInfo, info: BatchInfo, suffix: str) -> dict[str, Metric]:
    chunks, labels, documents = found.num_chunks, info.num_labels, sum(found.methods.values())
    metrics = {
        f"align/chunks{suffix}": Metric(chunks, "sum"),
        f"align/one_to_one{suffix}": Metric(found.num_one_to_one / max(chunks, 1), "mean", chunks),
        f"align/coverage{suffix}": Metric(found.num_covered / max(labels, 1), "mean", labels),
        f"align/exact{suffix}": Metric(found.num_exact / max(documents, 1), "mean", documents),
    }
    return metrics | {
        f"align/method/{method}{suffix}": Metric(count, "sum") for method, count in sorted(found.methods.items())
    }
