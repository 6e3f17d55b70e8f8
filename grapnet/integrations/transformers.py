"""Transformers: the feed-forward blocks of Hugging Face models, and of torch's own layers, as nets.

The library itself is needed for its models only: `pip install "grapnet[transformers]"`.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import grapnet as gn
from grapnet.convert import graft_chains

from .transformers_blocks import LOOKED_FOR, Block, blocks_of
from .transformers_handle import FeedForward as FeedForward

Optimizers = Optimizer | Sequence[Optimizer] | None


def graft_ffn(
    model: nn.Module,
    layers: int | slice | Iterable[int] | None = None,
    optimizer: Optimizers = None,
    *,
    drop_zeros: bool = False,
) -> list[FeedForward]:
    """Replaces the feed-forward blocks of a Transformer, in place, by nets that compute the same;
    returns handles.

    A block becomes one net when that computes all of it, dropout included: GPT-2, BERT, ViT, CLIP,
    DistilBERT, T5, torch's own layers, an `nn.Sequential`. Otherwise each of its Linears becomes a
    net of its own, called by the forward that is there: gated blocks (Llama, Mistral, Qwen, Gemma,
    Phi-3), layers whose forward drops or computes something between the Linears (OPT, Bart), and
    activations that nodes do not have. Refused are forwards that read the weights of their Linears
    (the gated T5) or need a second argument (Bloom, MPT). Outputs, gradients and the next step of
    `optimizer` stay as they were, to rounding; `gn.ungraft(model)` is the way back.

    Args:
        model: any model. Blocks are found by what they are made of, and by running their forwards
            with stand-ins.
        layers: which blocks, counted from 0 in the order of the model's modules, or from the end
            with negative numbers, by number, by several, or by a slice; all that are not nets
            already when left out.
        optimizer: one, or several, that go on with the nets' Parameters, as for `gn.graft`.
        drop_zeros: leave weights that are zero out of the graphs.

    Raises:
        ConversionError: there is no such block, or one cannot become nets; the message names it.
            Nothing was changed.
        OptimizerError: as for `gn.graft`.
        TypeError: `layers` are no whole numbers.

    Examples:
        >>> import torch
        >>> encoder = nn.TransformerEncoder(
        ...     nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), num_layers=2
        ... )
        >>> optimizer = torch.optim.AdamW(encoder.parameters())
        >>> first, second = graft_ffn(encoder, optimizer=optimizer)
        >>> first  # doctest: +ELLIPSIS
        FeedForward('layers.0', 32 hidden units, GrapNet(16-32-16, 1,024 relations, ...))
        >>> commits = first.remove_hidden([0, 1, 2], reason="try without")
        >>> len(first.hidden), encoder(torch.zeros(4, 7, 16)).shape
        (29, torch.Size([4, 7, 16]))
    """
    chosen = _chosen(model, blocks_of(model), layers)
    refused = [block.refusal for block in chosen if block.refusal is not None]
    if refused:
        raise gn.ConversionError("; ".join(refused))
    chains = {anchor: chain for block in chosen for anchor, chain in (block.chains or {}).items()}
    nets = graft_chains(model, chains, optimizer, drop_zeros=drop_zeros)
    return [FeedForward(b.name, tuple(nets[place] for place in b.places), b.packed) for b in chosen]


def ffn_handles(model: nn.Module) -> list[FeedForward]:
    """Returns the handles of the blocks that are nets already: after `gn.restore`, in a copy, in
    another function.
    """
    grafted = [
        block for block in blocks_of(model) if block.chains is None and block.refusal is None
    ]
    return [
        FeedForward(b.name, tuple(_net(model, place) for place in b.places), b.packed)
        for b in grafted
    ]


def _chosen(
    model: nn.Module, blocks: Sequence[Block], layers: int | slice | Iterable[int] | None
) -> list[Block]:
    """Returns the blocks that `layers` says; raises ConversionError when there are none, or they
    are nets already.
    """
    if not blocks:
        raise gn.ConversionError(
            f"this {type(model).__name__} has no feed-forward block that is known: {LOOKED_FOR}"
        )
    if layers is None:
        left = [block for block in blocks if block.chains is not None or block.refusal is not None]
        if not left:
            raise gn.ConversionError(
                "all feed-forward blocks of this model are nets already: ffn_handles(model)"
            )
        return left
    numbers = _numbers(layers, len(blocks))
    outside = [number for number in numbers if not -len(blocks) <= number < len(blocks)]
    if outside or not numbers:
        there = (
            f"the {len(blocks)} blocks of this model, from {blocks[0].name!r} to"
            f" {blocks[-1].name!r}"
        )
        told = layers if isinstance(layers, slice) else numbers
        raise gn.ConversionError(f"layers={told} does not choose among {there}")
    chosen = [blocks[number] for number in sorted({number % len(blocks) for number in numbers})]
    for block in chosen:
        if block.chains is None and block.refusal is None:
            raise gn.ConversionError(f"{block.name!r} is nets already: ffn_handles(model)")
    return chosen


def _numbers(layers: Any, count: int) -> list[int]:
    """Returns block numbers as they were given, those of a slice from 0; raises TypeError for what
    are none.
    """
    try:
        if isinstance(layers, slice):
            return list(range(count)[layers])
        several = isinstance(layers, Iterable) and getattr(layers, "ndim", 1) > 0
        given: list[Any] = list(layers) if several else [layers]
        if any(
            isinstance(number, bool) or getattr(number, "dtype", None) is torch.bool
            for number in given
        ):
            raise TypeError("bools are no numbers of blocks")
        return [operator.index(number) for number in given]
    except TypeError as error:
        raise TypeError(
            f"layers= is the number of a block, several, or a slice; got {layers!r} ({error})"
        ) from None


def _net(model: nn.Module, name: str) -> gn.GrapNet:
    net = model.get_submodule(name)
    assert isinstance(net, gn.GrapNet)
    return net
