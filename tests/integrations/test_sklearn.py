"""The estimators are what scikit-learn and its users expect of estimators."""

import re
from pathlib import Path
from unittest import SkipTest

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from examples import sklearn_estimator
from grapnet.integrations.sklearn import GrapNetClassifier, GrapNetRegressor
from grapnet.rules import At, PruneWeakest

GUIDE = Path(__file__).parents[2] / "docs/guides/scikit-learn.md"
# What scikit-learn itself leaves out where pandas is not installed, or SCIPY_ARRAY_API not set
# before Python starts; the estimators take arrays, and hand data frames to the same validation as
# scikit-learn's own.
LEFT_OUT = {
    "check_sample_weights_pandas_series": "pandas",
    "check_classifier_data_not_an_array": "pandas",
    "check_regressor_data_not_an_array": "pandas",
    "check_array_api_input": "SCIPY_ARRAY_API",
}


# Fewer epochs than by default are enough for the accuracies that scikit-learn asks for.
@parametrize_with_checks([GrapNetClassifier(max_epochs=30), GrapNetRegressor(max_epochs=30)])
def test_scikit_learn_finds_nothing_wrong(estimator, check):
    left_out = ""
    try:
        check(estimator)
    except SkipTest as skipped:
        left_out = str(skipped)
    assert not left_out or LEFT_OUT[check.func.__name__] in left_out


@pytest.fixture(scope="module")
def iris():
    x, y = load_iris(return_X_y=True)
    return StandardScaler().fit_transform(x), y


def quick(**parameters) -> GrapNetClassifier:
    return GrapNetClassifier(
        **{"hidden_layer_sizes": (16,), "max_epochs": 30, "random_state": 0} | parameters
    )


def equal(one, other) -> bool:
    """Says whether two estimators have nets of the same numbers."""
    ours = list(one.net_.parameters())
    theirs = list(other.net_.parameters())
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def test_pipelines_searches_and_cross_validation_take_rules_and_sizes(iris):
    x, y = iris
    pipeline = make_pipeline(StandardScaler(), quick(learning_rate=0.02))
    assert cross_val_score(pipeline, x, y, cv=3).min() > 0.85
    rules = [[(PruneWeakest(0.5), At(10))], ((PruneWeakest(0.95), At(29)),)]
    grid = {
        "grapnetclassifier__rules": rules,
        "grapnetclassifier__hidden_layer_sizes": [(16,), (8, 8)],
    }
    search = GridSearchCV(pipeline, grid, cv=3).fit(x, y)
    assert search.best_score_ > 0.85
    # The other cuts almost everything at the end.
    assert search.best_params_["grapnetclassifier__rules"] == rules[0]


def test_a_clone_has_the_parameters_and_nothing_that_was_learned(iris):
    model = quick(
        rules=[(PruneWeakest(0.5), At(3))], execution="dense", class_weight={0: 2.0, 1: 1.0, 2: 1.0}
    )
    copied = clone(model.fit(*iris))
    assert not hasattr(copied, "net_")
    assert repr(copied) == repr(model)
    assert equal(copied.fit(*iris), model)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_equal_seeds_make_equal_nets_and_torch_is_left_alone(iris, dropout):
    before = torch.get_rng_state()
    first = quick(dropout=dropout, density=0.5).fit(*iris)
    torch.manual_seed(99)
    assert equal(first, quick(dropout=dropout, density=0.5).fit(*iris))
    assert not equal(first, quick(dropout=dropout, density=0.5, random_state=1).fit(*iris))
    torch.set_rng_state(before)
    quick(dropout=dropout).fit(*iris).predict(iris[0])
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_is_for_training_only(iris):
    model = quick(dropout=0.5).fit(*iris)
    assert [layer.dropout for layer in model.net_.layers] == [0.0, 0.5, 0.0]
    assert not equal(model, quick().fit(*iris))
    assert (model.predict_proba(iris[0]) == model.predict_proba(iris[0])).all()
    model.net_.train()
    assert (model.predict_proba(iris[0]) == model.predict_proba(iris[0])).all()
    assert model.net_.training


def test_labels_can_be_words_and_probabilities_follow_their_order(iris):
    x, y = iris
    words = np.array(["rose", "iris", "lily"])[y]
    model = quick(learning_rate=0.02).fit(x, words)
    assert list(model.classes_) == ["iris", "lily", "rose"]
    assert model.score(x, words) > 0.9
    probabilities = model.predict_proba(x)
    assert (model.classes_[probabilities.argmax(1)] == model.predict(x)).all()
    np.testing.assert_allclose(np.exp(model.predict_log_proba(x)), probabilities)
    two = quick(learning_rate=0.02).fit(x, words == "rose")
    assert two.predict_proba(x).shape == (150, 2)
    assert two.score(x, words == "rose") == 1


def test_a_class_that_was_not_named_is_refused(iris):
    x, y = iris
    model = quick()
    with pytest.raises(ValueError, match="classes"):
        model.partial_fit(x, y)
    with pytest.raises(ValueError, match=r"\[2\].*\[0 1\]"):
        model.partial_fit(x, y, classes=[0, 1])
    assert not hasattr(model, "classes_")  # the next call is the first again
    model.partial_fit(x[:50], y[:50], classes=[2, 0, 1])
    with pytest.raises(ValueError, match="were"):
        model.partial_fit(x, y, classes=[0, 1])
    with pytest.raises(ValueError, match=r"labels \[7\]"):
        model.partial_fit(x, np.full(150, 7))
    assert (model.n_iter_, model.n_steps_, list(model.classes_)) == (1, 1, [0, 1, 2])


