"""What a model configuration says about its caches, as the plain numbers that the layouts are computed from."""

from shoal.engines.core.layout import CacheShape
from shoal.engines.model.config import ModelConfig


def cache_shape(config: ModelConfig, block_tokens: int = 128, ring_extra: int = 0) -> CacheShape:
    """The CacheShape of `config`; raises ValueError when `block_tokens` does not fit its ratios."""
    text = config.text
    return CacheShape(
        ratios=text.compress_ratios[: config.n_layers],
        kv_sources=text.kv_source_layer_ids,
        index_sources=text.kv_source_layer_ids,  # owners of index keys; the other index sources read theirs
        n_prefill_layer=config.n_prefill_layer,
        drafter_layers=len(config.drafter_layers),
        window=config.window,
        backtracking=config.backtracking,
        head_dim=text.head_dim,
        index_dim=text.index_head_dim,
        block_tokens=block_tokens,
        ring_extra=ring_extra,
    )
