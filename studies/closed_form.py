"""Our own head on the one-pass 7×7 Fashion-MNIST stream: fixed random nodes whose readout is
solved, beside controls.

The head stores sums over the stream and no image; the controls store images. Learning rates,
updates and ridges are chosen for every head and seed on training images that the head was not
trained on.

What limits it (seed 20, before the settings were fixed): replay that stores as many bytes as
float64 sums of 1,000 nodes keeps 20,059 images, a third of the stream. With logit adjustment and 16
updates a batch it reached 86.05 on the test images, and 84.55 with 4, against our 85.06 (85.07 from
float32 sums) and 86.73 with 3,000 nodes; so that row chooses among more updates. As many bytes as
those of 3,000 nodes would hold every image: that row is left out.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from grapnet.continual import Batch

from .data import small_images
from .paper import published
from .stream_heads import (
    Choice,
    Head,
    Loss,
    choice_of,
    compared,
    dense,
    joint_row,
    markdown,
    solved_rows,
    statistics_rows,
    trained,
    tuned_replay,
)

PAPER = published("split_fashion")
STORED = 24_500  # numbers in the paper's replay memory
BARS = {"few": 80.0, "full": 84.0}  # seen-class accuracy of the first head of each stream
Grid = tuple[tuple[float, ...], tuple[int, ...]]
STREAMS = {"few": "500 images a class", "full": "full stream"}


@dataclass(frozen=True)
class Settings:
    """The head that is solved instead of trained, on 500 images a class and on all 6,000."""

    seeds: tuple[int, ...] = tuple(range(20, 30))
    data: str = "fashion"  # or "made-up": patterns of the same shape, for a run without the images
    few: int = 500  # images a class of the short stream
    # images a class that choices for the full stream are trained on; the others judge them
    trial: int = 3000
    judged: int = 10_000  # about how many of these do
    few_heads: tuple[Head, ...] = (  # the bar is about the first
        Head("softplus", 210, "float32"),
        Head("relu", 210, "float32"),
        Head("softplus", 146, "float64"),
        Head("silu", 1000),
    )
    full_heads: tuple[Head, ...] = (
        Head("silu", 1000, "float32"),
        Head("silu", 1000),
        Head("relu", 1000, "float32"),
        Head("silu", 256, "float32"),
        Head("silu", 3000, seeds=3),
    )
    # standard deviation of the random incoming weights; that of the biases is 1
    spread: float = 2 / 7
    ridges: tuple[float, ...] = (0.1, 1.0, 10.0)  # to choose from
    memory: int = 500  # images the replay of the paper stores: 24,500 numbers
    batch: int = 64  # of the stream and of the replay
    # learning rates of Adam and updates a batch
    few_grid: Grid = (
        (5e-4, 1.5e-3, 5e-3, 1.5e-2),
        (1, 4, 16),
    )
    full_grid: Grid = ((2e-4, 7e-4, 2e-3), (1, 4))
    # of the full stream, where as many bytes are stored as by our head
    large_grid: Grid = (
        (7e-4, 2e-3),
        (4, 16),
    )
    epochs: int = 20  # of offline training
    offline_updates: int = 2500  # at least so many, where the stream is short


FAST = Settings(
    seeds=(20, 21),
    data="made-up",
    few=20,
    trial=50,
    few_heads=(Head("softplus", 24, "float32"), Head("relu", 16)),
    full_heads=(Head("silu", 32), Head("relu", 32), Head("silu", 48, seeds=1)),
    memory=20,
    few_grid=((5e-3,), (1, 4)),
    full_grid=((5e-3,), (1,)),
    large_grid=((5e-3,), (4,)),
    epochs=2,
    offline_updates=20,
)


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns the rows of both streams."""
    train, test = (Batch(*images) for images in small_images(settings.data))
    most = int(train.y.bincount().min())
    streams = {
        "few": (settings.few, settings.few, settings.few_heads),
        "full": (most, settings.trial, settings.full_heads),
    }
    found = {}
    for name, (count, trial_count, heads) in streams.items():
        choice = choice_of(
            train,
            test,
            batch=settings.batch,
            seed=seed,
            counts=(count, trial_count),
            judged=settings.judged,
        )
        rows = {}
        for head in heads:
            if head.seeds is None or seed in settings.seeds[: head.seeds]:
                others = head is heads[0]
                rows |= solved_rows(
                    choice, head, seed, settings.ridges, settings.spread, others=others
                )
        found[name] = rows | _controls(settings, name, choice, heads[0], rows[heads[0].name], seed)
    return found


