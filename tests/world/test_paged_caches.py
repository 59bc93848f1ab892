"""Pages of key-value caches: tokens lie where the tables say, one message a pair, lies are found before a write."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import mode
from support.mutation import mutated

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.errors import (
    BufferMismatchError,
    LayoutError,
    LowshardError,
    MeshError,
    MismatchError,
    PlanError,
    VerificationError,
)
from lowshard.reshard import PagedLayout, PagePair, PagePlan, digest_pages, move_pages, page_move, plan_pages

RANKS = 4
ORDERS = ("pthd", "phtd", "kpthd", "pkthd", "lkpthd", "lpkhtd", "hptd", "lptdh")
Caches = dict[int, dict[str, np.ndarray]]


class Case:
    """Two paged caches over the ranks of a job, sequences that go from one to the other, and what they hold."""

    def __init__(self, name: str, ranks: int = RANKS) -> None:
        rng = self.rng = mode.rng(f"pages {name}")
        heads, head_dim = int(rng.choice([1, 2, 3, 4, 6, 8])), int(rng.choice([1, 4, 8]))
        dtype = str(rng.choice(["bfloat16", "float16", "float32", "float8_e4m3fn"]))
        order = str(rng.choice(ORDERS))
        layers = int(rng.integers(1, 4)) if "l" in order else 1
        same = [o for o in ORDERS if set(o) == set(order)]
        self.names = ["k", "v"] if "k" not in order and rng.random() < 0.5 else ["kv"]

        def cache(dims: str) -> PagedLayout:
            counts = [n for n in range(1, ranks + 1) if n <= heads or n % heads == 0]
            tp = int(rng.choice(counts))
            chosen = tuple(int(r) for r in rng.permutation(ranks)[:tp])
            size = int(rng.choice([1, 3, 4, 8]))
            return PagedLayout(
                40 // size + 30, size, heads, head_dim, dtype, dims=dims, layers=layers, ranks=chosen
            )

        self.src, self.dst = cache(order), cache(str(rng.choice(same)))
        lengths = [int(n) for n in rng.integers(0, 14, int(rng.integers(1, 4)))]
        self.sequences = {
            f"s{i}": (there, here, n)
            for i, (n, there, here) in enumerate(
                zip(lengths, self._tables(self.src, lengths), self._tables(self.dst, lengths), strict=True)
            )
        }
        self.plan = plan_pages(self.src, self.dst, self.sequences)

    def _tables(self, layout: PagedLayout, lengths: list[int]) -> list[list[int]]:
        free = [int(p) for p in self.rng.permutation(layout.pages)]
        return [[free.pop() for _ in range(-(-n // layout.page_tokens))] for n in lengths]

    def filled(self, layout: PagedLayout) -> Caches:
        """Return random caches in which ranks with the same heads hold the same."""
        row = dtypes.get(layout.dtype).numpy
        made: Caches = {}
        for part in range(layout.parts):
            ranks = layout.holders(part)
            shape = layout.local_shape(ranks[0])
            size = int(np.prod(shape)) * row.itemsize
            values = {n: self.rng.integers(0, 256, size, dtype=np.uint8) for n in self.names}
            for rank in ranks:
                made[rank] = {n: v.copy().view(row).reshape(shape) for n, v in values.items()}
        return made

    def moved(
        self, src: Caches, dst: Caches, plan: PagePlan | None = None, digests: Any = None, ranks: int = RANKS
    ) -> list[Any]:
        def job(comm: lc.Communicator) -> Any:
            return move_pages(plan or self.plan, src.get(comm.rank), dst.get(comm.rank), comm, digests)

        return lc.run_loopback(ranks, job, 30)

    def digests(self, layout: PagedLayout, caches: Caches, side: int, ranks: int = RANKS) -> dict[str, str]:
        tables = {n: (row[side], row[2]) for n, row in self.sequences.items()}
        rows = lc.run_loopback(ranks, lambda c: digest_pages(layout, tables, caches.get(c.rank), c), 30)
        assert all(row == rows[0] for row in rows)
        return dict(rows[0])


def element(
    layout: PagedLayout, local: np.ndarray, rank: int, page: int, token: int, head: int
) -> np.ndarray:
    """Return a token's elements of one head, [layers, kinds, head_dim] as bytes, by indexing alone."""
    first = layout.heads_of(rank)[0]
    at: dict[str, Any] = {"p": page, "t": token, "h": head - first}
    found = local[tuple(at.get(letter, slice(None)) for letter in layout.dims)]
    left = [letter for letter in layout.dims if letter in "lkd"]
    found = found.transpose([left.index(letter) for letter in "lkd" if letter in left])
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)


