"""What may befall a fleet, by name. Each fault strikes a link, and through it one P and one D.

`pipe` is the one that something was about to come out of, or just came; None at a moment of its
own. What a fault leaves open it draws from the world's random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.kv.simulation.link import Link, Pipe

if TYPE_CHECKING:
    from tests.kv.simulation.world import World

Fault = Callable[["World", Link, Pipe | None], None]


def cut(world: World, link: Link, pipe: Pipe | None, *, silent: str = "") -> None:
    """The connection breaks. Of what is under way some arrives, of what was next nothing; a side
    in `silent` hears nothing of the end."""
    for one in link.pipes:
        keep = 0 if one is pipe else world.rng.randint(0, len(one.items))
        reader = "D" if one is link.to_d else "P"
        one.cut(keep, None if reader in silent else "lost")
    world.listen_for_silence(link)


def p_dies(world: World, link: Link, pipe: Pipe | None, *, silently: bool = False) -> None:
    world.crash(link.p_name, silently=silently)


def d_dies(world: World, link: Link, pipe: Pipe | None, *, silently: bool = False) -> None:
    world.crash(link.d_name, silently=silently)


def freeze(world: World, link: Link, pipe: Pipe | None, *, who: str, seconds: float) -> None:
    for name in (link.p_name, link.d_name):
        if name[0] in who:
            world.freeze(name, seconds)


def hold(world: World, link: Link, pipe: Pipe | None, *, to: str, seconds: float) -> None:
    """Nothing passes for a while, in one direction or both; nor is the other dialled anew."""
    if "D" in to:
        link.to_d.hold(seconds)
    if "P" in to:
        link.to_p.hold(seconds)
    world.block(link.p_name, link.d_name, seconds)
    world.listen_for_silence(link)


def slow_data(world: World, link: Link, pipe: Pipe | None) -> None:
    """Each further part of a DATA frame takes long; control frames pass between frames."""
    if link.to_d.writer is not None:
        link.to_d.writer.part_s = world.rng.choice([0.2, 2.0])


def corrupt(world: World, link: Link, pipe: Pipe | None, *, parts: int = 1) -> None:
    """Bytes of the next DATA change on their way."""
    link.to_d.corrupt_next += parts


def stall(world: World, link: Link, pipe: Pipe | None, *, who: str) -> None:
    """An engine is in a long step; its I/O thread runs."""
    seconds = world.rng.choice([0.3, 4.0, 12.0])
    p, d = world.process(link.p_name), world.process(link.d_name)
    if who == "P" and p is not None and p.prefill is not None:
        p.prefill.stall(seconds)
    if who == "D" and d is not None and d.decode is not None:
        d.decode.stall(seconds)


def at_p(world: World, link: Link, pipe: Pipe | None, *, what: str) -> None:
    """P's engine aborts, or takes the blocks of, a prompt of this D."""
    process = world.process(link.p_name)
    engine = process and process.prefill
    if not engine:
        return
    of_this_d = [p for p in engine.known.values() if p.plan.d_name == link.d_name]
    if of_this_d:
        act = engine.abort if what == "abort" else engine.preempt
        engine.tell(partial(act, world.rng.choice(of_this_d)))


def at_d(world: World, link: Link, pipe: Pipe | None, *, what: str) -> None:
    """D's request is aborted, or the router releases its KV."""
    process = world.process(link.d_name)
    engine = process and process.decode
    if not engine:
        return
    keys = [plan.key for plan in world.plan.prompts if plan.d_name == link.d_name]
    act = engine.forget if what == "forget" else engine.release
    engine.tell(partial(act, world.rng.choice(keys)))


def fill_d(world: World, link: Link, pipe: Pipe | None) -> None:
    """Other requests take D's blocks."""
    process = world.process(link.d_name)
    if process is not None and process.decode is not None:
        leave, seconds = world.rng.choice([0, 1, 3]), world.rng.choice([0.1, 2.0, 40.0])
        process.decode.tell(partial(process.decode.fill_up, leave, seconds))


def leave(world: World, link: Link, pipe: Pipe | None, *, who: str) -> None:
    """An instance drains, closes its connections and ends; another takes its place."""
    world.leave(link.p_name if who == "P" else link.d_name)


def trick(world: World, link: Link, pipe: Pipe | None, *, to: str, what: str) -> None:
    """The next frame in that direction is lost, comes twice, behind the one after it, or late."""
    (link.to_d if to == "D" else link.to_p).tricks.append(what)


def deafen(world: World, link: Link, pipe: Pipe | None, *, who: str) -> None:
    """A side answers PINGs and hears nothing else from now on: its process is defective."""
    (link.to_d if who == "D" else link.to_p).is_deaf = True


# What a connection, a process or an engine may do.
FAULTS: dict[str, Fault] = {
    "cut": cut,
    "cut_unheard_by_p": partial(cut, silent="P"),
    "cut_unheard_by_d": partial(cut, silent="D"),
    "p_dies": p_dies,
    "d_dies": d_dies,
    "p_vanishes": partial(p_dies, silently=True),
    "d_vanishes": partial(d_dies, silently=True),
    "p_freezes": partial(freeze, who="P", seconds=4.0),
    "d_freezes": partial(freeze, who="D", seconds=4.0),
    "p_freezes_long": partial(freeze, who="P", seconds=40.0),
    "d_freezes_long": partial(freeze, who="D", seconds=40.0),
    "hold_to_d": partial(hold, to="D", seconds=3.0),
    "hold_to_p": partial(hold, to="P", seconds=6.0),
    "partition": partial(hold, to="PD", seconds=15.0),
    "slow_data": slow_data,
    "corrupt": corrupt,
    "corrupt_much": partial(corrupt, parts=6),
    "p_stalls": partial(stall, who="P"),
    "d_stalls": partial(stall, who="D"),
    "p_aborts": partial(at_p, what="abort"),
    "p_preempts": partial(at_p, what="preempt"),
    "d_forgets": partial(at_d, what="forget"),
    "d_releases": partial(at_d, what="release"),
    "d_fills": fill_d,
    "p_leaves": partial(leave, who="P"),
    "d_leaves": partial(leave, who="D"),
    "p_deaf": partial(deafen, who="P"),
    "d_deaf": partial(deafen, who="D"),
}
# And what only a defective peer, or frames striped over several connections, would.
TRICKS: dict[str, Fault] = {
    f"{what}_to_{to.lower()}": partial(trick, to=to, what=what)
    for what in ("lose", "repeat", "delay", "linger")
    for to in "PD"
}
