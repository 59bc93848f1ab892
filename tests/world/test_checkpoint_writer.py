"""Writing by many ranks: one plain file, each byte written once; or, on any failure, nothing at all."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from support.layouts import layouts, meshes

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, dtypes, weights
from lowshard import comm as lc
from lowshard.checkpoint import CheckpointReader
from lowshard.checkpoint.header import encode_header
from lowshard.errors import (
    BufferMismatchError,
    CheckpointError,
    LayoutError,
    LowshardError,
    MeshError,
    MismatchError,
)

Globals = dict[str, tuple[Layout, np.ndarray]]


def random_array(layout: Layout, seed: int) -> np.ndarray:
    """Return a global array of random bytes (of valid values for bool)."""
    raw = np.random.default_rng(seed).integers(0, 256, layout.size_bytes, np.uint8)
    return (raw & 1 if layout.dtype == "bool" else raw).view(layout.numpy_dtype).reshape(layout.shape)


def sliced(value: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    return np.asarray(value[tuple(slice(a, b) for a, b in layout.box(rank))])


def local_state(state: Globals, rank: int) -> dict[str, tuple[Layout, np.ndarray]]:
    return {name: (layout, sliced(value, layout, rank)) for name, (layout, value) in state.items()}


def expected_bytes(state: Globals, metadata: dict[str, str] | None = None) -> bytes:
    head, entries = encode_header({n: (lay.dtype, lay.shape) for n, (lay, _) in state.items()}, metadata)
    return head + b"".join(state[e.name][1].tobytes() for e in entries)


def write_merged(path: Any, state: Any, comm: lc.Communicator, metadata: Any = None) -> None:
    weights.save(path, state, comm, merged=True, metadata=metadata)


def write(path: Path, state: Globals, size: int, metadata: dict[str, str] | None = None) -> None:
    lc.run_loopback(size, lambda c: write_merged(path, local_state(state, c.rank), c, metadata), 30)


def outcomes(size: int, job: Callable[[lc.Communicator], None]) -> list[BaseException | None]:
    """Run a job on all ranks and return what each raised; none may take another down."""

    def attempt(comm: lc.Communicator) -> BaseException | None:
        try:
            job(comm)
        except Exception as error:
            return error
        return None

    return lc.run_loopback(size, attempt, 30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sharded_state_gives_the_plain_file_and_reads_back_in_any_other_layout(
    tmp_path: Path, data: st.DataObject
) -> None:
    mesh = data.draw(meshes())
    names = data.draw(st.lists(st.text("ab.0", min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    seed = data.draw(st.integers(0, 2**31))
    state: Globals = {}
    for place, name in enumerate(names):
        layout = data.draw(layouts(mesh, partial=False))
        state[name] = (layout, random_array(layout, seed + place))
    metadata = data.draw(st.none() | st.just({"format": "np"}))
    path = tmp_path / "f.safetensors"
    written: list[int] = []
    real = os.pwrite

    def counting(fd: int, part: Any, at: int) -> int:
        done = real(fd, part, at)
        written.append(done)  # from several threads
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", counting)
        write(path, state, mesh.size, metadata)
    content = path.read_bytes()
    assert content == expected_bytes(state, metadata)
    assert sum(written) == len(content)  # each byte by one rank
    assert os.listdir(tmp_path) == [path.name]
    if all(dtypes.get(layout.dtype).in_numpy for layout, _ in state.values()):
        assert content == save({name: value for name, (_, value) in state.items()}, metadata)
    with CheckpointReader(path) as reader:
        for name, (layout, value) in state.items():
            other = data.draw(layouts(shape=layout.shape, dtype=layout.dtype, partial=False))
            for rank in range(other.mesh.size):
                assert reader.read(name, other, rank).tobytes() == sliced(value, other, rank).tobytes()


def small(size: int = 4) -> Globals:
    """Return a state over 4 ranks (2 x 2): cut twice, once, and not at all."""
    mesh = DeviceMesh((size // 2, 2), ("dp", "tp"))
    made = {
        "both": Layout.from_spec(mesh, (13, 7), "f32", ("tp", "dp")),
        "nested": Layout.from_spec(mesh, (9, 3), "bf16", (("tp", "dp"), None)),
        "rows": Layout(mesh, (10, 64), "f16", (Replicated(), Sharded(0))),
        "all": Layout(mesh, (5,), "i64", (Replicated(), Replicated())),
        "none": Layout(mesh, (0, 3), "u8", (Sharded(0), Sharded(1))),
        "step": Layout(mesh, (), "i32", (Replicated(), Replicated())),
    }
    return {name: (layout, random_array(layout, i)) for i, (name, layout) in enumerate(made.items())}


def test_each_element_is_written_once_and_copies_are_spread_over_the_ranks(tmp_path: Path) -> None:
    whole_everywhere = Layout(
        DeviceMesh((2, 2), ("dp", "tp")), (1000, 600), "f32", (Replicated(), Replicated())
    )
    state = small() | {"copies": (whole_everywhere, random_array(whole_everywhere, 7))}
    written = dict.fromkeys(range(4), 0)
    ranks: dict[int, int] = {}
    real = os.pwrite

    def counting(fd: int, part: Any, at: int) -> int:
        done = real(fd, part, at)
        written[ranks[threading.get_ident()]] += done
        return done

    def job(comm: lc.Communicator) -> None:
        ranks[threading.get_ident()] = comm.rank
        write_merged(tmp_path / "f", local_state(state, comm.rank), comm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", counting)
        lc.run_loopback(4, job, 30)
    whole = expected_bytes(state)
    assert sum(written.values()) == len(whole)
    head = len(whole) - sum(layout.size_bytes for layout, _ in state.values())
    written[0] -= head
    # A large copy is cut, small ones are dealt out.
    assert min(written.values()) > 0.4 * max(written.values())


def test_an_existing_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old" * 10000)
    os.link(path, tmp_path / "old")
    write(path, small(), 4)
    assert path.read_bytes() == expected_bytes(small())
    assert (tmp_path / "old").read_bytes() == b"old" * 10000  # a new file, not the old one overwritten
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_names_may_come_in_any_order_and_arrays_need_not_be_contiguous(tmp_path: Path) -> None:
    state = small()

    def job(comm: lc.Communicator) -> None:
        mine = local_state(state, comm.rank)
        turned = list(mine.items())[:: -1 if comm.rank % 2 else 1]
        loose = {n: (lay, np.asfortranarray(a) if a.ndim > 1 else a) for n, (lay, a) in turned}
        weights.save(str(tmp_path / "f"), loose, comm, merged=True)

    lc.run_loopback(4, job, 30)
    assert (tmp_path / "f").read_bytes() == expected_bytes(state)


def test_ranks_outside_the_mesh_take_part_with_none(tmp_path: Path) -> None:
    mesh = DeviceMesh((2,), ("tp",), ranks=(3, 1))
    layout = Layout(mesh, (5, 2), "f32", (Sharded(0),))
    value = random_array(layout, 0)

    def job(comm: lc.Communicator) -> None:
        local = sliced(value, layout, comm.rank) if comm.rank in mesh else None
        write_merged(tmp_path / "f", {"w": (layout, local)}, comm)

    lc.run_loopback(4, job, 30)
    assert (tmp_path / "f").read_bytes() == expected_bytes({"w": (layout, value)})

    errors = outcomes(4, lambda c: write_merged(tmp_path / "g", {"w": (layout, value[:3])}, c))
    assert {type(e) for e in errors} == {BufferMismatchError}
    assert "rank 0 is not in mesh" in str(errors[0])


Spoil = Callable[[dict[str, Any], int], dict[str, Any]]


def on_rank_2(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Spoil:
    return lambda state, rank: change(state) if rank == 2 else state


WRONG: dict[str, tuple[Spoil, type[LowshardError], str]] = {
    "wrong shape": (
        on_rank_2(lambda s: s | {"rows": (s["rows"][0], s["rows"][1][1:])}),
        BufferMismatchError, r"rank 2: .*tensor 'rows': rank 2 of layout .* float16\[5, 64\], got float16\[4, 64\]",
    ),
    "wrong dtype": (
        on_rank_2(lambda s: s | {"rows": (s["rows"][0], s["rows"][1].view(np.int16))}),
        BufferMismatchError, "got int16",
    ),
    "other byte order": (
        on_rank_2(lambda s: s | {"rows": (s["rows"][0], s["rows"][1].astype(">f2"))}), BufferMismatchError, "got >f2",
    ),
    "no array": (
        on_rank_2(lambda s: s | {"rows": (s["rows"][0], None)}), BufferMismatchError, "NumPy array, got NoneType",
    ),
    "a list": (
        on_rank_2(lambda s: s | {"step": (s["step"][0], [1])}), BufferMismatchError, "NumPy array, got list",
    ),
    "no layout": (on_rank_2(lambda s: s | {"step": (None, s["step"][1])}), LayoutError, "got NoneType first"),
    "not a pair": (on_rank_2(lambda s: s | {"step": s["step"][1]}), CheckpointError, "rank 2: .*local array"),
    "not a mapping": (on_rank_2(lambda s: 5), CheckpointError, "rank 2: .*mapping of names"),  # type: ignore[arg-type,return-value]
    "partial": (
        lambda s, r: {"p": (Layout(s["all"][0].mesh, (2,), "f32", (Partial(), Sharded(0))), np.zeros(1, "f4"))},
        LayoutError, "is partial, .* reduce it first",
    ),
    "mesh too large": (
        lambda s, r: {"w": (Layout(DeviceMesh((8,), ("a",)), (8,), "f32", (Sharded(0),)), np.zeros(1, "f4"))},
        MeshError, "has rank 4, the communicator has 4 ranks",
    ),
    "reserved name": (lambda s, r: {"__metadata__": s["step"]}, CheckpointError, "a name is Unicode text other"),
    "name missing on a rank": (
        on_rank_2(lambda s: {n: v for n, v in s.items() if n != "step"}), MismatchError, r"ranks \[2\] have",
    ),
    "other layout on a rank": (
        on_rank_2(lambda s: s | {"none": (s["none"][0].with_spec(("dp", None)), np.zeros((0, 3), "u1"))}),
        MismatchError, r"ranks \[2\] have",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "kind", "text"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_on_any_rank_raise_one_error_on_all_before_a_file_is_made(
    tmp_path: Path, spoil: Spoil, kind: type[LowshardError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    opened: list[str] = []
    real = os.open

    def noting(name: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(str(name))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", noting)
    errors = outcomes(4, lambda c: write_merged(path, spoil(local_state(small(), c.rank), c.rank), c))
    assert [type(e) for e in errors] == [kind] * 4
    assert len({str(e) for e in errors}) == 1
    with pytest.raises(kind, match=text):
        raise errors[0] or AssertionError
    assert not [name for name in opened if str(tmp_path) in name]
    assert path.read_bytes() == b"old"


def test_other_metadata_or_another_path_on_a_rank_is_a_mismatch(tmp_path: Path) -> None:
    for job in (
        lambda c: write_merged(tmp_path / "f", local_state(small(), c.rank), c, {"rank": str(c.rank)}),
        lambda c: write_merged(tmp_path / f"f{c.rank}", local_state(small(), c.rank), c),
    ):
        assert [type(e) for e in outcomes(4, job)] == [MismatchError] * 4
    assert os.listdir(tmp_path) == []


def place_missing(folder: Path) -> Path:
    return folder / "gone" / "f"


def place_folder(folder: Path) -> Path:
    (folder / "taken").mkdir()
    return folder / "taken"


def place_below_a_file(folder: Path) -> Path:
    (folder / "file").write_bytes(b"")
    return folder / "file" / "f"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (place_missing, "rank 0: .*there is no folder .*gone; make it first"),
        (place_folder, "taken: is a directory"),
        (place_below_a_file, "there is no folder"),
        (lambda folder: folder / ("n" * 300), "File name too long"),
        (lambda folder: Path("/"), "give the path of the file"),
    ],
    ids=["no folder", "a folder", "below a file", "long name", "root"],
)
def test_a_place_where_no_file_can_be_is_refused(
    tmp_path: Path, place: Callable[[Path], Path], text: str
) -> None:
    path = place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    errors = outcomes(4, lambda c: write_merged(path, local_state(small(), c.rank), c))
    assert [type(e) for e in errors] == [CheckpointError] * 4
    with pytest.raises(CheckpointError, match=text):
        raise errors[3] or AssertionError
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_larger_than_the_disk_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    layout = Layout(DeviceMesh((2,), ("a",)), (2**58,), "f32", (Sharded(0),))
    huge = np.broadcast_to(np.float32(1), (2**57,))  # 4 bytes of memory
    errors = outcomes(2, lambda c: write_merged(path, {"w": (layout, huge)}, c))
    assert [type(e) for e in errors] == [CheckpointError] * 2
    total_bytes = encode_header({"w": ("f32", layout.shape)})[1][0].stop
    assert f"takes {total_bytes} bytes" in str(errors[1])
    assert os.listdir(tmp_path) == ["f"]
    assert path.read_bytes() == b"old"


class Faults:
    """Makes a real system call fail on one rank, at its n-th use by that rank."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, call: str, rank: int, nth: int, error: BaseException
    ) -> None:
        self.rank, self.nth, self.error = rank, nth, error
        self.used, self.fired = 0, False
        self.idents: dict[int, int] = {}
        self.real = getattr(os, call)
        monkeypatch.setattr(os, call, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.idents.get(threading.get_ident()) == self.rank:
            self.used += 1
            if self.used == self.nth:
                self.fired = True
                raise self.error
        return self.real(*args, **kwargs)


@pytest.mark.parametrize(
    ("call", "rank", "nth", "error", "kind"),
    [
        ("pwrite", 2, 5, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), CheckpointError),
        ("pwrite", 0, 1, OSError(errno.EIO, os.strerror(errno.EIO)), CheckpointError),
        ("pwrite", 0, 3, OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), CheckpointError),
        ("pwrite", 3, 1, MemoryError("no memory"), LowshardError),
        ("posix_fallocate", 0, 1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), CheckpointError),
        ("fsync", 1, 1, OSError(errno.EIO, os.strerror(errno.EIO)), CheckpointError),
        ("open", 1, 1, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), CheckpointError),
        ("replace", 0, 1, PermissionError(errno.EACCES, os.strerror(errno.EACCES)), CheckpointError),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__ if isinstance(v, Exception) else None,
)
def test_a_failure_in_the_middle_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, rank: int, nth: int, error: Exception,
    kind: type[LowshardError],
) -> None:  # fmt: skip
    path = tmp_path / "f"
    write(path, small(), 4)
    old = path.read_bytes()
    faults = Faults(monkeypatch, call, rank, nth, error)

    def job(comm: lc.Communicator) -> None:
        faults.idents[threading.get_ident()] = comm.rank
        comm.barrier()
        new = {name: (lay, np.zeros_like(value)) for name, (lay, value) in small().items()}
        write_merged(path, local_state(new, comm.rank), comm)

    found = outcomes(4, job)
    assert faults.fired
    assert [type(e) for e in found] == [kind] * 4
    assert len({str(e) for e in found}) == 1
    text = error.strerror if isinstance(error, OSError) else "MemoryError: no memory"
    assert f"rank {rank}: " in str(found[0])
    assert str(text) in str(found[0])
    assert os.listdir(tmp_path) == ["f"]
    assert path.read_bytes() == old


def test_file_systems_without_fallocate_are_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch, "posix_fallocate", 0, 1, OSError(errno.EOPNOTSUPP, "not supported"))

    def job(comm: lc.Communicator) -> None:
        faults.idents[threading.get_ident()] = comm.rank
        write_merged(tmp_path / "f", local_state(small(), comm.rank), comm)

    lc.run_loopback(4, job, 30)
    assert faults.fired
    assert (tmp_path / "f").read_bytes() == expected_bytes(small())


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: real(fd, part[:5], at))
    write(tmp_path / "f", small(), 4)
    assert (tmp_path / "f").read_bytes() == expected_bytes(small())
