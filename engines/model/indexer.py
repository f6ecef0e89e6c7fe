"""The lightning indexer's scores: how much each query row wants each compressed entry.

Source: published model.py (Indexer). bfloat16 modes round the product, the weighted product and the sum over heads.
"""

from dataclasses import dataclass

from shoal.engines.model.numerics import Numerics, dot_products
from shoal.engines.model.parameters import IndexerWeights
from shoal.engines.model.rope import Phases, rotate_rounded
from torch import Tensor


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Index queries [..., heads, index dim] as their MXFP4 rows read back, and head weights [..., heads]."""

    queries: Tensor
    weights: Tensor


def index_queries(numerics: Numerics, latents: Tensor, x: Tensor, weights: IndexerWeights, by: Phases) -> IndexQueries:
    """Index queries from attention's query latents [..., q rank], head weights from normed rows [..., H]."""
    heads = weights.heads.weight.shape[0]
    queries = numerics.linear(latents, weights.queries).view(*latents.shape[:-1], heads, -1)
    queries = numerics.index_row(rotate_rounded(numerics, queries, by.unsqueeze(-2)))
    scale = queries.shape[-1] ** -0.5 * heads**-0.5
    return IndexQueries(queries, numerics.round_(numerics.linear(x, weights.heads).mul_(scale)))


def index_scores(numerics: Numerics, by: IndexQueries, keys: Tensor) -> Tensor:
    """Scores [B, n, E] of queries [B, n, heads, d] for keys [B, E, d]; visibility is the caller's."""
    products = dot_products(by.queries.flatten(1, 2), keys).view(*by.queries.shape[:3], -1)
    weighted = numerics.round_(products).relu_().mul_(by.weights.unsqueeze(-1))
    return numerics.round_(numerics.round_(weighted).sum(2))
