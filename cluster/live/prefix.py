"""Chain keys of a running sequence: known for its prompt, extended as its output fills grains."""

from collections.abc import Sequence

from shoal.cluster.live.submission import Origin
from shoal.engines.core.request import ImageSpan
from shoal.engines.run.output import AnchorToSave, GrainToSave
from shoal.kvstore.core.chain import KEY_BYTES, Namespace, chain_keys, extend_chain, root_key
from shoal.kvstore.core.records import Kind, StoredObject, TrafficClass


class Prefix:
    """The keys of one sequence's full grains so far."""

    def __init__(
        self, namespace: Namespace, token_ids: Sequence[int], images: Sequence[ImageSpan], grain_tokens: int
    ) -> None:
        self._root = root_key(namespace, grain_tokens)
        self._grain_tokens = grain_tokens
        self.keys = list(chain_keys(namespace, token_ids, images, grain_tokens))

    def grain(self, grain: GrainToSave, origin: Origin) -> StoredObject:
        """The object to store for a finished grain; grains of output come in order."""
        if grain.index == len(self.keys):  # output holds no images, so tokens alone extend the chain
            parent = self.keys[-1] if self.keys else self._root
            self.keys += extend_chain(parent, grain.token_ids, (), self._grain_tokens)
        return self._object(Kind.GRAIN, grain.index, grain.payload, origin)

    def anchor(self, anchor: AnchorToSave, origin: Origin) -> StoredObject:
        """The object to store for the sliding windows at a multiple of the grain; its grain came before."""
        return self._object(Kind.ANCHOR, anchor.tokens // self._grain_tokens - 1, anchor.payload, origin)

    def _object(self, kind: Kind, index: int, payload: bytes, origin: Origin) -> StoredObject:
        parent = self.keys[index - 1] if index else bytes(KEY_BYTES)
        traffic = TrafficClass(origin.traffic)
        return StoredObject(kind, self.keys[index], parent, index, traffic, payload)
