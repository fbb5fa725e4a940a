"""What of a model fits on which devices: weights of a rank, and KV blocks in the rest. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import check_parallel
from xpyd_core.parallel.partition import partition
from xpyd_core.parallel.ranks import Sizes
from xpyd_tools.advise.arithmetic import experts_of_a_rank, kv_bytes_per_token
from xpyd_tools.advise.facts import ModelFacts

MAX_STAGES = 64
"""The bound on stages in a fleet document."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Devices, all alike. `within` and `between` nodes: names of arithmetic.LINKS. `on_cpus`: each
    is a pod on a CPU, with its memory."""

    nodes: int
    gpus_per_node: int
    memory_bytes: int
    within: str = "nvlink"
    between: str = "ib"
    on_cpus: bool = False

    @property
    def gpus(self) -> int:
        """All devices of all nodes."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class Need:
    """What an instance must hold: KV of `concurrency` requests of `context` tokens, in `budget`
    bytes of a device that weights and KV share."""

    context: int
    concurrency: int
    budget_bytes: int

    @property
    def request_blocks(self) -> int:
        """KV blocks of one request."""
        return -(-self.context // DEFAULT_BLOCK_SIZE)

    @property
    def blocks(self) -> int:
        """KV blocks of all requests."""
        return self.concurrency * self.request_blocks


@dataclass(frozen=True)
class Division:
    """How one copy of the model is divided. `expert`: ranks that experts are dealt to, those of all
    copies that share them; 1: each expert is divided as the rest of its layer."""

    tensor: int
    pipeline: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Devices of one copy."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Memory:
    """One device's, of the rank that has the least room. `blocks`: KV blocks that all ranks have
    room for, none below 0."""

    weights_bytes: int
    kv_token_bytes: int
    blocks: int


def divide(facts: ModelFacts, tensor: int, pipeline: int = 1) -> Division:
    """The division by so many ranks, with experts dealt to a tensor group if there are enough."""
    return Division(tensor, pipeline, dealt(facts.experts.count if facts.experts else 0, tensor))


def dealt(experts: int, tensor: int) -> int:
    """How many ranks `experts` are dealt to: each of a tensor group, or not at all (1)."""
    return tensor if tensor <= experts else 1


def memory_of(facts: ModelFacts, division: Division, budget_bytes: int) -> Memory:
    """What a rank of `division` holds, and the room that is left of `budget_bytes` for KV."""
    stages = partition(len(facts.layers), division.pipeline)
    found = [_stage_memory(facts, division, layers, budget_bytes) for layers in stages]
    return min(found, key=lambda memory: memory.blocks)


def _stage_memory(
    facts: ModelFacts, division: Division, layers: range, budget_bytes: int
) -> Memory:
    held = [facts.layers[index] for index in layers]
    shared = sum(layer.shared for layer in held) // division.tensor
    experts = sum(layer.experts for layer in held)
    if facts.experts is not None and division.expert > 1:
        count = facts.experts.count
        experts = experts * experts_of_a_rank(count, division.expert) // count
    else:
        experts //= division.tensor
    is_last = layers.stop == len(facts.layers)
    outer = facts.embedding if layers.start == 0 else 0
    if is_last:
        # A tied head of a stage of its own is a second copy of the embedding.
        outer += facts.head or (0 if layers.start == 0 else facts.embedding)
    weights = facts.weights
    total = int(weights.of_layers(shared + experts) + weights.of_outer(outer // division.tensor))
    token = kv_bytes_per_token(
        len(layers), _kv_numbers_of_a_rank(facts, division.tensor), facts.element_bytes
    )
    room = max(budget_bytes - total, 0)
    return Memory(total, token, room // (token * DEFAULT_BLOCK_SIZE))


def _kv_numbers_of_a_rank(facts: ModelFacts, tensor: int) -> int:
    """A rank has whole heads, at least one; a latent is whole on each."""
    if facts.kv_heads == 0:
        return facts.kv_numbers
    return facts.kv_numbers // facts.kv_heads * max(facts.kv_heads // tensor, 1)


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What the trees ask. `experts`: of a layer, 0 for none. `tensor_most`: the largest group in a
    node that divides the model. `tensor_least`: the smallest that holds it in one stage; None: none
    does. `staged`: the division with stages on the fewest nodes, then of the fewest stages; None:
    the devices do not hold the model, or need no stages. `tensor_shared`: as `tensor_least`, where
    the copies that fill a node share their experts; None: there are too few, or no such group."""

    hardware: Hardware
    experts: int
    tensor_most: int
    tensor_least: int | None
    staged: Division | None
    tensor_shared: int | None = None

    @property
    def fits_device(self) -> bool:
        return self.tensor_least == 1

    @property
    def fits_node(self) -> bool:
        return self.tensor_least is not None or self.nodes == 1

    @property
    def fits(self) -> bool:
        """Whether all devices together hold the model."""
        return self.tensor_least is not None or self.staged is not None

    @property
    def nodes(self) -> int:
        """Nodes that one copy with stages takes; 0: there is none."""
        if self.staged is None:
            return 0
        return nodes_of(self.hardware, self.staged.tensor, self.staged.pipeline)


def size(facts: ModelFacts, hardware: Hardware, need: Need) -> Sizing:
    """Try the divisions that there are."""
    tensors = possible_tensors(facts, hardware)
    least = next((t for t in tensors if holds(facts, divide(facts, t), need)), None)
    staged = None if least else fewest_nodes(facts, hardware, need)
    if staged and nodes_of(hardware, staged.tensor, staged.pipeline) > hardware.nodes:
        staged = None
    return Sizing(
        hardware=hardware,
        experts=facts.experts.count if facts.experts else 0,
        tensor_most=tensors[-1],
        tensor_least=least,
        staged=staged,
        tensor_shared=shared_tensor(facts, hardware, need),
    )


def possible_tensors(facts: ModelFacts, hardware: Hardware) -> list[int]:
    """Sizes of tensor groups that divide the model and fit into a node, smallest first."""
    return [t for t in range(1, hardware.gpus_per_node + 1) if _divides(facts, t)]


def shared_tensor(facts: ModelFacts, hardware: Hardware, need: Need) -> int | None:
    """The smallest tensor group whose copies, as many as fill a node, hold the model while its
    experts lie on all devices of the node, once. An instance has all of these copies, and each a
    part of the requests."""
    each = hardware.gpus_per_node
    if facts.experts is None or facts.experts.count < each:
        return None
    for tensor in possible_tensors(facts, hardware):
        copies, odd = divmod(each, tensor)
        own = replace(need, concurrency=-(-need.concurrency // copies))
        if copies > 1 and not odd and holds(facts, Division(tensor, 1, each), own):
            return tensor
    return None


def fewest_nodes(facts: ModelFacts, hardware: Hardware, need: Need) -> Division | None:
    """The division with stages that takes the fewest nodes of this kind, however many there are,
    and of these the one with the fewest stages. None: none holds the model."""
    found = (
        divide(facts, tensor, stages)
        for tensor in possible_tensors(facts, hardware)
        if (stages := least_stages(facts, tensor, need)) is not None
    )
    return min(
        found,
        key=lambda each: (nodes_of(hardware, each.tensor, each.pipeline), each.pipeline),
        default=None,
    )


def holds(facts: ModelFacts, division: Division, need: Need) -> bool:
    """Whether weights and the KV that is asked for fit."""
    return memory_of(facts, division, need.budget_bytes).blocks >= need.blocks


def least_stages(facts: ModelFacts, tensor: int, need: Need) -> int | None:
    """The fewest stages of `tensor` ranks that hold the model, whatever devices there are."""
    # Divided as evenly as can be, fewer stages have no room after the weights.
    fewest = facts.weights_bytes // (tensor * need.budget_bytes) + 1
    counts = range(fewest, min(len(facts.layers), MAX_STAGES) + 1)
    return next((p for p in counts if holds(facts, divide(facts, tensor, p), need)), None)


def stages_of_a_pod(hardware: Hardware, tensor: int, pipeline: int) -> int:
    """Stages of `tensor` ranks in one pod: pods are all alike and no larger than a node."""
    most = min(hardware.gpus_per_node // tensor, pipeline)
    return next(count for count in range(most, 0, -1) if pipeline % count == 0)


def nodes_of(hardware: Hardware, tensor: int, pipeline: int) -> int:
    """Nodes that one copy takes, the last one perhaps in part."""
    return pipeline // stages_of_a_pod(hardware, tensor, pipeline)


def copies(hardware: Hardware, tensor: int, pipeline: int) -> int:
    """How many copies the devices have room for; no copy shares a pod with another."""
    pods = nodes_of(hardware, tensor, pipeline)
    of_a_pod = tensor * stages_of_a_pod(hardware, tensor, pipeline)
    return hardware.nodes * (hardware.gpus_per_node // of_a_pod) // pods


def _divides(facts: ModelFacts, tensor: int) -> bool:
    try:
        check_parallel(facts.shape, Sizes(tensor=tensor))
    except UserError:
        return False
    return True
