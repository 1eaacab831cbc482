"""The student's checkpoint: parameters, AdamW's state and random state, written and read by every rank together.

A directory holds files of torch.distributed.checkpoint (DCP), which reshard on load, and `student.json`. Where
directories are, which is the newest and whether one is whole is the business of `distill_rl.run.checkpoints`, which
commits, prunes and checks the manifest. Nothing in a directory is executed: the tensors are read with torch's
`weights_only`, and DCP's `.metadata`, which is a pickle, by `read_metadata`.
"""

from __future__ import annotations

import json
import pickletools
import re
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult

from distill_rl.errors import CheckpointError
from distill_rl.parallel.mesh import World, open_group_beside
from distill_rl.parallel.shards import local_part
from distill_rl.system.files import write_json

BUFFER_BYTES = 64 * 2**20
"""Of both halves together. A copy of 32 MiB takes about a millisecond on PCIe, far more than launching it."""

_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (dict, NoneType),
        "storage_data": (dict,),
        "storage_meta": (StorageMeta, NoneType),
        "version": (str, NoneType),
    },
    StorageMeta: {
        "checkpoint_id": (str, NoneType),
        "save_id": (str, NoneType),
        "load_id": (str, NoneType),
        "modules": (list,),
    },
    dcp_metadata.TensorStorageMetadata: {
        "properties": (TensorProperties,),
        "size": (torch.Size,),
        "chunks": (list,),
    },
    TensorProperties: {},  # a tuple, of which torch reads the dtype only
    dcp_metadata.ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, NoneType), "index": (int, NoneType)},
    _StorageInfo: {"relative_path": (str,), "offset": (int,), "length": (int,)},
}
"""The fields of every type that may be made, and their types; BytesStorageMetadata, whose content torch unpickles, is
not among them."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES: dict[tuple[str, str], Any] = {
    **{(made.__module__, made.__name__): made for made in _FIELDS},
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): "layout",
    (dcp_metadata.__name__, "_MEM_FORMAT_ENCODING"): dcp_metadata._MEM_FORMAT_ENCODING,
    ("pathlib", "PosixPath"): "path",
    ("pathlib._local", "PosixPath"): "path",  # Python 3.13
}
_VALUES = {"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_FILE = re.compile(r"__\d+_\d+\.distcp")

STATE_FILE = "student.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class StudentState:
    """The content of `student.json`: `step` optimizer steps were done on dp × sp × tp ranks."""

    step: int
    dp: int
    tp: int
    kd_scale: float = 1.0
    """CE / KD of the last step, by which the next one scales its KD under `loss.dynamic_scale`."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """State of `StepGuard`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Part of the format, but not used."""
    format: int = FORMAT
    sp: int = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank saves."""

    state: StudentState
    tensors: Mapping[str, Tensor]
    """The trained tensors themselves, not copies, and this rank's random state."""

    def copied(self, staging: Staging | None) -> Snapshot:
        """Returns a copy in plain host memory, complete on return, which further training does not change.

        Args:
            staging: copies the tensors that are on a GPU; None: there are none. Tensors on a CPU are cloned.
        """
        copies = {name: tensor.detach().clone() for name, tensor in self.tensors.items() if tensor.device.type == "cpu"}
        if staging is not None:
            copies |= staging.copied({name: tensor for name, tensor in self.tensors.items() if name not in copies})
        return replace(self, tensors={name: copies[name] for name in self.tensors})


def save(directory: str | Path, snapshot: Snapshot, world: World, group: dist.ProcessGroup | None = None) -> list[str]:
    """Writes the student into `directory`, which is created if missing and must be on storage that all ranks share.

    Collective over `group`, by default the default group. Everything is flushed to disk on return. If one rank
    fails to write, all of them raise.

    Returns:
        On the first rank the names of all ranks' files, an empty list on the others.

    Raises:
        CheckpointError: it cannot be written.
    """
    directory, what = Path(directory), f"checkpoint {directory}"
    failure: list[str | None] = [None]
    if world.rank == 0:
        try:
            write_json(directory / STATE_FILE, asdict(snapshot.state))
        except Exception as error:  # all ranks raise
            failure[0] = _one_line(error)
    dist.broadcast_object_list(failure, src=0, group=group)
    if failure[0] is not None:
        raise CheckpointError(what, "must be writable", failure[0])
    writer = _Writer(directory)
    _run_dcp(lambda: dcp.save(dict(snapshot.tensors), storage_writer=writer, process_group=group), what)
    return [] if world.rank else sorted({STATE_FILE, ".metadata", *writer.files})