def expected(case: Case, src: Caches, dst: Caches) -> Caches:
    """Return the destination as the tables say, token by token and head by head."""
    made = {rank: {n: a.copy() for n, a in arrays.items()} for rank, arrays in dst.items()}
    for there, here, tokens in case.sequences.values():
        for token in range(tokens):
            s, d = (divmod(token, layout.page_tokens) for layout in (case.src, case.dst))
            for head in range(case.src.heads):
                holder = next(
                    r for r in case.src.ranks if case.src.heads_of(r)[0] <= head < case.src.heads_of(r)[1]
                )
                for rank in case.dst.ranks:
                    low, high = case.dst.heads_of(rank)
                    if not low <= head < high:
                        continue
                    for name in case.names:
                        value = element(case.src, src[holder][name], holder, there[s[0]], s[1], head)
                        at: dict[str, Any] = {"p": here[d[0]], "t": d[1], "h": head - low}
                        dims = case.dst.dims
                        view = made[rank][name][tuple(at.get(letter, slice(None)) for letter in dims)]
                        left = [letter for letter in dims if letter in "lkd"]
                        order = [letter for letter in "lkd" if letter in left]
                        shape = [view.shape[left.index(letter)] for letter in order]
                        canonical = value.view(view.dtype).reshape(shape)
                        view[...] = canonical.transpose([order.index(letter) for letter in left])
    return made


def same(a: Caches, b: Caches) -> bool:
    return a.keys() == b.keys() and all(
        x.keys() == b[r].keys() and all(x[n].tobytes() == b[r][n].tobytes() for n in x) for r, x in a.items()
    )


def copied(caches: Caches) -> Caches:
    return {r: {n: a.copy() for n, a in arrays.items()} for r, arrays in caches.items()}


def test_tokens_lie_where_the_tables_say() -> None:
    moved = 0
    for number in range(400 if mode.full() else 40):
        case = Case(f"oracle {number}")
        src, dst = case.filled(case.src), case.filled(case.dst)
        right, before = expected(case, src, dst), copied(src)
        digests = case.digests(case.src, src, 0)
        reports = case.moved(src, dst, digests=digests if number % 2 else None)
        assert same(dst, right), f"case {number}: {case.plan.explain()}"
        assert same(src, before)
        assert case.digests(case.dst, dst, 1) == digests
        count = len(case.names)
        for rank, report in enumerate(reports):
            assert report.messages == case.plan.messages(rank)
            assert report.sent_bytes == count * case.plan.sent_bytes(rank)
        pairs = {(p.src_rank, p.dst_rank) for p in case.plan.pairs if p.src_rank != p.dst_rank}
        assert sum(r.messages for r in reports) == (len(pairs) if case.plan.tokens else 0)
        moved += bool(pairs)
        again = PagePlan.from_json(json.loads(json.dumps(case.plan.to_json())))
        assert again == case.plan
        assert again.digest() == case.plan.digest()
        assert hash(again) == hash(case.plan)
    assert moved > 10


