"""Collectives over shared memory: the bits of their sums, what they do with sizes of all kinds, and
that nothing of them stays. Lost ranks: test_lost_ranks.py, too."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.kit.groups import Seat, ranks, run_ranks
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.parallel import native
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.parallel.distributed import Store
from xpyd_worker.parallel.shared_memory import (
    PIECE_BYTES,
    SHARES_FROM_BYTES,
    Host,
    SharedMemoryCollectives,
    open_shared_memory,
)

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the compiled collectives")

TYPES = (torch.float32, torch.bfloat16, torch.float16)
EDGES = (SHARES_FROM_BYTES, PIECE_BYTES, 2 * PIECE_BYTES)
SOON_S = 1.0
GO = 5


def _opened(seat: Seat, name: str = "all", members: tuple[int, ...] = (), **changes: Any) -> Any:
    """The collectives of `members`, which are all ranks by default."""
    at = seat.at(**changes)
    found = open_shared_memory(
        _store(seat),
        name,
        members or tuple(range(seat.world)),
        at=at,
        host=Host(ranks=seat.world, cores=2),
    )
    assert found is not None
    return found


_stores: dict[int, Store] = {}


def _store(seat: Seat) -> Store:
    """This process's, once."""
    if seat.port not in _stores:
        _stores[seat.port] = Store(seat.at(), seat.rank, range(seat.world))
    return _stores[seat.port]


