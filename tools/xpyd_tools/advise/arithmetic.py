"""What a division of a model costs: bytes, messages and times, one formula each. Pure.

Sizes are bytes, bandwidths bytes per second, times seconds. Hidden states count as `element_bytes`
for each of their numbers. Bandwidths are those of one device that makers print, NVLink's for both
directions together; launch costs are what one collective takes however small it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

GB = 10**9


@dataclass(frozen=True)
class Link:
    """What joins devices. `launch_s`: least and most that one all-reduce takes before its bytes
    count; None where there is none."""

    label: str
    bytes_per_s: int
    launch_s: tuple[float, float] | None = None


HBM_BYTES_PER_S = 3350 * GB
"""HBM3 of one device, with which links are compared."""
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink": Link("NVLink", 900 * GB, (1e-6, 2e-6)),
        "pcie": Link("PCIe 5", 128 * GB),
        "ib": Link("InfiniBand NDR", 50 * GB, (10e-6, 50e-6)),
        "eth": Link("100 Gbit/s Ethernet", 12_500_000_000),
    }
)
WITHIN = ("nvlink", "pcie")
BETWEEN = ("ib", "eth")


def transfer_s(size_bytes: int, bytes_per_s: int) -> float:
    """How long so many bytes take at full speed."""
    return size_bytes / bytes_per_s


# --- memory


def kv_bytes_per_token(layers: int, kv_numbers: int, element_bytes: int) -> int:
    """KV of one token in `layers`; `kv_numbers`: 2 x KV heads x head size, or the latent's."""
    return layers * kv_numbers * element_bytes


def device_bytes(
    shared: int, experts: int, *, tensor: int = 1, pipeline: int = 1, expert: int = 1
) -> int:
    """Weights on one device, if layers were all alike: the shared part divided by `tensor`, experts
    by the larger of `tensor` and `expert` (expert parallelism takes the same ranks), both by
    stages. Copies (DP) have this each."""
    return -(-shared // (tensor * pipeline)) + -(-experts // (max(tensor, expert) * pipeline))


# --- tensor parallelism


def all_reduces(layers: int) -> int:
    """All-reduces of one step: behind attention and behind the MLP of each layer."""
    return 2 * layers


def all_reduce_bytes(tokens: int, hidden: int, element_bytes: int) -> int:
    """What each rank gives to one all-reduce."""
    return tokens * hidden * element_bytes


def ring_factor(ranks: int) -> Fraction:
    """What a ring all-reduce sends from each rank, as a multiple of the tensor."""
    return Fraction(2 * (ranks - 1), ranks)


def launches_s(link: Link, count: int) -> tuple[float, float] | None:
    """What `count` collectives over `link` take however small they are, least and most."""
    if link.launch_s is None:
        return None
    return count * link.launch_s[0], count * link.launch_s[1]


# --- pipeline parallelism


def boundary_bytes(tokens: int, hidden: int, element_bytes: int, *, tensor: int = 1) -> int:
    """Bytes from a rank to its twin in the next stage: its share of hidden states and residual."""
    return 2 * tokens * hidden * element_bytes // tensor


def bubble(stages: int, batches: int) -> Fraction:
    """The share of time in which a stage waits while `batches` go through `stages`."""
    return Fraction(stages - 1, stages - 1 + batches)


def stage_start_s(stage: int, batch: int, stage_s: float) -> float:
    """When `stage` begins with `batch`, both from 0, if each takes `stage_s` everywhere."""
    return stage_s * (stage + batch)


def batch_s(stages: int, stage_s: float, boundary_s: float) -> float:
    """One batch through all stages."""
    return stages * stage_s + (stages - 1) * boundary_s


# --- expert parallelism


def experts_of_a_rank(experts: int, ranks: int) -> int:
    """The most that one rank holds."""
    return -(-experts // ranks)


def all_to_all_bytes(tokens: int, hidden: int, element_bytes: int, per_token: int) -> int:
    """Bytes of one of the two exchanges of a layer with experts: each token to its experts, or
    back.
    """
    return tokens * hidden * element_bytes * per_token


# --- prefill and decode apart


@dataclass(frozen=True)
class Communicators:
    """Communicators of a fleet over NCCL whose instances all have the same tensor parallelism: one
    for each pair of P and D rank at the same place, and one for each instance's tensor group."""

    transfer: int
    tensor_groups: int

    @property
    def total(self) -> int:
        return self.transfer + self.tensor_groups


def communicators(prefill: int, decode: int, tensor: int) -> Communicators:
    """Communicators between `prefill` and `decode` instances of `tensor` ranks each."""
    groups = prefill + decode if tensor > 1 else 0
    return Communicators(prefill * decode * tensor, groups)