@pytest.mark.parametrize("tp", [(1, 4), (4, 1), (2, 4), (4, 2), (4, 4), (2, 2)])
def test_one_message_goes_from_each_rank_to_each_that_it_gives_anything(tp: tuple[int, int]) -> None:
    """Whatever the numbers of pages, sequences, layers and arrays; counted by the communicator."""
    size = sum(tp)
    src = PagedLayout(64, 4, 8, 16, "bfloat16", dims="lkpthd", layers=3, ranks=tuple(range(tp[0])))
    dst = PagedLayout(16, 16, 8, 16, "bfloat16", dims="lpkhtd", layers=3, ranks=tuple(range(tp[0], size)))
    sequences = {f"s{i}": (range(8 * i, 8 * i + 8), (2 * i, 2 * i + 1), 31) for i in range(6)}
    plan = plan_pages(src, dst, sequences)
    rng = mode.rng("messages")

    def job(comm: lc.Communicator) -> tuple[int, int]:
        own = src if comm.rank < tp[0] else dst
        shape, row = own.local_shape(comm.rank), dtypes.get("bfloat16").numpy
        arrays = {n: rng.integers(0, 9, shape).astype(row) for n in ("layer0", "layer1")}
        comm.traffic.clear()
        given = (arrays, None) if comm.rank < tp[0] else (None, arrays)
        report = move_pages(plan, *given, comm)
        assert comm.traffic.calls["send"] == report.messages == plan.messages(comm.rank)
        assert comm.traffic.sent_bytes == report.sent_bytes + 64 * report.messages
        return report.messages, comm.traffic.calls["recv"]

    rows = lc.run_loopback(size, job, 30)
    wide = max(tp)
    assert sum(sent for sent, _ in rows) == sum(got for _, got in rows) == wide  # one divides the other
    assert len(plan.pairs) == wide


def test_a_cache_is_repacked_in_its_own_place() -> None:
    layout = PagedLayout(8, 2, 2, 4, "float32", ranks=(0, 1))
    plan = plan_pages(layout, layout, {"a": ([7, 1, 5], [0, 1, 2], 6), "b": ([0], [7], 1)})
    caches = {r: {"k": np.random.default_rng(r).random(layout.local_shape(r), np.float32)} for r in range(2)}
    before = copied(caches)
    lc.run_loopback(2, lambda c: move_pages(plan, caches[c.rank], caches[c.rank], c), 30)
    for rank in range(2):
        old, new = before[rank]["k"], caches[rank]["k"]
        assert (new[[0, 1, 2]] == old[[7, 1, 5]]).all()
        assert (new[7, 0] == old[0, 0]).all()
        assert (new[7, 1] == old[7, 1]).all()  # behind the sequence's end nothing is written


# ---- lies


