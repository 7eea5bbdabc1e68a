"""Layers of PyTorch that keep state, read each other's weights or compute their own: attention, recurrence, norms."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.parity.models_control import WIDTH, dense
from tests.parity.models_training import evaluate
from tests.parity.problem import BATCH, Models, Phase, square_loss

from .entry import Entry
from .entry_builders import module, numbered, spread

LENGTH = 5


def sequences(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(BATCH, LENGTH, WIDTH, generator=random),)


def masked_sequences(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Sequences, and where each of them is padded: never at its start."""
    lengths = torch.randint(1, LENGTH + 1, (BATCH, 1), generator=random)
    return (*sequences(step, random), torch.arange(LENGTH) >= lengths)


def masked_step(models: Models, x: torch.Tensor, padded: torch.Tensor) -> Any:
    output = models["model"](x, padded)
    loss = output.masked_fill(padded[..., None], 0.0).square().mean()
    models["model"].backward(loss)
    return loss, output


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor, padded: torch.Tensor, **masks: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(x)
        y, weights = self.attention(normed, normed, normed, key_padding_mask=padded, **masks)
        return x + y, weights


class MaskedAttention(nn.Module):
    """Every kind of mask: of bools, of numbers to add, of one matrix and of one for each head, and causal."""

    causal: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attends() for _ in range(4))
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> Any:
        added = torch.zeros_like(padded, dtype=x.dtype).masked_fill(padded, -1e4)
        for_each_head = self.causal.expand(2 * len(x), -1, -1)
        x, first = self.blocks[0](x, padded, attn_mask=self.causal)
        x, second = self.blocks[1](x, added, attn_mask=torch.zeros(LENGTH, LENGTH).masked_fill(self.causal, -1e4))
        x, third = self.blocks[2](x, padded, attn_mask=for_each_head, average_attn_weights=False)
        x, nothing = self.blocks[3](x, padded, attn_mask=self.causal, is_causal=True, need_weights=False)
        assert nothing is None
        return x + (first + second + third.mean(1)).sum(-1, keepdim=True)


class Translator(nn.Module):
    """PyTorch's own encoder and decoder: nested stacks of copied layers, with masks for both and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            WIDTH, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=12, dropout=0.0, batch_first=True
        )

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        floating = torch.zeros_like(padded, dtype=x.dtype).masked_fill(padded, -torch.inf)
        return self.transformer(
            x,
            x.flip(1),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=floating,
            memory_key_padding_mask=floating,
        )


class Packed(nn.Module):
    """Recurrent layers that hand a packed sequence and their states on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.both = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.gated = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.projected = nn.LSTM(WIDTH, 8, proj_size=WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, (~padded).sum(1), batch_first=True, enforce_sorted=False)
        packed, (hidden, _) = self.up(packed)
        packed, _ = self.both(packed)
        packed, last = self.gated(packed, hidden[-1:])
        packed, (final, _) = self.projected(packed)
        x, _ = pad_packed_sequence(packed, batch_first=True, total_length=LENGTH)
        return x + last[0][:, None] * final[0][:, None]


class Cells(nn.Module):
    """Cells of recurrence that are called at every position, in turn, on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.long, self.gated, self.out = (
            dense(),
            nn.LSTMCell(WIDTH, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            dense(),
        )

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.start(x[:, 0])
        states = hidden, torch.zeros_like(hidden)
        seen = []
        for position in range(x.shape[1]):
            states = self.long(x[:, position], states)
            hidden = self.gated(states[0], hidden)
            seen.append(self.out(hidden))
        return torch.stack(seen, 1)


class Normalised(nn.Module):
    """Batch normalisation of every kind: running, cumulative, without statistics of its own, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense() for _ in range(4))
        self.running = nn.BatchNorm1d(WIDTH, momentum=0.3)
        self.cumulative = nn.BatchNorm1d(WIDTH, momentum=None, affine=False)
        self.untracked = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(WIDTH).requires_grad_(False)

    def train(self, mode: bool = True) -> Normalised:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> Any:
        norms = (self.running, self.cumulative, self.untracked, self.frozen)
        for layer, norm in zip(self.layers, norms, strict=True):
            x = x + norm(layer(x))
        return x


