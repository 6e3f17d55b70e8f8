"""A fitted estimator is edited, copied and trained on, and rules change it while it trains."""

import copy
import pickle
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import grapnet as gn
from grapnet.integrations.sklearn import GrapNetClassifier, GrapNetRegressor
from grapnet.rules import (
    At,
    Budget,
    CovarianceSifter,
    Every,
    EveryTask,
    GrowForTask,
    GrowWidth,
    PruneWeakest,
    Rewire,
    RuleManager,
    SplitIntoFamilies,
)

X, Y = load_digits(return_X_y=True)
X = X[:600] / 16
Y = Y[:600]
CHUNKS = [(X[start : start + 150], Y[start : start + 150]) for start in range(0, 600, 150)]


def quick(**parameters) -> GrapNetClassifier:
    return GrapNetClassifier(
        **{
            "hidden_layer_sizes": (20,),
            "max_epochs": 2,
            "batch_size": 50,
            "random_state": 0,
            "density": 0.5,
        }
        | parameters
    )


def numbers(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.net_.parameters()]


def equal(one, other) -> bool:
    ours = numbers(one)
    theirs = numbers(other)
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def edit(model) -> None:
    """Cuts, grows and freezes."""
    net = model.net_
    with net.edit(reason="by hand", generator=torch.Generator().manual_seed(1)) as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.2))
        grown = edit.add_nodes(1, 3)
        edit.connect(net.layers[0], grown)
        edit.connect(grown, net.layers[2])
        edit.freeze(net.layers[1][:2])


def test_an_edit_between_two_calls_is_trained_on_with_the_same_optimizer():
    model = quick().fit(X, Y)
    before = model.predict_proba(X)
    edit(model)
    assert not np.allclose(before, model.predict_proba(X))
    assert model.net_.sizes == [64, 23, 10]
    frozen = model.net_.layers[1][:2].incoming()
    kept = frozen.weights.detach().clone()
    steps = model.n_steps_
    optimizer = model.optimizer_
    net = model.net_
    edited = model.predict_proba(X)
    model.partial_fit(X, Y)
    assert model.net_ is net
    assert model.optimizer_ is optimizer
    assert model.n_steps_ == steps + 12
    assert torch.equal(model.net_.layers[1][:2].incoming().weights, kept)
    assert not np.allclose(edited, model.predict_proba(X))
    for transition in net.transitions:
        assert optimizer.state[transition.weight]["exp_avg"].shape == transition.weight.shape
    gn.check(net)


RULES = {
    "weights": (PruneWeakest(0.1), Every(3, start=3)),
    "gradients": (Rewire(grow="gradient"), Every(5, start=4)),
    "covariance": (CovarianceSifter(transitions=(0,)), At(9)),
    "co-activation": (SplitIntoFamilies(1, 4), At(9)),
    "growth": (GrowWidth(1, 4, init="gradmax"), At(9)),
}


def streamed(
    between=lambda model: None, again=lambda model: model, **parameters
) -> GrapNetClassifier:
    """Learns four chunks, is edited behind the second; `again` may return a copy to go on with."""
    model = quick(dropout=0.1, **parameters)
    for number, (x, y) in enumerate(CHUNKS):
        model.partial_fit(x, y, classes=range(10))
        between(model)
        model = again(model)
        if number == 1:
            edit(model)
            model = again(model)
    return model


@pytest.mark.parametrize("rule", RULES)
def test_copies_train_on_alike(rule):
    whole = streamed(rules=[RULES[rule]])
    assert any(type(RULES[rule][0]).__name__ in commit.reason for commit in whole.net_.history)
    assert not equal(whole, streamed(rules=[RULES[rule]], random_state=1))
    for again in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        copied = streamed(again=again, rules=[RULES[rule]])
        assert equal(whole, copied)
        np.testing.assert_array_equal(whole.predict_proba(X), copied.predict_proba(X))
        assert [c.reason for c in whole.net_.history] == [c.reason for c in copied.net_.history]


@pytest.mark.parametrize("rule", ["gradients", "covariance", "co-activation"])
def test_recorders_do_not_take_predictions_for_training_data(rule):
    parameters = {"rules": [RULES[rule]]}
    plain = streamed(**parameters)
    assert equal(plain, streamed(lambda model: model.predict(X[::-1] * 3), **parameters))


def test_every_fit_gets_rules_of_its_own():
    @dataclass
    class Counting:
        calls: int = 0

        def __call__(self, net, edit, context):
            self.calls += 1

    rule = Counting()
    model = quick(rules=[rule]).fit(X, Y)
    assert (rule.calls, model.rules_["Counting"].calls) == (0, model.n_steps_)
    first = model.rules_
    assert model.fit(X, Y).rules_ is not first
    assert model.rules_["Counting"].calls == model.n_steps_ == 24


