"""``smp.nn``: modules that are divided over tensor-parallel ranks (paper, appendices E.1, F and I.3), or into tiles.

A module refuses values of arguments that are not allowed, and sizes that are not divisible by the tensor parallelism
degree, with a :class:`ConfigError`. If the tensors of a call do not match what it expects (shapes, dtypes, on the CPU
also ids), or differ between ranks where they must not, all ranks raise it.
"""

from shardwright.nn import huggingface, utils
from shardwright.nn.attention import DistributedAttentionLayer
from shardwright.nn.embedding import DistributedEmbedding
from shardwright.nn.flash_attention import FlashAttentionLayer
from shardwright.nn.language_model import DistributedTransformerLMHead
from shardwright.nn.layer_norm import DistributedLayerNorm, DistributedRMSNorm, FusedLayerNorm
from shardwright.nn.linear import ColumnParallelLinear, DistributedLinear, RowParallelLinear
from shardwright.nn.tiled_linear import TiledLinear
from shardwright.nn.transformer import DistributedTransformer, DistributedTransformerLayer
from shardwright.nn.transformer_output import DistributedTransformerOutputLayer
from shardwright.nn.vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy
from shardwright.tensor_parallel.module import DistributedModule

__all__ = [
    "ColumnParallelLinear",
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedRMSNorm",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "RowParallelLinear",
    "TiledLinear",
    "VocabularyParallelEmbedding",
    "huggingface",
    "utils",
    "vocabulary_parallel_cross_entropy",
]
