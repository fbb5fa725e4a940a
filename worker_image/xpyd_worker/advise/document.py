"""The part of a fleet document that says a layout. Pure; plain text, since it is for a person."""

from __future__ import annotations

from xpyd_worker.advise.layout import Advice


def snippet(advice: Advice) -> str:
    """`spec` of an InferenceFleet, without the model."""
    wishes, layout = advice.wishes, advice.layout
    return "\n".join(
        (
            "spec:",
            "  engine:",
            f"    args: [--max-model-len={wishes.context}, --max-num-seqs={wishes.concurrency}, "
            f"--gpu-memory-utilization={wishes.utilization:g}]",
            "  pools:",
            f"  - name: {wishes.role.lower()}",
            f"    role: {wishes.role}",
            f"    replicas: {layout.data}",
            f"    parallelism: {{tensor: {layout.tensor}, pipeline: {layout.pipeline}}}",
            f"    resources: {{gpus: {advice.pod_gpus}}}",
            "",
        )
    )
