"""Models for sequences of tokens: a recurrent network and a transformer.

Both accept tokens as int64 ``[b, L]``, with 0 for padding at the end, and return logits ``[b, k]`` for each sequence or
``[b, L, k]`` for each position. Padding does not change the logits of earlier positions, and the shapes of the
parameters do not depend on L.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.models.dropout import Dropout
from fedloom.models.spec import ModelSpec


class TokenModelSpec(ModelSpec):
    """Model that accepts only tokens."""

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        name = type(self).__name__.lower()
        raise ConfigError(
            f"model {name} needs tokens, but these samples are numbers of shape {shape}. Use softmax, mlp or cnn"
        )


class LSTM(TokenModelSpec):
    """Embedding, LSTM layers, and a linear head (LEAF's model for Shakespeare: widths 8 and 256, 2 layers).

    A label for the whole sequence is predicted at its last token.
    """

    embedding: PositiveInt = Field(32, description="width of the embedding (LEAF, Shakespeare: 8)")
    hidden: PositiveInt = Field(128, description="width of every layer (LEAF, Shakespeare: 256)")
    layers: PositiveInt = Field(1, description="number of layers (LEAF, Shakespeare: 2)")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate after the embedding and every layer")

    def sequence(self, length: int, outputs: int, vocabulary: int, each: bool) -> nn.Module:
        return LSTMNetwork(self, outputs, vocabulary, each)


class Transformer(TokenModelSpec):
    """Attention and two linear layers, each after a normalization (Vaswani et al. 2017; Xiong et al. 2020).

    Positions are encoded by fixed sines and cosines. A label for the whole sequence is predicted at the last token if
    the model is causal, and otherwise from the mean over the tokens.
    """

    width: PositiveInt = Field(64, description="width of the embedding and of the layers. Must be even")
    layers: PositiveInt = Field(2, description="number of layers")
    heads: PositiveInt = Field(4, description="number of attention heads. Must divide the width")
    inner: PositiveInt | None = Field(
        None, description="hidden width between the two linear layers (None: four times the width)"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate after the embedding and every layer")
    causal: bool = Field(
        True,
        description=(
            "use causal attention: a position does not depend on later positions, as in next-token "
            "prediction. Set to false for tagging"
        ),
    )

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Transformer:
        if self.width % self.heads or self.width % 2:
            raise ValueError(
                f"heads must divide the width, which must be even, got {self.heads} heads and width {self.width}"
            )
        return self

    def sequence(self, length: int, outputs: int, vocabulary: int, each: bool) -> nn.Module:
        return TransformerNetwork(self, length, outputs, vocabulary, each)


class LSTMNetwork(nn.Module):
    """Network built by `LSTM`."""

    def __init__(self, spec: LSTM, outputs: int, vocabulary: int, each: bool) -> None:
        super().__init__()
        widths = [spec.embedding, *[spec.hidden] * spec.layers]
        self.embedding = nn.Embedding(vocabulary, spec.embedding)
        self.layers = nn.ModuleList(
            TorchLSTMLayer(before, after, batch_first=True) for before, after in pairwise(widths)
        )
        self.drops = nn.ModuleList(Dropout(spec.dropout) for _ in widths)
        self.pick = HeadInputSelection(each, last=True)
        self.head = nn.Linear(spec.hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for tokens ``[b, L]``."""
        h = self.drops[0](self.embedding(x))
        for layer, drop in zip(self.layers, list(self.drops)[1:], strict=True):
            assert isinstance(layer, TorchLSTMLayer)
            h = drop(layer.compute_equations(h) if layer.plain else layer(h)[0])
        return self.head(self.pick(h, x))  # type: ignore[no-any-return]


class TorchLSTMLayer(nn.LSTM):
    """LSTM layer computed by torch or, if ``plain`` is True, by plain operations that `torch.vmap` supports."""

    plain = False
    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def compute_equations(self, x: Tensor) -> Tensor:
        """Return all states ``[b, L, hidden]`` for ``x [b, L, .]``, which are the same as the states in ``forward``."""
        gates = (x @ self.weight_ih_l0.mT + (self.bias_ih_l0 + self.bias_hh_l0)).unbind(1)
        h = c = torch.zeros_like(gates[0][:, : self.hidden_size])
        states = []
        for gate in gates:
            i, f, g, o = (gate + h @ self.weight_hh_l0.mT).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, 1)


class TransformerNetwork(nn.Module):
    """Network built by `Transformer`."""

    positions: Tensor
    before: Tensor

    def __init__(self, spec: Transformer, length: int, outputs: int, vocabulary: int, each: bool) -> None:
        super().__init__()
        self.register_buffer("positions", sine_positions(length, spec.width), persistent=False)
        pairs = torch.ones(length, length, dtype=torch.bool)
        self.register_buffer("before", pairs.tril() if spec.causal else pairs, persistent=False)
        self.embedding = nn.Embedding(vocabulary, spec.width)
        self.drop = Dropout(spec.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width)
        self.pick = HeadInputSelection(each, last=spec.causal)
        self.head = nn.Linear(spec.width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for tokens ``[b, L]``."""
        visible = self.before & (x != 0)[:, None, :]
        h = self.drop(self.embedding(x) + self.positions)
        for block in self.blocks:
            h = block(h, visible)
        return self.head(self.pick(self.norm(h), x))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each with a residual connection."""

    def __init__(self, spec: Transformer) -> None:
        super().__init__()
        inner = spec.inner or 4 * spec.width
        self.norm1 = nn.LayerNorm(spec.width)
        self.attention = SelfAttention(spec.width, spec.heads)
        self.drop1 = Dropout(spec.dropout)
        self.norm2 = nn.LayerNorm(spec.width)
        self.fc1 = nn.Linear(spec.width, inner)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(inner, spec.width)
        self.drop2 = Dropout(spec.dropout)

    def forward(self, h: Tensor, visible: Tensor) -> Tensor:
        """Return the output of the block for ``h [b, L, width]``.

        ``visible [b, L, L]`` is True for the positions that each position attends to.
        """
        h = h + self.drop1(self.attention(self.norm1(h), visible))
        return h + self.drop2(self.fc2(self.act(self.fc1(self.norm2(h)))))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Scaled dot-product attention with several heads (Vaswani et al. 2017, Section 3.2).

    It consists of plain operations, which `torch.vmap` supports.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, h: Tensor, visible: Tensor) -> Tensor:
        """Return the result of attention ``[b, L, width]``."""
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible[:, None], -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class HeadInputSelection(nn.Module):
    """Selection of the input of the head: each position, the last token of a sequence, or the mean over its tokens."""

    def __init__(self, each: bool, last: bool) -> None:
        super().__init__()
        self.each, self.last = each, last

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        """Return ``[b, L, a]`` or ``[b, a]`` from ``h [b, L, a]`` and tokens ``x [b, L]``."""
        if self.each:
            return h
        pooled = (x != 0).to(h.dtype)
        if self.last:
            pooled = pooled * (pooled.cumsum(1) == pooled.sum(1, keepdim=True))
        return (h * (pooled / pooled.sum(1, keepdim=True))[..., None]).sum(1)


def sine_positions(length: int, width: int) -> Tensor:
    """Return positions encoded as sines and cosines ``[length, width]`` (Vaswani et al. 2017, Section 3.5)."""
    rate = torch.exp(-math.log(10_000.0) * torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
