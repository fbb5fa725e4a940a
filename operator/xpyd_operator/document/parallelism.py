"""spec.pools[].parallelism: the ranks of an instance (docs/parallel.md), and their words.

What depends on the pod besides, such as its GPUs, is a rule of the pool (`document.engines`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xpyd_core.parallel.ranks import Sizes
from xpyd_operator.document.base import ApiModel, Numbers, rule

MOST_DATA = "(has({0}.parallelism.maxData) ? {0}.parallelism.maxData : {0}.parallelism.data)"
"""The replicas that an instance of the pool {0} has room for, in CEL."""
RANKS = "{0}.parallelism.tensor * {0}.parallelism.pipeline * " + MOST_DATA
"""The ranks of an instance of the pool {0}, in CEL."""


def _expert_ranks(parallelism: Parallelism) -> tuple[int, ...]:
    tensor, data = parallelism.tensor, parallelism.data
    return parallelism.expert, tensor, data, tensor * data


def _pipeline(parallelism: Parallelism) -> tuple[int, ...]:
    return (parallelism.pipeline,)


def _data_and_most(parallelism: Parallelism) -> tuple[int, ...]:
    return parallelism.data, parallelism.most


class Parallelism(ApiModel):
    """How one instance splits the model, and how many copies of it it has: tensor * pipeline * data
    ranks, each a process with a GPU of its own or, in an instance on the CPU, a share of the cores.
    Any layout of Prefill pools goes with any of Decode pools. With `maxData` pods have room for so
    many copies."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share each layer; they must divide the model's attention heads, and never leave
    their pod."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages, which share the layers among them; each has `tensor` ranks."""
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Replicas of the engine in one instance, behind one endpoint: each has a copy of the model and
    `tensor * pipeline` ranks of its own."""
    max_data: Annotated[int, Field(ge=2, le=64)] | None = None
    """Most replicas: pods have their devices, and another number in `data` makes no new pods:
    replicas come and go in those that are there. None: another number is a new revision."""
    expert: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share the experts of a layer, each of which then has whole ones: all of a stage in
    all replicas, so `tensor * data`; with `maxData` also `tensor * maxData`, which may stay when
    `data` changes. 1: each expert is divided as the rest of its layer."""
    on_rank_loss: Literal["Restart", "Continue"] = "Restart"
    """Where replicas share experts and a rank of one is lost: the instance ends and starts again,
    or the other replicas take over its experts and go on until it has come again."""

    @property
    def most(self) -> int:
        """The replicas that an instance has room for."""
        return self.max_data or self.data

    @property
    def sizes(self) -> Sizes:
        """The same as the ranks know it, with all replicas that there may be."""
        return Sizes(
            data=self.most,
            pipeline=self.pipeline,
            tensor=self.tensor,
            has_whole_experts=self.expert > 1,
        )

    @property
    def ranks(self) -> int:
        """Processes of one instance that hold a part of the model."""
        return self.sizes.world

    @property
    def layout(self) -> str:
        """For people: TP2xPP2, with replicas TP2xPP2xDP2, with whole experts TP2xPP2xDP2xEP4; of
        replicas that come and go TP2xPP1xDP1-4xEP2-8."""
        data, expert = str(self.data), str(self.expert)
        if self.max_data:
            data = f"1-{self.max_data}"
            expert = f"{self.tensor}-{self.tensor * self.max_data}" if self.expert > 1 else "1"
        more = (("DP", data), ("EP", expert))
        shown = "".join(f"x{name}{size}" for name, size in more if size != "1")
        return f"TP{self.tensor}xPP{self.pipeline}{shown}"

    @property
    def with_whole_experts(self) -> Parallelism:
        """The same, with experts whole on the ranks that share them."""
        return self.model_copy(update={"expert": self.tensor * self.most})

    @property
    def with_replicas_that_stay(self) -> Parallelism:
        """The same, where no replicas come and go. One alone shares experts with none, and is not
        left behind."""
        expert = self.tensor * self.data if self.expert > 1 else 1
        on_loss = self.on_rank_loss if self.data > 1 else "Restart"
        update = {"max_data": None, "expert": expert, "on_rank_loss": on_loss}
        return self.model_copy(update=update)

    @rule(
        "!has(self.maxData) || !has(self.data) || self.data <= self.maxData",
        "there is room for parallelism.maxData replicas: lower data, or raise maxData, which makes "
        "new pods",
        field="data",
        numbers=Numbers("data %d, maxData %d", "self.data, self.maxData", _data_and_most),
    )
    def _has_room(self) -> bool:
        return self.max_data is None or self.data <= self.max_data

    @rule(
        "!has(self.maxData) || !has(self.pipeline) || self.pipeline <= 1",
        "replicas come and go only without stages: leave maxData out, or pipeline",
        field="maxData",
        numbers=Numbers("pipeline %d", "self.pipeline", _pipeline),
    )
    def _may_be_elastic(self) -> bool:
        return self.max_data is None or self.pipeline <= 1

    @rule(
        # Tried on the default {}, too, before the fields have their own.
        "!has(self.expert) || self.expert <= 1 || (has(self.tensor) && has(self.data) && "
        "(self.expert == self.tensor * self.data || "
        "(has(self.maxData) && self.expert == self.tensor * self.maxData)))",
        "experts lie on all ranks of a stage: set parallelism.expert to tensor * data, with "
        "maxData to that or to tensor * maxData, or leave it out",
        field="expert",
        numbers=Numbers(
            "expert %d, %d * %d = %d ranks",
            "self.expert, self.tensor, self.data, self.tensor * self.data",
            _expert_ranks,
        ),
    )
    def _experts_are_on_a_stage(self) -> bool:
        return self.expert in (1, self.tensor * self.data, self.tensor * self.most)

    @rule(
        "!has(self.onRankLoss) || self.onRankLoss != 'Continue' || (has(self.expert) && "
        "self.expert > 1 && (has(self.maxData) || (has(self.data) && self.data > 1)) && "
        "(!has(self.pipeline) || self.pipeline <= 1))",
        "replicas go on where they share experts and have one stage: raise parallelism.data and "
        "expert, leave pipeline out, or set Restart",
        field="onRankLoss",
    )
    def _others_can_go_on(self) -> bool:
        can = self.expert > 1 and self.most > 1 and self.pipeline == 1
        return self.on_rank_loss == "Restart" or can
