"""The distributed transformer with embeddings and a language-model head (paper, appendix E.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch

from shardwright.errors import ConfigError
from shardwright.nn.dropout import STREAMS_PER_LAYER, draw_seed, dropout, seed_of
from shardwright.nn.gathered import GatheredCall, LayerInputs, check_shapes, gather_states, tensors_by_name
from shardwright.nn.transformer import DistributedTransformer, TransformerOptions
from shardwright.nn.vocabulary import TiedOutput, VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy
from shardwright.tensor_parallel.agreement import Agreement
from shardwright.tensor_parallel.layouts import FEATURES, PARTIAL, SHARED, hidden_states, relayout, samples
from shardwright.tensor_parallel.module import DistributedModule

_IDS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_CROSS = ("cross_states", "cross_mask")
_MASKS = ("attention_mask", "cross_mask")
_ID_DTYPES = (torch.int32, torch.int64)
#: Labels with this value are ignored, as for ``nn.CrossEntropyLoss``.
_IGNORED = -100
#: Added to masked scores: their softmax is zero next to other scores, but a row in which all scores are masked keeps
#: its precision, which fused attention needs in the backward.
_UNSEEN = -1e4


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, a transformer, and an output layer with the weight of the word embedding (paper, appendix E.1).

    All embeddings are divided over their rows, also with ``optimize`` = ``"memory"``, so that the output layer uses the
    same slice of the word embedding, and a rank computes logits of its slice of the vocabulary only. Ids are gathered
    once. Each rank looks up its rows of all embeddings, and one sum over ranks produces the input of the layers: an
    all-reduce for speed, a reduce-scatter of channels for memory. The output layer sends nothing for speed, and
    all-gathers channels of the hidden states for memory. Numbers of ids need not be divisible by the tensor
    parallelism degree.

    Attributes:
        word_embedding: The embedding of ids.
        position_embedding: The embedding of positions.
        token_type_embedding: The embedding of token types; None without token types.
        transformer: The transformer, with the layers in ``seq_layers``.
        lm_head: The output layer; None without one.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Unpack[TransformerOptions],
    ) -> None:
        """Create a model with newly initialized weights. Sizes are those of the whole module.

        Args:
            num_layers: See :class:`DistributedTransformer`, also for arguments not described here.
            vocab_size: The number of ids.
            num_positions: The maximum sequence length.
            hidden_dropout_prob: See :class:`DistributedTransformer`; applied to the sum of embeddings too.
            num_token_types: The number of token types; 0 for a model without token types.
            causal_mask_size: See :class:`DistributedTransformer`. If set, the loss is that of next-token prediction.
            add_lm_head: Whether there is an output layer.
            initializer_range: The standard deviation of embeddings, and of normally distributed weights.
            use_normal_initialization: See :class:`DistributedTransformer`; embeddings are always normal.
            **options: Options of :class:`TransformerOptions`.
        """
        super().__init__(options.get("group"), device=options.get("device"), dtype=options.get("dtype"))
        _check_sizes(vocab_size=vocab_size, num_positions=num_positions, num_token_types=num_token_types)
        if options.get("inside"):
            raise ConfigError(f"{type(self).__name__}: inside is True; it gathers the samples itself, allowed: False")
        self.hidden_size, self.vocab_size, self.num_positions = hidden_size, vocab_size, num_positions
        self.causal = causal_mask_size is not None
        self.hidden_dropout_prob = hidden_dropout_prob
        self._stream = (num_layers + (options.get("layer_idx") or 0)) * STREAMS_PER_LAYER  # after all layers
        place: dict[str, Any] = {"initializer_range": initializer_range, "inside": True, **self.placed}
        self.word_embedding = VocabularyParallelEmbedding(vocab_size, hidden_size, **place)
        self.position_embedding = VocabularyParallelEmbedding(num_positions, hidden_size, **place)
        self.token_type_embedding = (
            VocabularyParallelEmbedding(num_token_types, hidden_size, **place) if num_token_types else None
        )
        given: dict[str, Any] = {**options, "group": self.tp_group, "inside": True}
        of_heads, sizes = (num_attention_heads, attention_head_size), (hidden_size, intermediate_size)
        dropouts, norms = (attention_dropout_prob, hidden_dropout_prob), (pre_layernorm, post_layernorm)
        weights, attention = (initializer_range, use_normal_initialization), (causal_mask_size, add_cross_attention)
        of_all = (*of_heads, *sizes, *dropouts, activation, layernorm_epsilon, *weights, *attention, *norms)
        self.transformer = DistributedTransformer(num_layers, *of_all, **given)
        self.lm_head = TiedOutput(self.word_embedding) if add_lm_head else None

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """Apply the model; all ranks of the group must call it together.

        Args:
            inputs: (input_ids, attention_mask, token_type_ids, position_ids, labels), or with cross-attention
                (input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels). All but
                ``input_ids`` and ``cross_states`` may be None, and be omitted at the end. N is the batch, which may
                differ between ranks and may be 0 (with ``prescaled_batch``, all inputs are the same on all ranks), S
                the length of the sequence, K that of the cross states. Ids are int32 or int64, [N, S]; masks of any
                dtype, [N, S] and [N, K], 1 for masked positions and 0 for others; ``cross_states`` [N, K, hidden_size].
                A first dim of 1 of a mask, token types or positions means the same for all samples of all ranks.
                Positions by default count from 0; token types are 0 by default. Labels are ids, or -100 for
                positions to ignore.

        Returns:
            Without labels, the logits, [N, S, vocab_size]; without an output layer, the hidden states,
            [N, S, hidden_size]. With labels, only the loss, a scalar: the mean cross entropy over the labels of this
            rank's samples, for which logits are not gathered. With ``causal_mask_size``, the logits of a position are
            compared with the label of the next position, as in causal language models of ``transformers``; otherwise
            with its own label, as in masked language models.

        Raises:
            ConfigError: Shapes or dtypes do not match, a sequence is too long, or on the CPU an id is out of
                range or a mask neither 0 nor 1; all ranks raise it.
        """
        group = self.tp_group
        given, agreement = self._agreed(self._named(inputs))
        batches = agreement.sizes(0)
        needs_grad = agreement.needs_grad or agreement.parameters_need_grad
        seed = agreement.seed if self._drops else None
        if group.size > 1:
            given = self._gathered(given, agreement)
        hidden = self._embedded(given, needs_grad, seed)
        masks = {name: self._added(name, given[name], hidden.dtype) for name in _MASKS if name in given}
        mask, cross_mask = (masks.get(name) for name in _MASKS)
        taken = LayerInputs(hidden, given.get("cross_states"), mask, cross_mask, seed=seed)
        (hidden, *_) = self.transformer(tuple(taken))
        if self.lm_head is None:
            return GatheredCall(group, taken, batches).leave(hidden)
        hidden = relayout(hidden, hidden_states(group), SHARED, group=group, needs_grad=needs_grad)
        logits: torch.Tensor = self.lm_head(hidden)
        if "labels" not in given:
            logits = relayout(logits, FEATURES, samples(group), group=group, needs_grad=needs_grad, sizes=batches)
            return logits[..., : self.vocab_size]
        labels = given["labels"].long()
        if self.causal:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], _IGNORED)], 1)
        return vocabulary_parallel_cross_entropy(
            logits,
            labels,
            group=group,
            batches=None if group.prescaled_batch else batches,
            ignore_index=_IGNORED,
            vocab_size=self.vocab_size,
            needs_grad=needs_grad,
        )

    @property
    def _drops(self) -> bool:
        return self.training and self.transformer.drops

    def _named(self, inputs: object) -> dict[str, torch.Tensor]:
        """Return the tensors of a caller's tuple by name."""
        names = (*_IDS, *(_CROSS if self.transformer.add_cross_attention else ()), "labels")
        return tensors_by_name(self.operation, inputs, names)

    def _agreed(self, given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Agreement]:
        """Exchange shapes and dtypes with all ranks, and check them against what the model accepts."""
        given = {name: one.detach() if name in _MASKS else one for name, one in given.items()}
        seed = draw_seed() if self._drops else 0
        agreement = self.agree(list(given.values()), given, free_dim=samples(self.tp_group).dim, seed=seed)
        for rank, signature in enumerate(agreement.signatures):
            self._check_shapes(rank, dict(zip(given, signature.shapes, strict=True)))
        for name, one in given.items():
            if name not in (*_MASKS, "cross_states") and one.dtype not in _ID_DTYPES:
                raise ConfigError(f"{self.operation}: {name} are {one.dtype}; allowed: torch.int32 and torch.int64")
        if "token_type_ids" in given and self.token_type_embedding is None:
            raise ConfigError(f"{self.operation}: num_token_types is 0, so token_type_ids have to be None")
        if "labels" in given and self.lm_head is None:
            raise ConfigError(f"{self.operation}: add_lm_head is False, so labels have to be None")
        if self.transformer.add_cross_attention and "cross_states" not in given:
            raise ConfigError(f"{self.operation}: add_cross_attention is True, but cross_states are None")
        return given, agreement

    def _check_shapes(self, rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        batch, length = (*shapes["input_ids"], 0, 0)[:2]
        keys = (*shapes.get("cross_states", ()), 0, 0)[1]
        needed: dict[str, tuple[tuple[int, ...] | None, ...]] = {
            **{name: ((batch, 1), (length,)) for name in _IDS},
            "input_ids": (None, None),
            "labels": ((batch,), (length,)),
            "cross_states": ((batch,), None, (self.hidden_size,)),
            "cross_mask": ((batch, 1), (keys,)),
        }
        check_shapes(self.operation, rank, shapes, needed)
        if length > self.num_positions:
            raise ConfigError(
                f"{self.operation}: the sequence has length {length} on tp rank {rank}; num_positions allows up to "
                f"{self.num_positions}"
            )

    def _gathered(self, given: dict[str, torch.Tensor], agreement: Agreement) -> dict[str, torch.Tensor]:
        """Gather the inputs of all samples."""
        group, batches, found = self.tp_group, agreement.sizes(0), dict(given)
        if not group.prescaled_batch:
            own = [
                name
                for place, name in enumerate(given)
                if name != "cross_states" and agreement.sizes(0, place) == batches
            ]
            ones = [given[name] for name in own]
            together = relayout(ones, samples(group), SHARED, group=group, sizes=batches, needs_grad=False)
            found.update(zip(own, together, strict=True))
        if "cross_states" in given:
            found.update(gather_states({"cross_states": given["cross_states"]}, agreement, group))
        return found

    def _embedded(self, given: Mapping[str, torch.Tensor], needs_grad: bool, seed: int | None) -> torch.Tensor:
        """Return the sum of embeddings, [N, S, hidden_size], or [N, S, hidden_size / tp degree] for memory."""
        group, ids = self.tp_group, given["input_ids"]
        places = given.get("position_ids")
        if places is None:
            places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        hidden: torch.Tensor = self.word_embedding(ids) + self.position_embedding(places)
        if self.token_type_embedding is not None:
            types = given.get("token_type_ids")
            hidden = hidden + self.token_type_embedding(torch.zeros_like(ids) if types is None else types)
        hidden = relayout(hidden, PARTIAL, hidden_states(group), group=group, needs_grad=needs_grad)
        if seed is not None and self.hidden_dropout_prob > 0:
            own = seed_of(seed, self._stream, group.rank if group.optimize == "memory" else None)
            hidden = dropout(hidden, self.hidden_dropout_prob, own)
        return hidden

    def _added(self, name: str, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert a mask of 0 and 1, [N or 1, keys], to summands of scores, [N or 1, 1, 1, keys]."""
        if mask.device.type == "cpu" and not bool(((mask == 0) | (mask == 1)).all()):
            raise ConfigError(
                f"{self.operation}: {name} has numbers from {mask.min().item()} to {mask.max().item()}; allowed: 1 "
                "where a position is not seen and 0 where it is"
            )
        return (mask.to(dtype) * _UNSEEN)[:, None, None]


def _check_sizes(**sizes: int) -> None:
    for name, number in sizes.items():
        least = 0 if name == "num_token_types" else 1
        if number < least:
            raise ConfigError(f"DistributedTransformerLMHead: {name} is {number}; allowed: {least} or more")
