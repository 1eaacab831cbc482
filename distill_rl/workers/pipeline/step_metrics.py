"""A step's metrics about alignment, teachers and transport, computed from what the workers returned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from distill_rl.config.schema import Config
from distill_rl.observe.metrics import Metric
from distill_rl.types import AlignmentInfo, BatchInfo
from distill_rl.workers.actors.teacher import TeacherStats


def describe_transport(
    config: Config,
    stats: Sequence[Sequence[Sequence[TeacherStats]]],
    occupancy: Mapping[str, float],
    lost: Collection[str] = (),
) -> dict[str, Metric]:
    """Returns the metrics of one batch about the transport and the teachers' times, by name; empty without teachers.

    These are bytes, bytes per position of the rows (padding included), the share of tokens whose targets came from a
    store (where teachers have one), and by teacher the use of its ring and the
    seconds of `forward` and `publish` of its slowest replica, and the peak memory of its largest, in GiB.

    Args:
        stats: what was measured, by sub-batch, running teacher and replica.
        occupancy: by teacher, the largest share of its ring in use.
        lost: teachers that the run continues without; they get no metrics.
    """
    teachers = config.running_teachers
    if not teachers:
        return {}
    flat = [replica for sub_batch in stats for teacher in sub_batch for replica in teacher]
    num_bytes = sum(replica.num_bytes for replica in flat)
    positions = sum(replica.num_positions for replica in flat)
    metrics = {
        "transport/bytes": Metric(float(num_bytes), "sum"),
        "transport/bytes_per_token": Metric(num_bytes / max(positions, 1), "mean", positions),
    }
    if looked_up := sum(replica.tokens_read + replica.tokens_computed for replica in flat):
        read = sum(replica.tokens_read for replica in flat)
        metrics["store/read"] = Metric(read / looked_up, "mean", looked_up)
    for t, teacher in enumerate(teachers):
        if teacher.name in lost:
            continue
        suffix = f"/{teacher.name}" if len(teachers) > 1 else ""
        metrics[f"transport/slot_occupancy{suffix}"] = Metric(occupancy[teacher.name], "max")
        # A replica's time is the sum over its sub-batches; a teacher's time is that of its slowest replica.
        replicas = list(zip(*(sub_batch[t] for sub_batch in stats)))
        forward_s = max(sum(call.forward_s for call in replica) for replica in replicas)
        publish_s = max(sum(call.publish_s for call in replica) for replica in replicas)
        metrics[f"timing/{teacher.name}/forward"] = Metric(forward_s, "per_step")
        metrics[f"timing/{teacher.name}/publish"] = Metric(publish_s, "per_step")
        metrics[f"memory/{teacher.name}"] = Metric(max(c.peak_gib for replica in replicas for c in replica), "max")
    return metrics


def describe_alignment(info: BatchInfo, queue: int = 0) -> dict[str, Metric]:
    """Returns the metrics of one batch about its alignment, by name.

    These are counts of documents, of those truncated, split, incompletely rendered, left out and without labels, of tokens and
    rows, the shares of positions that hold a token and of tokens with a label, the queue, seconds, the aligner's peak
    memory in GiB, and per teacher with another tokenizer those about its chunks.

    Args:
        queue: batches that the aligners had not finished when the student was ready for this one.
    """
    metrics = {
        "align/documents": Metric(info.num_documents, "sum"),
        "align/truncated": Metric(info.num_truncated, "sum"),
        "align/split": Metric(info.num_split, "sum"),
        "align/unlabelled": Metric(info.num_unlabelled, "sum"),
        "align/tokens": Metric(info.num_tokens, "sum"),
        "align/rows": Metric(info.num_rows, "sum"),
        "align/bad_rows": Metric(info.num_left_out, "sum"),
        "align/efficiency": Metric(info.num_tokens / max(info.num_positions, 1), "mean", info.num_positions),
        "align/labelled": Metric(info.num_labels / max(info.num_tokens, 1), "mean", info.num_tokens),
        "align/queue": Metric(queue, "max"),
        "timing/aligner/align": Metric(info.seconds, "per_step"),
        "memory/aligner": Metric(info.peak_gib, "max"),
    }
    if info.num_not_stored:
        metrics["align/not_stored"] = Metric(info.num_not_stored, "sum")
    if info.num_incomplete:
        metrics["align/incomplete"] = Metric(info.num_incomplete, "sum")
    for alignment in info.alignments:
        suffix = f"/{alignment.teacher}" if len(info.alignments) > 1 else ""
        metrics |= _describe_pair(alignment, info.num_labels, suffix)
    return metrics


def _describe_pair(alignment: AlignmentInfo, num_labels: int, suffix: str) -> dict[str, Metric]:
    """Returns the metrics about the chunks of one teacher with another tokenizer, by name."""
    # These are their number, the shares of one-to-one chunks, of labels covered and of documents aligned exactly, and
    # documents by alignment method.
    chunks, documents = alignment.num_chunks, sum(alignment.methods.values())
    num_labels = num_labels if alignment.num_labels is None else alignment.num_labels
    metrics = {
        f"align/chunks{suffix}": Metric(chunks, "sum"),
        f"align/one_to_one{suffix}": Metric(alignment.num_one_to_one / max(chunks, 1), "mean", chunks),
        f"align/coverage{suffix}": Metric(alignment.num_covered / max(num_labels, 1), "mean", num_labels),
        f"align/exact{suffix}": Metric(alignment.num_exact / max(documents, 1), "mean", documents),
    }
    for method, count in sorted(alignment.methods.items()):
        metrics[f"align/method/{method}{suffix}"] = Metric(count, "sum")
    return metrics