def test_weights_count_like_repeated_samples_and_classes(iris):
    x, y = iris
    weights = np.where(y == 0, 3, 1)
    weighted = quick(batch_size=1000).fit(x, y, sample_weight=weights).predict_proba(x)
    plain = quick(batch_size=1000).fit(x, y).predict_proba(x)
    by_class = quick(batch_size=1000, class_weight={0: 3, 1: 1, 2: 1}).fit(x, y).predict_proba(x)
    repeated = (
        quick(batch_size=1000).fit(x.repeat(weights, axis=0), y.repeat(weights)).predict_proba(x)
    )
    np.testing.assert_allclose(weighted, by_class, atol=1e-12)
    np.testing.assert_allclose(weighted, repeated, atol=1e-9)
    assert abs(weighted - plain).max() > 0.01
    rare = np.r_[0:50, 50:55]
    balanced = quick(class_weight="balanced").fit(x[rare], y[rare])
    assert (
        balanced.predict_proba(x)[50:100, 1]
        > quick().fit(x[rare], y[rare]).predict_proba(x)[50:100, 1]
    ).mean() > 0.9
    with pytest.raises(ValueError, match="all data at once"):
        balanced.partial_fit(x[rare], y[rare])
    with pytest.raises(ValueError, match="weights are zero"):
        quick(class_weight=dict.fromkeys(range(3), 0)).fit(x, y)


def test_sparse_features_are_the_same_features(iris):
    x = np.where(np.abs(iris[0]) < 0.5, 0, iris[0])
    y = iris[1]
    dense = quick().fit(x, y)
    sparse = quick().fit(csr_array(x), y)
    assert equal(dense, sparse)
    np.testing.assert_array_equal(dense.predict_proba(x), sparse.predict_proba(csr_array(x)))


@pytest.mark.parametrize(
    ("given", "wanted", "used"),
    [
        ("float32", None, torch.float32),
        ("int32", None, torch.float64),
        ("float64", "float32", torch.float32),
        ("float32", "float64", torch.float64),
    ],
)
def test_it_computes_in_the_precision_of_the_features_unless_given(iris, given, wanted, used):
    x, y = iris
    model = quick(dtype=wanted, max_epochs=2).fit(x.astype(given), y)
    assert model.net_.transitions[0].weight.dtype == used
    assert model.partial_fit(x, y).predict_proba(x.astype(np.float32)).shape == (150, 3)


def test_several_targets_and_their_shapes():
    x, y = make_regression(200, 6, n_targets=3, random_state=0)
    y = (y - y.mean(0)) / y.std(0)
    model = GrapNetRegressor((32,), learning_rate=0.02, random_state=0).fit(x, y)
    assert model.predict(x).shape == (200, 3)
    assert model.score(x, y) > 0.95
    assert model.net_.sizes == [6, 32, 3]
    assert [
        GrapNetRegressor(max_epochs=1).fit(x, part).predict(x).shape for part in (y[:, 0], y[:, :1])
    ] == [
        (200,),
        (200, 1),
    ]
    with pytest.raises(ValueError, match=r"1 targets.*3"):
        model.partial_fit(x, y[:, 0])


def test_training_stops_when_held_out_samples_no_longer_gain():
    x, y = make_regression(300, 4, noise=0, random_state=0)
    model = GrapNetRegressor(
        (16,), learning_rate=0.05, early_stopping=True, random_state=0, n_iter_no_change=3, tol=1e-3
    )
    model.fit(x, y / y.std())
    assert len(model.validation_loss_curve_) == len(model.loss_curve_) == model.n_iter_ < 100
    assert min(model.validation_loss_curve_[:-3]) - 1e-3 <= min(model.validation_loss_curve_[-3:])
    assert model.score(x, y / y.std()) > 0.9
    assert not hasattr(
        model.set_params(early_stopping=False, max_epochs=1).fit(x, y), "validation_loss_curve_"
    )


def test_the_guide_says_what_became_of_every_parameter_of_the_perceptron():
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", GUIDE.read_text(), flags=re.MULTILINE)
    theirs = MLPClassifier().get_params()
    ours = GrapNetClassifier().get_params()
    answers = {name: answer for names, answer in rows for name in re.findall(r"`(\w+)`", names)}
    assert answers.keys() - {"MLPClassifier"} == theirs.keys()
    for name, answer in answers.items():
        if answer.startswith("the same"):
            assert ours[name] == theirs[name]
        elif answer.startswith("`"):
            assert re.findall(r"^`(\w+)`", answer)[0] in ours
    assert {"max_iter", "alpha", "solver", "warm_start"}.isdisjoint(ours)


def test_the_example_searches_edits_and_trains_on():
    result = sklearn_estimator.main(sklearn_estimator.Settings(sparsities=(0.5, 0.99), epochs=12))
    assert result["best_sparsity"] == 0.5
    assert result["accuracy"] > 0.93
    assert result["relations"] == (64 * 64 + 64 * 10) / 2
    assert result["accuracy_after_edit"] < result["accuracy_after_training_on"]
    assert result["accuracy_after_training_on"] > 0.93