def test_a_wrong_sender_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a plan whose sender ids are swapped moves bytes of the right sizes, and they are wrong."""
    src = PagedLayout(8, 4, 4, 8, "float32", ranks=(0, 1))
    dst = PagedLayout(8, 2, 4, 8, "float32", ranks=(2, 3))
    case = Case.__new__(Case)
    case.rng, case.names, case.src, case.dst = mode.rng("sender"), ["k"], src, dst
    case.sequences = {"a": ([3, 1], [0, 1, 2], 5)}
    case.plan = plan_pages(src, dst, case.sequences)
    held, target = case.filled(src), case.filled(dst)
    right = expected(case, held, target)
    digests = case.digests(src, held, 0)
    swapped = plan_pages(replace(src, ranks=(1, 0)), dst, case.sequences)
    wrong = copied(target)
    case.moved(held, wrong, swapped)  # nothing says what the caches hold, so nothing can be found
    assert not same(wrong, right)  # what the oracle of this file finds
    assert case.digests(dst, wrong, 1) != digests
    before = copied(target)
    with pytest.raises(
        VerificationError, match=r"sequence 'a': what came for it has the digest .* not its own"
    ):
        case.moved(held, target, swapped, digests)
    assert same(target, before)
    case.moved(held, target, digests=digests)
    assert same(target, right)


LIES = {
    "sender": (2, "says that it is from rank 9 to rank"),
    "receiver": (3, "to rank 9, heads"),
    "heads": (4, "heads 9 to"),
    "plan": (0, "is of another plan"),
    "sums": (6, "is damaged: the sums of its bits differ"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_message_that_lies_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    word, said = LIES[lie]
    src, dst = PagedLayout(8, 4, 4, 8, ranks=(0, 1)), PagedLayout(8, 2, 4, 8, ranks=(2, 3))
    plan = plan_pages(src, dst, {"a": ([3, 1], [0, 1, 2], 5)})
    row = dtypes.get("bfloat16").numpy
    target = {r: np.zeros(dst.local_shape(r), row) for r in (2, 3)}
    real = page_move._Side._head
    ended: dict[int, BaseException] = {}

    def lying(self: Any, pair: PagePair, payload: Any) -> Any:
        head = real(self, pair, payload)
        if self._comm.rank == 1:
            head[word] = 9
        return head

    monkeypatch.setattr(page_move._Side, "_head", lying)

    def job(comm: lc.Communicator) -> None:
        arrays = {"k": np.ones(src.local_shape(0), row)} if comm.rank < 2 else {"k": target[comm.rank]}
        try:
            move_pages(plan, *((arrays, None) if comm.rank < 2 else (None, arrays)), comm)
        except LowshardError as error:
            ended[comm.rank] = error

    lc.run_loopback(RANKS, job, 30)
    assert sorted(ended) == list(range(RANKS))
    assert all(isinstance(e, VerificationError) and said in str(e) for e in ended.values()), ended
    assert all("the message of rank 1 to rank 3" in str(e) for e in ended.values())
    assert not any(a.astype(np.float32).any() for a in target.values())


def test_bits_that_change_on_the_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = PagedLayout(8, 4, 4, 8, ranks=(0, 1)), PagedLayout(8, 2, 4, 8, ranks=(2, 3))
    plan = plan_pages(src, dst, {"a": ([3, 1], [0, 1, 2], 5)})
    row = dtypes.get("bfloat16").numpy
    real = page_move.Mail.take

    def take(self: Any, number: int) -> Any:
        came = real(self, number)
        if 1 in came:
            came[1][-9] ^= 4
        return came

    monkeypatch.setattr(page_move.Mail, "take", take)

    def job(comm: lc.Communicator) -> str:
        own = src if comm.rank < 2 else dst
        arrays = {"k": np.ones(own.local_shape(comm.rank), row)}
        with pytest.raises(VerificationError) as error:
            move_pages(plan, *((arrays, None) if comm.rank < 2 else (None, arrays)), comm)
        return str(error.value)

    assert all("rank 1 to rank 3 is damaged" in text for text in lc.run_loopback(RANKS, job, 30))


def test_tables_that_lie_are_refused_or_their_digests_differ() -> None:
    """Mutated plans, on all ranks or on one: a named error on every rank, or another digest and nothing written."""
    counts = {"refused": 0, "apart": 0, "digest": 0, "same": 0}
    for number in range(1000 if mode.full() else 120):
        rng = random.Random(f"{mode.seed()} lies {number}")
        case = Case(f"lies {number % 25}")
        data = _mutated(case.plan.to_json(), rng)
        src, dst = case.filled(case.src), case.filled(case.dst)
        digests, before = case.digests(case.src, src, 0), copied(dst)
        try:
            plan = PagePlan.from_json(data)
        except LowshardError:
            counts["refused"] += 1
            continue
        liar = rng.choice([None, *range(RANKS)])
        ended: list[BaseException | None] = [None] * RANKS

        def job(
            comm: lc.Communicator,
            plan=plan,
            liar=liar,
            ended=ended,
            case=case,
            src=src,
            dst=dst,
            digests=digests,
        ):  # type: ignore[no-untyped-def]
            mine = plan if liar in (None, comm.rank) else case.plan
            try:
                move_pages(mine, src.get(comm.rank), dst.get(comm.rank), comm, digests)
            except LowshardError as error:
                ended[comm.rank] = error

        lc.run_loopback(RANKS, job, 30)
        kinds = {type(e) for e in ended}
        assert len(kinds) == 1, (number, ended)
        if ended[0] is None:
            # only a change that means the same gets through: the same tokens, elsewhere or under the same digest
            assert plan.digest() == case.plan.digest() or liar is None, number
            tables = {s.name: (s.dst_pages, s.tokens) for s in plan.sequences}
            rows = lc.run_loopback(
                RANKS,
                lambda c, plan=plan, tables=tables, dst=dst: digest_pages(
                    plan.dst, tables, dst.get(c.rank), c
                ),
                30,
            )
            assert rows[0] == digests
            counts["same"] += 1
            continue
        assert same(dst, before), number
        counts["digest" if kinds == {VerificationError} else "apart"] += 1
    assert counts["refused"] > 20, counts
    assert counts["apart"] > 10, counts
    assert counts["digest"] > 0, counts


def _mutated(data: Any, rng: random.Random) -> Any:
    """Change a table as bugs do (a page, a length, a rank), or anything at all."""
    data = json.loads(json.dumps(data))
    filled = [s for s in data["sequences"] if s[1]]
    if not filled or rng.random() < 0.2:
        return mutated(data, rng)
    row, side = rng.choice(filled), rng.choice([1, 2])
    layout = data["src" if side == 1 else "dst"]
    at = rng.randrange(len(row[side]))
    match rng.randrange(6):
        case 0:
            row[side][at] = rng.choice([-1, layout["pages"], 1 << 40])
        case 1:
            row[side][at] = rng.randrange(layout["pages"])
        case 2:
            other = rng.choice(filled)
            row[side][at] = rng.choice(other[side])
        case 3:
            row[3] += rng.choice([-1, 1, layout["page_tokens"], 1000])
        case 4:
            rng.shuffle(row[side])
        case _:
            rng.shuffle(layout["ranks"])
    return data


# ---- what is refused


SRC, DST = PagedLayout(8, 4, 4, 8, ranks=(0, 1)), PagedLayout(8, 2, 4, 8, ranks=(2, 3))


@pytest.mark.parametrize(
    ("sequences", "said"),
    [
        ({"a": ([8], [0, 1], 4)}, r"sequence 'a': source: pages are ids from 0 to 7: \[8\], got 8"),
        ({"a": ([-1], [0, 1], 4)}, "pages are ids from 0 to 7"),
        ({"a": ([0], [0, True], 4)}, "sequence 'a': destination: pages are ids from 0 to 7"),
        ({"a": ([0, 0], [0, 1, 2], 5)}, "source: a page stands once in a table, 0 stands twice"),
        ({"a": ([0], [0, 1], 5)}, "source: 5 tokens fill 2 pages of 4, got 1 pages"),
        ({"a": ([0], [0, 1, 2], 4)}, "destination: 4 tokens fill 2 pages of 2, got 3 pages"),
        ({"a": ([0], [0], 2), "b": ([1], [0], 1)}, "sequence 'b': destination page 0 is of sequence 'a' too"),
        ({"a": ([3, 1], [0, 1, 2], 5), "b": ([1], [4], 1)}, "'b': source page 1 is of sequence 'a' too"),
        ({"a": ([0], [0], -1)}, "its tokens are a number of 0 or more"),
        ({"a": ([0], 1)}, r"\(pages there, pages here, tokens\): 'a' has"),
        ({"a": None}, r"\(pages there, pages here, tokens\)"),
        ([], "sequences are a mapping"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_are_named(sequences: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_pages(SRC, DST, sequences)


def test_sequences_may_share_the_pages_that_they_begin_with() -> None:
    plan = plan_pages(SRC, DST, {"a": ([3, 1], [0, 1, 2], 5), "b": ([3, 2], [3, 4, 5], 6)})
    assert plan.tokens == 11


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 2}, "heads is 4 there, 2 here"),
        ({"head_dim": 2}, "head_dim is 8 there"),
        ({"dtype": "float16"}, "dtype is bfloat16 there, float16 here"),
        ({"dims": "kpthd"}, "keys and values share an array on both sides, or on neither"),
        ({"dims": "lpthd", "layers": 2}, "layers is 1 there, 2 here"),
    ],
)
def test_caches_of_other_models_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_pages(SRC, replace(DST, **change), {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pages": 0}, "pages of a paged layout is a number of 1 or more"),
        ({"page_tokens": True}, "page_tokens of a paged layout"),
        ({"dims": "ptd"}, "dims of a paged layout are p, t, h and d, each once"),
        ({"dims": "ptthd"}, "each once"),
        ({"layers": 2}, "with l where there are layers"),
        ({"ranks": (0, 0)}, "each once"),
        ({"ranks": ()}, "each once"),
        ({"ranks": (0, 1, 2, 3, 4, 5)}, "with more ranks than heads each head has as many ranks"),
    ],
)
def test_layouts_that_cannot_be_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        replace(SRC, **change)


def test_arrays_and_plans_that_do_not_fit_are_refused_on_every_rank() -> None:
    plan = plan_pages(SRC, DST, {"a": ([3, 1], [0, 1, 2], 5)})
    other = plan_pages(SRC, DST, {"a": ([3, 2], [0, 1, 2], 5)})
    row = dtypes.get("bfloat16").numpy

    def arrays(rank: int) -> list[Any]:
        own = SRC if rank < 2 else DST
        made = {"k": np.zeros(own.local_shape(rank), row)}
        return [made, None] if rank < 2 else [None, made]

    def attempt(liar: int, change: Any, kind: type[LowshardError], said: str) -> None:
        def job(comm: lc.Communicator) -> None:
            given: list[Any] = [plan, *arrays(comm.rank), comm, None]
            if comm.rank == liar:
                change(given)
            with pytest.raises(kind, match=said):
                move_pages(*given)

        lc.run_loopback(RANKS, job, 30)

    def shape(given: list[Any]) -> None:
        given[1]["k"] = given[1]["k"][:, :2]

    def kind_(given: list[Any]) -> None:
        given[2]["k"] = given[2]["k"].astype(np.float32)

    def frozen(given: list[Any]) -> None:
        given[2]["k"].flags.writeable = False

    def named(given: list[Any]) -> None:
        given[2] = {"v": given[2]["k"]}

    attempt(1, shape, BufferMismatchError, r"source k: rank 1 holds bfloat16\[8, 4, 2, 8\]")
    attempt(2, kind_, BufferMismatchError, "destination k: rank 2 holds bfloat16")
    attempt(2, frozen, BufferMismatchError, "destination k: ")
    attempt(3, named, BufferMismatchError, r"rank 0 has \['k'\], rank 3 \['v'\]")
    attempt(0, lambda g: g.__setitem__(1, None), BufferMismatchError, "source arrays are a mapping")
    attempt(2, lambda g: g.__setitem__(1, {"k": np.zeros(1)}), BufferMismatchError, "none of the source's")
    attempt(
        1, lambda g: g.__setitem__(0, other), MismatchError, r"ranks \[1\] have .* 'a': 5 tokens \(digest"
    )
    attempt(1, lambda g: g.__setitem__(0, "plan"), PlanError, "plan is a PagePlan")
    attempt(
        1, lambda g: g.__setitem__(4, {"b": "0"}), PlanError, "digests are a mapping of the plan's sequences"
    )
    with pytest.raises(
        MeshError, match="the plan has ranks up to 3, but the communicator has 2; start 4 ranks"
    ):
        lc.run_loopback(2, lambda c: move_pages(plan, *arrays(c.rank), c), 30)


def test_replicas_that_differ_are_named() -> None:
    layout = PagedLayout(4, 2, 1, 4, "float32", ranks=(0, 1))
    caches = [np.zeros(layout.local_shape(0), np.float32) for _ in range(2)]
    caches[1][2, 1, 0, 3] = 1

    def job(comm: lc.Communicator) -> None:
        given = {"k": caches[comm.rank]}
        assert set(digest_pages(layout, {"a": ([0, 1], 4), "b": ([2], 1)}, given, comm)) == {"a", "b"}
        with pytest.raises(VerificationError, match="sequence 'b' differs on ranks 0 and 1"):
            digest_pages(layout, {"a": ([0, 1], 4), "b": ([2], 2)}, given, comm)
        with pytest.raises(MismatchError, match=r"ranks \[1\] have f32 .* over 2 ranks, 'a': 2 tokens"):
            digest_pages(layout, {"a": ([0], 1 + comm.rank)}, given, comm)

    lc.run_loopback(2, job, 30)


def test_one_process_has_digests_too() -> None:
    one = PagedLayout(4, 2, 3, 4, "float32")
    cache = np.random.default_rng(0).random(one.local_shape(0), np.float32)
    found = digest_pages(one, {"a": ([2, 0], 3)}, {"k": cache})
    moved = np.zeros((3, 3, 3, 4), np.float32)
    moved[1] = [cache[2, 0], cache[2, 1], cache[0, 0]]
    other = PagedLayout(3, 3, 3, 4, "float32")
    assert digest_pages(other, {"a": ([1], 3)}, {"k": moved}) == found
    moved[1, 2, 1, 1] += 1
    assert digest_pages(other, {"a": ([1], 3)}, {"k": moved}) != found


def test_a_rank_or_a_part_that_is_no_number_is_told() -> None:
    layout = PagedLayout(4, 2, 2, 4, "float32", ranks=(0, 1))
    for call in (layout.heads_of, layout.part_of, layout.local_shape, layout.holders):
        assert call(np.int64(1)) == call(1)
        for wrong in (np.arange(3), 1.0, None, 2, -1):
            with pytest.raises(LayoutError):
                call(wrong)  # type: ignore[arg-type]
