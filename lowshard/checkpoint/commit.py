"""The commit protocol: how all ranks together put a new checkpoint in the place of an old one.

A file is put in place by one rename: the index of a sharded checkpoint, the file itself of a merged one or of a delta.
Before the rename it has a private name, `.NAME.TOKEN.tmp` (of a long NAME its digest), and is called the claim:
whoever removes the claim makes sure that this save never commits.

              rank 0                                  every other rank
              |                                       |
    prepare   | removes leftovers, makes the claim    |
              | and locks it                          |
              |------------------- meeting -----------|
              | writes its data under private names   | writes its data under private names
    flush     | and syncs it                          | and syncs it
              |------------------- meeting -----------|  an error up to here: each rank removes its files
              | completes and syncs the claim,        |  :
              | syncs the folder                      |  : does not know; removes nothing if it hears no more,
    COMMIT    | RENAMES THE CLAIM TO THE TARGET       |  : unless it hears of an error: then its files
              | syncs the folder                      |  :
    clean     | removes the old checkpoint's files    |  :
              |------------------- meeting -----------|
              |                                       | knows

From the rename on nobody removes anything of the new checkpoint; before it nobody removes anything of the old one.
What a killed save leaves is removed by the next one: it tries the lock of the claim (a live save holds it), removes
the claim, then reads the index, and removes data files of that token that the index does not name. A save that lost
its claim to a file system without locks finds that at its rename, and the checkpoint in place stays whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lowshard.argument import path as check_path
from lowshard.checkpoint.checkpoint_index import DATA_NAME, INDEX_NAME, TOKEN, forget, read_index
from lowshard.comm import Communicator, collective_step, share_text
from lowshard.errors import CheckpointError, CommError, LowshardError, NotDurable

_LONG_BYTES = 120
"""Of a name from which none with a token is made: file systems have names of 143 bytes or of 255."""


class Commit:
    """A new checkpoint in the making, on all ranks. Use it in a `with` block, which all ranks enter together."""

    fd: int
    """The claim, open for writing on every rank."""

    def __init__(
        self, target: Path, comm: Communicator, what: str, prepare: Callable[[int], object] | None = None,
        final: Path | None = None,
    ) -> None:  # fmt: skip
        self.target, self.comm = target, comm
        self._final = final or target  # what the claim, which is called after the target, becomes
        self.path = target.parent if target.name == INDEX_NAME else target
        self.token, self.fd = "", -1
        self._what, self._prepare = what, prepare
        self._files: list[Path] = []
        self._made: list[Path] = []
        self._is_ready = self._is_committed = False

    @property
    def claim(self) -> Path:
        """The private name of the target."""
        return _claim(self.target, self.token)

    def __enter__(self) -> Commit:
        """Make the claim."""
        try:
            with self.step():
                if self.comm.rank == 0:
                    self._open_place()
            self.token, made = share_text(self.comm.control, f"{self.token} {len(self._made)}")[0].split()
            self._made = [self.path, *self.path.parents][: int(made)]
            with self.step():
                if self.fd < 0:
                    self.fd = os.open(self.claim, os.O_RDWR)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def step(self) -> collective_step:
        """Return a block for a part of the writing that each rank does by itself."""
        return collective_step(self.comm, self._what, path=self.path)

    def data_file(self, number: int, count: int) -> Path:
        """Return the name of a data file, `number` of `count`, which this rank is about to make."""
        name = f"shard-{self.token}-{number:05d}-of-{count:05d}.safetensors"
        self._files.append(self.target.with_name(name))
        return self._files[-1]

    def rename(self, file: str, name: str) -> None:
        """Give a data file another name, before the commit."""
        self._files.append(self.target.with_name(name))
        os.replace(self.target.with_name(file), self._files[-1])

    def commit(
        self, said: str = "", complete: Callable[[Sequence[str]], object] = lambda texts: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Put the new checkpoint in place, for good."""
        self._is_ready = True  # once rank 0 has heard of all ranks it may commit
        texts = share_text(self.comm.control, said)
        with self.step():
            if self.comm.rank == 0:
                self._publish(texts, complete, after)
        self._is_committed = True

    def _open_place(self) -> None:
        """Make the folder, clear it, and make a claim that is locked as long as this process lives."""
        if self.target.name == INDEX_NAME:
            self._made = missing_folders(self.path)
        for folder in reversed(self._made):
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)
        with suppress(FileNotFoundError):  # any other error is one of the rename as well
            if not stat.S_ISREG(os.stat(self._final).st_mode):
                raise CheckpointError(
                    f"{self._final}: is not a regular file, and a save does not replace it: give another path, or "
                    "remove it"
                )
        with suppress(OSError):
            _sweep(self.target)
        while True:
            self.token = secrets.token_hex(6)
            self.fd = os.open(self.claim, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            if _lock(self.fd) and os.fstat(self.fd).st_nlink:
                break
            os.close(self.fd)  # another save has just taken it for a leftover
            self.fd = -1
        if self._prepare is not None:
            self._prepare(self.fd)

    def _publish(
        self, texts: Sequence[str], complete: Callable[[Sequence[str]], object], after: Callable[[], object]
    ) -> None:
        complete(texts)
        os.fsync(self.fd)
        sync_folder(self.target.parent)  # the names of data files, before the index that speaks of them
        try:
            os.replace(self.claim, self._final)  # the commit
        except FileNotFoundError as error:
            if not os.path.isdir(self.target.parent):  # somebody has removed all of it
                raise
            raise CheckpointError(
                f"{self.path}: another save removed {self.claim.name}: one save at a time into a place whose file "
                "system has no locks; save again"
            ) from error
        except OSError as error:
            if self._in_place() is False:
                raise
            raise NotDurable(  # a network may lose the answer alone
                f"{self.path}: renaming {self.claim.name} failed ({error.strerror}), and may have happened all the "
                "same: the old checkpoint or the new one is in place, whole; the files of both are kept"
            ) from error
        self._is_committed = True
        try:
            sync_folder(self.target.parent)
        except OSError as error:  # the old checkpoint's files stay: its index may come back
            raise NotDurable(
                f"{self.path}: the new checkpoint is in place and whole, but syncing its folder failed "
                f"({error.strerror}): if the machine stops now the old one may be back; the files of both are kept"
            ) from error
        for action in (after, lambda: _sweep(self.target)):
            with suppress(Exception):  # the new checkpoint is in place, whatever goes wrong now
                action()

    def is_in_place(self) -> bool:
        """Say whether the checkpoint in place is this one: another save may have replaced it meanwhile."""
        return self._in_place() is True

    def _in_place(self) -> bool | None:
        """Return whether the claim is what lies at the target; None where the system does not say."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self._final, follow_symlinks=False))
        except FileNotFoundError:
            return False
        except OSError:
            return None

    def _has_committed(self, error: BaseException) -> bool | None:
        """Return whether the new checkpoint was put in place; None where this rank does not know."""
        if self._is_committed:
            return True
        if not self._is_ready:
            return False
        agreed = isinstance(error, LowshardError) and not isinstance(error, CommError)
        if agreed and self.comm.rank:
            return False  # rank 0 said so
        found = self._in_place()
        return found if found or self.comm.rank == 0 else None

    def _leave(self, error: BaseException | None) -> None:
        """Close the claim; after an error, say which checkpoint is in place, and remove the new one where it is not."""
        try:
            if error is None or isinstance(error, NotDurable):
                return
            committed = self._has_committed(error)
            if committed:
                error.add_note(f"{self.path}: the new checkpoint is in place and whole")
            elif committed is None:
                error.add_note(
                    f"{self.path}: this rank does not know whether the new checkpoint is in place: it is the new one "
                    "or the old one, whole; nothing was removed here, the next save removes what is left over"
                )
            else:
                self._remove()
                error.add_note(f"{self.path}: nothing has changed there; the new checkpoint is not in place")
        finally:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def _remove(self) -> None:
        for file in [self.claim, *self._files] if self.token else []:
            with suppress(OSError):  # the next save tries again
                file.unlink(missing_ok=True)
        for folder in self._made:
            with suppress(OSError):  # others still have files in it; the last one removes it
                folder.rmdir()


def remove_leftovers(path: Path) -> list[str]:
    """Remove what killed saves left of a sharded checkpoint, given by its folder, or of a merged file.

    The checkpoint in place and files of a save that still runs stay.

    Returns:
        The names of the files removed.

    Raises:
        CheckpointError: the folder cannot be read or synced.
    """
    path = check_path(path, "a save is known by the path of its folder or file", CheckpointError)
    try:
        return _sweep(path / INDEX_NAME if _is_folder(path) else path)
    except OSError as error:
        raise CheckpointError(f"{path}: leftovers of saves cannot be removed: {error}") from error


def _is_folder(path: Path) -> bool:
    """Say whether a path is a folder; raise OSError where the system does not tell, as not every `Path.is_dir` does."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _sweep(target: Path) -> list[str]:
    # The last rename may be on no disk yet: until it is, the checkpoint before it may come back.
    sync_folder(target.parent)
    names = sorted(os.listdir(target.parent))
    claimed = re.compile(rf"{re.escape(_stem(target))}\.({TOKEN})\.tmp")
    data: dict[str, str] = {}
    if target.name == INDEX_NAME:
        data = {name: found[1] for name in names if (found := DATA_NAME.fullmatch(name))}
    tokens = {found[1] for name in names if (found := claimed.fullmatch(name))} | set(data.values())
    removed: list[str] = []
    ended = {token for token in sorted(tokens) if _remove_dead(_claim(target, token), removed)}
    try:  # read after the claims: a save among them may have committed meanwhile
        kept = set(read_index(target).files) if data and os.path.lexists(target) else set()
    except CheckpointError:
        return removed  # a damaged index, or a link whose file is away, does not say which files are its own
    old = [name for name, token in data.items() if token in ended and name not in kept]
    forget(target.parent, old)
    for name in old:
        _remove_dead(target.with_name(name), removed)
    return removed


def _remove_dead(path: Path, removed: list[str]) -> bool:
    """Remove a file unless a process that lives has locked it, and note its name; return whether it is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:  # another user's
        return False
    try:
        if not _lock(fd):
            return False
        path.unlink(missing_ok=True)
        removed.append(path.name)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Lock a file; return False where another process has done so. Where the file system has no locks, all are free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _claim(target: Path, token: str) -> Path:
    return target.with_name(f"{_stem(target)}.{token}.tmp")


def _stem(target: Path) -> str:
    """Return what the names of all claims on a target begin with."""
    name = os.fsencode(target.name)
    if len(name) > _LONG_BYTES:
        return f".{hashlib.blake2b(name, digest_size=16).hexdigest()}"
    return f".{target.name}"


def missing_folders(folder: Path) -> list[Path]:
    """Return a folder and those above it that do not exist, innermost first."""
    found: list[Path] = []
    while not folder.exists():
        found.append(folder)
        folder = folder.parent
    return found


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no folders
            raise
    finally:
        os.close(fd)
