"""Files that trainers write are converted, or refused for what is in the way of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import grapnet as gn
from tests.rounding import SINGLE

from .nobody import as_nobody, open_folder


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def stepped(model: nn.Module) -> dict[str, Any]:
    """Returns the state of an optimizer that has made a step, which holds tensors in dicts inside
    dicts.
    """
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


STATE, OTHER = mlp().state_dict(), mlp(1).state_dict()
LAYERS = {"W1": torch.ones(4, 5), "b1": torch.ones(4), "W2": torch.ones(3, 4), "b2": torch.ones(3)}


def assert_computes(path: Path, state: dict[str, Tensor]) -> None:
    model, x = mlp(), torch.randn(6, 5)
    model.load_state_dict(state)
    torch.testing.assert_close(gn.load(path)(x), model(x), rtol=0, atol=SINGLE)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ({**STATE, "epoch": 3, "best": None}, {"under": None, "no_tensors": ["epoch", "best"]}),
        ({**STATE, "optimizer": stepped(mlp())}, {"under": None, "no_tensors": ["optimizer"]}),
        ({**STATE, "scaler": {"mean": torch.ones(3)}}, {"under": None, "no_tensors": ["scaler"]}),
        ({"model": STATE, "optimizer": stepped(mlp()), "loss": torch.ones(())}, {"under": "model"}),
        ({"model": {**STATE, "epoch": 3}}, {"under": "model", "no_tensors": ["epoch"]}),
        ({"state": {"model": STATE}, "epoch": 3}, {"under": "state.model"}),
        ({"model": STATE, 3: "x"}, {"under": "model"}),
        ({**STATE, 3: "x", (1, 2): torch.ones(3)}, {"under": None, "no_tensors": ["3", "(1, 2)"]}),
        ({3: STATE, 4: {"mean": torch.ones(3)}}, {"under": "3"}),
        (
            {"model": STATE, "extra": {"mean": torch.ones(3)}},
            {"under": "model", "beside": ["extra"]},
        ),
    ],
)
def test_the_one_state_dict_of_a_file_is_found_and_what_is_left_out_is_told(
    tmp_path, run, file, told
):
    torch.save(file, tmp_path / "file.pt")
    asked = ["convert", tmp_path / "file.pt", "-o", tmp_path / "net", "--force"]
    done = run(*asked, "--json")
    assert (done.code, done.err) == (0, "")
    found, expected = json.loads(done.out), {"no_tensors": [], "beside": [], **told}
    assert {key: found[key] for key in expected} == expected
    assert_computes(tmp_path / "net", STATE)
    text = run(*asked).out
    assert all(name in text for name in (*expected["no_tensors"], *map(repr, expected["beside"])))


def test_a_prefix_chooses_among_several_state_dicts(tmp_path, run):
    torch.save(
        {"model": STATE, "ema": {"net": OTHER}, "means": {"x": torch.ones(3)}}, tmp_path / "file.pt"
    )
    asked = ["convert", tmp_path / "file.pt", "-o", tmp_path / "net", "--force"]
    for options in ((), ("--prefix", "0.")):
        code, out, err = run(*asked, *options)
        assert (code, out) == (2, "")
        first, hint = err.splitlines()
        assert first.endswith("file.pt holds several state dicts: 'model', 'ema.net'")
        assert hint.startswith("hint: say --prefix model. or --prefix ema.net.; or save one")
    for prefix, under, state in (
        ("model.", "model", STATE),
        ("ema.net.", "ema.net", OTHER),
        ("ema.", "ema.net", OTHER),
    ):
        assert json.loads(run(*asked, "--prefix", prefix, "--json").out)["under"] == under
        assert_computes(tmp_path / "net", state)
    assert "x of shape [3] is no weight or bias" in run(*asked, "--prefix", "means.").err


def test_a_prefix_names_the_dict_before_the_keys_in_it(tmp_path, run):
    both = [{f"model.{key}": tensor for key, tensor in state.items()} for state in (STATE, OTHER)]
    torch.save({"model": both[0], "ema": both[1]}, tmp_path / "file.pt")
    asked = ["convert", tmp_path / "file.pt", "-o", tmp_path / "net", "--force"]
    for prefix, state in (("model.", STATE), ("ema.", OTHER), ("ema.model.", OTHER)):
        assert run(*asked, "--prefix", prefix).code == 0
        assert_computes(tmp_path / "net", state)


@pytest.mark.parametrize(
    ("file", "ways"),
    [
        ({"net": {**STATE, "ema": OTHER}}, {"--prefix net.": STATE, "--prefix net.ema.": OTHER}),
        (
            {"model": STATE, "model.ema": OTHER},
            {"--prefix model.": STATE, "--prefix model.ema.": OTHER},
        ),
        ({**STATE, "ema": OTHER}, {"--keys 0,2": STATE, "--prefix ema.": OTHER}),
        ({3: STATE, "ema": OTHER}, {"--prefix 3.": STATE, "--prefix ema.": OTHER}),
        ({"a": {"b": STATE}, "a.b": STATE, "c": OTHER}, {"--prefix c.": OTHER}),
        ({"a": {"b": STATE}, "a.b": OTHER}, {}),
    ],
)
def test_every_option_that_a_hint_offers_chooses_its_state_dict(tmp_path, run, file, ways):
    torch.save(file, tmp_path / "file.pt")
    asked = ["convert", tmp_path / "file.pt", "-o", tmp_path / "net", "--force"]
    refused = run(*asked)
    hint = f"say {' or '.join(ways)}; or save one" if ways else "save one"
    assert refused.code == 2
    assert refused.err.splitlines()[1].startswith(f"hint: {hint}: torch.save(")
    for way, state in ways.items():
        assert run(*asked, *way.split()).code == 0, way
        assert_computes(tmp_path / "net", state)


@pytest.mark.parametrize(
    ("options", "under", "keys", "state"),
    [
        (["--keys", "ema.0,ema.2"], "ema", ["0", "2"], OTHER),
        (["--keys", "a,b"], "named", ["a", "b"], STATE),
        (["--keys", "deep.model.0,deep.model.2"], "deep.model", ["0", "2"], STATE),
        (["--prefix", "deep.", "--keys", "ema.0,ema.2"], "deep.ema", ["0", "2"], OTHER),
        (["--prefix", "ema.", "--keys", "0,2"], "ema", ["0", "2"], OTHER),
    ],
)
def test_keys_that_one_state_dict_holds_choose_it(tmp_path, run, options, under, keys, state):
    named = {key.replace("0.", "a.").replace("2.", "b."): tensor for key, tensor in STATE.items()}
    several = {"model": STATE, "ema": OTHER, "named": named, "deep": {"model": STATE, "ema": OTHER}}
    torch.save(several, tmp_path / "file.pt")
    asked = ["convert", tmp_path / "file.pt", "-o", tmp_path / "net", "--force", "--json"]
    told = json.loads(run(*asked, *options).out)
    assert (told["under"], told["keys"], told["beside"], told["left_out"]) == (under, keys, [], [])
    assert_computes(tmp_path / "net", state)
    assert run(*asked, "--keys", "0,2").code == 2


def test_a_prefix_is_of_a_dict_with_layers_before_one_without(tmp_path, run):
    torch.save(
        {"model": STATE, "ema": {"decay": torch.ones(()), "model": OTHER}}, tmp_path / "file.pt"
    )
    done = run(
        "convert", tmp_path / "file.pt", "-o", tmp_path / "net", "--prefix", "ema.", "--json"
    )
    assert json.loads(done.out)["under"] == "ema.model"
    assert_computes(tmp_path / "net", OTHER)


def test_keys_are_those_inside_a_state_dict_before_those_of_the_file(tmp_path, run):
    torch.save(
        {"model": {f"model.{key}": tensor for key, tensor in STATE.items()}}, tmp_path / "file.pt"
    )
    for keys in ("model.0,model.2", "model.model.0,model.model.2"):
        done = run(
            "convert",
            tmp_path / "file.pt",
            "-o",
            tmp_path / "net",
            "--force",
            "--keys",
            keys,
            "--json",
        )
        assert json.loads(done.out)["keys"] == ["model.0", "model.2"]
        assert_computes(tmp_path / "net", STATE)


def test_a_dict_that_holds_itself_is_no_endless_search(tmp_path, run):
    endless: dict[str, Any] = dict(STATE)
    endless["again"] = endless
    torch.save(endless, tmp_path / "file.pt")
    done = run("convert", tmp_path / "file.pt")
    assert (done.code, "holds several state dicts: '', 'again'" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("tensors", "message", "hint"),
    [
        (LAYERS, "W1 of shape [4, 5] is not known", "rename the keys"),
        (dict(reversed(LAYERS.items())), "W2 of shape [3, 4] is not known", "rename the keys"),
        (
            {"fc1_weight": torch.ones(4, 5), "fc1_bias": torch.ones(4)},
            "end in .weight and .bias",
            "rename the keys",
        ),
        (
            nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)
            ).state_dict(),
            "0.parametrizations.weight.original0 is one part of a parametrized weight",
            "torch.nn.utils.parametrize.remove_parametrizations(module, name)",
        ),
        (
            {
                "0.bias": torch.ones(4),
                "0.weight_g": torch.ones(4, 1),
                "0.weight_v": torch.ones(4, 3),
            },
            "0.weight_g is one part of a parametrized weight",
            "torch.nn.utils.remove_weight_norm(module)",
        ),
        (
            {"weight_orig": torch.ones(4, 3), "weight_u": torch.ones(4), "weight_v": torch.ones(3)},
            "weight_u is one part of a parametrized weight",
            "torch.nn.utils.remove_spectral_norm(module)",
        ),
    ],
)
def test_keys_that_are_not_those_of_linear_layers_are_told_with_the_remedy(
    tmp_path, run, tensors, message, hint
):
    torch.save(tensors, tmp_path / "mlp.pt")
    code, out, err = run("convert", tmp_path / "mlp.pt")
    assert (code, out) == (2, "")
    assert message in err.splitlines()[0]
    assert hint in err.splitlines()[1]


def test_layers_named_by_keys_that_are_not_those_of_linear_layers_are_told_too(tmp_path, run):
    torch.save(LAYERS, tmp_path / "mlp.pt")
    assert (
        "keys have to end in .weight and .bias"
        in run("convert", tmp_path / "mlp.pt", "--keys", "W1,W2").err
    )


@pytest.mark.parametrize("name", ["mlp.safetensors", "mlp.pt"])
def test_a_file_that_may_not_be_read_is_said_to_be_so(tmp_path, run, name):
    with open_folder() as folder:
        (save_file if name.endswith(".safetensors") else torch.save)(STATE, folder / name)
        assert run("convert", folder / name, "-o", tmp_path / "net").code == 0
        (folder / name).chmod(0)
        with as_nobody():
            code, out, err = run("convert", folder / name)
    assert (code, out) == (2, "")
    assert (
        err
        == f"grapnet: {folder / name}: Permission denied\nhint: see who may read and write it and"
        " its folder: ls -ld\n"
    )
