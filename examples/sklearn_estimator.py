"""A net inside scikit-learn: search how much of it can be pruned, then edit what was found and
train on.

`python -m examples.sklearn_estimator` takes a few seconds on the digits that come with
scikit-learn.
"""

import argparse
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from grapnet.integrations.sklearn import GrapNetClassifier
from grapnet.rules import Scheduled, gradual_pruning


@dataclass
class Settings:
    """One hidden layer, pruned along a ramp while it trains."""

    hidden: int = 64
    epochs: int = 20
    batch: int = 100
    sparsities: tuple[float, ...] = (0.5, 0.9, 0.99)  # to choose from
    seed: int = 0


def main(settings: Settings | None = None) -> dict[str, float]:
    """Searches, edits, trains on, and returns the numbers it prints."""
    settings = settings or Settings()
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=0.25, stratify=y, random_state=0
    )

    # A rule is a parameter like any other: every fit gets copies, and a search can choose among
    # them.
    net = GrapNetClassifier(
        (settings.hidden,),
        max_epochs=settings.epochs,
        batch_size=settings.batch,
        random_state=settings.seed,
    )
    pipeline = Pipeline([("scale", StandardScaler()), ("net", net)])
    choices = [pruning(sparsity, settings) for sparsity in settings.sparsities]
    search = GridSearchCV(pipeline, {"net__rules": choices}, cv=3).fit(x_train, y_train)
    for sparsity, score in zip(
        settings.sparsities, search.cv_results_["mean_test_score"], strict=True
    ):
        print(f"{sparsity:.0%} pruned: {score:.1%} in cross-validation")
    scaler, model = search.best_estimator_.named_steps.values()
    found = model.score(scaler.transform(x_test), y_test)
    print(f"best: {model.net_}, {found:.1%} on the test set")

    # Edit the fitted net: without the border of the images, and with eight more hidden nodes.
    border = [row for row in range(64) if row // 8 in (0, 7) or row % 8 in (0, 7)]
    relations = model.net_.count().relations
    drawn_from = torch.Generator().manual_seed(settings.seed)
    with model.net_.edit(reason="ignore the border", generator=drawn_from) as edit:
        edit.cut(model.net_.layers[0][border].outgoing())
        nodes = edit.add_nodes(1, 8, owner="grown afterwards")
        edit.connect(model.net_.layers[0][[row for row in range(64) if row not in border]], nodes)
        edit.connect(nodes, model.net_.layers[2], weights="zero")
    edited = model.score(scaler.transform(x_test), y_test)
    for _ in range(5):
        model.partial_fit(scaler.transform(x_train), y_train)
    trained = model.score(scaler.transform(x_test), y_test)
    print(f"edited: {model.net_}, {edited:.1%}; after five more epochs {trained:.1%}")
    return {
        "best_sparsity": settings.sparsities[search.best_index_],
        "accuracy": found,
        "accuracy_after_edit": edited,
        "accuracy_after_training_on": trained,
        "relations": relations,
        "relations_after_edit": model.net_.count().relations,
    }


def pruning(sparsity: float, settings: Settings) -> list[Scheduled]:
    """Returns the rules that prune to a sparsity in the middle half of a fit."""
    # cross-validation trains on 898 of the 1,347 images
    steps = settings.epochs * -(-898 // settings.batch)
    return [gradual_pruning(steps, sparsity, every=5, start=steps // 4)]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    main()
