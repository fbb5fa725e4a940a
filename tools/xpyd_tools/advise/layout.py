"""Computes a layout with its costs from a model, devices and requirements. Pure.

The costs: what a step of the layout sends between its ranks, and what moving KV from P to D takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.errors import UserError
from xpyd_kv.transport.devices.nccl.library import NcclLimits, communicator_bytes
from xpyd_tools.advise.arithmetic import (
    LINKS,
    Link,
    all_reduce_bytes,
    all_reduces,
    all_to_all_bytes,
    boundary_bytes,
    bubble,
    kv_bytes_per_token,
    launches_s,
    ring_factor,
    transfer_s,
)
from xpyd_tools.advise.engines import OWN_ENGINE, Engine
from xpyd_tools.advise.facts import ModelFacts
from xpyd_tools.advise.fit import (
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
from xpyd_tools.advise.trees import Decision, Layout, decide

CHANNELS = (16, NcclLimits().channels)
"""Channels of a communicator: NCCL's usual number, and what engines ask for."""


HOST_POOL_BYTES = 4 << 30
"""spec.kvTransfer.hostPoolSize of a D, where a document says none."""


@dataclass(frozen=True)
class Messages:
    """Messages of one kind in one step: how many, the bytes that a rank gives to each, the bytes
    that leave a rank in the step, how long these take at full speed, and what launching takes."""

    count: int
    each_bytes: int
    sent_bytes: int
    seconds: float
    link: Link
    launches_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class Step:
    """One step of `tokens`. None: there are no such messages in this layout. `all_to_alls` replace
    one all-reduce of each layer with experts, and count as if all of a token's experts
    were elsewhere."""

    tokens: int
    all_reduces: Messages | None
    boundaries: Messages | None
    all_to_alls: Messages | None


