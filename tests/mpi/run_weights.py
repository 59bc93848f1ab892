"""Run by every rank of a job: a checkpoint saved, loaded by every strategy, and the time and memory that takes."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi4py import MPI
from support import mode
from support.checkpoints import attention_and_more, local_of, same, state_of, values_of

from lowshard import comm as lc
from lowshard.checkpoint import Catalog
from lowshard.tiling import Tiling
from lowshard.weights import (
    LoadPlan,
    LoadReport,
    NamePatterns,
    Sizes,
    load,
    load_sharded,
    nodes_of,
    plan_load,
    save,
)  # fmt: skip
from lowshard.weights.load_plan import STRATEGIES

HIDDEN, INNER, HEADS, KV, LAYERS = 1024, 2816, 16, 4, 8


def memory_bytes() -> int:
    """Return the anonymous and shared-memory pages of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(li.split()[1]) * 1024 for li in lines if li.startswith(("RssAnon", "RssShmem")))


class Peak:
    """Samples this process's memory in a thread."""

    def __init__(self) -> None:
        self.most = memory_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, memory_bytes())

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            self.most = max(self.most, memory_bytes())


def check_values(folder: Path, comm: lc.Communicator) -> None:
    """Save over these ranks and load by every strategy."""
    tilings = attention_and_more(comm.size)
    values = values_of(tilings)
    for merged in (False, True):
        path = folder / f"small{int(merged)}"
        save(path, state_of(values, tilings, comm.rank), comm, merged=merged)
        for strategy in STRATEGIES:
            plan = plan_load(path, tilings, strategy=strategy, nodes=nodes_of(comm))  # type: ignore[arg-type]
            reports: list[LoadReport] = []
            found = load(path, plan, comm, reports=reports)
            assert reports[0].read_bytes == plan.read_bytes(comm.rank), strategy
            assert reports[0].sent_bytes == plan.sent_bytes(comm.rank), strategy
            for name, tiling in tilings.items():
                right = local_of(values[name], tiling, comm.rank)
                assert right is not None
                assert same(found[name], right), (name, strategy)
        own = load_sharded(path, comm)  # without a plan
        assert merged or dict(own.tilings) == tilings
        for name, array in own.items():
            right = local_of(values[name], own.tilings[name], comm.rank)
            assert right is not None
            assert same(array, right), name


def model() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama of about 100 million parameters."""
    dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (8192, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (HIDDEN, HIDDEN), f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV * dim, HIDDEN), f"{at}self_attn.v_proj.weight": (KV * dim, HIDDEN),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN), f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER), f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
        }  # fmt: skip
    return shapes


def timed(comm: lc.Communicator, job: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank."""
    comm.barrier()
    start = time.perf_counter()
    job()
    most = np.array([time.perf_counter() - start])
    comm.all_reduce(most, most, op="max")
    return float(most[0])


def quick_read(files: tuple[str, ...], offset: int, size: int) -> None:
    """Read a run of some files, one behind the other, into one array: the quickest read there is."""
    buffer, done = memoryview(np.empty(size, np.uint8)), 0
    for file in files:
        length = Path(file).stat().st_size
        if offset < length and done < size:
            with open(file, "rb", buffering=0) as f:
                f.seek(offset)
                while done < size and (got := f.readinto(buffer[done:])):
                    done += got
        offset = max(0, offset - length)
    assert done == size


def prepare(folder: Path, comm: lc.Communicator) -> None:
    """Save a model plain, as each rank's part, and as two ranks' parts."""
    shapes = model()
    folder.mkdir(exist_ok=True)
    plain = folder / "model.safetensors"
    if comm.rank == 0:
        rng = np.random.default_rng(0)
        whole = {n: Tiling.whole(s, "float32") for n, s in shapes.items()}
        save(plain, {n: (whole[n], rng.random(s, dtype=np.float32)) for n, s in shapes.items()}, merged=True)
    comm.barrier()
    for form, ranks in (("sharded", comm.size), ("halves", 2)):
        tilings = cut(ranks, comm)
        mine = load(plain, plan_load(plain, tilings, comm.size), comm)
        save(folder / form, {n: (t, mine.get(n)) for n, t in tilings.items()}, comm)


def cut(ranks: int, comm: lc.Communicator) -> dict[str, Tiling]:
    """Return the model in tensor parallel over the first ranks."""
    shapes = model()
    made = NamePatterns.load("llama").strategies(shapes, ranks, Sizes(HEADS, KV))
    return {n: made[n].layout(s, "float32").widened(comm.size) for n, s in shapes.items()}


def cases(folder: Path, comm: lc.Communicator) -> Iterator[tuple[Catalog, LoadPlan]]:
    """Yield each form with each strategy."""
    plain, sharded, halves = folder / "model.safetensors", folder / "sharded", folder / "halves"
    made = [(plain, "own-slice"), (plain, "node-leader"), (sharded, "own-slice")]
    if mode.full():
        made += [(sharded, "node-leader"), (halves, "own-slice"), (halves, "node-leader")]
    tilings = cut(comm.size, comm)
    for path, strategy in made:
        catalog = Catalog.open(path)
        yield catalog, plan_load(catalog, tilings, strategy=strategy)  # type: ignore[arg-type]


def measure(folder: Path, comm: lc.Communicator) -> None:
    """Compare loading, without and with checksums, with the quickest read of the same bytes by the same ranks.

    `ratio` sets the quickest of each beside one another, `median_ratio` is the median of the pairs.
    """
    rows = []
    for catalog, plan in cases(folder, comm):
        share = plan.read_bytes(comm.rank)
        offset = sum(plan.read_bytes(r) for r in range(comm.rank))
        jobs: list[Callable[[], object]] = [
            partial(quick_read, catalog.files, offset, share),
            partial(load, catalog, plan, comm, verify=False),
            partial(load, catalog, plan, comm),
        ]
        seconds = np.array([[timed(comm, job) for job in jobs] for _ in range(9)])
        quickest, medians = seconds.min(0), np.median(seconds[:, 1:] / seconds[:, :1], 0)
        rows.append({
            "form": Path(catalog.where).stem, "strategy": plan.strategy,
            "ratio": quickest[1] / quickest[0], "median_ratio": medians[0],
            "verified_ratio": quickest[2] / quickest[0], "verified_median_ratio": medians[1],
        })  # fmt: skip
    if comm.rank == 0:
        print(json.dumps(rows))


def measure_memory(folder: Path, comm: lc.Communicator) -> None:
    """Set the most memory that a rank's process holds while it loads beside its shards."""
    rows = []
    for catalog, plan in cases(folder, comm):
        with Peak() as peak:
            held = load(catalog, plan, comm)
        del held
        over = np.array([peak.most - plan.held_bytes(comm.rank)], np.int64)
        comm.all_reduce(over, over, op="max")
        rows.append({"strategy": plan.strategy, "over_shards_mb": over[0] / 1e6})
    if comm.rank == 0:
        print(json.dumps(rows))


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as world:
    task, target = sys.argv[1], Path(sys.argv[2])
    if task == "values":
        check_values(target, world)
        if world.rank == 0:
            print(f"all right on {world.size} ranks")
    else:
        {"prepare": prepare, "measure": measure, "memory": measure_memory}[task](target, world)
