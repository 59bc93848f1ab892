"""Which ranks share a node and who talks to whom: for any numbering and any numbers of ranks on the nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowshard.comm.node_map import Seating


def seating(homes: list[int]) -> Seating:
    """Return the seating of ranks on these nodes, seated as they come."""
    return Seating(tuple((node, homes[:rank].count(node)) for rank, node in enumerate(homes)))


def test_nodes_are_in_the_order_of_their_first_ranks() -> None:
    found = seating([7, 3, 3, 7, 1])
    assert found.nodes == ((0, 3), (1, 2), (4,))
    assert [found.home(rank) for rank in range(5)] == [0, 1, 1, 0, 2]
    assert found.shares
    assert not seating([2, 0, 1]).shares


def test_contacts_have_the_same_place_where_there_is_one() -> None:
    found = seating([0, 0, 0, 1, 1, 2])
    assert [found.contact(rank, 1) for rank in (0, 1, 2, 5)] == [3, 4, 3, 3]
    assert [found.contact(rank, 2) for rank in range(5)] == [5] * 5


def test_a_part_keeps_its_ranks_where_they_sit() -> None:
    part = seating([0, 1, 0, 1]).part([3, 0, 1])
    assert part.seats == ((1, 1), (0, 0), (1, 0))
    assert part.nodes == ((0, 2), (1,))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_each_rank_is_served_by_one_rank_of_every_other_node(homes: list[int]) -> None:
    found = seating(homes)
    assert sorted(rank for ranks in found.nodes for rank in ranks) == list(range(len(homes)))
    for rank, home in enumerate(homes):
        for node, ranks in enumerate(found.nodes):
            assert found.contact(rank, node) in ranks
            if homes[ranks[0]] == home:
                assert found.home(rank) == node
    # The work is spread: no rank of a node serves two more of another node than a second one does.
    for node, ranks in enumerate(found.nodes):
        for other in found.nodes[:node] + found.nodes[node + 1 :]:
            served = [sum(found.contact(rank, node) == r for rank in other) for r in ranks]
            assert max(served) - min(served) <= 1
