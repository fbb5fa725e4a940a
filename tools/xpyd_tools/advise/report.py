"""An advice as text, as JSON, as notes and as a part of a fleet document. Pure.

A note says what the numbers of a layout do not: what the engine cannot do yet, and what is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.sizes import format_bytes
from xpyd_tools.advise.arithmetic import LINKS
from xpyd_tools.advise.layout import Advice, Messages, Moves, Step, bubbles
from xpyd_tools.advise.trees import Answer, Layout

MIB, GIB = 1 << 20, 1 << 30
_KINDS = (
    ("all-reduces (TP)", "all_reduces"),
    ("to the next stage (PP)", "boundaries"),
    ("all-to-alls (EP)", "all_to_alls"),
)


def text_of(name: str, advice: Advice, *, not_served: str | None) -> str:
    """Everything, for a person. `not_served`: why the engine does not serve the model."""
    parts = [
        "\n".join(_head(name, advice)),
        "\n".join(_trees(advice)),
        _rows(list(_memory(advice))),
        *("\n".join(_step(step)) for step in advice.steps),
        "\n".join(_more(advice)),
        "\n".join(f"note: {note}" for note in _notes(advice, not_served)),
        f"for the fleet document:\n{snippet(advice)}",
    ]
    return "\n\n".join(part for part in parts if part)


def _head(name: str, advice: Advice) -> Iterator[str]:
    facts, hardware = advice.facts, advice.hardware
    experts = facts.experts
    more = f", {experts.count} experts in {experts.layers} layers" if experts else ""
    yield (
        f"{name}: {facts.architecture}, {len(facts.layers)} layers{more}, "
        f"{_parameters(facts.parameters)} parameters in {facts.weights.label}"
    )
    if hardware.on_cpus:
        yield f"{hardware.nodes} pods on CPUs, each of {_size(hardware.memory_bytes)}"
        return
    between = f", {LINKS[hardware.between].label} between" if hardware.nodes > 1 else ""
    yield (
        f"{hardware.gpus} devices of {_size(hardware.memory_bytes)}, {hardware.nodes} "
        f"node{'s' if hardware.nodes > 1 else ''} of {hardware.gpus_per_node}, "
        f"{LINKS[hardware.within].label} within{between}"
    )


def _trees(advice: Advice) -> Iterator[str]:
    decision = advice.decision
    for number, answer in enumerate((decision.first, decision.second), 1):
        yield f"tree {number}: {_steps(answer)} -> {answer.layout}"
    for each in decision.differences:
        says = f"{each.first} and {each.second}, taken {each.taken}"
        yield f"they differ in {each.axis} ({says}): {each.reason}"
    if not decision.differences:
        yield "they agree"
    yield f"layout: {decision.layout}"


def _steps(answer: Answer) -> str:
    return ", ".join(f"{question}? {'yes' if yes else 'no'}" for question, yes in answer.steps)


def _memory(advice: Advice) -> Iterator[tuple[str, str]]:
    facts, memory, wishes = advice.facts, advice.memory, advice.wishes
    layout = advice.layout
    budget = advice.hardware.memory_bytes * wishes.utilization
    yield f"weights, {facts.weights.source}", _size(facts.weights_bytes)
    yield "weights of the fullest device", _size(memory.weights_bytes)
    yield f"a device's {wishes.utilization:.0%}", _size(budget)
    yield "of it reserved", _size(wishes.reserve_bytes)
    yield "KV of a token", f"{advice.kv_token_bytes:,} B"
    yield "KV of a token on a device", f"{memory.kv_token_bytes:,} B"
    prompt = advice.kv_token_bytes * wishes.context
    yield f"KV of {wishes.context} tokens", _size(prompt)
    yield f"KV blocks of {DEFAULT_BLOCK_SIZE} tokens that fit", f"{memory.blocks:,}"
    yield f"requests of {wishes.context} tokens that fit", f"{advice.requests:,}"
    yield "asked for", f"{wishes.concurrency:,}"
    copies = f"{layout.data} cop{'ies' if layout.data > 1 else 'y'}"
    pods, more = advice.pods, ""
    if layout.inside > 1:
        pods, more = layout.instances, f", with {layout.inside} copies"
    yield copies, f"{pods} pod{'s' if pods > 1 else ''} of {advice.pod_gpus} each{more}"


def _step(step: Step) -> Iterator[str]:
    found = [(name, getattr(step, field)) for name, field in _KINDS]
    found = [(name, messages) for name, messages in found if messages is not None]
    if not found:
        return
    yield f"a step of {step.tokens} tokens sends"
    yield _rows([(f"  {name}", _messages(messages)) for name, messages in found])


def _messages(messages: Messages) -> str:
    text = (
        f"{messages.count} x {format_bytes(messages.each_bytes)}: a rank sends "
        f"{format_bytes(messages.sent_bytes)}, {_time(messages.seconds)} over {messages.link.label}"
    )
    if messages.launches_s is None:
        return text
    least, most = messages.launches_s
    return f"{text}; launches {_time(least)} to {_time(most)}"


def _more(advice: Advice) -> Iterator[str]:
    if advice.layout.pipeline > 1:
        shares = ", ".join(
            f"{float(share):.1%} with {count}" for count, share in bubbles(advice.layout.pipeline)
        )
        yield f"stages wait (bubble), by batches under way: {shares}"
    if moves := advice.moves:
        yield (
            f"KV of {advice.wishes.context} tokens from P to D: {_size(moves.prompt_bytes)}"
            f", {_time(moves.seconds)} over {moves.link.label}"
        )
        memory = ", ".join(
            f"{_size(size)} with {channels} channels" for channels, size in moves.nccl_bytes
        )
        peers = f"{moves.peers} peer{'s' if moves.peers > 1 else ''}"
        if memory:
            yield f"KV over NCCL to {peers} takes of a device: {memory}"


def _notes(advice: Advice, not_served: str | None) -> tuple[str, ...]:
    served = () if not_served is None else (f"this engine does not serve the model: {not_served}",)
    return (*served, *notes_of(advice))


def _parameters(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _size(count: float) -> str:
    """A size in powers of 1000, as memory of devices is sold and KV is counted."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _rows(rows: list[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def json_of(name: str, advice: Advice, *, not_served: str | None) -> dict[str, Any]:
    """The report as JSON: sizes in bytes, times in seconds."""
    facts, memory, decision = advice.facts, advice.memory, advice.decision
    return {
        "model": {
            "name": name,
            "architecture": facts.architecture,
            "layers": len(facts.layers),
            "parameters": facts.parameters,
            "weights_bytes": facts.weights_bytes,
            "weights_from": facts.weights.source,
            "weights_format": facts.weights.label,
            "served": not_served is None,
        },
        "trees": [_answer(answer) for answer in (decision.first, decision.second)],
        "differences": [vars(each) for each in decision.differences],
        "layout": _sizes(decision.layout),
        "memory": {
            "device_weights_bytes": memory.weights_bytes,
            "device_kv_token_bytes": memory.kv_token_bytes,
            "kv_token_bytes": advice.kv_token_bytes,
            "kv_blocks": memory.blocks,
            "requests": advice.requests,
        },
        "steps": [_step_json(step) for step in advice.steps],
        "bubble": {count: float(share) for count, share in bubbles(advice.layout.pipeline)},
        "moves": None if advice.moves is None else _moves_json(advice.moves),
        "pods": {"count": advice.pods, "gpus": advice.pod_gpus},
        "idle_gpus": advice.idle_gpus,
        "notes": list(_notes(advice, not_served)),
        "document": snippet(advice),
    }


