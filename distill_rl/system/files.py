"""Files and folders: names, sizes and hashes; writes that are atomic and durable; who may write, and who owns what."""

from __future__ import annotations

import atexit
import ctypes
import difflib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO

from distill_rl.errors import ConfigError

DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{8}")
"""The name of what is made beside a file or folder that it will replace, whose name it holds."""

_OTHER_FILES = 512
"""Files, sockets and pipes that a process has open beside those that `allow_open_files` is asked for."""
MAX_NAME_BYTES = 200
"""Of a name that users choose; file systems take 255, and names of files add to it."""


def name_problem(name: str) -> str | None:
    """Why files and folders cannot have this name in all places where it is written, scripts among them; None: they can."""
    if name in ("", ".", "..") or any(letter in name for letter in "/\\\0"):
        return "must be the name of one folder"
    if not name.isprintable():
        return "must not contain control characters"
    if any(letter in name for letter in "'\"`$"):
        return "must not contain quotes or $, because it is written into scripts"
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        return f"may have {MAX_NAME_BYTES} bytes at most, because files are named after it; it has {size}"
    return None


def nearby(path: Path) -> str:
    """`did you mean PATH?` with the most similar name in the folder of a path that does not exist; empty if none is."""
    names: list[str] = []
    with suppress(OSError):  # there is no such folder, or it may not be read
        names = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Writes a file that appears complete or not at all: writes beside it, flushes to disk, renames.

    Missing folders above it are created, an existing file is replaced, and text is encoded as UTF-8. What a killed process
    left of writing the same file is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(path)
    temporary, file = _draft_of(path)
    try:
        with file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _draft_of(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside another, locked: what is not locked was left by a killed process (`remove_drafts`)."""
    while True:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        file = draft.open("xb")
        with suppress(OSError):  # a file system without locks, where no draft is removed
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return draft, file
        file.close()  # it was removed before it was locked


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What `flock` answers on a file system without locks."""


def lock_file(file: IO[Any] | int, folder: Path, *, wait: bool = False) -> bool:
    """Locks an open file for this process as long as it is open; False if another process holds the lock, unless `wait` is set.

    Args:
        folder: named by the error.

    Raises:
        ConfigError: the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        rule = "must be on a file system with locks (flock)"
        remedy = "mount it with them (Lustre: -o flock), or choose a folder elsewhere"
        raise ConfigError(f"{folder}", rule, f"{error.strerror}", remedy) from None
    return True


def remove_drafts(path: Path) -> None:
    """Removes what killed processes left beside a file of writing it."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}"):
        with suppress(OSError), draft.open("r+b") as file:  # a folder, or another process writes it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def write_json(path: str | Path, value: Any) -> None:
    """Writes a value as indented JSON with sorted keys, atomically, as `write_atomic` does.

    Raises:
        ValueError: it contains NaN or infinity.
        TypeError: it contains something that JSON cannot express.
    """
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_json_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON objects to a file, one per line, atomically, as `write_atomic` does."""
    write_atomic(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file, or it is damaged or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in the complete lines of a file; nothing if there is no file.

    Invalid lines are skipped, and so is a last line that a killed process left half-written.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            row = None
            with suppress(ValueError, RecursionError):
                row = json.loads(line) if line.endswith(b"\n") else None
            if isinstance(row, dict):
                yield row


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends JSON objects to a file, one per line, durably, after ending a line that a killed process left half-written."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files, if it can and must, so that it may have `count` beside all others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + _OTHER_FILES  # twice, so that the limit is not raised for each further file
    if soft == resource.RLIM_INFINITY or soft >= count + _OTHER_FILES:
        return
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def sync(path: str | Path) -> None:
    """Flushes a file to disk, or a directory, so that files renamed, created or deleted in it stay so after a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: str | Path) -> None:
    """Flushes every file and directory under `root`, and `root` itself, to disk."""
    for directory, _, names in os.walk(root):
        for name in names:
            sync(Path(directory) / name)
        sync(directory)


def size_text(count: int) -> str:
    """A number of bytes as text in MiB, or in GiB from one GiB on, such as `1.5 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def size_of(root: str | Path) -> int:
    """Bytes of all files in the folder `root` and below; 0 if there is no such folder.

    A link counts with its own size, not its target's. Files may be deleted meanwhile.
    """
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(directory) / name).lstat().st_size
    return total


def sha256(path: str | Path) -> str:
    """The SHA-256 of the contents of a file, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Who may write to a folder. What a run continues from decides about everything it makes, so only this user and root
