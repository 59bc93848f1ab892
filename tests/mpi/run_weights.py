"""Run by every rank of a job: a checkpoint saved, loaded by every strategy, and the time and memory that takes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi4py import MPI
from support import mode
from support.checkpoints import attention_and_more, local_of, same, state_of, values_of

from lowshard import comm as lc
from lowshard.checkpoint import Catalog, CheckpointReader
from lowshard.tiling import Tiling
from lowshard.weights import NamePatterns, Sizes, load, nodes_of, plan_load, save
from lowshard.weights.plan import STRATEGIES

HIDDEN, INNER, HEADS, KV, LAYERS = 1024, 2816, 16, 4, 8


def memory_bytes() -> int:
    """Return the anonymous and shared-memory pages of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(li.split()[1]) * 1024 for li in lines if li.startswith(("RssAnon", "RssShmem")))


class Peak:
    """Samples this process's memory in a thread."""

    def __init__(self) -> None:
        self.before = self.most = memory_bytes()
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
            found = load(path, plan, comm)
            for name, tiling in tilings.items():
                right = local_of(values[name], tiling, comm.rank)
                assert right is not None
                assert same(found[name], right), (name, strategy)


def save_and_die(folder: Path, comm: lc.Communicator, victim: int, nth: int) -> None:
    """Save whole, then again with other values while one rank is killed at its n-th sync."""
    tilings = attention_and_more(comm.size)
    save(folder / "c", state_of(values_of(tilings, 1), tilings, comm.rank), comm)
    real, seen = os.fsync, [0]

    def sync(fd: int) -> None:
        seen[0] += 1
        if comm.rank == victim and seen[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    os.fsync = sync
    save(folder / "c", state_of(values_of(tilings, 2), tilings, comm.rank), comm)


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


def measure(folder: Path, comm: lc.Communicator) -> None:
    """Compare loading with a plain read of the same bytes, and memory with the shards."""
    shapes = model()
    plain = folder / "model.safetensors"
    whole = {n: Tiling.from_pieces(s, "float32", [[tuple((0, x) for x in s)]]) for n, s in shapes.items()}
    if comm.rank == 0:
        rng = np.random.default_rng(0)
        save(plain, {n: (whole[n], rng.random(s, dtype=np.float32)) for n, s in shapes.items()}, merged=True)
    comm.barrier()
    made = NamePatterns.load("llama").strategies(shapes, comm.size, Sizes(HEADS, KV))
    tilings = {n: made[n].layout(s, "float32") for n, s in shapes.items()}
    sharded = folder / "sharded"
    with CheckpointReader(plain) as reader:
        mine = {n: local_of(reader.read_box(n), t, comm.rank) for n, t in tilings.items()}
    save(sharded, {n: (t, mine[n]) for n, t in tilings.items()}, comm, strategies=made)
    held = sum(a.nbytes for a in mine.values() if a is not None)
    del mine
    rows = []
    cases = [("plain", plain, "own-slice"), ("sharded", sharded, "own-slice")]
    if mode.full():
        cases += [("plain", plain, "node-leader"), ("plain", plain, "root-scatter")]
    for label, path, strategy in cases:
        catalog = Catalog.open(path)
        plan = plan_load(catalog, tilings, strategy=strategy)  # type: ignore[arg-type]
        share = plan.read_bytes(comm.rank)
        offset = sum(plan.read_bytes(r) for r in range(comm.rank))
        whole_file = path if path.is_file() else None

        def plain_read(file: Path = whole_file or plain, at: int = offset, size: int = share) -> None:
            with open(file, "rb", buffering=0) as f:
                f.seek(at)
                buffer = memoryview(np.empty(size, np.uint8))
                done = 0
                while done < size and (got := f.readinto(buffer[done:])):
                    done += got

        def by_plan(path: Path = path, plan: object = plan, verify: bool = False) -> None:
            load(path, plan, comm, verify=verify)  # type: ignore[arg-type]

        pairs = [(timed(comm, plain_read), timed(comm, by_plan)) for _ in range(7)]
        plain_s, load_s = (min(p[k] for p in pairs) for k in range(2))
        ratios = [b / a for a, b in pairs]
        with Peak() as peak:
            found = load(path, plan, comm)
        over = np.array([peak.most - peak.before - held, peak.most - held], np.int64)
        comm.all_reduce(over, over, op="max")
        del found
        verified_s = min(timed(comm, lambda: by_plan(verify=True)) for _ in range(3))
        rows.append({
            "form": label, "strategy": strategy, "ratio": load_s / plain_s, "median_ratio": float(np.median(ratios)),
            "gb_per_s": sum(plan.read_bytes(r) for r in range(comm.size)) / load_s / 1e9,
            "over_shards_mb": over[0] / 1e6, "with_python_mb": over[1] / 1e6, "verified_ratio": verified_s / plain_s,
        })  # fmt: skip
    if comm.rank == 0:
        print(json.dumps(rows))


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as world:
    target = Path(sys.argv[2])
    if sys.argv[1] == "values":
        check_values(target, world)
        if world.rank == 0:
            print(f"all right on {world.size} ranks")
    elif sys.argv[1] == "die":
        save_and_die(target, world, int(sys.argv[3]), int(sys.argv[4]))
    else:
        measure(target, world)
