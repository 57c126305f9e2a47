"""The layers between the linears: attention, norm, embedding and loss, each with its gradient rule."""

from shardwright.layers.dropout import ForwardDraws, GridDropout
from shardwright.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from shardwright.layers.loss import VocabParallelLoss
from shardwright.layers.norm import GridLayerNorm, GridRMSNorm

__all__ = [
    "ForwardDraws",
    "GridDropout",
    "GridLayerNorm",
    "GridRMSNorm",
    "PositionEmbedding",
    "VocabParallelEmbedding",
    "VocabParallelLoss",
]