def step_of(facts: ModelFacts, layout: Layout, hardware: Hardware, tokens: int) -> Step:
    """What `layout` sends for `tokens` tokens, of all requests of an instance together. Its copies
    have equal parts of them, and so have the ranks that send rows to experts of several copies."""
    size, own = facts.element_bytes, -(-tokens // layout.inside)
    within = LINKS[hardware.within]
    reduces = boundaries = to_all = None
    if layout.tensor > 1:
        count = all_reduces(len(facts.layers))
        each = all_reduce_bytes(own, facts.hidden, size)
        sent = int(count * each * ring_factor(layout.tensor))
        launching = launches_s(within, count)
        reduces = Messages(count, each, sent, _s(sent, within), within, launching)
    if layout.pipeline > 1:
        is_between = nodes_of(hardware, layout.tensor, layout.pipeline) > 1
        link = LINKS[hardware.between if is_between else hardware.within]
        each = boundary_bytes(own, facts.hidden, size, tensor=layout.tensor)
        count = layout.pipeline - 1
        boundaries = Messages(count, each, each, count * _s(each, link), link)
    if layout.expert > 1 and facts.experts is not None:
        per_token, count = facts.experts.per_token, 2 * facts.experts.layers
        each = all_to_all_bytes(tokens, facts.hidden, facts.expert_element_bytes, per_token)
        sent = count * each // (layout.expert if layout.inside > 1 else 1)
        to_all = Messages(count, each, sent, _s(sent, within), within)
    return Step(tokens, reduces, boundaries, to_all)


def _s(size_bytes: int, link: Link) -> float:
    return transfer_s(size_bytes, link.bytes_per_s)


def bubbles(stages: int) -> tuple[tuple[int, Fraction], ...]:
    """The share of time that stages wait, by batches under way; none without stages."""
    if stages == 1:
        return ()
    return tuple((count, bubble(stages, count)) for count in (1, stages, 2 * stages, 4 * stages))


@dataclass(frozen=True)
class Moves:
    """KV of one prompt from P to D, and NCCL's memory on each device for `peers` instances of the
    other role, by channels of a communicator."""

    prompt_bytes: int
    seconds: float
    link: Link
    peers: int
    nccl_bytes: tuple[tuple[int, int], ...]


def moves_of(prompt_bytes: int, hardware: Hardware, peers: int, *, over_nccl: bool = True) -> Moves:
    """A device has a communicator with the rank at its own place in each of `peers` instances, if
    both sides are divided alike. Not `over_nccl`: a fleet of vLLM has none."""
    link = LINKS[hardware.between]
    channels = CHANNELS if over_nccl else ()
    memory = tuple((each, peers * communicator_bytes(each)) for each in channels)
    return Moves(prompt_bytes, _s(prompt_bytes, link), link, peers, memory)


# --- the advice


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the layout is for. `role`: of a fleet's pool. `utilization`: share of a device's memory;
    `reserve_bytes` of it are for activations, graphs and NCCL. `prefill_tokens`: of one step.
    `engine`: what serves."""

    role: str
    context: int
    concurrency: int
    utilization: float
    reserve_bytes: int
    prefill_tokens: int
    peers: int
    high_availability: bool = False
    throughput: bool = False
    engine: Engine = OWN_ENGINE


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
        """Requests of the whole context that fit into an instance's KV cache at once."""
        of_a_copy = self.memory.blocks // -(-self.wishes.context // DEFAULT_BLOCK_SIZE)
        return self.layout.inside * of_a_copy

    @property
    def needed_kv_bytes(self) -> int:
        """KV of all requests that were asked for."""
        return self.wishes.concurrency * self.wishes.context * self.kv_token_bytes

    @property
    def idle_gpus(self) -> int:
        """Devices that the layout has no use for."""
        return self.hardware.gpus - self.layout.data * self.layout.tensor * self.layout.pipeline


def advise(facts: ModelFacts, hardware: Hardware, wishes: Wishes) -> Advice:
    """The layout to take. UserError, with the numbers, where no layout holds the model."""
    budget = int(hardware.memory_bytes * wishes.utilization) - wishes.reserve_bytes
    if hardware.on_cpus and wishes.engine.has_our_connector and wishes.role == "Decode":
        budget -= HOST_POOL_BYTES
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
        sizing,
        high_availability=wishes.high_availability,
        throughput=wishes.throughput,
        # Several copies in one instance are one KV address each.
        may_share=wishes.role == "Aggregated",
    )
    layout = decision.layout
    division = Division(layout.tensor, layout.pipeline, layout.expert)
    token = kv_bytes_per_token(len(facts.layers), facts.kv_numbers, facts.element_bytes)
    pods = nodes_of(hardware, layout.tensor, layout.pipeline)
    if wishes.engine.is_vllm and pods > 1:
        raise UserError(
            f"--engine VLLM: an instance of vLLM is one pod, and {layout} takes {pods} nodes of "
            f"{hardware.gpus_per_node}; try a smaller --concurrency, a shorter --context, "
            "--quantization, or devices with more memory"
        )
    return Advice(
        facts=facts,
        hardware=hardware,
        wishes=wishes,
        decision=decision,
        memory=memory_of(facts, division, budget),
        kv_token_bytes=token,
        pod_gpus=layout.tensor
        * layout.inside
        * stages_of_a_pod(hardware, layout.tensor, layout.pipeline),
        pods=pods,
        steps=tuple(step_of(facts, layout, hardware, tokens) for tokens in _step_tokens(wishes)),
        moves=None
        if wishes.role == "Aggregated"
        else moves_of(
            token * wishes.context,
            hardware,
            wishes.peers,
            over_nccl=not wishes.engine.is_vllm,
        ),
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
    flag = "--cpu-pods" if hardware.on_cpus else "--gpus"
    text = (
        f"{flag}: {facts.weights_bytes / 1e9:.1f} GB of weights and {kv * tokens / 1e9:.1f} GB of "
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