def _share(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What `rank` adds: numbers of unlike sizes, so that the order of the sum shows."""
    made = torch.Generator().manual_seed(rank)
    values = torch.randn(count, generator=made) * 10.0 ** torch.randint(-2, 3, (1,), generator=made)
    return values.to(dtype)


def _summed(shares: list[Tensor]) -> Tensor:
    """In float32, by rank."""
    total = shares[0].float()
    for share in shares[1:]:
        total = total + share.float()
    return total.to(shares[0].dtype)


def _off(x: Tensor) -> Tensor:
    """The same numbers, an element behind where memory begins."""
    return torch.cat([x[:1], x])[1:]


def sums(seat: Seat) -> int:
    found = _opened(seat)
    done = 0
    for dtype in TYPES:
        edges = [edge // dtype.itemsize for edge in EDGES]
        for count in (1, 15, 16, 17, 1000, *(edge + more for edge in edges for more in (-1, 0, 3))):
            shares = [_share(rank, count, dtype) for rank in range(seat.world)]
            own = _off(shares[seat.rank])
            assert found.takes(own)
            found.all_reduce(own)
            assert torch.equal(own, _summed(shares)), (dtype, count)
            done += 1
    return done


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_sums_are_those_of_float32_in_the_order_of_ranks_on_each(world: int):
    assert run_ranks(sums, world) == [42] * world


def gathers(seat: Seat) -> int:
    found = _opened(seat)
    done = 0
    for dtype in (*TYPES, torch.int64, torch.uint8):
        most = PIECE_BYTES // dtype.itemsize
        for rows, width in ((1, 1), (3, 5), (2, most - 1), (5, most // 2 + 7), (1, 3 * most + 1)):
            shares = [
                (_share(rank, rows * width, torch.float32) * 10).to(dtype).view(rows, width)
                for rank in range(seat.world)
            ]
            beside = torch.empty(rows, seat.world * width, dtype=dtype)
            found.all_gather(beside, shares[seat.rank], rows)
            assert torch.equal(beside, torch.cat(shares, dim=1)), (dtype, rows, width)
            # In place, one behind the other.
            flat = torch.zeros(seat.world, rows * width, dtype=dtype)
            flat[seat.rank] = shares[seat.rank].view(-1)
            found.all_gather(flat, flat[seat.rank], 1)
            assert torch.equal(flat, torch.stack(shares).view(seat.world, -1))
            done += 1
    return done


@pytest.mark.parametrize("world", [2, 3])
def test_shares_stand_beside_each_other_by_rank(world: int):
    assert run_ranks(gathers, world) == [25] * world


def _tables(world: int) -> list[list[list[int]]]:
    """Rows that each rank has for each: few, none at all, one rank with all of them, and more than
    go through the memory at once."""
    made = torch.Generator().manual_seed(world)
    tables = torch.randint(0, 5, (4, world, world), generator=made)
    tables[1] = 0
    tables[2] = 0
    tables[2, 0] = 7
    tables[3] *= 700
    found: Any = tables.tolist()
    return found


def exchanges(seat: Seat) -> int:
    found, done = _opened(seat), 0
    for table in _tables(seat.world):
        for dtype, width in ((torch.float32, 1), (torch.bfloat16, 33), (torch.int64, 130)):
            send = table[seat.rank]
            receive = [table[sender][seat.rank] for sender in range(seat.world)]
            # Numbers that say whose row it is, for whom, and which.
            x = torch.cat([_rows_for(seat.rank, to, n) for to, n in enumerate(send)])
            x = x.unsqueeze(1).repeat(1, width).to(dtype)
            out = torch.empty(sum(receive), width, dtype=dtype)
            found.all_to_all(out, x, send, receive)
            expected = torch.cat([_rows_for(f, seat.rank, n) for f, n in enumerate(receive)])
            assert torch.equal(out, expected.unsqueeze(1).repeat(1, width).to(dtype))
            done += 1
    return done


def _rows_for(sender: int, to: int, count: int) -> Tensor:
    return (torch.arange(count) % 16) * 16 + sender * 4 + to


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_go_to_the_ranks_that_they_are_for_in_their_order(world: int):
    assert run_ranks(exchanges, world) == [12] * world


def disagrees(seat: Seat) -> str:
    """Rank 1 sends two rows where rank 0 counts on one."""
    found, send = _opened(seat, step_s=SOON_S), [0, 0] if seat.rank == 0 else [2, 0]

    def twice() -> None:
        # Rank 1 sees no more than that its next call fails.
        for _ in range(2):
            found.all_to_all(torch.empty(1, 3), torch.ones(2, 3), send, [0, 1 - seat.rank])

    with pytest.raises(GroupError) as error:
        twice()
    return str(error.value)


def test_rows_that_are_not_as_many_as_was_said_are_refused():
    said = run_ranks(disagrees, 2)
    assert set(said) == {
        "all_to_all in group all: rank 1 did not take part: another call, size or type of tensor "
        "there"
    }


def in_turns(seat: Seat) -> int:
    """Each rank in four groups; calls in an order of which all members know the same."""
    members = [(0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 3)]
    groups = {one: _opened(seat, str(one), one) for one in members if seat.rank in one}
    made, done = torch.Generator().manual_seed(7), 0
    for turn in range(400):
        ranks = members[int(torch.randint(len(members), (1,), generator=made))]
        count = int(torch.randint(1, 3000, (1,), generator=made))
        if seat.rank not in ranks:
            continue
        if turn % 5 == 0:
            out = torch.empty(len(ranks), count)
            ones = [1] * len(ranks)
            x = torch.tensor([[1000.0 * to + seat.rank] for to in ranks]).repeat(1, count)
            groups[ranks].all_to_all(out, x, ones, ones)
            assert (
                out[:, 0].tolist() == out[:, -1].tolist() == [1000 * seat.rank + r for r in ranks]
            )
        elif turn % 3:
            x = torch.full((count,), float(turn + seat.rank))
            groups[ranks].all_reduce(x)
            assert torch.equal(x, torch.full((count,), float(turn * len(ranks) + sum(ranks))))
        else:
            out = torch.empty(len(ranks), count)
            groups[ranks].all_gather(out, torch.full((count,), float(turn + seat.rank)), 1)
            assert out[:, 0].tolist() == out[:, -1].tolist() == [turn + rank for rank in ranks]
        done += 1
    return done


def test_groups_that_overlap_do_not_mix():
    found = run_ranks(in_turns, 4)
    assert all(done > 200 for done in found)


def late(seat: Seat) -> list[float]:
    """Behind as many meetings as are left before the counters begin again."""
    found = _opened(seat)
    for steps in (2**31 - 2, 2**32 - 2):
        found.all_reduce(torch.ones(1))
        _count_from(found, seat, steps)
        for _ in range(5):
            x = torch.ones(3)
            found.all_reduce(x)
            assert x.tolist() == [seat.world] * 3
    return x.tolist()


def _count_from(found: SharedMemoryCollectives, seat: Seat, steps: int) -> None:
    """As if `steps` meetings had been."""
    store = _store(seat)
    store.put(f"{steps}/{seat.rank}", b"")
    for rank in range(seat.world):
        store.take(f"{steps}/{rank}", of=rank, within_s=60)
    member: Any = found._member
    member.step = steps
    arrived, word = (ctypes.c_uint32.from_address(member.shared + at) for at in (64, 128))
    arrived.value, word.value = steps * seat.world, steps & (2**31 - 1)
    store.put(f"{steps}/set/{seat.rank}", b"")
    for rank in range(seat.world):
        store.take(f"{steps}/set/{rank}", of=rank, within_s=60)


def test_meetings_go_on_when_their_counters_begin_again():
    assert run_ranks(late, 3) == [[3.0] * 3] * 3


def unlike(seat: Seat, ones: list[tuple[int, torch.dtype]]) -> str:
    count, dtype = ones[seat.rank]
    with pytest.raises(GroupError) as error:
        _opened(seat).all_reduce(torch.ones(count, dtype=dtype))
    return str(error.value)


@pytest.mark.parametrize("other", [(9, torch.float32), (8, torch.bfloat16)], ids=str)
def test_ranks_that_are_at_unlike_calls_are_told(other: tuple[int, torch.dtype]):
    first, second = run_ranks(unlike, 2, [(8, torch.float32), other])
    assert first == second  # whoever saw it first
    assert first.startswith("all_reduce in group all: rank ")
    assert first.endswith("another call, size or type of tensor there")


def waits(seat: Seat, how: str) -> list[str]:
    """Rank 2 does not come to the second call; what the others are told of it."""
    found = _opened(seat, step_s=600.0 if how == "ends" else SOON_S)
    found.all_reduce(torch.ones(4))
    if seat.rank == 2:
        if how == "closes":
            found.close()
        if how == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    said = []
    for _ in range(2):
        with pytest.raises(GroupError) as error:
            found.all_reduce(torch.ones(4))
        said.append(str(error.value))
    return said


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("stays away", "within 1 s"),
        # Long before the deadline, which would outlast this test's patience.
        ("ends", "the process has ended"),
        ("closes", "the group is closed there"),
    ],
)
def test_who_does_not_come_is_named_and_the_group_is_over(how: str, why: str):
    with ranks(waits, 3, how) as found:
        for rank in (0, 1):
            for said in found[rank].answer():
                assert said.startswith("all_reduce in group all: rank 2 did not take part")
                assert said.endswith(why)


def own(seat: Seat) -> tuple[list[str], list[str]]:
    """What this process has of the memory while the group is open, and behind it."""
    with seat.open(Sizes(tensor=2)) as state:
        state.tensor.all_reduce(torch.ones(1, 2))
        before = _memory_here()
    return before, _memory_here()


def _memory_here() -> list[str]:
    """Mappings and descriptors, as the system names them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    links = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
    names = [line[line.find("/") :] for line in lines]
    names += [os.readlink(link) for link in links if os.path.lexists(link)]
    return [name for name in names if "xpyd-collectives" in name]


def test_the_memory_has_no_name_and_ends_with_its_processes():
    for before, behind in run_ranks(own, 2):
        # The mapping, and its descriptor.
        assert before == ["/memfd:xpyd-collectives (deleted)"] * 2
        assert behind == []


def without(seat: Seat) -> tuple[bool, list[float]]:
    if seat.rank == 1:
        native.library.cache_clear()
        native.load = lambda level: None
    with seat.open(Sizes(tensor=3)) as state:
        total = state.tensor.all_reduce(torch.ones(1, 4, dtype=torch.bfloat16))
        assert state.tensor.all_gather(total).shape == (1, 12)
        return state.tensor_group._fast is None, total[0].tolist()


def test_where_one_rank_has_no_library_all_use_gloo():
    assert run_ranks(without, 3) == [(True, [3.0] * 4)] * 3


def others(seat: Seat) -> list[float]:
    with seat.open(Sizes(tensor=2)) as state:
        state.tensor.all_reduce(torch.empty(0, 4))
        return state.tensor.all_reduce(torch.ones(1, 3, dtype=torch.float64))[0].tolist()


def test_types_that_are_not_for_it_go_over_gloo_and_no_rows_nowhere():
    assert run_ranks(others, 2) == [[2.0] * 3] * 2
