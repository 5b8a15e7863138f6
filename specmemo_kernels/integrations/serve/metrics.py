"""Prometheus metrics: vLLM's names where they mean the same, ``specmemo:`` for the rest."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specmemo_kernels.integrations.hf.engine import Engine

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
_BETWEEN = (0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one server, in a registry of its own.

    Attributes:
        prompt_tokens, generation_tokens: counters.
        first_token: seconds from a request to its first token.
        between_tokens: a request's seconds per token behind the first one.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        registry = self._registry
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of all requests.", registry=registry)
        self.generation_tokens = Counter("vllm:generation_tokens", "Generated tokens.", registry=registry)
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Seconds from a request to its first token.", buckets=_FIRST,
            registry=registry,
        )  # fmt: skip
        self.between_tokens = Histogram(
            "vllm:time_per_output_token_seconds", "Seconds per token behind the first one, by request.",
            buckets=_BETWEEN, registry=registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's counters at each collection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, handle = self._engine, self._engine.handle
        stats, pool = handle.stats, handle.pool
        used = 0.0 if pool is None else 1 - pool.free_pages / max(1, pool.num_pages)
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests with pages.", engine.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests without pages.", engine.waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1.", used)
        for name, text, value in (
            ("vllm:prefix_cache_hits", "Prompt tokens found in cached pages.", stats.reused_tokens),
            ("vllm:num_preemptions", "Preempted requests.", stats.preemptions),
            ("vllm:spec_decode_num_drafts", "Verified trees.", stats.sequence_steps),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.", sum(stats.accepted_at_depth)),
        ):
            yield CounterMetricFamily(name, text, value)
        by_depth = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by depth.", labels=["position"]
        )
        for depth, count in enumerate(stats.accepted_at_depth):
            by_depth.add_metric([str(depth)], count)
        yield by_depth
        held = GaugeMetricFamily("specmemo:memory_bytes", "Bytes held, by part.", labels=["part"])
        planned = GaugeMetricFamily("specmemo:planned_bytes", "Bytes planned, by part.", labels=["part"])
        for part, size in handle.bytes_by_part.items():
            held.add_metric([part], size)
        for part, size in handle.plan.parts.items():
            planned.add_metric([part], size)
        yield held
        yield planned
        if handle.plan.budget is not None:
            yield GaugeMetricFamily("specmemo:budget_bytes", "The memory budget.", handle.plan.budget)
        yield GaugeMetricFamily(
            "specmemo:memory_pressure_level", "Degradation steps in force; 0: none.", handle.memory_pressure.shrunk
        )
