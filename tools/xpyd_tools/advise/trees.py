"""The two decision trees for a layout, their answers, and which one is followed where. Pure.

Tree 1 asks for the smallest place that holds the model, then for experts in it, and for
availability where no node holds it. Tree 2 asks for one device, then for NVLink and whether a
tensor group is enough, for experts, and for throughput. Each forgets what the other asks for, so
they differ: `decide` says where, and what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xpyd_tools.advise.fit import Sizing, copies, dealt


@dataclass(frozen=True)
class Layout:
    """Sizes of the four ways to divide work. `expert` 1: none. `data`: copies in all; `inside`: of
    them in one instance, where they share their experts."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    inside: int = 1

    @property
    def instances(self) -> int:
        """Replicas of the pool."""
        return self.data // self.inside

    def __str__(self) -> str:
        sizes = (("TP", self.tensor), ("PP", self.pipeline), ("EP", self.expert), ("DP", self.data))
        return " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one device"


@dataclass(frozen=True)
class Answer:
    """What a tree says, and how it came there: each question with its answer."""

    steps: tuple[tuple[str, bool], ...]
    layout: Layout


@dataclass(frozen=True)
class Difference:
    """Where the trees disagree: the size in question, what each says, what is taken and why."""

    axis: str
    first: int
    second: int
    taken: int
    reason: str


@dataclass(frozen=True)
class Decision:
    """Both answers and the layout that is followed. `notes`: what neither tree asks."""

    first: Answer
    second: Answer
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    layout: Layout


def first_tree(sizing: Sizing, *, high_availability: bool) -> Answer:
    """The layout by place: a device, a node, several nodes."""
    hardware, each = sizing.hardware, sizing.hardware.gpus_per_node
    steps = [("one device holds it", sizing.fits_device)]
    if sizing.fits_device:
        return Answer(tuple(steps), Layout(data=hardware.gpus))
    steps.append(("one node holds it", sizing.fits_node))
    if sizing.fits_node:
        steps.append(("experts", sizing.experts > 0))
        return Answer(tuple(steps), Layout(each, 1, dealt(sizing.experts, each)))
    steps.append(("high availability", high_availability))
    data = hardware.nodes // sizing.nodes if high_availability else 1
    return Answer(tuple(steps), Layout(each, sizing.nodes, 1, data))


def second_tree(sizing: Sizing, *, throughput: bool) -> Answer:
    """The layout by what the links allow."""
    hardware = sizing.hardware
    steps = [("one device holds it", sizing.fits_device)]
    if sizing.fits_device:
        steps.append(("more throughput", throughput))
        return Answer(tuple(steps), Layout(data=hardware.gpus if throughput else 1))
    has_nvlink = hardware.within == "nvlink"
    steps.append(("NVLink", has_nvlink))
    if has_nvlink:
        steps.append(("TP is enough", sizing.tensor_least is not None))
    tensor, pipeline = _ranks(sizing, throughput=throughput)
    steps.append(("experts", sizing.experts > 0))
    steps.append(("more throughput", throughput))
    data = copies(hardware, tensor, pipeline) if throughput else 1
    expert = dealt(sizing.experts, tensor)
    return Answer(tuple(steps), Layout(tensor, pipeline, expert, data))


def _ranks(sizing: Sizing, *, throughput: bool) -> tuple[int, int]:
    """Sizes of tensor groups and of the pipeline of the second tree."""
    if sizing.tensor_least is not None:
        return (sizing.tensor_least if throughput else sizing.tensor_most), 1
    if sizing.staged is None:
        raise ValueError("the devices do not hold the model")
    return sizing.staged.tensor, sizing.staged.pipeline


def decide(
    sizing: Sizing, *, high_availability: bool, throughput: bool, may_share: bool = False
) -> Decision:
    """Walk both trees and follow one of them on each axis. `may_share`: an instance may have copies
    that share their experts, which neither tree knows."""
    first = first_tree(sizing, high_availability=high_availability)
    second = second_tree(sizing, throughput=throughput)
    one, two = first.layout, second.layout
    notes: list[str] = []
    data = one.data
    if not sizing.fits_device:
        most = copies(sizing.hardware, two.tensor, two.pipeline)
        data = most if throughput or high_availability else 1
        if high_availability:
            notes.extend(_of_availability(sizing, most))
    layout = Layout(two.tensor, two.pipeline, two.expert, data)
    if may_share and throughput and (shared := _shared(sizing)) is not None:
        layout = shared
        notes.append(
            "neither tree lets copies share their experts: with these on all "
            f"{shared.expert} devices of a node, once, tensor groups of {shared.tensor} are enough "
            f"in place of {sizing.tensor_least}, and more copies compute"
        )
    return Decision(first, second, _differences(sizing, one, two, layout), tuple(notes), layout)


def _shared(sizing: Sizing) -> Layout | None:
    """Copies that fill a node and share their experts, where smaller tensor groups are enough
    then; see docs/adr/0125."""
    tensor, least = sizing.tensor_shared, sizing.tensor_least
    if tensor is None or least is None or tensor >= least:
        return None
    hardware, each = sizing.hardware, sizing.hardware.gpus_per_node
    inside = each // tensor
    return Layout(tensor, 1, each, hardware.nodes * inside, inside)


def _of_availability(sizing: Sizing, copies_in_all: int) -> Iterator[str]:
    if copies_in_all == 1:
        yield "high availability needs a second copy; there are no devices for one"
    elif sizing.fits_node:
        yield "neither tree asks for availability where one node holds the model: copies for it"


def _differences(sizing: Sizing, one: Layout, two: Layout, taken: Layout) -> tuple[Difference, ...]:
    found: list[Difference] = []
    shares = "copies that share their experts need smaller tensor groups" * (taken.inside > 1)
    if one.tensor != two.tensor:
        why = shares or _why_tensor(sizing)
        found.append(Difference("TP", one.tensor, two.tensor, taken.tensor, why))
    if one.pipeline != two.pipeline:
        why = "tree 1 takes a node for a stage; here a node has room for several"
        found.append(Difference("PP", one.pipeline, two.pipeline, taken.pipeline, why))
    if (one.expert > 1) != (two.expert > 1):
        why = (
            "tree 1 asks for experts only where one node holds the model; dealt out within each "
            "node they send nothing between nodes"
        )
        found.append(Difference("EP", one.expert, two.expert, taken.expert, why))
    if one.data != two.data:
        why = shares or _why_data(sizing, one, two)
        found.append(Difference("DP", one.data, two.data, taken.data, why))
    return tuple(found)


def _why_tensor(sizing: Sizing) -> str:
    if sizing.tensor_most < sizing.hardware.gpus_per_node:
        return "tree 1 does not ask what divides the model's heads"
    if sizing.tensor_least is None:
        return "tree 1 does not ask whether smaller tensor groups take fewer nodes"
    return "for throughput the smallest tensor group that holds the model leaves devices for copies"


def _why_data(sizing: Sizing, one: Layout, two: Layout) -> str:
    if sizing.fits_device:
        return "each device holds a whole copy; a device without a copy would serve no request"
    if one.data > two.data:
        return "tree 2 does not ask for availability"
    return "tree 1 does not ask for throughput where one device is too small"
