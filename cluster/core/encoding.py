"""Images of one request: which are encoded, which are still needed, how often each has failed."""

from shoal.balancers.reports import EncodeNeed
from shoal.cluster.core.job import Embedding, Job
from shoal.cluster.core.names import image_id


class Encoding:
    """Embeddings by image, kept over attempts. An image wholly inside a hit needs none."""

    def __init__(self, job: Job) -> None:
        assert len(job.patches) == len(job.images), f"{len(job.patches)} patch counts for {len(job.images)} images"
        self._job = job
        self._embeddings: dict[int, Embedding] = {}
        self._failures: dict[int, int] = {}

    def _needed(self, hit_tokens: int) -> tuple[int, ...]:
        return tuple(i for i, span in enumerate(self._job.images) if span.end > hit_tokens)

    def missing(self, hit_tokens: int) -> tuple[int, ...]:
        """Images the hit does not wholly cover and that have no embedding."""
        return tuple(i for i in self._needed(hit_tokens) if i not in self._embeddings)

    def for_hit(self, hit_tokens: int) -> tuple[Embedding, ...]:
        """Embeddings an engine needs after that hit, in order of the images."""
        return tuple(self._embeddings[i] for i in self._needed(hit_tokens))

    def need(self, index: int, attempt: int, excluded: set[str]) -> EncodeNeed:
        """What to ask of the encode balancer; each try has its own name."""
        name = image_id(self._job.request_id, attempt, index, self._failures.get(index, 0))
        return EncodeNeed(name, self._job.images[index].digest, self._job.patches[index], tuple(sorted(excluded)))

    def add(self, index: int, embedding: Embedding) -> None:
        """The image is encoded."""
        self._embeddings[index] = embedding

    def lose(self, index: int) -> Embedding | None:
        """The embedding cannot be read any more; counts as a failure. Returns what was lost."""
        self.fail(index)
        return self._embeddings.pop(index, None)

    def fail(self, index: int) -> int:
        """Failures of this image, this one included."""
        self._failures[index] = self._failures.get(index, 0) + 1
        return self._failures[index]
