"""Policies by name: the entry-point group `xpyd.router.policies`, ours and other packages'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from xpyd_core.errors import UserError
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.policy.base import SideFactory, SideKind, SidePolicy, Tools
from xpyd_router.policy.pairs import PairPolicy

GROUP = "xpyd.router.policies"


@cache
def installed() -> Mapping[str, EntryPoint]:
    """The policies of all installed packages by name. Looked up once for a process: the metadata
    of every package is read for it."""
    return MappingProxyType({entry.name: entry for entry in entry_points(group=GROUP)})


def build_policy(
    config: RouterConfig,
    *,
    loads: LoadTable,
    random: Callable[[], float],
    first_turn: int = 0,
    known: Mapping[str, EntryPoint] | None = None,
) -> PairPolicy:
    """The policy that `config` names; UserError for a name that no package has."""
    entries = installed() if known is None else known

    def make(kind: SideKind, flag: str, name: str) -> SidePolicy:
        if name not in entries:
            raise UserError(f"{flag}: no policy {name!r}; there are {', '.join(sorted(entries))}")
        factory: SideFactory = entries[name].load()
        return factory(Tools(kind, loads, random, first_turn))

    aggregated = make("A", "--policy", config.policy)
    return PairPolicy(
        prefill=make("P", "--prefill-policy", config.prefill_policy or config.policy),
        decode=make("D", "--decode-policy", config.decode_policy or config.policy),
        aggregated=aggregated,
        local_prefill_tokens=config.local_prefill_tokens,
        loads=loads,
    )
