"""Groups of ranks, made over one address (article facts 49 to 53): who is in which, what goes over
them, how they end. Real processes over Gloo."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ranks.kit.groups import HOST, PATIENCE_S, Seat, run_ranks
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.engine.executor import Resize
from xpyd_worker.parallel import native
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.parallel.distributed import ProcessGroup, Rendezvous, Store
from xpyd_worker.parallel.groups import group_by_name

TP2_PP2 = Sizes(tensor=2, pipeline=2)
KINDS = ("tensor", "pipeline", "world", "data", "expert")
DP2_TP2 = Sizes(data=2, tensor=2, has_whole_experts=True)


def _groups(state: Any) -> dict[str, Any]:
    found = {
        "world": state.world,
        "tensor": state.tensor_group,
        "pipeline": state.pipeline_group,
        "data": state.data_group,
        "expert": state.expert_group,
    }
    return {kind: group for kind, group in found.items() if group is not None}


def places(seat: Seat, sizes: Sizes) -> dict[str, Any]:
    with seat.open(sizes) as state:
        found: dict[str, Any] = {}
        for kind, group in _groups(state).items():
            assert group_by_name(group.unique_name) is group
            assert group.device_group.ranks == group.cpu_group.ranks == group.ranks
            found[kind] = (group.ranks, group.rank_in_group, group.is_first, group.is_last)
            found[f"{kind} ends"] = (
                group.first_rank,
                group.last_rank,
                group.next_rank,
                group.prev_rank,
            )
            assert (group.rank, group.local_rank) == (seat.rank, seat.rank)
        found["part"] = state.part
        return found


def test_ranks_know_their_groups_and_parts():
    """Article facts 49 and 52."""
    found = run_ranks(places, 4, TP2_PP2)
    assert [one["tensor"][0] for one in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [one["pipeline"][0] for one in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [one["data"][0] for one in found] == [(0,), (1,), (2,), (3,)]
    assert [one["world"][0] for one in found] == [(0, 1, 2, 3)] * 4
    # Rank 3: the last of its pipeline group, number 1 there; behind it comes the first.
    assert found[3]["pipeline"] == ((1, 3), 1, False, True)
    assert found[3]["pipeline ends"] == (1, 3, 1, 1)
    assert found[1]["world ends"] == (0, 3, 2, 0)
    assert [one["part"].layers for one in found] == [range(6), range(6), range(6, 12), range(6, 12)]
    assert [one["part"].is_last for one in found] == [False, False, True, True]
    assert [one["part"].tensor_rank for one in found] == [0, 1, 0, 1]
    assert [one["part"].stage for one in found] == [one["pipeline"][1] for one in found]


def test_ranks_of_two_replicas_share_their_experts():
    """Article facts 49 and 51. Two replicas of two stages of two ranks."""
    sizes = Sizes(data=2, pipeline=2, tensor=2, has_whole_experts=True)
    found = run_ranks(places, 8, sizes)
    first, last = (0, 1, 4, 5), (2, 3, 6, 7)
    assert [one["expert"][0] for one in found] == [first] * 2 + [last] * 2 + [first] * 2 + [
        last
    ] * 2
    assert [one["expert"][1] for one in found] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [one["data"][0] for one in found] == [(0, 4), (1, 5), (2, 6), (3, 7)] * 2
    assert [one["tensor"][0] for one in found[4:6]] == [(4, 5)] * 2
    assert {(one["part"].replicas, one["part"].ranks) for one in found} == {(2, 8)}


def exchanged(seat: Seat, is_shared: bool) -> Any:
    """Rows to rank 0 of the group, and one to each."""
    with seat.open(DP2_TP2) as state:
        if not is_shared:
            state.expert_group._shared = None
        group = state.experts
        own = torch.arange(6.0).view(3, 2) + 100 * seat.rank
        to_first = group.all_to_all(own, [3, 0, 0, 0], [3] * 4 if group.rank == 0 else [0] * 4)
        ones = [1] * 4
        to_each = group.all_to_all(torch.full((4, 1), seat.rank), ones, ones)
        return group.replicas, to_first.tolist(), to_each.view(-1).tolist()


@pytest.mark.parametrize("is_shared", [True, False], ids=["memory", "Gloo"])
def test_an_expert_group_exchanges_rows_over_shared_memory_and_over_gloo_alike(is_shared: bool):
    found = run_ranks(exchanged, 4, is_shared)
    rows = [[100.0 * r + 2 * i, 100.0 * r + 2 * i + 1] for r in range(4) for i in range(3)]
    assert found[0] == (2, rows, [0, 1, 2, 3])
    assert found[1:] == [(2, [], [0, 1, 2, 3])] * 3


def sums(seat: Seat, sizes: Sizes) -> Any:
    with seat.open(sizes) as state:
        mine = torch.arange(6.0).view(2, 3) + 10 * seat.rank
        total = state.tensor.all_reduce(mine.clone())
        beside = state.tensor.all_gather(mine)
        return total.tolist(), beside.tolist()


def test_a_tensor_group_adds_up_and_gathers_among_its_own_ranks():
    found = run_ranks(sums, 4, TP2_PP2)
    base = torch.arange(6.0).view(2, 3)
    for rank, (total, beside) in enumerate(found):
        pair = (0, 1) if rank < 2 else (2, 3)
        assert total == (2 * base + 10 * sum(pair)).tolist()
        assert beside == torch.cat([base + 10 * one for one in pair], dim=1).tolist()


def ends(seat: Seat, sizes: Sizes) -> tuple[list[str], list[str], dict[str, bool]]:
    """Groups in the order in which they were made, and ended; which had shared memory."""
    made: list[str] = []
    ended: list[str] = []
    _note(ProcessGroup, "__init__", made)
    _note(ProcessGroup, "close", ended)
    with seat.open(sizes) as state:
        shared = {kind: group._fast is not None for kind, group in _groups(state).items()}
    return made, ended, shared


def _note(kind: Any, method: str, names: list[str]) -> None:
    call = getattr(kind, method)

    def noting(self: Any, *more: Any) -> None:
        call(self, *more)
        names.append(self.name)

    setattr(kind, method, noting)


def test_each_group_is_one_on_the_device_and_one_on_the_host_and_they_end_the_last_first():
    """Article fact 51."""
    for rank, (made, ended, shared) in enumerate(run_ranks(ends, 4, TP2_PP2)):
        data = TP2_PP2.data_groups.index((rank,))
        number = {"tensor": rank // 2, "pipeline": rank % 2, "world": 0, "data": data}
        assert made == [
            f"{kind}-{number[kind]}-{on}" for kind in number for on in ("cpu", "device")
        ]
        assert ended == made[::-1]
        assert not any(shared[kind] for kind in number if kind != "tensor")
        assert shared["tensor"] == (native.library() is not None)


def test_the_group_of_whole_experts_is_made_last_and_ends_first():
    """Article fact 51."""
    for made, ended, shared in run_ranks(ends, 4, DP2_TP2):
        assert [one.partition("-")[0] for one in made[::2]] == list(KINDS)
        assert made[-2:] == ["expert-0-cpu", "expert-0-device"]
        assert ended == made[::-1]
        assert shared["expert"] == shared["tensor"] == (native.library() is not None)


def resized(seat: Seat) -> list[Any]:
    """Replicas of two ranks: one, two with those that come, and one again."""
    comes = seat.rank >= 2
    found: list[Any] = []
    sizes = replace(DP2_TP2, data=2 if comes else 1, is_elastic=True)
    with seat.open(sizes, meeting=int(comes)) as state:
        for meeting, replicas in ((1, 2), (2, 1)):
            stays = state.resize(Resize(meeting, tuple(range(replicas))))
            found.append(stays)
            if stays:
                size = 2 * replicas
                rows = torch.full((size, 1), float(seat.rank))
                group = state.experts
                got = group.all_to_all(rows, [1] * size, [1] * size).view(-1).tolist()
                total = state.tensor.all_reduce(torch.ones(1)).item()
                found.append((group.rank, group.replicas, got, state.part.replicas, total))
                assert group is state.experts
                assert state.expert_group.ranks == state.world.ranks == tuple(range(size))
    return found


def test_replicas_come_into_the_groups_that_cross_them_and_go():
    found = run_ranks(resized, 4)
    for rank, (came, there, stayed, *last) in enumerate(found):
        assert (came, stayed) == (True, rank < 2)
        assert there == (rank, 2, [0, 1, 2, 3], 2, 2)
        assert last == ([(rank, 1, [0, 1], 1, 2)] if rank < 2 else [])


def missed(seat: Seat) -> str:
    with seat.open(replace(DP2_TP2, is_elastic=True), connect_s=3.0) as state:
        if seat.rank == 3:
            return ""
        with pytest.raises(GroupError) as raised:
            state.resize(Resize(1, (0,)))
        return str(raised.value)


def test_who_does_not_come_to_a_change_is_named():
    *others, last = run_ranks(missed, 4)
    assert others == ["rank 3 did not come to meeting-1 within 3 s"] * 3
    assert last == ""


def test_rank_0_listens_where_the_others_look_for_it() -> None:
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    at = Rendezvous(host=HOST, port=port, address=HOST, connect_s=PATIENCE_S)
    store = Store(at, 0, range(1))
    with socket.create_connection((HOST, port), timeout=PATIENCE_S):
        store.put("a", b"b")
    assert store.take("a", of=0, within_s=PATIENCE_S) == b"b"
