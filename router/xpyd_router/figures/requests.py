"""Figures of the requests as clients see them, per endpoint. Pure."""

from __future__ import annotations

from collections import Counter

from xpyd_core.distribution import Distribution
from xpyd_router.figures.exposition import Exposition
from xpyd_router.requests.trace import Trace

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class EndpointFigures:
    """One endpoint's figures. Written at each request's end."""

    __slots__ = (
        "body_bytes",
        "output_tokens",
        "prompt_tokens",
        "response_bytes",
        "seconds",
        "statuses",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.seconds = Distribution(_SECONDS)
        self.ttft_s = Distribution(_SECONDS)
        self.body_bytes = 0
        self.response_bytes = 0
        self.prompt_tokens = 0
        self.output_tokens = 0

    def take(self, trace: Trace, status: int, now_s: float) -> None:
        """A request that ended with `status`."""
        self.statuses[status] += 1
        self.seconds.observe(now_s - trace.started_s)
        if trace.first_s is not None:
            self.ttft_s.observe(trace.first_s)
        self.body_bytes += trace.body_bytes
        self.response_bytes += trace.sent_bytes
        self.prompt_tokens += trace.prompt_tokens or 0
        self.output_tokens += trace.output_tokens or 0


class RequestTable:
    """Owner of the figures of all requests."""

    def __init__(self) -> None:
        self._endpoints: dict[str, EndpointFigures] = {}
        self.in_flight = 0
        """Requests that came and are not answered yet."""

    def began(self) -> None:
        """A request came."""
        self.in_flight += 1

    def ended(self, trace: Trace, status: int, now_s: float) -> None:
        """It was answered, or its client left."""
        self.in_flight -= 1
        figures = self._endpoints.get(trace.endpoint)
        if figures is None:
            figures = self._endpoints[trace.endpoint] = EndpointFigures()
        figures.take(trace, status, now_s)

    def write(self, out: Exposition) -> None:
        """All figures as metrics."""
        found = [(f'endpoint="{name}"', f) for name, f in sorted(self._endpoints.items())]
        out.numbers("xpyd_router_in_flight", "gauge", "Requests served", [("", self.in_flight)])
        out.numbers(
            "xpyd_router_requests_total",
            "counter",
            "Requests answered",
            [
                (f'{labels},status="{status}"', count)
                for labels, f in found
                for status, count in sorted(f.statuses.items())
            ],
        )
        out.histograms(
            "xpyd_router_request_seconds",
            "From request to last byte",
            [(labels, f.seconds) for labels, f in found],
        )
        out.histograms(
            "xpyd_router_ttft_seconds",
            "From request to first byte of a stream",
            [(labels, f.ttft_s) for labels, f in found],
        )
        for name, meaning, values in (
            ("request_bytes", "Bodies of requests", [f.body_bytes for _, f in found]),
            ("response_bytes", "Bodies of answers", [f.response_bytes for _, f in found]),
            ("prompt_tokens", "Prompt tokens, where known", [f.prompt_tokens for _, f in found]),
            ("output_tokens", "Output tokens, where known", [f.output_tokens for _, f in found]),
        ):
            samples = zip([labels for labels, _ in found], values, strict=True)
            out.numbers(f"xpyd_router_{name}_total", "counter", meaning, samples)
