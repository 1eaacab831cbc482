"""The student of one rank: loss, gradients, optimizer step. Runs under Ray, plain `torchrun`, or in a test.

Every method is collective: all ranks of the mesh call it together, with the same arguments but for their part of the batch.
Gradients are sums over data-parallel ranks of losses that were already divided by the global number of labels, so
that no split of a batch changes the gradient.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_rl.config.facts import running_teachers
from distill_rl.config.memory import reduces_once_per_step
from distill_rl.config.schema import Config
from distill_rl.models import families
from distill_rl.models.attention.varlen import documents_for
from distill_rl.models.determinism import be_deterministic
from distill_rl.models.export import export_model
from distill_rl.models.fsdp import GradientReduction, reshard
from distill_rl.models.inputs import micro_batches, tensor_to_device, to_device
from distill_rl.models.kernels import use_liger
from distill_rl.models.load import load_model
from distill_rl.observe.metrics import Metric
from distill_rl.parallel.mesh import World, data_mesh
from distill_rl.parallel.vocabulary import mask_padded_columns
from distill_rl.student import checkpoint
from distill_rl.student.objective import Blend, LossSums, Objective, Target
from distill_rl.student.optim import Schedule, build_optimizer, clip_gradients
from distill_rl.student.projections import complete_gradient, open_projections, save_learned
from distill_rl.student.step_guard import StepGuard
from distill_rl.student.teacher_heads import open_heads
from distill_rl.student.writer import Writer
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.types import IGNORE_INDEX, CrossTokenizerSpec, RankBatch, TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TargetSource = Callable[[int, int], AbstractContextManager[Sequence[Target | None]]]
"""`targets(first_row, num_rows)`: the targets of these rows of the global batch, one entry per teacher in the order of
the config, each flattened to [num_rows·S, …], on any device, never written to; valid inside the block. None for a
teacher that the run has lost; an empty list where there is no teacher."""

log = logging.getLogger(__name__)


class StudentEngine:
    """Model, optimizer and schedule of one rank.

    Args:
        config: the run's settings.
        world: this rank's place; the student's mesh.
        vocabulary_size: ids of the tokenizer; wider embedding tables are padding that never gets probability.
        total_steps: optimizer steps of the whole run, the schedule's horizon unless `schedule.steps` is set.
        cross_tokenizer_specs: per teacher, None for one with the student's tokenizer; empty if all have it.
    """

    @gpu_phase("student load")
    def __init__(
        self,
        config: Config,
        world: World,
        *,
        vocabulary_size: int,
        total_steps: int,
        cross_tokenizer_specs: Sequence[CrossTokenizerSpec | None] = (),
    ):
        student = config.student
        be_deterministic(config.train.deterministic, world.device)
        self.config = config
        self.world = world
        self.vocabulary_size = vocabulary_size
        self.step = 0
        self.model = load_model(
            student.model,
            world,
            role="student",
            dtype=student.dtype,
            attention=student.attention,
            activation_checkpointing=student.activation_checkpointing,
            compile=student.compile,
            revision=student.revision,
            packing=config.data.packing,
        )
        if student.kernels == "liger":
            use_liger(self.model)
        self.cross_tokenizer_specs = tuple(cross_tokenizer_specs)
        bridges = open_projections(cross_tokenizer_specs, world, learnable=config.projection.learnable)
        heads = open_heads(
            running_teachers(config),
            cross_tokenizer_specs,
            world,
            columns=self.model.config.vocab_size,
            tokens=vocabulary_size,
        )
        self.objective = Objective(config.loss, config.teachers, bridges, heads)
        self.kd_scale = 1.0
        """r of `loss.dynamic_scale`: CE / KD of the step before"""
        self.trained = nn.ModuleDict({"model": self.model, "objective": self.objective})
        self.parameters = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.trained, config.optimizer, fused=world.device.type == "cuda")
        once = reduces_once_per_step(student, sum(parameter.numel() for parameter in self.model.parameters()))
        self._reduction = GradientReduction(self.model, data_mesh(world.mesh), once=once)
        self.schedule = Schedule(config.schedule, peak=config.optimizer.lr, total_steps=total_steps)
        self.guard = StepGuard(config.faults)
        self._writer = Writer(world, config.ray.step_timeout_s)
        self._begin_step()
        self._seed()

    def train_step(self, batch: RankBatch, targets: TargetSource, scores: Sequence[float] = ()) -> dict[str, Metric]:
        """One optimizer step on this rank's part of a global batch.

        Args:
            scores: per teacher what its share of the KD falls with, the same on all ranks; empty: shares are fixed.

        Returns:
            On the first tensor-parallel rank: `train/kl_loss` (weighted over teachers, T² included), `train/nll_loss`,
            `train/teacher_mass`, means over this rank's labelled tokens and weighted by them, so that their merge
            over ranks is the mean of the global batch; `train/loss`, their weighted sum; `train/tokens` (labelled);
            `train/grad_norm` before clipping and `train/lr`, `train/kd_scale` under `loss.dynamic_scale`; and
            `train/skipped`, 1 where the step left the weights alone because a loss or a gradient was not finite. `{}` on
            the others. The KD of chunks is a mean over chunks.

        Raises:
            NumericsError: on all ranks alike, before any weight has changed, if too many steps in a row were to be skipped.
        """
        metrics = self.forward_backward(batch, targets, scores)
        return metrics | self.optim_step()

    def forward_backward(
        self, batch: RankBatch, targets: TargetSource, scores: Sequence[float] = (), *, last: bool = True
    ) -> dict[str, Metric]:
        """Computes the gradient of `batch`, micro-batch by micro-batch, and adds it to what the step has so far.

        Args:
            last: no further call comes before `optim_step`. Only then are gradients complete in the parameters'
                `.grad`; before, they may be in FSDP2's buffers.
        """
        dynamic = self.config.loss.dynamic_scale if self.objective.teachers else "off"
        if dynamic == "exact":
            with torch.no_grad():
                self.kd_scale = self._ratio(self._sweep(batch, targets, self.objective.blend(scores)))
        blend = self.objective.blend(scores, self.kd_scale)
        sums = self._sweep(batch, targets, blend, backward=True, last=last)
        kd, ce = sums.kd_and_ce
        self._loss += (blend.kd * kd + blend.ce * ce) / max(batch.num_labels, 1)
        if dynamic == "on":
            self.kd_scale = self._ratio(sums)
        metrics = self._metrics("train", batch, sums, blend)
        if metrics and dynamic != "off":
            metrics["train/kd_scale"] = Metric(blend.kd, "last")
        return metrics

    @gpu_phase("optimizer step")
    def optim_step(self) -> dict[str, Metric]:
        """Clips, updates the weights with this step's learning rate, and clears the gradients; or skips the step, for a
        reason that all ranks see alike (`StepGuard`)."""
        step = self.step + 1
        reshard(self.model)
        for parameter in self.objective.parameters():
            complete_gradient(parameter)
        norm = clip_gradients(self.parameters, self.config.train.max_grad_norm).item()
        reason = self.guard.reason_to_skip(step, self._global_loss(), norm)
        lr = self.schedule(step)
        if reason is None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        else:
            log.warning("step %d is skipped: %s", step, reason)
            self.kd_scale = self._kd_scale_before
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step
        self._begin_step()
        if self.world.tp_rank:
            return {}
        return {
            "train/grad_norm": Metric(norm, "last"),
            "train/lr": Metric(lr, "last"),
            "train/skipped": Metric(float(reason is not None), "max"),
        }

    @torch.no_grad()
    def evaluate(self, batch: RankBatch, targets: TargetSource, scores: Sequence[float] = ()) -> dict[str, Metric]:
        """`validation/kl_loss` (with teachers) and `validation/nll_loss` of `batch`, to be merged like the training metrics."""
        blend = self.objective.blend(scores, self.kd_scale)
        self.model.eval()
        try:
            sums = self._sweep(batch, targets, blend)
        finally:
            reshard(self.model)
            self.model.train()
        report = self._metrics("validation", batch, sums, blend)
        return {name: report[name] for name in ("validation/kl_loss", "validation/nll_loss") if name in report}

    @gpu_phase("checkpoint copy")
    def save(self, directory: str | Path, state_extra: Mapping[str, Any], marker: str | Path | None = None) -> None:
        """Writes weights, optimizer, random state and `state_extra` (JSON) into `directory`; the caller commits it.

        Args:
            marker: None: all is written on return. A file: all is copied on return and is written beside what comes
                next; the file tells when (`Writer`).

        Raises:
            CheckpointError: on all ranks alike, if any of them cannot write, now or in the save before.
        """
        snapshot = self._snapshot(state_extra)
        if marker is None:
            self.finish_saving()
            checkpoint.save(directory, snapshot, self.world)
        else:
            self._writer.start(snapshot, Path(directory), Path(marker))

    def finish_saving(self) -> None:
        """Waits for what `save` writes beside the training.

        Raises:
            CheckpointError: on all ranks alike, if any of them could not write.
        """
        self._writer.wait()

    def checkpoint_bytes(self) -> int:
        """What `save` writes on all ranks together, but for a few kilobytes."""
        return self._snapshot({}).num_bytes

    def _snapshot(self, state_extra: Mapping[str, Any]) -> checkpoint.Snapshot:
        return checkpoint.snapshot(
            parameters=self._named_parameters(),
            optimizer=self.optimizer,
            world=self.world,
            step=self.step,
            kd_scale=self.kd_scale,
            guard=self.guard.state(),
            extra=state_extra,
        )

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Goes on from what `save` wrote, bit for bit where the mesh is the same; returns `state_extra`.

        On a mesh of other sizes weights and optimizer are resharded, and random numbers (dropout) start anew from
        run.seed and the step.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
        state, random_restored = checkpoint.load(
            directory, parameters=self._named_parameters(), optimizer=self.optimizer, world=self.world
        )
        self.step, self.kd_scale = state.step, state.kd_scale
        self.guard.restore(state.guard)
        self._begin_step()
        if not random_restored:
            self._seed()
        return dict(state.extra)

    @gpu_phase("weight export")
    def export(self, out_dir: str | Path, tokenizer: PreTrainedTokenizerBase, card: str | None = None) -> None:
        """Writes the student as a Hugging Face folder; collective."""
        export_model(
            self.model,
            source=self.config.student.model,
            tokenizer=tokenizer,
            out_dir=out_dir,
            card=card,
            revision=self.config.student.revision,
        )

    def export_projections(self, folder: str | Path) -> None:
        """Writes what was learnt of projections between vocabularies, if anything was."""
        if self.world.rank == 0:
            save_learned(self.objective.learnt, self.cross_tokenizer_specs, Path(folder))

    def _sweep(
        self, batch: RankBatch, targets: TargetSource, blend: Blend, *, backward: bool = False, last: bool = False
    ) -> LossSums:
        """All micro-batches, also those without a label: the other ranks wait for their collectives."""
        sums = LossSums(len(self.objective.teachers), self.world.device)
        end = batch.first_row + batch.rows.shape[0]
        for first_row, rows in micro_batches(batch, self.config.train.micro_batch_size):
            if backward:
                self._reduction.before_micro_batch(last and first_row + rows.shape[0] == end)
            labels = to_device(rows.labels, self.world.device)
            start = first_row - batch.first_row
            chunks = [each and each[start : start + rows.shape[0]] for each in batch.chunks]
            with gpu_phase("forward"), targets(first_row, rows.shape[0]) as found:
                teachers = [target and _on_device(target, self.world.device) for target in found]
                output = self.objective(self._logits(rows), labels, teachers, batch.num_labels, chunks, blend)
                if backward:
                    with gpu_phase("backward"):
                        output.loss.backward()
            sums.add(output)
        return sums

    def _metrics(self, prefix: str, batch: RankBatch, sums: LossSums, blend: Blend) -> dict[str, Metric]:
        if self.world.tp_rank:
            return {}
        num_labels = int(np.count_nonzero(batch.rows.labels != IGNORE_INDEX))
        return sums.metrics(prefix, self.objective, blend, num_labels)

    def all_agree(self, able: bool) -> bool:
        """Whether every rank says so. Collective."""
        if self.world.world_size == 1:
            return able
        unable = torch.tensor(float(not able), device=self.world.device)
        dist.all_reduce(unable)
        return unable.item() == 0

    def _begin_step(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        """this rank's share of the loss, over the micro-batches of the step so far"""
        self._kd_scale_before = self.kd_scale

    def _global_loss(self) -> float:
        """The loss of the step's global batch, the same on every rank; NaN if it is NaN on one. Collective."""
        if self.world.world_size == 1:
            return self._loss.item()
        total = self._loss.clone()
        dist.all_reduce(
            total
        )  # over all ranks, so that the word of one is heard by all; tensor-parallel ranks repeat it
        return total.item() / self.world.tp

    def _ratio(self, sums: LossSums) -> float:
        """CE / KD of the global batch, the same on every rank; 1 where there is no KD to scale. Collective."""
        total = sums.kd_and_ce.clone()
        dist.all_reduce(total, group=self.world.dp_group)
        kd, ce = total.tolist()
        return ce / kd if kd > 0 else 1.0

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the model by their names, and what else is trained, under `objective.`."""
        reshard(self.model)
        named = dict(self.model.named_parameters())
        return named | {f"objective.{name}": parameter for name, parameter in self.objective.named_parameters()}

    def _logits(self, rows: TokenRows) -> Tensor:
        device = self.world.device
        documents = documents_for(self.model.config, rows.position_ids, device)
        ids, positions = to_device(rows.input_ids, device), to_device(rows.position_ids, device)
        logits = families.logits(self.model, ids, positions, documents)
        return mask_padded_columns(logits, self.vocabulary_size)

    def _seed(self) -> None:
        """Draws that depend on run.seed, the step and the data-parallel rank: tensor-parallel ranks must draw alike."""
        text = f"{self.config.run.seed}/{self.step}/{self.world.dp_rank}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)


def _on_device(target: Target, device: torch.device) -> Target:
    values = {each.name: getattr(target, each.name) for each in fields(target)}
    moved: dict[str, Any] = {
        name: tensor_to_device(each, device) for name, each in values.items() if isinstance(each, Tensor)
    }
    return replace(target, **moved)
