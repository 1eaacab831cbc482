"""The student of one rank: loss, gradients, optimizer step. Runs under Ray, plain `torchrun`, or in a test.

Every method is collective: all ranks of the mesh call it together, with equal arguments except their part of the batch.

One step:

1. `forward_backward`, once per sub-batch, takes this rank's rows one micro-batch after another: fetch the targets,
   forward, loss, backward. Each loss is divided by the number of labels (or chunks) of the *global* batch, so a
   gradient is the plain sum over micro-batches, sub-batches and ranks with other tokens, and no division of a batch
   changes it. A micro-batch without labels is computed too, because the other ranks wait for its collectives.
2. The last call of a step completes the reduction over the data-parallel ranks (`GradientReduction`).
3. `optim_step` sums the loss over all ranks, computes the gradient's norm, clips, and updates the weights with the
   step's learning rate. If the loss or the norm is not finite, or is a spike, it leaves the weights alone
   (`StepGuard`). All ranks decide alike, because they see the same two numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from distill_rl.align.projection import load_projection, save_projection
from distill_rl.config.measured import is_validated
from distill_rl.config.memory import fused_loss, reduces_once_per_step
from distill_rl.config.schema import Config
from distill_rl.losses import StudentHidden
from distill_rl.losses.targets import with_each_tensor
from distill_rl.models import forward
from distill_rl.models.determinism import be_deterministic, seed_of
from distill_rl.models.export import export_model
from distill_rl.models.families import family_of, length_limit, use_liger
from distill_rl.models.forward import micro_batches, tensor_to_device, to_device
from distill_rl.models.load import load_model
from distill_rl.models.parallelize import ComputeCopies, GradientReduction, reshard
from distill_rl.models.varlen import Documents, documents_for
from distill_rl.observe.metrics import Metric
from distill_rl.parallel.mesh import World, data_mesh
from distill_rl.parallel.sequence import own_positions, part_of_rows
from distill_rl.parallel.shards import mask_padded_columns
from distill_rl.student import checkpoint
from distill_rl.student.compared import ComparedTeacher, Target, open_head, open_projection
from distill_rl.student.loss_sums import LossSums, StepLosses, ce_over_kd
from distill_rl.student.objective import Blend, ComparedRows, Objective, ObjectiveOutput, asked_sizes
from distill_rl.student.optim import Schedule, StepGuard, build_optimizer, clip_gradients
from distill_rl.student.router_balance import RouterBalance
from distill_rl.system.files import replacing
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.types import IGNORE_INDEX, CrossTokenizerSpec, RankBatch, TeacherPart, TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TargetSource = Callable[[int, int], AbstractContextManager[Sequence[Target | None]]]
"""`targets(first_row, num_rows)`: the targets of these rows of the global batch, one entry per teacher in the order of
the config, each flattened to [num_rows·S, …], on any device, read-only and valid inside the block. None for a teacher that
the run has lost; an empty list without teachers."""


log = logging.getLogger(__name__)


class StudentEngine:
    """Model, optimizer and schedule of one rank.

    Making one is collective: it loads the model, the projections and the teachers' output layers, and seeds torch.

    Args:
        config: the run's settings.
        world: this rank of the student's mesh.
        vocabulary_size: ids of the tokenizer. Further columns of the output layer are padding without probability.
        total_steps: optimizer steps of the whole run, the schedule's horizon unless `schedule.steps` is set; see `Schedule`.
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
        data, seed = config.data, config.run.seed
        self.model = load_model(student, world, packing=data.packing, longest=data.max_length, seed=seed)
        self._by_length = length_limit(self.model.config) is not None
        columns, known_head = self.model.config.vocab_size, family_of(self.model.config).proven
        on_gpu = world.device.type == "cuda"
        self.fused = fused_loss(config, columns, known_head=known_head, on_gpu=on_gpu)
        if self.fused:
            forward.enter_at_hidden(self.model)
        if student.kernels == "liger":
            use_liger(self.model)
        self.cross_tokenizer_specs = tuple(cross_tokenizer_specs)
        specs = self.cross_tokenizer_specs or (None,) * len(config.running_teachers)
        teachers = [
            ComparedTeacher(
                teacher,
                None if spec is None else open_projection(spec, world, learnable=config.projection.learnable),
                open_head(teacher, spec, world, columns=columns, tokens=vocabulary_size),
            )
            for teacher, spec in zip(config.running_teachers, specs, strict=True)
        ]
        self.objective = Objective(config.loss, teachers)
        self.routers = RouterBalance(self.model, config.loss.router_weight, world)
        self.kd_scale = 1.0
        """r of `loss.dynamic_scale`: CE / KD of the previous step."""
        self.trained = nn.ModuleDict({"model": self.model, "objective": self.objective})
        self.parameters = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.trained, config.optimizer, fused=on_gpu)
        once = reduces_once_per_step(student, sum(parameter.numel() for parameter in self.parameters))
        self._reduction = GradientReduction(self.model, data_mesh(world.mesh), once=once)
        self.schedule = Schedule(config.schedule, peak=config.optimizer.lr, total_steps=total_steps)
        self.guard = StepGuard(config.faults)
        self._writer = checkpoint.Writer(world, config.ray.step_timeout_s)
        self._begin_step()
        self._seed()

    def train_step(self, batch: RankBatch, targets: TargetSource, scores: Sequence[float] = ()) -> dict[str, Metric]:
        """Takes one optimizer step on this rank's part of a global batch. Collective.

        Args:
            targets: gives the teachers' targets of each micro-batch.
            scores: per-teacher score, the same on all ranks; a higher score lowers that teacher's share of the KD.
                Empty: shares are fixed.

        Returns:
            On the first of the ranks that work on the same rows (`World.reports`), `{}` on the others:
            `train/loss`, the weighted sum of its parts: with teachers `train/kl_loss` (weighted over teachers, T²
            included; a mean over chunks where chunks are compared), with several also `train/kl_loss/NAME`;
            `train/nll_loss`; of a mixture of experts `train/router_balance`; `train/teacher_mass` as well, if the first
            teacher has the student's tokenizer. All of these are means over this rank's labelled tokens with their number
            as weight, so that merging over ranks gives the mean of the global batch; KD and mass of teachers that are
            chosen by row are means over what they are asked for, and `train/taught/NAME` is the share of the labelled
            tokens that this is;
            `train/tokens`, this rank's labelled tokens; `train/grad_norm`, before clipping; `train/lr`;
            `train/kd_scale`, with teachers under `loss.dynamic_scale`;
            `train/unlabelled`, 1 if nothing in the global batch is trained on, so that the gradient is zero;
            `train/skipped`, 1 if the step left the weights alone.

        Raises:
            NumericsError: on all ranks, before any weight has changed, if too many steps in a row would be skipped.
        """
        return self.forward_backward(batch, targets, scores) | self.optim_step()

    def forward_backward(
        self, batch: RankBatch, targets: TargetSource, scores: Sequence[float] = (), *, last: bool = True
    ) -> dict[str, Metric]:
        """Computes the gradient of `batch`, micro-batch by micro-batch, and adds it to that of the step so far.

        Collective. The arguments and the returned metrics are those of `train_step`, without what `optim_step` adds.
        Under `loss.dynamic_scale: exact`, a pass over the batch without gradient comes first.

        Args:
            last: whether `optim_step` comes next. Only then are the gradients complete in the parameters' `.grad`;
                until then they may be in FSDP2's buffers.

        If this raises, the step is lost: on one rank the gradients so far are dropped.
        """
        batch = self._with_teachers(batch)
        dynamic = self.config.loss.dynamic_scale if self.objective.teachers else "off"
        if dynamic == "exact":
            with torch.no_grad():
                first = self.objective.blend(scores, asked=asked_sizes(batch))
                self.kd_scale = ce_over_kd(self._run(batch, targets, first), self.world)
        blend = self.objective.blend(scores, self.kd_scale, asked_sizes(batch))
        try:
            sums = self._run(batch, targets, blend, last=last)
        except BaseException:  # what is computed next must not find half of a step
            if copies := ComputeCopies.of(self.model):
                copies.drop()
            self.optimizer.zero_grad()
            raise
        if last:
            reshard(self.model)
        self._losses.add(sums, blend, batch.num_labels)
        if dynamic == "on":
            self.kd_scale = ce_over_kd(sums, self.world, otherwise=self.kd_scale)
        metrics = sums.metrics("train", self.objective, blend, batch) if self.world.reports else {}
        if metrics:
            compared = self.objective.num_compared(batch.num_labels, batch.teachers)
            metrics["train/unlabelled"] = Metric(float(compared == 0), "max")
        if metrics and dynamic != "off":
            metrics["train/kd_scale"] = Metric(blend.kd, "last")
        return metrics

    @gpu_phase("optimizer step")
    def optim_step(self) -> dict[str, Metric]:
        """Clips the gradients, updates the weights, clears the gradients and counts the step.

        If `StepGuard` finds a reason to skip the step, only the update is left out and a warning is logged. Collective;
        comes after `forward_backward` with `last`.

        Returns:
            `train/grad_norm`, `train/lr` and `train/skipped`; `{}` on a rank that does not report.

        Raises:
            NumericsError: on all ranks, before any weight has changed, if too many steps in a row would be skipped.
        """
        step = self.step + 1
        for parameter in self.objective.parameters():  # each rank has a share of the gradient of what is replicated
            if isinstance(parameter.grad, DTensor):
                whole = [Replicate()] * parameter.grad.device_mesh.ndim
                parameter.grad = parameter.grad.redistribute(placements=whole)
        norm = clip_gradients(self.parameters, self.config.train.max_grad_norm).item()
        loss = self._losses.total()
        blamed = () if math.isfinite(loss) else self._losses.blamed(self.objective.teachers)
        reason = self.guard.reason_to_skip(step, loss, norm, blamed)
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
        skipped = Metric(float(reason is not None), "max")
        metrics = {"train/grad_norm": Metric(norm, "last"), "train/lr": Metric(lr, "last"), "train/skipped": skipped}
        return metrics if self.world.reports else {}

    @torch.no_grad()
    def evaluate(self, batch: RankBatch, targets: TargetSource, scores: Sequence[float] = ()) -> dict[str, Metric]:
        """Returns losses and agreement with the teachers on held-out rows, without gradient or dropout. Collective.

        They are `validation/nll_loss` and with teachers, as in `LossSums.metrics`, `kl_loss`, `top1_agreement` and
        `acceptance`, and `taught/NAME` of teachers that are chosen by row. The arguments are those of `train_step`. The
        metrics are merged over ranks like its own; on a rank that does not report the result is `{}`. The
        model is in training mode afterwards.
        """
        batch = self._with_teachers(batch)
        blend = self.objective.blend(scores, self.kd_scale, asked_sizes(batch))
        self.model.eval()
        try:
            sums = self._run(batch, targets, blend, with_agreement=bool(self.objective.teachers))
        finally:
            reshard(self.model)
            self.model.train()
        report = sums.metrics("validation", self.objective, blend, batch) if self.world.reports else {}
        return {name: metric for name, metric in report.items() if is_validated(name) or "/taught/" in name}

    @gpu_phase("checkpoint copy")
    def save(self, directory: str | Path, marker: str | Path | None = None) -> None:
        """Writes weights, optimizer, random state and `student.json` into `directory`, which all ranks must share.

        Collective. Waits for the previous save. The caller commits the directory.

        Args:
            marker: None: everything is written on return. A path: everything is copied on return and written in the
                background; the file appears when that is done (`checkpoint.Writer`).

        Raises:
            CheckpointError: on all ranks, if any of them cannot write, now or in the previous save.
        """
        snapshot = self._snapshot()
        if marker is None:
            self.finish_saving()
            checkpoint.save(directory, snapshot, self.world)
        else:
            self._writer.start(snapshot, Path(directory), Path(marker))

    def finish_saving(self) -> None:
        """Waits for a save in the background.

        Raises:
            CheckpointError: on all ranks, if any of them could not write.
        """
        self._writer.wait()

    def checkpoint_bytes(self) -> int:
        """Returns how many bytes `save` writes on all ranks together, except a few kilobytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._snapshot().tensors.values())

    def _snapshot(self) -> checkpoint.Snapshot:
        """Returns what this rank saves at present: the tensors themselves, not copies."""
        world = self.world
        state = checkpoint.StudentState(self.step, world.dp, world.tp, self.kd_scale, self.guard.state(), sp=world.sp)
        tensors = checkpoint.trained_tensors(self._named_parameters(), self.optimizer)
        return checkpoint.Snapshot(state, tensors | checkpoint.random_state(world))

    def load(self, directory: str | Path) -> None:
        """Continues from what `save` wrote, bit for bit if the mesh has the same sizes.

        On a mesh of other sizes weights and optimizer are resharded, and random numbers (dropout) start afresh from
        run.seed and the step.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
        named = self._named_parameters()
        state, random_restored = checkpoint.load(
            directory, parameters=named, optimizer=self.optimizer, world=self.world
        )
        self.step, self.kd_scale = state.step, state.kd_scale
        self.guard.restore(state.guard)
        self._begin_step()
        if not random_restored:
            self._seed()

    @gpu_phase("weight export")
    def export(
        self, out_dir: str | Path, tokenizer: PreTrainedTokenizerBase, card: str | None = None, **form: Any
    ) -> None:
        """Writes the student with its tokenizer as a Hugging Face folder, replacing an existing one. Collective.

        Args:
            card: the text of the model card; None: none.
            form: `dtype` and `max_file_bytes`, as in `export_model`.

        Raises:
            ExportError: on the first rank only, if the folder cannot be written.
        """
        student = self.config.student
        form |= {"source": student.model, "revision": student.revision, "card": card}
        export_model(self.model, tokenizer=tokenizer, out_dir=out_dir, **form)

    def export_projections(self, folder: str | Path) -> None:
        """Writes the learned vocabulary projections into `folder`, on the first rank only; nothing without any.

        The files are `INDEX.safetensors` by the index of the teacher, in the format that `projection.path` takes. The folder
        replaces an earlier one as a whole; its parent must exist.
        """
        if self.world.rank or not self.objective.projections:
            return
        with replacing(Path(folder)) as new:
            for teacher, projection in self.objective.projections.items():
                spec = self.cross_tokenizer_specs[int(teacher)]
                assert spec is not None
                stored, values = load_projection(spec.projection), projection().values.detach().cpu().numpy()
                save_projection(replace(stored, values=values), new / f"{teacher}.safetensors")

    def _run(
        self, batch: RankBatch, targets: TargetSource, blend: Blend, *, last: bool = False, with_agreement: bool = False
    ) -> LossSums:
        """Runs forward, and where gradients are recorded backward, over all micro-batches of `batch`; returns the summed losses."""
        # Collective. Under sequence parallelism a rank gets the whole rows and their whole targets, and takes its own positions
        # of both: the labels are shifted already, so the one that a rank's last position predicts does not depend on the next.
        if self.world.sp > 1 and any(teacher.chunks for teacher in batch.teachers):
            raise ValueError("chunks: may cross the border between two ranks, so student.parallel.sp must be 1")
        backward = torch.is_grad_enabled()
        sums = LossSums(len(self.objective.teachers), self.world.device, with_agreement, bool(self.routers))
        end = batch.first_row + batch.rows.shape[0]
        for first_row, rows in micro_batches(batch, self.config.train.micro_batch_size, padding_apart=self._by_length):
            if backward:
                self._reduction.before_micro_batch(last and first_row + rows.shape[0] == end)
            start, part = first_row - batch.first_row, own_positions(self.world, rows.shape[1])
            own = rows.labels[:, part]
            with gpu_phase("forward"), targets(first_row, rows.shape[0]) as fetched:
                labels, num_own = to_device(own, self.world.device), int(np.count_nonzero(own != IGNORE_INDEX))
                teachers = [each[start : start + rows.shape[0]].of_positions(part) for each in batch.teachers]
                compared = ComparedRows(labels, batch.num_labels, blend, teachers, num_own, with_agreement)
                with self.routers.of(rows, batch.num_labels) as balance:
                    output = self._forward(rows, compared, fetched)
                if backward:
                    with gpu_phase("backward"):
                        output.loss.backward()
            sums.add(output, balance)
        sums.add_other_positions(self.world)
        return sums

    def _forward(self, rows: TokenRows, batch: ComparedRows, targets: Sequence[Target | None]) -> ObjectiveOutput:
        """The model on a micro-batch, and its loss over this rank's positions."""
        # With a fused loss the logits are never made as a whole. Padded columns are masked either way.

        def own_part(of_target: Tensor) -> Tensor:
            if self.world.sp > 1:
                of_target = part_of_rows(of_target, rows.shape[0], own_positions(self.world, rows.shape[1]))
            return tensor_to_device(of_target, self.world.device)

        here = [target and with_each_tensor(target, own_part) for target in targets]
        if not self.fused:
            return self.objective(self.logits(rows), batch, here)

        scale, softcap = forward.scale_and_cap(self.model.config)

        def loss(hidden: Tensor, layer: Any) -> ObjectiveOutput:
            bias = layer.bias if getattr(layer, "bias", None) is None else layer.bias * scale
            student = StudentHidden(hidden, layer.weight, bias, softcap, scale, self.vocabulary_size)
            return self.objective(student, batch, here)

        ids, positions, documents = self._inputs(rows)
        return forward.with_hidden(self.model, ids, positions, loss, documents)

    def logits(self, rows: TokenRows) -> Tensor:
        """Returns the logits [R, S, V] of a micro-batch's rows, with padded columns at −inf.

        Under tensor parallelism they are a DTensor sharded over the last dimension, under sequence parallelism those of
        this rank's positions [R, S / sp, V].
        """
        return mask_padded_columns(forward.logits(self.model, *self._inputs(rows)), self.vocabulary_size)

    def _inputs(self, rows: TokenRows) -> tuple[Tensor, Tensor, Documents | None]:
        """Returns ids and positions [R, S / sp] that this rank holds of a micro-batch on the device, and its documents."""
        device, part = self.world.device, own_positions(self.world, rows.shape[1])
        ids, positions = to_device(rows.input_ids[:, part], device), to_device(rows.position_ids[:, part], device)
        return ids, positions, documents_for(self.model.config, rows.position_ids, device, self.world.sp_group)

    def _with_teachers(self, batch: RankBatch) -> RankBatch:
        return batch if batch.teachers else replace(batch, teachers=(TeacherPart(),) * len(self.objective.teachers))

    def _begin_step(self) -> None:
        """Starts new sums of losses, and remembers `kd_scale`, which is restored if the step is skipped."""
        self._losses = StepLosses(self.world, len(self.objective.teachers))
        self._kd_scale_before = self.kd_scale

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the model's trained parameters, sharded, by name, and the objective's with the prefix `objective.`."""
        # Reshards the model first.
        reshard(self.model)
        named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return named | dict(self.objective.named_parameters(prefix="objective"))

    def _seed(self) -> None:
        """Seeds torch from run.seed, the step and the rank in the data dimension."""
        # The tensor-parallel rank has no part in it, because tensor-parallel ranks must draw the same numbers.
        torch.manual_seed(seed_of(f"{self.config.run.seed}/{self.step}/{self.world.data_rank}"))