def load(
    directory: str | Path, *, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, world: World
) -> tuple[StudentState, bool]:
    """Reads what `save` wrote, on any mesh, into the parameters and their optimizer state, in place.

    Collective over all ranks. The optimizer must already hold state for every parameter (`build_optimizer`). Torch's
    random state is restored too, if dp and tp are those of the save and the checkpoint holds this rank's state, of the
    CPU and, on a GPU, of the GPU.

    Returns:
        The content of `student.json`, which the caller must apply, and whether this rank's random state was restored.

    Raises:
        CheckpointError: missing or unreadable, from another format, or of a model with other parameters.
    """
    directory = Path(directory)
    state = read_state(directory)
    reader = _Reader(directory)
    described: dict[str, Any] = reader.read_metadata().state_dict_metadata
    saved = {name: tuple(entry.size) for name, entry in described.items()}
    tensors = trained_tensors(parameters, optimizer)
    _check_shapes(directory, saved, tensors)
    generators = random_state(world)
    same_layout = (state.dp, state.sp, state.tp) == (world.dp, world.sp, world.tp) and generators.keys() <= saved.keys()
    if same_layout:
        tensors |= generators
    _run_dcp(lambda: dcp.load(tensors, storage_reader=reader), f"checkpoint {directory}")
    if same_layout:
        for name, tensor in generators.items():
            if name.endswith(".cuda"):
                torch.cuda.set_rng_state(tensor)
            else:
                torch.set_rng_state(tensor)
    return state, same_layout


class Writer:
    """Writes snapshots of the student while training continues, one at a time.

    All ranks call each method together. The threads communicate over a process group of their own, because two threads
    on one group can meet in different orders on different ranks.

    Args:
        timeout_s: seconds that a rank's thread waits for the others.
    """

    def __init__(self, world: World, timeout_s: float):
        self._world, self._timeout_s = world, timeout_s
        self._group: dist.ProcessGroup | None = None
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, snapshot: Snapshot, directory: Path, marker: Path) -> None:
        """Waits for the save in progress, if any, copies the snapshot, and starts a thread that writes the copy.

        The thread writes into `directory`. When all ranks are done or have failed, the first rank writes `marker`
        atomically. It is JSON: `error`, one line or null, and `files`, the names in `directory` (none after an error).
        If the marker's folder no longer exists, none is written.

        Raises:
            CheckpointError: the previous save failed. The new one is then not started.
        """
        self.wait()
        if self._group is None:
            self._group = open_group_beside(self._world, self._timeout_s)
        if self._staging is None and self._world.device.type == "cuda":
            self._staging = Staging(self._world.device)
        arguments = (snapshot.copied(self._staging), Path(directory), Path(marker))
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the save in progress; returns at once if there is none.

        Raises:
            CheckpointError: it failed. Raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, snapshot: Snapshot, directory: Path, marker: Path) -> None:
        """Writes a snapshot together with the other ranks, then the first rank's marker; runs in the thread."""
        # Never raises: an error is kept for `wait`, and its message is in the marker.
        files: list[str] = []
        try:
            if self._world.device.type == "cuda":  # per thread; otherwise DCP would open a context on GPU 0
                torch.cuda.set_device(self._world.device)
            files = save(directory, snapshot, self._world, self._group)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # `wait` raises it in the caller's thread
            self._error = CheckpointError(f"checkpoint {directory}", "must be writable", _one_line(error))
        if self._world.rank == 0 and marker.parent.is_dir():  # otherwise nobody waits any more
            message = None if self._error is None else str(self._error)
            with suppress(OSError):  # if the disk is full, `wait` raises the error
                write_json(marker, {"error": message, "files": files})


def read_state(directory: str | Path) -> StudentState:
    """Reads `student.json` of the student's part of a checkpoint and nothing else.

    Args:
        directory: the student's folder in the checkpoint.

    Raises:
        CheckpointError: the file is missing, is not JSON, or has another format.
    """
    path = Path(directory) / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            remedy = "use the version of distill_rl that wrote it"
            raise CheckpointError(f"checkpoint {path}", f"its format must be {FORMAT}", state["format"], remedy)
        return StudentState(**state)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path}", "must be a readable student state", _one_line(error)) from error