# may own or change checkpoints and stores, and no link may lead to them.

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def ownership_problems(folder: Path) -> Iterator[str]:
    """Yields why a folder and its contents cannot be trusted, one clause per bad entry; nothing if they can.

    No file is opened.
    The owner must be this user or root, neither group nor others may write, and there may be no links or special files.
    The folder must exist; what disappears from it meanwhile is not looked at.
    """
    for entry in (folder, *sorted(folder.rglob("*"))):
        name = "the folder" if entry == folder else str(entry.relative_to(folder))
        try:
            info = entry.lstat()
        except FileNotFoundError:
            if entry == folder:
                raise
            continue  # a draft that was renamed meanwhile
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
            yield f"{name} is a {'link' if entry.is_symlink() else 'special file'}"
        elif info.st_uid not in (os.geteuid(), 0):
            yield f"{name} belongs to user {info.st_uid}"
        elif info.st_mode & _OTHERS:
            yield f"{name} can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"


def parent_problem(folder: Path) -> str | None:
    """Why others could swap the entries of a folder, or None if they cannot; the folder must exist.

    They could if a user other than this one or root owns it, or if group or others may write to it and it is not
    sticky, as /tmp is.
    """
    info = folder.stat()
    if info.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {info.st_uid}"
    if info.st_mode & _OTHERS and not info.st_mode & stat.S_ISVTX:
        return f"it can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def close_folder(folder: Path) -> None:
    """Removes the write permission of group and others from one folder, not from its contents.

    Does nothing if the folder does not exist or cannot be changed, for example because another user owns it.
    """
    with suppress(OSError):  # `parent_problem` reports a folder of another user
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & _OTHERS:
            folder.chmod(mode & ~_OTHERS)


def close_tree(folder: Path) -> None:
    """Removes the write permission of group and others from a folder and all its contents, links excepted.

    Raises:
        OSError: it does not exist, or an entry that others may write to belongs to another user.
    """
    for entry in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(entry.lstat().st_mode)
        if mode & _OTHERS and not entry.is_symlink():
            entry.chmod(mode & ~_OTHERS)


# Folders that disappear with their owner: each is locked by the process that made it, as long as that process lives.
#
# A killed process cannot remove its folder. The next process that makes one removes every folder whose lock is free.

OWNER = "owner"
"""The file that the owner has locked."""


class OwnedFolder:
    """A new folder in `root`, which only this user can enter, named `prefix` and eight random hex digits."""

    def __init__(self, root: Path, prefix: str):
        """Makes the folder and locks it for this process; `path` is its path.

        Args:
            root: an existing folder.
            prefix: start of the folder's name.

        Raises:
            OSError: the folder cannot be made or locked. Nothing of it is left.
        """
        while True:
            self.path = root / f"{prefix}{secrets.token_hex(4)}"
            self.path.mkdir(mode=0o700)
            try:
                lock = claim(self.path)
            except OSError:
                _remove_locked(self.path)
                raise
            # `remove_abandoned` in another process may remove the folder before it is locked here. Then make another one.
            if lock is not None:
                self._lock = lock
                return

    def remove(self, *names: str) -> None:
        """Removes the files of these names and the folder, and gives up its lock; call it once.

        A folder with other contents stays, without those files and its lock file. Nothing is raised for that.
        """
        _remove_locked(self.path, *names)
        os.close(self._lock)


def remove_abandoned(root: Path, pattern: str, before: Callable[[Path], object] = lambda path: None) -> list[Path]:
    """Removes the folders of this user whose owners are dead, with their contents, and returns their paths.

    Folders whose owner cannot be determined are left alone. Nothing is raised for them.

    Args:
        pattern: glob in `root` that matches only folders made by `OwnedFolder`.
        before: called with each folder before it is removed; if it raises OSError, the folder stays.
    """
    removed = []
    for path in root.glob(pattern):
        with suppress(OSError):
            lock = claim(path) if path.lstat().st_uid == os.getuid() and not path.is_symlink() else None
            if lock is not None:
                try:
                    before(path)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
                removed.append(path)
    return removed


def claim(folder: Path) -> int | None:
    """Locks a folder and returns the descriptor of its lock file, which the caller must close to give it up.

    Creates the lock file if necessary. Returns None, without waiting, if another process holds the lock or has removed
    the folder. On a file system without locks nobody holds any.

    Raises:
        OSError: it cannot be determined who owns the folder, for example because no descriptor is free.
    """
    owner = folder / OWNER
    with suppress(FileNotFoundError, BlockingIOError), ExitStack() as undo:
        lock = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if owner.stat().st_ino == os.fstat(lock).st_ino:
            undo.pop_all()
            return lock
    return None


def _remove_locked(folder: Path, *names: str) -> None:
    """Removes the files of these names and the lock file in a folder, then the folder if it is empty; ignores errors."""
    # Needs no file descriptor, unlike `shutil.rmtree`, because there may be none left.
    with suppress(OSError):
        for name in (*names, OWNER):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


