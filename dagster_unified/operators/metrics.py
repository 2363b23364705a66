"""Metrics of parallel instances: how they are measured, reported and added up.

The library's own counts and an author's metrics take the same way. A function registers metrics in its `MetricGroup`,
as in PyFlink. They write into the `Metrics` of their parallel instance, which are its report. Reports may come in any
order, from any number of partitions: counters and the marks of a meter are summed, a gauge keeps the smallest and the
largest value, and a distribution adds up the counts of its buckets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from dagster_unified.errors import PipelineError

Number = int | float


class GaugeRange(msgspec.Struct, frozen=True):
    """The smallest and the largest of the values that parallel instances last reported for a gauge."""

    min: Number
    max: Number

    def merge(self, other: GaugeRange) -> GaugeRange:
        """The range of both."""
        return GaugeRange(min(self.min, other.min), max(self.max, other.max))


class MeterCount(msgspec.Struct):
    """The events that a meter has marked, and the seconds over which its rate is taken."""

    count: int
    time_span: int

    def merge(self, other: MeterCount) -> MeterCount:
        """The events of both."""
        return MeterCount(self.count + other.count, max(self.time_span, other.time_span))


class Histogram(msgspec.Struct):
    """The distribution of values: how many, their sum, the smallest, the largest, and quantiles to within 1 %.

    Values are counted in buckets whose bounds grow by a constant factor (as in DDSketch), so that the histograms of
    parallel instances add up to the histogram of all values.
    """

    count: int = 0
    sum: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    zeros: int = 0
    positive: dict[int, int] = {}
    negative: dict[int, int] = {}

    def add(self, value: Number) -> None:
        """Count one value, a finite number."""
        bucket = math.ceil(math.log(abs(value)) * _SCALE) if value else 0
        self.count += 1
        self.sum += value
        if value < self.min:
            self.min = float(value)
        if value > self.max:
            self.max = float(value)
        if value > 0:
            self.positive[bucket] = self.positive.get(bucket, 0) + 1
        elif value < 0:
            self.negative[bucket] = self.negative.get(bucket, 0) + 1
        else:
            self.zeros += 1

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of the values of both."""
        return Histogram(
            self.count + other.count,
            self.sum + other.sum,
            min(self.min, other.min),
            max(self.max, other.max),
            self.zeros + other.zeros,
            _added(self.positive, other.positive),
            _added(self.negative, other.negative),
        )

    @property
    def mean(self) -> float:
        """The mean; 0 without values."""
        return self.sum / self.count if self.count else 0.0

    def quantile(self, fraction: float) -> float:
        """The value that this fraction of the values does not exceed, to within 1 %; 0 without values."""
        if not self.count:
            return 0.0
        rank = fraction * (self.count - 1)
        buckets = [(-_middle(b), n) for b, n in sorted(self.negative.items(), reverse=True)]
        buckets += [(0.0, self.zeros), *((_middle(b), n) for b, n in sorted(self.positive.items()))]
        seen = 0
        for value, number in buckets:
            seen += number
            if seen > rank:
                return min(max(value, self.min), self.max)
        return self.max


_ACCURACY = 0.01
_BASE = (1 + _ACCURACY) / (1 - _ACCURACY)
_SCALE = 1 / math.log(_BASE)


def _middle(bucket: int) -> float:
    return float(2 * _BASE**bucket / (_BASE + 1))


def _added(first: Mapping[int, int], second: Mapping[int, int]) -> dict[int, int]:
    return {bucket: first.get(bucket, 0) + second.get(bucket, 0) for bucket in (*first, *second)}


