"""Counters of the HTTP side in Prometheus text, under vLLM's names where the meaning is the same."""

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 600.0)
_TOKEN_BUCKETS = tuple(float(2**power) for power in range(0, 21, 2))


class ApiMetrics:
    """One registry for one application; every series carries the model's name."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests without a token yet.")
        self.running = self._gauge("vllm:num_requests_running", "Requests with tokens on the way.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Output tokens.")
        self.cached_tokens = self._counter("shoal:prompt_cached_tokens", "Prompt tokens nobody had to compute.")
        self.aborted = self._counter("shoal:api_requests_aborted", "Requests whose client went away.")
        self.images = self._counter("shoal:api_images", "Images prepared.")
        self.ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS
        )
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Between token batches, a token.", _ITL_BUCKETS)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _E2E_BUCKETS)
        self.prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self.output_length = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKEN_BUCKETS)
        self._success = Counter(
            "vllm:request_success", "Finished answers.", ("model_name", "finished_reason"), registry=self.registry
        )
        self._http = Counter("shoal:api_http_requests", "HTTP requests by status.", ("status",), registry=self.registry)
        self._scrape = Gauge("shoal:api_cluster_metrics_up", "1: the cluster's part is here.", registry=self.registry)

    def count_finish(self, reason: str) -> None:
        """Count a finished answer."""
        self._success.labels(self._model, reason).inc()

    def count_http(self, status: int) -> None:
        """Count an answered HTTP request."""
        self._http.labels(str(status)).inc()

    def text(self, cluster: str | None) -> str:
        """Prometheus text, merged with the cluster's (None: it did not answer)."""
        self._scrape.set(cluster is not None)
        return merge_metrics(generate_latest(self.registry).decode(), cluster or "")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)
        return histogram.labels(self._model)


_META = re.compile(r"# (HELP|TYPE) (\S+)")


def merge_metrics(*texts: str) -> str:
    """Join Prometheus texts so that each family appears once; the first text's HELP and TYPE are kept.

    Sample lines follow the header they came under; two texts with a family of one name share it and should differ
    in labels.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        family, known = "", set(headers)
        for line in text.splitlines():
            if meta := _META.match(line):
                family = meta[2]
                if family not in known:
                    headers.setdefault(family, []).append(line)
                samples.setdefault(family, [])
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(line)
    lines = [line for family in samples for line in (*headers.get(family, ()), *samples[family])]
    return "".join(f"{line}\n" for line in lines)