def _answer(answer: Answer) -> dict[str, Any]:
    return {"questions": dict(answer.steps), "layout": _sizes(answer.layout)}


def _sizes(layout: Layout) -> dict[str, int]:
    return dict(vars(layout))


def _step_json(step: Step) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": step.tokens}
    for _, field in _KINDS:
        messages: Messages | None = getattr(step, field)
        found[field] = None if messages is None else {**vars(messages), "link": messages.link.label}
    return found


def _moves_json(moves: Moves) -> dict[str, Any]:
    return {**vars(moves), "link": moves.link.label, "nccl_bytes": dict(moves.nccl_bytes)}


# --- notes


def notes_of(advice: Advice) -> list[str]:
    """One sentence for each note, those of the decision first."""
    layout, facts, engine = advice.layout, advice.facts, advice.wishes.engine
    found = [*advice.decision.notes, *(_of_vllm(advice) if engine.is_vllm else ())]
    if layout.expert > 1:
        if not engine.is_vllm and layout.inside == 1:
            found.append(
                "this engine sends no rows to experts (EP) within one copy: each rank computes "
                "what its own experts make of all rows, and an all-reduce takes the place of the "
                "all-to-alls"
            )
        if layout.pipeline > 1:
            found.append("elastic EP (ranks that come and go) excludes PP")
    if layout.inside > 1:
        found.append(
            f"an instance has {layout.inside} copies of all but the experts (parallelism.data), in "
            "lock step: a copy without requests computes, too, while another one has some; they "
            "run without CUDA graphs, and no GPU has run them yet: measure them beside TP with EP, "
            "which was faster on CPUs (docs/parallel.md)"
        )
    elif layout.data > 1:
        found.append(
            f"DP {layout.data} is {layout.data} replicas of the pool, between which the router "
            "chooses; copies inside of an instance (parallelism.data) are for models whose experts "
            "they share"
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


def _of_vllm(advice: Advice) -> Iterator[str]:
    wishes = advice.wishes
    yield "which models vLLM serves, and in which quantization, is not checked"
    if not wishes.engine.has_our_connector:
        return
    if not advice.hardware.on_cpus:
        yield "xpyd's connector in vLLM was not run on a GPU yet"
    yield "xpyd's connector reads the checkpoint's folder: spec.model.uri must be file://FOLDER"
    if wishes.role == "Decode":
        beside = (
            ""
            if advice.hardware.on_cpus
            else ("; a bufferSize is memory of the GPU beside --gpu-memory-utilization")
        )
        yield (
            "KV that comes before its request waits in spec.kvTransfer.hostPoolSize (4Gi) of the "
            f"pod's memory{beside}"
        )


def _of_idle(advice: Advice) -> str:
    wishes, idle = advice.wishes, advice.idle_gpus
    text = f"{idle} of {advice.hardware.gpus} devices are left"
    is_room = idle >= advice.layout.tensor * advice.layout.pipeline
    if is_room and not (wishes.throughput or wishes.high_availability):
        return f"{text}: --throughput or --high-availability makes copies"
    return f"{text}: they do not hold another copy"


# --- the fleet document


def snippet(advice: Advice) -> str:
    """`spec` of an InferenceFleet, without the model."""
    wishes, layout = advice.wishes, advice.layout
    engine = wishes.engine
    lines = [f"    type: {engine.type}"] if engine.is_vllm else []
    lines += [f"    connector: {engine.connector}"] if engine.connector else []
    lines += [f"    image: {json.dumps(engine.image)}"] if engine.image else []
    of_a_copy = -(-wishes.concurrency // layout.inside)
    args = [f"--max-model-len={wishes.context}", f"--max-num-seqs={of_a_copy}"]
    on_cpus = advice.hardware.on_cpus
    # vLLM has the same flags.
    args += [] if on_cpus else [f"--gpu-memory-utilization={wishes.utilization:g}"]
    lines.append(f"    args: [{', '.join(args)}]")
    sizes = (("data", layout.inside), ("expert", layout.expert))
    more = "".join(f", {name}: {size}" for name, size in sizes if size > 1)
    memory = f"{{requests: {{memory: {-(-advice.hardware.memory_bytes // MIB)}Mi}}}}"
    template = f"{{spec: {{containers: [{{name: engine, resources: {memory}}}]}}}}"
    if on_cpus:
        space = f'"{-(-advice.needed_kv_bytes // GIB)}"'
        lines += ["    env:", f"    - {{name: VLLM_CPU_KVCACHE_SPACE, value: {space}}}"]
    return "\n".join(
        (
            "spec:",
            "  engine:",
            *lines,
            "  pools:",
            f"  - name: {wishes.role.lower()}",
            f"    role: {wishes.role}",
            f"    replicas: {layout.instances}",
            f"    parallelism: {{tensor: {layout.tensor}, pipeline: {layout.pipeline}{more}}}",
            f"    resources: {{gpus: {0 if on_cpus else advice.pod_gpus}}}",
            *([f"    template: {template}"] if on_cpus else []),
            "",
        )
    )
