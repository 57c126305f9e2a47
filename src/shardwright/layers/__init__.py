"""The layers between the linears: attention, norm, embedding and loss, each with its gradient rule."""

from shardwright.layers.embedding import VocabParallelEmbedding
from shardwright.layers.loss import VocabParallelLoss
from shardwright.layers.norm import GridRMSNorm

__all__ = ["GridRMSNorm", "VocabParallelEmbedding", "VocabParallelLoss"]