def _controls(
    settings: Settings, name: str, choice: Choice, head: Head, ours: dict[str, Any], seed: int
) -> dict[str, dict[str, Any]]:
    """Returns the rows of replay with as many nodes, of closed forms on the inputs, and of offline
    training.
    """
    inputs = choice.test.x.shape[1]
    grid = settings.few_grid if name == "few" else settings.full_grid
    memories = {f"{settings.memory:,} images": (settings.memory, grid)}
    if name == "full":
        content = choice.stream[0].content
        row_bytes = (content.x.nbytes + content.y.nbytes) // len(content.y)
        memories["as many bytes as the closed form"] = (
            ours["bytes"] // row_bytes,
            settings.large_grid,
        )
    rows = {}
    losses: dict[Loss, str] = {"seen": "ER", "adjusted": "logit-adjusted ER"}
    for loss, title in losses.items():
        for words, (memory, (rates, updates)) in memories.items():
            rows[f"{title}, {head.nodes} nodes, {words}"] = tuned_replay(
                {"normalised": choice},
                lambda rate: trained(dense(inputs, head.nodes), rate),
                seed,
                loss=loss,
                memory=memory,
                rates=rates,
                updates=updates,
            )
    activation = {"softplus": nn.Softplus, "silu": nn.SiLU, "relu": nn.ReLU}[head.activation]
    offline = {"rates": grid[0], "epochs": settings.epochs, "least": settings.offline_updates}
    rows[f"offline joint training, {head.nodes} {head.activation} nodes"] = joint_row(
        choice, lambda: dense(inputs, head.nodes, activation), seed, **offline
    )
    return rows | statistics_rows(choice, settings.ridges)


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and spread of every row of both streams, and the first head against each."""
    heads = {"few": settings.few_heads[0].name, "full": settings.full_heads[0].name}
    return {
        name: compared([numbers[name] for numbers in seeds.values()], heads[name])
        for name in STREAMS
    }


def table(result: dict[str, Any]) -> str:
    """Returns one Markdown table a stream."""
    parts = []
    for stream, title in STREAMS.items():
        parts.append(f"### One-pass 7×7 Split Fashion-MNIST, {title}")
        parts.append(markdown(result["summary"][stream]))
    parts.append(
        "Paper, 500 images a class: GrapNet plastic"
        f" {PAPER['GrapNet-48 plastic, reservoir: seen-class']}, dense-256"
        f" {PAPER['Dense ER-256, reservoir: seen-class']}, with {STORED:,} stored numbers. Ours"
        " keeps sums and no image; the incoming relations of its nodes are random and fixed from"
        " the start. Learning rates, updates a batch and ridges are chosen for every head and seed"
        " on training images that it did not learn. Offline training sees all images at once,"
        " again and again: it is what forgetting and one pass cost."
    )
    return "\n\n".join(parts)


def missed(result: dict[str, Any]) -> list[str]:
    """Returns a line for every bar that the result misses."""
    lines = []
    for stream, bar in BARS.items():
        name, row = next(iter(result["summary"][stream].items()))
        if not row["seen_class"]["mean"] >= bar:
            lines.append(
                f"{stream}: {name} reaches {row['seen_class']['mean']:.2f}, the bar is {bar:.2f}"
            )
        if row["images"]:
            lines.append(f"{stream}: {name} stores {row['images']:,} images, and is to store none")
        if stream == "few" and row["numbers"] > STORED:
            lines.append(
                f"few: {name} stores {row['numbers']:,} numbers, the replay memory {STORED:,}"
            )
    return lines