def synchronised() -> nn.Module:
    """Batch normalisation over all data-parallel ranks, of which there is one."""
    layers = nn.Sequential(*(part for _ in range(4) for part in (*dense(), nn.BatchNorm1d(WIDTH))))
    return nn.SyncBatchNorm.convert_sync_batchnorm(layers)


class Doubled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale + 0.1 * weight.tril()


class Chained(nn.Module):
    """Its weight goes through two parametrizations, and is computed once for two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.inner, "weight", Doubled())
        parametrize.register_parametrization(self.inner, "weight", Doubled())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            result: torch.Tensor = self.inner(x) + self.inner(x.sin())
        return result


class Parametrized(nn.Module):
    """Weights computed by parametrizations: some chained, some with buffers that every forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=2)
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.chained = Chained()

    def forward(self, x: torch.Tensor) -> Any:
        return self.chained(self.orthogonal(self.spectral(self.weight(x).tanh())))


class OldNorms(nn.Module):
    """The older norms of weights, which a hook before the forward computes and sets as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layers = nn.ModuleList(
                (
                    nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
                    nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
                    nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH), dim=None),
                    dense(),
                )
            )

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Clipped(nn.Module):
    """Embeddings whose forward shortens the rows it reads, in the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(11, WIDTH, max_norm=0.5)
        self.bag = nn.EmbeddingBag(11, WIDTH, max_norm=0.4, mode="sum")
        self.one, self.two = dense(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        indices = (x.abs() * 5).long().clamp(max=10)
        y = self.one(self.first(indices)).mean(1)
        return self.two(y + self.bag(indices))


#: Training, and the model evaluated after it.
TRAINED_AND_EVALUATED = (Phase(body=square_loss), Phase(body=evaluate, training=False, zero=(), update=()))

ENTRIES: dict[str, Entry] = {
    "attention with masks": module(
        "masks of bools and of numbers cross, one of them expanded; weights come back or are None",
        MaskedAttention,
        spread(*numbered("blocks")),
        batch=masked_sequences,
        phases=(Phase(body=masked_step),),
    ),
    "nn.Transformer": module(
        "nested stacks of layers with a fused path of their own, masks for both, and a memory that all decoders read",
        Translator,
        None,
        batch=masked_sequences,
        phases=(Phase(body=masked_step),),
    ),
    "LSTM and GRU, packed": module(
        "packed sequences and states cross, with lengths that change",
        Packed,
        spread("up", "both", "gated", "projected"),
        batch=masked_sequences,
        phases=(Phase(body=masked_step),),
    ),
    "recurrent cells": module(
        "a state goes round over ranks, once for each position",
        Cells,
        spread("start", "long", "gated", "out"),
        batch=sequences,
    ),
    "BatchNorm": module(
        "buffers of several kinds are written in every forward, in the order of the microbatches",
        Normalised,
        None,
        phases=TRAINED_AND_EVALUATED,
    ),
    "SyncBatchNorm": module(
        "wants a process group, of the ranks that hold the same layer",
        synchronised,
        None,
        phases=TRAINED_AND_EVALUATED,
    ),
    "parametrizations": module(
        "a weight is an attribute that other modules compute, one of them with buffers that the forward writes to",
        Parametrized,
        spread("weight", "spectral", "orthogonal", "chained"),
    ),
    "weight_norm and spectral_norm by hooks": module(
        "a weight is a plain attribute that a hook sets before every forward",
        OldNorms,
        spread(*numbered("layers")),
    ),
    "embedding with max_norm": module(
        "the forward writes to a weight, which the trace must put back",
        Clipped,
        spread("first", "one", "bag", "two"),
    ),
}
