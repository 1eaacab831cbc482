"""Memory that several processes map: a memfd, or a file in /dev/shm where a memfd cannot be used.

A memfd has no name, so a killed process leaves nothing behind. A reader opens it through `/proc/<pid>/fd`, which needs
the same user and PID namespace and a living writer. A file is in a folder of its own, whose owner holds a lock on it.
The next process of this user that makes a segment removes all folders whose owner is dead.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distill_rl.errors import TransportError
from distill_rl.system.files import OwnedFolder, claim, remove_abandoned
from distill_rl.system.memory import available_bytes

Backing = Literal["memfd", "file"]
SHM = Path("/dev/shm")
RING = "ring"
"""The file in a folder that is the memory."""
NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Address:
    """How another process of this node finds a segment."""

    path: str
    size: int
    nonce: bytes
    pid: int
    """Of the process that made it."""
    folder: str = ""
    """The folder that the process has locked, if the segment is a file."""


class Segment:
    """Mapped memory that begins with its nonce. It stays mapped as long as `view`, or anything made from it, exists."""

    def __init__(self, mapped: mmap.mmap, address: Address, folder: OwnedFolder | None = None, fd: int = -1):
        self.view, self.address = memoryview(mapped), address
        self._folder, self._fd = folder, fd

    @classmethod
    def create(cls, size: int, backing: Backing = "memfd") -> Segment:
        """A new segment of `size` bytes, all pages present, for this process to write.

        First removes the folders of segments whose owners are dead. The owner calls `close`.

        Args:
            backing: a memfd falls back to a file where other processes could not open it.

        Raises:
            TransportError: there is too little shared memory, or it cannot be created.
        """
        try:
            sweep()
            return cls._create(size, backing)
        except OSError as error:
            rule = "the slots of one teacher rank need shared memory, which could not be created"
            raise TransportError("transport", rule, error.strerror, "use transport=object_store") from error

    @classmethod
    def _create(cls, size: int, backing: Backing) -> Segment:
        """`create` without removing others' folders; leaves nothing behind if it fails."""
        nonce, pid = secrets.token_bytes(NONCE_BYTES), os.getpid()
        with ExitStack() as undo:
            fd = _memfd() if backing == "memfd" else -1
            folder = None
            if fd < 0:
                folder = OwnedFolder(SHM, _prefix())
                undo.callback(folder.remove, RING)
                fd = os.open(folder.path / RING, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            undo.callback(os.close, fd)
            _allocate(fd, size)
            mapped = _map(fd, size)
            mapped[:NONCE_BYTES] = nonce
            if not folder:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            undo.pop_all()
        if not folder:
            return cls(mapped, Address(f"/proc/{pid}/fd/{fd}", size, nonce, pid), fd=fd)
        os.close(fd)
        return cls(mapped, Address(str(folder.path / RING), size, nonce, pid, str(folder.path)), folder)

    @classmethod
    def attach(cls, address: Address, what: str) -> Segment:
        """Maps another process's segment for reading and writing.

        Args:
            what: what the segment is, for messages.

        Raises:
            TransportError: it is gone, its writer is dead, it cannot be reached from here, or it is a different one.
        """
        remedy = "use transport=object_store if its writer lives, as another user or in another PID namespace"
        try:
            if address.folder and (lock := claim(Path(address.folder))) is not None:
                os.close(lock)
                raise TransportError(what, "its writer must live when it is opened")
            fd = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(what, "its shared memory must be there to open", error.strerror, remedy) from None
        try:
            # A reused process id or file descriptor leads to some other file.
            if os.fstat(fd).st_size != address.size or os.pread(fd, NONCE_BYTES, 0) != address.nonce:
                raise TransportError(what, "its shared memory must be the writer's", "another file", remedy)
            return cls(_map(fd, address.size), address)
        except OSError as error:
            raise TransportError(what, "its shared memory must be mapped", error.strerror, remedy) from None
        finally:
            os.close(fd)

    @property
    def words(self) -> memoryview:
        """The segment as 8-byte words, without an incomplete one at the end."""
        return self.view[: len(self.view) // 8 * 8].cast("Q")

    def forget_name(self) -> None:
        """Removes the file of a segment that this process has made as one, so that a kill cannot leave it behind.

        Call it when nobody needs to open the segment any more; the memory stays mapped. Nothing happens for a memfd.
        """
        if self._folder:
            self._folder.remove(RING)
            self._folder = None

    def close(self) -> None:
        """Lets go of the memory, which this process unmaps as soon as nobody in it holds a view; may be called again.

        In the process that made the segment, its file or memfd goes too, so nobody can attach it afterwards.
        """
        self.forget_name()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.view = memoryview(b"")


def sweep(root: Path = SHM) -> list[Path]:
    """Removes the folders of this user's segments whose owners are dead, and returns their paths."""
    return remove_abandoned(root, f"{_prefix()}*")


def _prefix() -> str:
    return f"distill_rl-{os.getuid()}-"


def memfd_usable() -> bool:
    """Whether segments are memfds here, which need no room in /dev/shm."""
    fd = _memfd()
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def _memfd() -> int:
    """Returns the file descriptor of a new, empty memfd that other processes can open; -1 if that is not possible."""
    try:
        fd = os.memfd_create("distill_rl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return -1
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
    except OSError:
        os.close(fd)
        return -1
    return fd


def _allocate(fd: int, size: int) -> None:
    """Makes a new file `size` bytes long and allocates all pages now."""
    # With `ftruncate` alone, a lack of memory would be a bus error at the first write.
    free = available_bytes()  # nothing limits a memfd
    try:
        if size > free:
            raise OSError(errno.ENOMEM, f"{free} bytes of memory are free")
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        rule = f"the slots of one teacher rank take {size} bytes of shared memory"
        remedy = "give /dev/shm more room, or set prefetch.slots, prefetch.depth or train.micro_batch_size lower"
        raise TransportError("transport", rule, error.strerror, remedy) from None


def _map(fd: int, size: int) -> mmap.mmap:
    return mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
