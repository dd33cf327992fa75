"""What the server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "mesh_transformer_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class Metrics:
    """One server's counters, in a registry of its own. Every method of theirs is thread-safe."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            PREFIX + "http_requests", "HTTP requests answered, by route and status", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self.waiting = Gauge(PREFIX + "waiting", "texts in the queue", registry=registry)
        self.running = Gauge(PREFIX + "running", "texts in the running batch", registry=registry)
        self.ready = Gauge(PREFIX + "ready", "1 while requests are taken", registry=registry)
        self.prompt_tokens = Counter(PREFIX + "prompt_tokens", "prompt tokens read", registry=registry)
        self.generated_tokens = Counter(PREFIX + "generated_tokens", "tokens drawn", registry=registry)
        self.finished = Counter(PREFIX + "finished", "texts that ended, by reason", ["reason"], registry=registry)
        self.failures = Counter(PREFIX + "engine_failures", "device steps that failed", registry=registry)
        self.queued = Histogram(
            PREFIX + "queue_seconds", "from arrival to a place in the batch", registry=registry, buckets=_SECONDS
        )
        self.first_token = Histogram(
            PREFIX + "first_token_seconds", "from arrival to the first token", registry=registry, buckets=_SECONDS
        )
        self.latency = Histogram(
            PREFIX + "text_seconds", "from arrival to the last token", registry=registry, buckets=_SECONDS
        )
        self.step = Histogram(
            PREFIX + "step_seconds", "one turn of the engine", registry=registry, buckets=_STEP_SECONDS
        )

    def render(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)
