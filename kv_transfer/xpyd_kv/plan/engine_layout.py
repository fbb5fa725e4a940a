"""How one engine's KV is divided over its ranks, as the plan sees it. Pure.

Made at the handshake from what LAYOUT announces, so each value here may be a peer's. Knows nothing
of the other side (`transfers` compares the two) and of no request.

Heads: with tp <= heads rank r has heads [r * heads / tp, (r + 1) * heads / tp); with more ranks
than heads each head lies on `replicas` neighbouring ranks. MLA caches one latent row per token and
layer instead of heads, so it counts as one head, which every rank has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from xpyd_core.errors import XpydError

# A plan is made from a peer's numbers, so its size needs a bound: far above any engine's ranks.
MAX_RANKS = 1024


class LayoutError(XpydError):
    """Between these engines no KV can move. `factor` is what REFUSE names: the field at fault;
    `detail` says what is wrong with it."""

    def __init__(self, factor: str, message: str) -> None:
        self.factor = factor
        self.detail = message
        super().__init__(f"{factor}: {message}")


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """Shape of one engine's paged cache over all its ranks.

    Ranks are numbered as in HELLO: stage * tp + place in the stage. On each, one block of one layer
    is [heads_per_rank, block_size, row_bytes], contiguous. Raises LayoutError where the fields do
    not fit together.
    """

    kv_heads: int
    """KV heads of the model, all ranks together. Of no effect with MLA."""
    tp: int
    """Ranks of a stage: at most the heads and a divisor of them, or a multiple."""
    stages: tuple[tuple[int, ...], ...]
    """For each pipeline stage the absolute indices of its layers, ascending: LAYOUT's `layers` of
    its ranks. They need not be equally many or adjacent."""
    block_size: int
    """Tokens."""
    row_bytes: int
    """K and V of one token of one head of one layer, or MLA's latent row: LAYOUT's `block_bytes` /
    (kv_heads of the rank x `block_size`)."""
    is_mla: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_heads", "tp", "block_size", "row_bytes"):
            if getattr(self, name) < 1:
                raise LayoutError(name, f"{getattr(self, name)}; must be at least 1")
        if not self.stages or not all(self.stages):
            raise LayoutError("layers", "every pipeline stage must hold a layer")
        if self.num_ranks > MAX_RANKS:
            raise LayoutError("tp", f"{self.num_ranks} ranks; at most {MAX_RANKS}")
        if self.heads % self.tp and self.tp % self.heads:
            raise LayoutError(
                "tp", f"{self.tp} ranks for {self.heads} KV heads; one must divide the other"
            )
        held = [layer for stage in self.stages for layer in stage]
        if len(set(held)) != len(held):
            raise LayoutError("layers", "a layer is held twice")
        if any(list(stage) != sorted(stage) for stage in self.stages):
            raise LayoutError("layers", "a stage's layers must be in ascending order")

    @cached_property
    def heads(self) -> int:
        """Heads that are cached, all ranks together."""
        return 1 if self.is_mla else self.kv_heads

    @property
    def replicas(self) -> int:
        """Ranks of a stage that hold the same head."""
        return max(1, self.tp // self.heads)

    @property
    def heads_per_rank(self) -> int:
        """`kv_heads` in LAYOUT of a rank."""
        return max(1, self.heads // self.tp)

    @property
    def block_bytes(self) -> int:
        """`block_bytes` in LAYOUT of a rank: one block of one layer."""
        return self.heads_per_rank * self.block_size * self.row_bytes

    @property
    def bytes_per_block(self) -> int:
        """The bytes of one block of all layers and heads, without replicas."""
        layers = sum(map(len, self.stages))
        return layers * self.heads * self.block_size * self.row_bytes

    @property
    def held_bytes_per_block(self) -> int:
        """The bytes of one block of all layers on all ranks, with replicas."""
        return sum(map(len, self.stages)) * self.tp * self.block_bytes

    @property
    def num_ranks(self) -> int:
        return self.tp * len(self.stages)

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """Absolute indices of the layers that the rank holds."""
        return self.stages[rank // self.tp]

    def heads_of(self, rank: int) -> range:
        """Absolute indices of the heads that the rank holds."""
        first = rank % self.tp * self.heads // self.tp
        return range(first, first + self.heads_per_rank)