def trained_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns everything that is trained, and its optimizer state, by the name that it has in a checkpoint.

    The names are `model.NAME` and `optimizer.NAME.KEY`. The tensors share memory with the parameters and the optimizer,
    so loading into them restores both.

    Args:
        parameters: by name; a tied parameter once.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def random_state(world: World) -> dict[str, Tensor]:
    """Returns copies of torch's random states of this rank, by the names that they have in a checkpoint.

    The names are `random.RANK.cpu` and, if the world is on GPUs, also `random.RANK.cuda`.
    """
    tensors = {f"random.{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        tensors[f"random.{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return tensors


class _Writer(dcp.FileSystemWriter):
    """Remembers the names of the files that all ranks wrote, on the first rank."""

    files: Collection[str] = ()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.files = {result.storage_data.relative_path for of_rank in results for result in of_rank}


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once, without running the pickle."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        try:
            self._metadata = read_metadata(directory / ".metadata")
        except (OSError, ValueError) as error:
            rule, remedy = "its metadata must be what torch writes for tensors", "use another checkpoint"
            raise CheckpointError(f"checkpoint {directory}", rule, _one_line(error), remedy) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _check_shapes(directory: Path, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor]) -> None:
    """Checks that a checkpoint holds the wanted tensors, with their shapes, and no other parameters or optimizer state."""
    # The checkpoint may hold random state and parameters besides the model's (`objective.`) that are not wanted. Dtypes
    # are not compared.
    # An export reads the student alone, without what was trained besides it.
    optional = ("random.", "model.objective.", "optimizer.objective.")
    unwanted = [name for name in saved if not name.startswith(optional) and name not in wanted]
    differing = [name for name, tensor in wanted.items() if saved.get(name) != tuple(tensor.shape)]
    if unwanted or differing:
        name = (differing + unwanted)[0]
        here = tuple(wanted[name].shape) if name in wanted else "missing"
        count, there = len(unwanted) + len(differing), saved.get(name, "missing")
        rule, found = "must hold what is trained of student.model", f"{name} is {there} there and {here} here"
        remedy = "resume with the student, and the student.lora, that wrote it"
        raise CheckpointError(f"checkpoint {directory}", rule, f"{count} that differ ({found})", remedy)


def _run_dcp(action: Callable[[], Any], what: str) -> Any:
    # The error for a failed call is one line that names each cause and its rank.
    try:
        return action()
    except CheckpointException as error:
        causes = {f"rank {rank}: {_one_line(cause)}" for rank, (cause, _) in error.failures.items()}
        raise CheckpointError(what, "every rank must write or read its part", "; ".join(sorted(causes))) from error


def _one_line(error: BaseException) -> str:
    """Returns `TYPE: MESSAGE` of an error, with every run of white space as one blank."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# A pickle is a program of a small machine with a stack. What torch writes uses two dozen of its instructions, and names
# a dozen of torch's types. `read_metadata` follows these, and refuses the file at anything else. It calls nothing that
# the file names: a type becomes an object of that type whose fields have the types that torch gives them.


def read_metadata(file: Path) -> Metadata:
    """Returns what a `.metadata` describes: tensors only, in files beside it.

    Raises:
        OSError: it cannot be read.
        ValueError: torch would not have written it for tensors.
    """
    try:
        return _checked(_run(file.read_bytes()))
    except (IndexError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _run(program: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []  # heights of the stack
    memo: list[Any] = []

    def above_mark() -> list[Any]:
        height = marks.pop()
        items = stack[height:]
        del stack[height:]
        return items

    value: Any
    for instruction, value, _ in pickletools.genops(program):
        name = instruction.name
        if name in _VALUES:
            stack.append(value)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            stack.append(tuple(above_mark()))
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("SETITEM", "SETITEMS"):
            items = above_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            if any(type(key) not in (str, MetadataIndex) for key in items[::2]):
                raise ValueError("a key that is neither a name nor an index")
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = above_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(items)
        elif name == "STACK_GLOBAL":
            where, what = stack.pop(-2), stack.pop()
            if type(where) is not str or type(what) is not str:  # what is nested may be endless to hash and to show
                raise ValueError("a name that is no text")
            if (where, what) not in _NAMES:
                raise ValueError(f"it names {f'{where}.{what}'[:200]!r}")
            stack.append(_NAMES[where, what])
        elif name == "NEWOBJ":
            made, arguments = stack.pop(-2), stack.pop()
            if arguments != () or not isinstance(made, type) or made not in _FIELDS:
                raise ValueError("it makes an object of another type")
            stack.append(object.__new__(made))
        elif name == "REDUCE":
            called, arguments = stack.pop(-2), stack.pop()
            stack.append(_reduced(called, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the instruction {name}")
    (result,) = stack
    return result


def _reduced(called: Any, arguments: Any) -> Any:
    """What a call of one of the functions in `_NAMES` returns, for the arguments that torch writes."""
    if called is torch.Size:
        (sizes,) = arguments
        if type(sizes) is tuple and all(type(size) is int for size in sizes):
            return torch.Size(sizes)
    elif called is dcp_metadata._MEM_FORMAT_ENCODING and arguments == (0,):
        return dcp_metadata._MEM_FORMAT_ENCODING(0)
    elif called == "layout" and arguments == ("torch.strided",):
        return torch.strided
    elif called == "path":
        return None  # where it was written
    raise ValueError("it calls a function with other arguments")


def _build(made: Any, state: Any) -> None:
    if type(made) is TensorProperties and type(state) is tuple and isinstance(state[0], torch.dtype):
        made.__setstate__(state)
        return
    fields = _FIELDS[type(made)]
    if type(state) is not dict or state.keys() != fields.keys():
        raise ValueError(f"{type(made).__name__} has other fields")
    for name, value in state.items():
        if type(value) not in fields[name]:
            raise ValueError(f"{name} of {type(made).__name__} is {type(value).__name__}")
    vars(made).update(state)


def _checked(read: Any) -> Metadata:
    """The parts of a file's content that loading needs, if every tensor consists of parts of files beside it."""
    if type(read) is not Metadata:
        raise ValueError(f"it makes {type(read).__name__}")
    tensors: dict[str, Any] = read.state_dict_metadata
    places = read.storage_data
    kinds = {(type(name), type(entry)) for name, entry in tensors.items()}
    if kinds - {(str, dcp_metadata.TensorStorageMetadata)}:
        raise ValueError("an entry that is no tensor")
    chunks = [chunk for entry in tensors.values() for chunk in entry.chunks]
    if len(chunks) != len(places):
        raise ValueError("tensors with other parts than it has places for")
    if any(type(chunk) is not dcp_metadata.ChunkStorageMetadata for chunk in chunks):
        raise ValueError("a part of a tensor that is none")
    if any(type(index) is not MetadataIndex or type(place) is not _StorageInfo for index, place in places.items()):
        raise ValueError("a place that is none")
    for place in places.values():
        if not _FILE.fullmatch(place.relative_path):
            raise ValueError(f"a part of a tensor in {place.relative_path[:200]!r}")
    return Metadata(tensors, None, places, StorageMeta(), read.version)


@dataclass
class _Half:
    """One half of the buffer, and the destination of its content."""

    memory: Tensor
    target: Tensor | None = None
    done: torch.cuda.Event | None = None


class Staging:
    """Copies tensors of a GPU into pageable host memory, at the speed of page-locked memory.

    The driver copies straight into pageable memory at a fraction of the bus, and page-locking the whole copy would
    lock three times the size of the weights on the node. So each tensor goes in pieces through two page-locked halves:
    while the GPU fills one on a stream of its own, the host empties the other.

        gpu    ── piece 0 → A ─ piece 1 → B ─ piece 2 → A ─ …
        host            ─────── A → target ── B → target ── …

    On a CPU the same steps run with plain memory and without streams; product code clones there instead.

    Args:
        device: of the tensors.
        buffer_bytes: size of both halves together.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES):
        on_gpu = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._halves = [_Half(torch.empty(buffer_bytes // 2, dtype=torch.uint8, pin_memory=on_gpu)) for _ in range(2)]

    @torch.no_grad()
    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of the tensors in pageable host memory, by name.

        A DTensor remains one on the same mesh, with its local part on the host. The copies include all work queued on
        the current stream before the call, and are complete when it returns: nothing queued afterwards (the next
        optimizer step) can change them.

        Args:
            tensors: contiguous, on `device` or on the CPU.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
        turn, size = 0, self._halves[0].memory.numel()
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for name, tensor in tensors.items():
                for source, target in zip(_bytes(tensor).split(size), _bytes(copies[name]).split(size)):
                    self._empty(self._halves[turn])
                    self._fill(self._halves[turn], source, target)
                    turn = 1 - turn
            for half in (self._halves[turn], self._halves[1 - turn]):
                self._empty(half)
        return copies

    def _fill(self, half: _Half, source: Tensor, target: Tensor) -> None:
        """Begins to copy `source` into an empty half (`_empty`), which must be large enough, and notes `target`."""
        half.memory[: source.numel()].copy_(source, non_blocking=True)
        half.target = target
        if self._stream is not None:
            half.done = self._stream.record_event()

    def _empty(self, half: _Half) -> None:
        """Waits until the half is filled, copies its content to the target, and marks it as empty."""
        # Nothing happens if it is empty already.
        if half.target is None:
            return
        if half.done is not None:
            half.done.synchronize()
        half.target.copy_(half.memory[: half.target.numel()])
        half.target, half.done = None, None


def _bytes(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().view(-1).view(torch.uint8)