def test_a_manager_brings_names_and_budgets():
    manager = RuleManager(budget=Budget(edits=7))
    manager.add(PruneWeakest(0.5), name="prune", schedule=At(3, 5))
    model = quick(rules=manager).fit(X, Y)
    assert [len(commit.change.transitions) > 0 for commit in model.net_.history] == [True, True]
    assert model.net_.count().relations == quick().fit(X, Y).net_.count().relations - 14
    assert equal(model, quick(rules=manager).fit(X, Y))
    with pytest.raises(ValueError, match="RuleManager"):
        quick(rules=model.rules_).fit(X, Y)


def test_a_rule_behind_the_last_step_is_told():
    last = quick().fit(X, Y).n_steps_ - 1
    # without a warning
    assert len(quick(rules=[(PruneWeakest(0.5), At(last))]).fit(X, Y).net_.history) == 1
    with pytest.warns(
        UserWarning, match=rf"never due: PruneWeakest\. The fit made {last + 1} steps"
    ) as warned:
        late = quick(rules=[(PruneWeakest(0.5), At(last + 1)), (PruneWeakest(0.5), At(last))]).fit(
            X, Y
        )
    assert len(warned) == len(late.net_.history) == 1


def test_tasks_end_with_a_part_of_the_data():
    model = quick(
        hidden_layer_sizes=(0,), rules=[(GrowForTask(8, classes_per_task=2), EveryTask())]
    )
    for task in range(3):
        model.partial_fit(X, Y, classes=range(10), task=task)
        model.partial_fit(X, Y)
    assert model.net_.sizes == [64, 24, 10]
    assert len(model.net_.select(owner="task-1")) == 8


def test_attention_is_trained_and_repeatable():
    one, other = (
        quick(execution="attention", max_epochs=1).fit(X[:200], Y[:200]) for _ in range(2)
    )
    assert equal(one, other)
    keys = {name: p for name, p in one.net_.named_parameters() if "key" in name or "quer" in name}
    assert keys
    assert all(p in one.optimizer_.state for p in keys.values())


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adamw", torch.optim.AdamW),
        (partial(torch.optim.RMSprop, alpha=0.9), torch.optim.RMSprop),
    ],
)
def test_optimizers_are_named_or_made_and_spare_biases(optimizer, kind):
    model = quick(optimizer=optimizer, learning_rate=0.01, weight_decay=0.1).fit(X, Y)
    assert type(model.optimizer_) is kind
    decays = {
        p: group["weight_decay"] for group in model.optimizer_.param_groups for p in group["params"]
    }
    assert {name.split(".")[-1]: decays[p] for name, p in model.net_.named_parameters()} == {
        "weight": 0.1,
        "bias": 0.0,
    }
    edit(model)
    assert model.partial_fit(X, Y).loss_curve_[-1] < model.loss_curve_[0]


def test_a_fit_that_raises_leaves_what_was_fitted():
    model = quick().fit(X, Y)
    net = model.net_
    before = numbers(model)

    def refuse(net, edit, context):
        raise RuntimeError("not like this")

    with pytest.raises(RuntimeError, match="not like this"):
        model.set_params(rules=[(refuse, At(3))]).fit(X[:, :7], Y)
    assert model.net_ is net
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(model), strict=True))
    assert (model.n_features_in_, model.n_iter_) == (64, 2)
    assert model.predict(X).shape == Y.shape
    assert not hasattr(_failed(quick(rules=[(refuse, At(3))])), "net_")


def _failed(model):
    with pytest.raises(RuntimeError):
        model.partial_fit(X, Y, classes=range(10))
    return model


def test_an_edit_that_takes_a_class_or_a_feature_away_is_named():
    model = quick().fit(X, Y)
    for layer in (0, 2):
        with model.net_.edit() as change:
            change.remove_nodes(model.net_.layers[layer][:1], interface=True)
        for call in (lambda: model.predict(X), lambda: model.partial_fit(X, Y)):
            with pytest.raises(ValueError, match="64 and 10"):
                call()
        model.net_.undo()
    assert model.partial_fit(X, Y).predict(X).shape == Y.shape


def test_a_loss_that_is_not_finite_says_what_to_do():
    model = GrapNetRegressor((8,), optimizer="sgd", learning_rate=1e3, random_state=0)
    with pytest.raises(ValueError, match="learning_rate"):
        model.fit(X * 100, Y * 100)
