"""Figures on their way to `/metrics`: plain values in, Prometheus' families out. Knows no names.

The owners of the figures make samples when Prometheus asks; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from xpyd_core.distribution import Distribution

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True)
class Sample:
    """One number. `labels` name one child of the metric."""

    name: str
    kind: str  # "counter" (name without _total) or "gauge"
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class HistogramSample:
    """One distribution. `labels` name one child of the metric."""

    name: str
    help: str
    values: Distribution
    labels: tuple[tuple[str, str], ...] = ()


AnySample = Sample | HistogramSample


def families(samples: Iterable[AnySample]) -> Iterable[Metric]:
    """The samples by metric; those of one name have the same kind and names of labels."""
    found: dict[str, Family] = {}
    for sample in samples:
        family = found.get(sample.name)
        if family is None:
            names = [key for key, _ in sample.labels]
            family = found[sample.name] = _kind_of(sample)(sample.name, sample.help, labels=names)
        labels = [value for _, value in sample.labels]
        if isinstance(sample, Sample):
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, sample.value)
        else:
            assert isinstance(family, HistogramMetricFamily)
            bounds = [*map(str, sample.values.bounds), "+Inf"]
            counts = map(float, sample.values.cumulative())
            buckets = list(zip(bounds, counts, strict=True))
            family.add_metric(labels, buckets, sample.values.sum)
    return found.values()


def _kind_of(sample: AnySample) -> type[Family]:
    if isinstance(sample, HistogramSample):
        return HistogramMetricFamily
    return CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
