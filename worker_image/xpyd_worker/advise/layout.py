"""From a model, devices and wishes to a layout with its numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.errors import UserError
from xpyd_worker.advise.arithmetic import kv_bytes_per_token
from xpyd_worker.advise.costs import Moves, Step, moves_of, step_of
from xpyd_worker.advise.facts import ModelFacts
from xpyd_worker.advise.fit import (
    Division,
    Hardware,
    Memory,
    Need,
    fewest_nodes,
    memory_of,
    nodes_of,
    size,
    stages_of_a_pod,
)
from xpyd_worker.advise.trees import Decision, Layout, decide


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the layout is for. `role`: of a fleet's pool. `utilization`: share of a device's memory;
    `reserve_bytes` of it are for activations, graphs and NCCL. `prefill_tokens`: of one step."""

    role: str
    context: int
    concurrency: int
    utilization: float
    reserve_bytes: int
    prefill_tokens: int
    peers: int
    high_availability: bool = False
    throughput: bool = False


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The layout and all that is said of it. `kv_token_bytes`: of a whole token, on all ranks of
    one copy together if none kept a part twice. `moves`: None for instances that do both."""

    facts: ModelFacts
    hardware: Hardware
    wishes: Wishes
    decision: Decision
    memory: Memory
    kv_token_bytes: int
    pod_gpus: int
    pods: int
    steps: tuple[Step, ...]
    moves: Moves | None

    @property
    def layout(self) -> Layout:
        return self.decision.layout

    @property
    def requests(self) -> int:
        """Of the whole context, that fit into one copy's KV cache at once."""
        return self.memory.blocks // -(-self.wishes.context // DEFAULT_BLOCK_SIZE)

    @property
    def idle_gpus(self) -> int:
        """Devices that the layout has no use for."""
        return self.hardware.gpus - self.layout.data * self.layout.tensor * self.layout.pipeline


def advise(facts: ModelFacts, hardware: Hardware, wishes: Wishes) -> Advice:
    """The layout to take. UserError, with the numbers, where no layout holds the model."""
    budget = int(hardware.memory_bytes * wishes.utilization) - wishes.reserve_bytes
    if budget <= 0:
        raise UserError(
            f"--reserve: {wishes.reserve_bytes} bytes leave nothing of a device's "
            f"{hardware.memory_bytes} at --utilization {wishes.utilization:g}"
        )
    need = Need(context=wishes.context, concurrency=wishes.concurrency, budget_bytes=budget)
    sizing = size(facts, hardware, need)
    if not sizing.fits:
        raise UserError(_too_small(facts, hardware, need))
    decision = decide(
        sizing, high_availability=wishes.high_availability, throughput=wishes.throughput
    )
    layout = decision.layout
    division = Division(layout.tensor, layout.pipeline, layout.expert)
    token = kv_bytes_per_token(len(facts.layers), facts.kv_numbers, facts.element_bytes)
    return Advice(
        facts=facts,
        hardware=hardware,
        wishes=wishes,
        decision=decision,
        memory=memory_of(facts, division, budget),
        kv_token_bytes=token,
        pod_gpus=layout.tensor * stages_of_a_pod(hardware, layout.tensor, layout.pipeline),
        pods=nodes_of(hardware, layout.tensor, layout.pipeline),
        steps=tuple(step_of(facts, layout, hardware, tokens) for tokens in _step_tokens(wishes)),
        moves=None
        if wishes.role == "Aggregated"
        else moves_of(token * wishes.context, hardware, wishes.peers),
    )


def _step_tokens(wishes: Wishes) -> tuple[int, ...]:
    """A decoding step has a token of each request."""
    if wishes.role == "Prefill":
        return (wishes.prefill_tokens,)
    if wishes.role == "Decode":
        return (wishes.concurrency,)
    return (wishes.concurrency, wishes.prefill_tokens)


def _too_small(facts: ModelFacts, hardware: Hardware, need: Need) -> str:
    kv = kv_bytes_per_token(len(facts.layers), facts.kv_numbers, facts.element_bytes)
    tokens = need.blocks * DEFAULT_BLOCK_SIZE
    text = (
        f"--gpus: {facts.weights_bytes / 1e9:.1f} GB of weights and {kv * tokens / 1e9:.1f} GB of "
        f"KV ({need.concurrency} requests of {need.context} tokens) do not fit into "
        f"{hardware.gpus} x {hardware.memory_bytes / 1e9:g} GB, of each "
        f"{need.budget_bytes / 1e9:.1f} GB to use"
    )
    least = fewest_nodes(facts, hardware, need)
    if least is None:
        return (
            f"{text}, nor into any number of them; try a smaller --concurrency, a shorter "
            "--context or --quantization"
        )
    nodes = nodes_of(hardware, least.tensor, least.pipeline)
    return f"{text}; it takes {nodes} nodes of {hardware.gpus_per_node}"
