"""A plain PyTorch loop: a convolutional encoder, a net behind it, rules that rewire and prune it,
and a way to go on.

`python -m examples.plain_loop` trains on the digits of scikit-learn for a few seconds and writes
runs/plain_loop/.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import grapnet as gn
from grapnet.rules import Every, Rewire, RuleManager, gradual_pruning

Split = tuple[Tensor, Tensor]


@dataclass
class Settings:
    """Ten digits of 8×8 pixels, of which 400 are for the test."""

    epochs: int = 6
    batch: int = 64
    hidden: int = 96  # nodes of the net's hidden layer
    sparsity: float = 0.9  # of the net, in the end
    every: int = 10  # steps between two changes of the net
    images: int = 1397  # to train on
    learning_rate: float = 0.01
    seed: int = 0
    out: Path = Path("runs/plain_loop")


def encoder() -> nn.Module:
    """Returns a small convolutional encoder: 8×8 pixels -> 64 features, one for each sensory
    node.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


def rules(settings: Settings) -> RuleManager:
    """Returns rules that prune the net step by step, and move what is left to where gradients are
    large.
    """
    steps = settings.epochs * -(-settings.images // settings.batch)
    manager = RuleManager(seed=settings.seed)
    every = settings.every
    manager.add(gradual_pruning(steps, settings.sparsity, every=every, start=every, stop=2 / 3))
    manager.add(
        Rewire(fraction=0.1),
        schedule=Every(every, start=every + every // 2),
    )
    return manager


def main(settings: Settings | None = None) -> dict[str, float]:
    """Trains, saves, and loads what was saved; returns the numbers it prints."""
    settings = settings or Settings()
    torch.manual_seed(settings.seed)
    train, test = read(settings.images)
    net = gn.GrapNet([64, settings.hidden, 10])
    model = nn.Sequential(encoder(), net)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    manager = rules(settings)
    dense = net.count().relations

    gn.attach(optimizer, net)  # its moments follow every edit
    manager.start(net)  # recorders watch what the first rules need
    step = 0
    for epoch in range(settings.epochs):
        for rows in torch.randperm(len(train[0])).split(settings.batch):
            optimizer.zero_grad()
            cross_entropy(model(train[0][rows]), train[1][rows]).backward()
            optimizer.step()
            manager.apply(net, step)  # behind the optimizer's step
            step += 1
        print(
            f"epoch {epoch}: {net.count().relations:,} relations, accuracy"
            f" {accuracy(model, test):.1%}"
        )

    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / "run.safetensors"
    gn.save(path, model, rules=manager, optimizer=optimizer)
    # dense, whatever the file holds
    loaded = nn.Sequential(encoder(), gn.GrapNet([64, settings.hidden, 10]))
    gn.restore(path, into=loaded)
    result = {
        "accuracy": accuracy(model, test),
        "loaded_accuracy": accuracy(loaded, test),
        "relations_before": dense,
        "relations": net.count().relations,
        "changes": len(net.history),
    }
    print(
        f"{len(net.history)} changes left {result['relations']:,} of {dense:,} relations; written"
        f" to {path}"
    )
    return result


def accuracy(model: nn.Module, split: Split) -> float:
    """Returns the share of images that a model names rightly."""
    with torch.no_grad():
        return float((model(split[0]).argmax(1) == split[1]).double().mean())


def read(images: int) -> tuple[Split, Split]:
    """Returns digits to train on and digits to test with: images [n, 1, 8, 8] and labels."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels).float().view(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    return (x[400 : 400 + images], y[400 : 400 + images]), (x[:400], y[:400])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    main()
