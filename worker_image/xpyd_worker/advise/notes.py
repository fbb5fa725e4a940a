"""What a layout's numbers do not say: what the engine cannot do yet, what is left. Pure."""

from __future__ import annotations

from xpyd_worker.advise.arithmetic import LINKS
from xpyd_worker.advise.layout import Advice


def notes_of(advice: Advice) -> list[str]:
    """One sentence for each, those of the decision first."""
    layout, facts = advice.layout, advice.facts
    found = list(advice.decision.notes)
    if layout.expert > 1:
        found.append(
            "this engine does not deal experts out yet (EP): each rank holds a share of every "
            "expert, which takes the same memory and an all-reduce instead of all-to-alls"
        )
        if layout.pipeline > 1:
            found.append("elastic EP (ranks that come and go) excludes PP")
    if layout.data > 1:
        found.append(
            f"DP {layout.data} is {layout.data} replicas of the pool, between which the router "
            "chooses; this engine has no DP inside of an instance yet"
        )
    if facts.kv_heads and layout.tensor > facts.kv_heads:
        found.append(
            f"{layout.tensor} ranks share {facts.kv_heads} KV heads: each head is kept "
            f"{layout.tensor // facts.kv_heads} times"
        )
    if facts.kv_heads == 0 and layout.tensor > 1:
        found.append("the KV of a token is one latent (MLA), whole on each rank of a tensor group")
    if layout.tensor > 1 and advice.hardware.within == "pcie":
        ratio = LINKS["nvlink"].bytes_per_s / LINKS["pcie"].bytes_per_s
        found.append(f"without NVLink the bytes of all-reduces take {ratio:.0f} times as long")
    if advice.idle_gpus:
        found.append(_of_idle(advice))
    return found


def _of_idle(advice: Advice) -> str:
    wishes, idle = advice.wishes, advice.idle_gpus
    text = f"{idle} of {advice.hardware.gpus} devices are left"
    is_room = idle >= advice.layout.tensor * advice.layout.pipeline
    if is_room and not (wishes.throughput or wishes.high_availability):
        return f"{text}: --throughput or --high-availability makes copies"
    return f"{text}: they do not hold another copy"
