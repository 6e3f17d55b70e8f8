"""Hugging Face models: heads, groups, hidden units, stream and layers of an adopted transformer.

Examples:
    >>> import torch
    >>> import transformers
    >>> import grapnet as gn
    >>> import grapnet.integrations.transformers as hf
    >>> tokens = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1}
    >>> config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=4, **tokens)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> net = gn.adopt(model, torch.randint(40, (2, 8)))
    >>> first, second, third = hf.layers(net)
    >>> with net.edit(reason="two heads, half of the hidden units") as edit:
    ...     edit.remove_nodes(first.heads[[0, 3]])
    ...     edit.remove_nodes(third.ffn.weakest(fraction=0.5))
    >>> with net.edit(reason="one layer") as edit:
    ...     edit.remove(second.container, second.index)
    >>> [(len(layer.heads), len(layer.ffn)) for layer in hf.layers(net)]
    [(2, 64), (4, 32)]
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.convert._config import sync_config as _sync_config
from grapnet.spaces import Adopted, Space, gate_gradients, transformer_layers
from grapnet.spaces import Attention as Attention
from grapnet.spaces import TransformerLayer as TransformerLayer

Loss = Callable[[nn.Module, Any], Tensor]


def layers(net: nn.Module, within: str = "") -> list[TransformerLayer]:
    """Returns the layers of an adopted transformer, in the order of its modules.

    They are found from the axes of the tensors, for any family of models: a layer is a block that
    writes the stream which it reads. Its `heads`, `kv_groups`, `queries`, `ffn` and `stream` are
    spaces, whose nodes an edit removes and adds; `edit.remove(layer.container, layer.index)`
    removes the layer.

    Args:
        net: the graph of `gn.adopt`, or the model.
        within: the path of a part of the model, such as "decoder"; all of it by default.
    """
    found = transformer_layers(gn.adopted(net))
    if within:
        found = [layer for layer in found if layer.path.startswith(f"{within}.")]
    return found


@dataclass(frozen=True)
class Scores:
    """How much a model needs its parts, by `scores`.

    Attributes:
        nodes: one number per node, [nodes], for every space of heads and of hidden units: what
            `space.weakest(key=scores.nodes[space])` ranks by, and a criterion `PruneNodes(by=…)`.
        layers: one number per layer, in the order of `layers`.
    """

    nodes: Mapping[Space, Tensor]
    layers: Tensor


def scores(
    net: nn.Module, batches: Iterable[Any], loss: Loss | None = None, *, within: str = ""
) -> Scores:
    """Returns how much a model needs its heads, hidden units and layers, on some batches.

    The score of a head, a group or a hidden unit is |∂loss/∂gate|, averaged over the batches, where
    a gate of 1 multiplies what the node sends on: to first order, how much the loss changes without
    it. Batches of one sample each give the scores of Michel, Levy and Neubig (2019).

    The score of a layer is its block influence (ShortGPT, Men et al. 2024): 1 minus the cosine of
    what enters the layer and what leaves it, averaged over all positions.

    The model runs in evaluation mode, and nothing of it changes.

    Args:
        net: the graph of `gn.adopt`, or the model.
        batches: what the model is called with, by name: `{"input_ids": …, "labels": …}`.
        loss: `loss(model, batch)`; by default `model(**batch).loss`.
        within: as for `layers`.
    """
    graph = gn.adopted(net)
    found = layers(graph, within)
    spaces = list(dict.fromkeys(space for layer in found for space in layer.spaces))
    if loss is None:
        loss = _own_loss
    model = graph.model
    totals = {space: torch.zeros(len(space), dtype=torch.float64) for space in spaces}
    influences = torch.zeros(len(found), dtype=torch.float64)
    count = 0
    with _evaluating(model), _recording([layer.block for layer in found]) as passes:
        for batch in batches:
            gradients = gate_gradients(graph, spaces, lambda one=batch: loss(model, one))
            for space, gradient in gradients.items():
                totals[space] += gradient.abs()
            influences += torch.tensor([sum(own) / len(own) for own in passes])
            for own in passes:
                own.clear()
            count += 1
    if count == 0:
        raise ValueError("scores need at least one batch")
    nodes = {space: total / count for space, total in totals.items()}
    return Scores(nodes, influences / count)


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    found = model(**batch).loss
    if found is None:
        raise ValueError("the model returned no loss: give `labels` in the batches, or a loss=")
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode for a while."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _recording(blocks: Iterable[nn.Module]) -> Iterator[list[list[float]]]:
    """Collects the influence of blocks, a number for every pass through one."""
    passes: list[list[float]] = []
    handles = []
    for block in blocks:
        own: list[float] = []
        passes.append(own)

        def record(
            module: nn.Module, args: Any, kwargs: Any, output: Any, own: list[float] = own
        ) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            returned = output if isinstance(output, Tensor) else output[0]
            with torch.no_grad():
                cosine = torch.cosine_similarity(given.double(), returned.double(), dim=-1)
            own.append(1 - float(cosine.mean()))

        handles.append(block.register_forward_hook(record, with_kwargs=True))
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def sync_config(net: nn.Module) -> None:
    """Sets the numbers in the config of an adopted model to the sizes that its layers have.

    Which numbers these are is found out: models are made without contents from changed configs,
    until one has the axes of this model. Edits and undo do not set them, except for the number of
    layers, so call it after the last edit. `gn.ungraft` does so, too.

    Args:
        net: the graph of `gn.adopt`, or the model.

    Raises:
        EditError: no config describes the model, as where layers have different sizes; the message
            names them, and nothing changes.
    """
    _sync_config(gn.adopted(net))


def save_pretrained(net: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Writes an adopted model for `from_pretrained`, which needs no GrapNet; the graph stays.

    Relations that were cut are zeros in the file. `gn.save` writes models of any sizes, with their
    history and optimizers.

    Args:
        net: the graph of `gn.adopt`, or the model.
        folder: where to.
        **options: of the model's own `save_pretrained`.

    Raises:
        EditError: as in `sync_config`; nothing is written.
    """
    graph = gn.adopted(net)
    sync_config(graph)
    model: Any = graph.model
    model.save_pretrained(folder, state_dict=_plain_state(graph), **options)


def _plain_state(net: Adopted) -> dict[str, Tensor]:
    """Returns the state dict of a model with the tensors that its modules compute with."""
    state = net.state_dict()
    for name in state:
        path, _, own = name.rpartition(".")
        tensor = getattr(net.model.get_submodule(path), own)
        if tensor.shape != state[name].shape:
            state[name] = tensor.detach()
    return state