# Folders that are whole or not there at all, whichever process makes them and whenever it is killed.
#
# A replacement is made in a hidden folder beside its target, `.NAME.<8 hex digits>`, which belongs to the process that made it
# (`OwnedFolder`). The new folder is `new` in it, and takes the target's place in one of two ways:
#
#     exchange          one call exchanges new and old (Linux, on most local file systems)
#     set aside         where that is impossible, the old one is renamed to `old` in the hidden folder, and the new one takes its name;
#                       a kill in between leaves no target, and `restore` puts the old one back

PARTIAL = ".partial-"
_NEW, _OLD = "new", "old"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def made_once(root: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder `root`/`name`, which is made if it does not exist and renamed into place when it is complete.

    A second process that needs the same folder waits for the first. What a process that died had begun is deleted.

    Args:
        make: makes the folder, which does not exist, at the given path.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        lock_file(lock, root, wait=True)
        if not (root / name).is_dir():
            partial = root / f"{PARTIAL}{name}"
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            sync_tree(partial)
            partial.rename(root / name)
            sync(root)
    return root / name


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields an empty folder, which takes the place of `target` when the block ends without an error, durably.

    `target` need not exist, and neither need the folders above it. What killed replacements of it left is removed first.

    Raises:
        OSError: it cannot be written or renamed; `target` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    restore(target)
    hidden = OwnedFolder(target.parent, f".{target.name}.")
    new, old = hidden.path / _NEW, hidden.path / _OLD
    try:
        new.mkdir()
        yield new
        sync_tree(new)
        put_in_place(new, target, old)
    finally:
        _remove(new)
        if os.path.lexists(target):
            _remove(old)
        hidden.remove()


def put_in_place(new: Path, target: Path, aside: Path) -> None:
    """Gives a folder that is complete, and on the disk, its name; what had this name is afterwards at `new` or `aside`.

    Args:
        aside: in the same file system; used where two folders cannot be exchanged.

    Raises:
        OSError: it cannot be renamed; `target` is unchanged.
    """
    if not os.path.lexists(target):
        new.rename(target)
    else:
        try:
            _exchange(new, target)
        except OSError:
            target.rename(aside)
            try:
                new.rename(target)
            except OSError:
                aside.rename(target)
                raise
    sync(target.parent)


def restore(target: Path) -> None:
    """Puts a folder back that a killed replacement had set aside, and removes what else it left."""

    def put_back(hidden: Path) -> None:
        if others := {entry.name for entry in hidden.iterdir()} - {OWNER, _NEW, _OLD}:
            raise FileExistsError(f"{hidden} is not of a replacement: it has {others}")
        if (hidden / _OLD).exists() and not os.path.lexists(target):
            (hidden / _OLD).rename(target)
            sync(target.parent)

    remove_abandoned(target.parent, f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}", before=put_back)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left in a folder of replacing its files, folders and links, and puts back what is missing.

    No other process may point a link in it elsewhere meanwhile.
    """
    for path in sorted(folder.glob(".*")):
        if match := DRAFT.fullmatch(path.name):
            if path.is_symlink():
                path.unlink()
            remove_drafts(folder / match[1])
            restore(folder / match[1])


def point_at(link: Path, name: str) -> None:
    """Makes `link` a symbolic link to its neighbour `name`, in place of what it pointed at before.

    A folder in its place, which a copy that followed links has made of it, is kept as `copied-NAME-…`.
    """
    if link.is_dir() and not link.is_symlink():
        link.rename(link.with_name(f"copied-{link.name}-{secrets.token_hex(4)}"))
    fresh = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    fresh.symlink_to(name)
    fresh.replace(link)
    sync(link.parent)


def _exchange(one: Path, other: Path) -> None:
    """Exchanges two entries of a file system. Raises OSError where C library, kernel or file system cannot do it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _remove(path: Path) -> None:
    """Removes a folder, a file or a link, if there is one; ignores errors."""
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


TMP = Path("/tmp")


@cache
def private_directory() -> Path:
    """Returns this process's directory for Ray's files and token, which only this user can enter."""
    # It is created at the first call.
    # Removed at exit; the first call also removes those that dead processes have left. It is in /tmp whatever TMPDIR is, because Ray's
    # socket paths must stay under 107 bytes.
    remove_abandoned(TMP, "drl-*-*")
    directory = OwnedFolder(TMP, f"drl-{os.getpid()}-").path
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def private_folder() -> Path:
    """Makes and returns an empty folder in `private_directory()`. Its name is short, as socket paths in it must be."""
    while True:
        path = private_directory() / secrets.token_hex(2)
        with suppress(FileExistsError):
            path.mkdir()
            return path