class Metrics(msgspec.Struct, omit_defaults=True):
    """Totals of one partition, or merged from many.

    `last_event_times` are milliseconds since the epoch, by the assigner's uid. `event_times` has how many records an
    assigner has seen of each unit of event time, where a job counts them.
    """

    counters: dict[str, int] = {}
    last_event_times: dict[str, int] = {}
    gauges: dict[str, GaugeRange] = {}
    meters: dict[str, MeterCount] = {}
    histograms: dict[str, Histogram] = {}
    event_times: dict[str, dict[int, int]] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def saw_event_time(self, assigner: str, timestamp: int) -> None:
        """Remember the latest event time that an assigner assigned."""
        self.last_event_times[assigner] = max(timestamp, self.last_event_times.get(assigner, timestamp))

    def count_event_times(self, assigner: str, counts: Mapping[int, int]) -> None:
        """Add to what an assigner has seen of each unit of event time."""
        seen = self.event_times.setdefault(assigner, {})
        for number, count in counts.items():
            seen[number] = seen.get(number, 0) + count

    def last_event_time(self, assigners: Iterable[str]) -> int | None:
        """The latest event time that any of these assigners assigned."""
        return max((self.last_event_times[a] for a in assigners if a in self.last_event_times), default=None)

    def add(self, other: Metrics) -> None:
        """Add another partition's report."""
        for name, amount in other.counters.items():
            self.count(name, amount)
        for assigner, timestamp in other.last_event_times.items():
            self.saw_event_time(assigner, timestamp)
        for assigner, counts in other.event_times.items():
            self.count_event_times(assigner, counts)
        for name, gauge in other.gauges.items():
            self.gauges[name] = gauge.merge(self.gauges.get(name, gauge))
        for name, meter in other.meters.items():
            self.meters[name] = self.meters.get(name, MeterCount(0, meter.time_span)).merge(meter)
        for name, histogram in other.histograms.items():
            self.histograms[name] = self.histograms.get(name, Histogram()).merge(histogram)

    def add_later(self, later: Metrics) -> None:
        """Add a later report of the same partitions; each gauge replaces the one before it."""
        self.add(msgspec.structs.replace(later, gauges={}))
        self.gauges.update(later.gauges)

    def clear(self) -> None:
        """Forget everything."""
        for part in self._parts_of_report():
            part.clear()

    def take(self) -> Metrics:
        """Return the metrics, and forget them here, so that each is reported once."""
        report = merge([self])
        self.clear()
        return report

    def empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self._parts_of_report())

    def encode(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()

    def _parts_of_report(self) -> tuple[dict[str, object], ...]:
        return (  # type: ignore[return-value]
            self.counters,
            self.last_event_times,
            self.gauges,
            self.meters,
            self.histograms,
            self.event_times,
        )


def merge(reports: Iterable[str | Metrics]) -> Metrics:
    """The totals over several reports, as `Metrics` or as their JSON."""
    total = Metrics()
    for report in reports:
        total.add(report if isinstance(report, Metrics) else msgspec.json.decode(report, type=Metrics))
    return total


class Totals:
    """A job's metrics so far, on the driver: reports added up as they come, with the seconds at which they come."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self._marked: dict[str, deque[tuple[float, MeterCount]]] = {}
        self._since: float | None = None

    def add(self, metrics: Metrics, now: float, seconds: float) -> None:
        """Add a report of the `seconds` until `now`."""
        if self._since is None:
            self._since = now - seconds
        self.metrics.add_later(metrics)
        for name, meter in metrics.meters.items():
            marked = self._marked.setdefault(name, deque())
            marked.append((now, meter))
            while marked[0][0] <= now - meter.time_span:
                marked.popleft()

    def rates(self, now: float) -> dict[str, float]:
        """Events per second of every meter, over its time span or, where that is shorter, the job's time."""
        rates = {}
        for name, marked in self._marked.items():
            span = marked[-1][1].time_span
            elapsed = min(now - (self._since or now), span)
            count = sum(meter.count for at, meter in marked if at > now - span)
            rates[name] = count / elapsed if elapsed > 0 else 0.0
        return rates

    def shown(self, now: float) -> dict[str, Number]:
        """Every metric as numbers with names."""
        total = self.metrics
        return shown(total.counters, total.gauges, self.rates(now), total.histograms)


def shown(
    counters: Mapping[str, int],
    gauges: Mapping[str, GaugeRange],
    rates: Mapping[str, float],
    histograms: Mapping[str, Histogram],
) -> dict[str, Number]:
    """Metrics as numbers with names: a gauge's largest value has the gauge's own name."""
    numbers: dict[str, Number] = dict(counters)
    for name, gauge in gauges.items():
        numbers |= {name: gauge.max, f"{name} (min)": gauge.min}
    for name, rate in rates.items():
        numbers[f"{name} (per second)"] = round(rate, 3)
    for name, histogram in histograms.items():
        numbers |= {f"{name} ({part})": value for part, value in _parts(histogram)}
    return numbers


def _parts(histogram: Histogram) -> list[tuple[str, Number]]:
    quantiles = [(f"p{percent}", histogram.quantile(percent / 100)) for percent in (50, 95, 99)]
    numbers = [("min", histogram.min), ("max", histogram.max), ("mean", histogram.mean), *quantiles]
    return [("count", histogram.count), *((part, float(f"{number:.6g}")) for part, number in numbers)]


class Registry:
    """The metrics of one parallel instance since its last report, and the gauges to read."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.gauges: dict[str, Callable[[], Number]] = {}

    def read(self, name: str) -> None:
        """Read a gauge; a value that is not finite counts as none."""
        value = self.gauges[name]()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PipelineError(f"a gauge has to give an int or a float, and gave {value!r}")
        if math.isfinite(value):
            self.metrics.gauges[name] = GaugeRange(value, value)


class Counter:
    """Counts events; there is an example at `MetricGroup`."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self._name, self._counters, self._count = name, metrics.counters, 0

    def inc(self, n: int = 1) -> None:
        """Add `n`."""
        self._count += n
        self._counters[self._name] = self._counters.get(self._name, 0) + n

    def dec(self, n: int = 1) -> None:
        """Subtract `n`."""
        self.inc(-n)

    def get_count(self) -> int:
        """The count of this parallel instance."""
        return self._count


class Meter:
    """Measures a rate: events per second; there is an example at `MetricGroup`."""

    def __init__(self, name: str, metrics: Metrics, time_span_in_seconds: int) -> None:
        self._name, self._meters, self._time_span, self._count = name, metrics.meters, time_span_in_seconds, 0

    def mark_event(self, value: int = 1) -> None:
        """Count `value` events."""
        self._count += value
        marked = self._meters.get(self._name)
        if marked is None:
            marked = self._meters[self._name] = MeterCount(0, self._time_span)
        marked.count += value

    def get_count(self) -> int:
        """The events of this parallel instance."""
        return self._count


class Distribution:
    """Measures the distribution of values: count, smallest, largest, mean and quantiles.

    There is an example at `MetricGroup`.
    """

    def __init__(self, name: str, metrics: Metrics) -> None:
        self._name, self._histograms = name, metrics.histograms

    def update(self, value: Number) -> None:
        """Add a value, a finite number."""
        histogram = self._histograms.get(self._name)
        if histogram is None:
            histogram = self._histograms[self._name] = Histogram()
        histogram.add(value)


class MetricGroup:
    """Registers an operator's metrics (Flink: *Metrics*; PyFlink: `MetricGroup`).

    A metric is known by its group and its name: `enrich.cache.hits`. Registering a name twice gives the same metric. In
    BATCH metrics reach the metadata of the stage's materialization, in STREAMING the observations of the sinks' assets.

    Examples:
        >>> class Measured(MapFunction[int, int]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         metrics = runtime_context.get_metrics_group()
        ...         self.odd, self.sizes = metrics.counter("odd"), metrics.distribution("sizes")
        ...     def map(self, value: int) -> int:
        ...         self.odd.inc(value % 2)
        ...         self.sizes.update(value)
        ...         return value
        >>> words = Pipeline("words")
        >>> sink = words.from_collection([1, 2, 3]).map(Measured()).print()
        >>> metrics = run_pipeline(words, "BATCH").metrics
        >>> metrics.counters["Measured.odd"], metrics.histograms["Measured.sizes"].mean
        (2, 2.0)
    """

    def __init__(self, registry: Registry, scope: tuple[str, ...], variables: Mapping[str, str] | None = None) -> None:
        self._registry, self._scope, self._variables = registry, scope, dict(variables or {})

    def add_group(self, name: str, extra: str | None = None) -> MetricGroup:
        """The group `name` in this one; with `extra` the group of the value `extra` of the variable `name`."""
        if extra is None:
            return MetricGroup(self._registry, (*self._scope, name), self._variables)
        return MetricGroup(self._registry, (*self._scope, name, extra), {**self._variables, name: extra})

    def counter(self, name: str) -> Counter:
        """A counter. Counts of parallel instances, micro-batches and runs of a job are summed."""
        return Counter(self.get_metric_identifier(name), self._registry.metrics)

    def gauge(self, name: str, obj: Callable[[], Number]) -> None:
        """A value that `obj` returns, read at the end of a partition, a micro-batch, and an epoch of an iteration.

        Of the values of parallel instances the smallest and the largest are kept; each micro-batch replaces the one
        before. The stage of an iteration also has the values of its epochs, as a plot. NaN and infinity mean no value.
        """
        self._registry.gauges[self.get_metric_identifier(name)] = obj

    def meter(self, name: str, time_span_in_seconds: int = 60) -> Meter:
        """A rate, in events per second over all parallel instances.

        In STREAMING it is the rate of the last `time_span_in_seconds`, in BATCH that of the stage's whole run.
        """
        return Meter(self.get_metric_identifier(name), self._registry.metrics, time_span_in_seconds)

    def distribution(self, name: str) -> Distribution:
        """A distribution, of the values of all parallel instances."""
        return Distribution(self.get_metric_identifier(name), self._registry.metrics)

    def histogram(self, name: str) -> Distribution:
        """Flink's name in Java for `distribution`."""
        return self.distribution(name)

    def get_scope_components(self) -> list[str]:
        """The names of the operator and of the groups down to this one."""
        return list(self._scope)

    def get_all_variables(self) -> dict[str, str]:
        """The variables of this group and of the groups around it, with their values."""
        return dict(self._variables)

    def get_metric_identifier(self, metric_name: str) -> str:
        """A metric's full name."""
        return ".".join((*self._scope, metric_name))
