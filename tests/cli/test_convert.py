"""Weights of plain MLPs become nets that compute the same; what is no MLP is refused by key."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

import grapnet as gn
from tests.rounding import SINGLE

from .edited import content


class Named(nn.Module):
    """An MLP whose layers are attributes."""

    def __init__(self, first: str, second: str, third: str) -> None:
        super().__init__()
        self.order = [first, second, third]
        for name, (a, b) in zip(self.order, [(5, 8), (8, 8), (8, 3)], strict=True):
            self.add_module(name, nn.Linear(a, b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = (self.get_submodule(name) for name in self.order)
        return third(second(first(x).relu()).relu())


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), activation(), nn.Linear(8, 8, bias=False), activation(), nn.Linear(8, 3)
    )


def assert_computes(path: Path, model: nn.Module) -> gn.GrapNet:
    net, x = gn.load(path), torch.randn(6, 5)
    torch.testing.assert_close(net(x), model(x), rtol=0, atol=SINGLE)
    return net


def test_a_sequential_becomes_a_net(tmp_path, run):
    model = mlp()
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    done = run("convert", tmp_path / "mlp.safetensors", "--json")
    told = json.loads(done.out)
    assert (done.code, done.err, told["sizes"], told["keys"]) == (
        0,
        "",
        [5, 8, 8, 3],
        ["0", "2", "4"],
    )
    assert told["difference"] < SINGLE
    net = assert_computes(tmp_path / "mlp.grapnet.safetensors", model)
    assert (net.count().frozen, net.version) == (8, 0)  # the biases that one layer does not have
    text = run("convert", tmp_path / "mlp.safetensors", "--force").out
    assert "2: 8 -> 8, 64 relations, no bias" in text


@pytest.mark.parametrize(
    "names", [("fc1", "fc2", "fc10"), ("enter", "hidden", "leave"), ("l3", "l1", "l2")]
)
def test_layers_are_found_in_the_order_that_fits(tmp_path, run, names):
    model = Named(*names)
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    done = run("convert", tmp_path / "mlp.safetensors", "-o", tmp_path / "net", "--json")
    assert json.loads(done.out)["keys"] == list(names)
    assert_computes(tmp_path / "net", model)


def test_another_activation_and_a_torch_file(tmp_path, run):
    model = mlp(nn.Tanh)
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "mlp.pt")
    asked = ["convert", tmp_path / "mlp.pt", "-o", tmp_path / "net", "--force"]
    assert run(*asked, "--activation", "tanh").code == 0
    assert_computes(tmp_path / "net", model)
    assert run(*asked).code == 0
    with pytest.raises(AssertionError):
        assert_computes(tmp_path / "net", model)  # files do not tell the activation


def test_a_state_dict_among_other_things_is_named_and_its_prefix_read_either_way(tmp_path, run):
    model = nn.Sequential(nn.Flatten(), mlp())
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "mlp.pt")
    asked = ["convert", tmp_path / "mlp.pt", "-o", tmp_path / "net", "--force"]
    for prefix in ("", "model.", "1.", "model.1."):
        done = run(*asked, "--prefix", prefix)
        assert done.out.splitlines()[1] == "read the state dict under 'model'", prefix
        assert_computes(tmp_path / "net", model)
    assert json.loads(run(*asked, "--json").out)["under"] == "model"
    assert run(*asked, "--prefix", "other.1.").code == 2
    torch.save({"model": model.state_dict(), "ema": model.state_dict()}, tmp_path / "mlp.pt")
    assert (
        run(*asked).err.splitlines()[0].endswith("mlp.pt holds several state dicts: 'model', 'ema'")
    )


def test_layers_are_taken_out_of_a_larger_model(tmp_path, run):
    model = mlp()
    prune.random_unstructured(model[0], "weight", amount=3)
    norm = nn.BatchNorm1d(5)
    torch.save(
        nn.ModuleDict({"body": nn.Conv2d(3, 4, 3), "norm": norm, "fc": model}).state_dict(),
        tmp_path / "cnn.pt",
    )
    asked = ["convert", tmp_path / "cnn.pt", "-o", tmp_path / "net"]
    refused = run(*asked)
    assert "body.weight of shape [4, 3, 3, 3] is no weight or bias" in refused.err
    hint = refused.err.splitlines()[1]
    assert hint.startswith("hint: gn.graft(model, nn.Linear) in Python")
    assert "--keys fc.2,fc.4,fc.0 takes these layers alone, without what runs between them" in hint
    refused = run(*asked, "--keys", "fc.0,body").err.splitlines()
    assert refused == [
        "grapnet: --keys: 'body' is no linear layer",
        "hint: the layers are: fc.0, fc.2, fc.4",
    ]
    done = run(*asked, "--keys", "fc.0,fc.2,fc.4")
    assert done.code == 0
    assert_computes(tmp_path / "net", model)
    norms = [f"norm.{key}" for key in norm.state_dict()]
    assert (
        f"left out: body.weight, body.bias, {', '.join(norms)}; where these take part" in done.out
    )
    by_prefix = json.loads(run(*asked, "--prefix", "fc.", "--force", "--json").out)
    assert by_prefix["left_out"] == ["body.weight", "body.bias", *norms]
    torch.save(model.state_dict(), tmp_path / "cnn.pt")
    whole = run(*asked, "--force")
    assert (whole.code, "left out" in whole.out) == (0, False)


def test_only_an_activation_that_nobody_named_is_said_to_be_a_guess(tmp_path, run):
    save_file(mlp().state_dict(), tmp_path / "mlp.safetensors")
    asked, said = (
        ["convert", tmp_path / "mlp.safetensors", "-o", tmp_path / "net", "--force"],
        "the file does not say",
    )
    assert said in run(*asked).out
    assert said not in run(*asked, "--activation", "relu").out


def test_every_hidden_layer_has_its_own_activation(tmp_path, run):
    model = mlp(nn.Tanh)
    model[1] = nn.LeakyReLU(0.2)
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    asked = ["convert", tmp_path / "mlp.safetensors", "-o", tmp_path / "net", "--force"]
    done = run(*asked, "--activation", "leaky_relu(0.2),tanh", "--json")
    assert json.loads(done.out)["activations"] == ["leaky_relu(0.2)", "tanh"]
    assert_computes(tmp_path / "net", model)
    assert (
        "  2: 8 -> 8, 64 relations, no bias, then leaky_relu(0.2)"
        in run(*asked, "--activation", "tanh, leaky_relu(0.2)").out
    )
    with pytest.raises(AssertionError):
        assert_computes(tmp_path / "net", model)
    assert json.loads(run(*asked, "--json").out)["activations"] == ["relu", "relu"]


@pytest.mark.parametrize(
    ("named", "message", "hint"),
    [
        (
            "relu,tanh,elu",
            "--activation names 3 activations, and the number of hidden layers is 2, behind 0, 2",
            "one for each",
        ),
        ("relu,bent", "no activation is called 'bent'", "elu, gelu"),
        ("relu,", "no activation is called ''", "elu, gelu"),
    ],
)
def test_activations_that_do_not_fit_are_refused(tmp_path, run, named, message, hint):
    save_file(mlp().state_dict(), tmp_path / "mlp.safetensors")
    code, out, err = run("convert", tmp_path / "mlp.safetensors", "--activation", named)
    assert (code, out, os.listdir(tmp_path)) == (2, "", ["mlp.safetensors"])
    first, second = err.splitlines()
    assert message in first
    assert hint in second


def test_zeros_stay_or_are_dropped(tmp_path, run):
    model = mlp()
    prune.random_unstructured(model[0], "weight", amount=30)
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    asked = ["convert", tmp_path / "mlp.safetensors", "-o", tmp_path / "net", "--force", "--json"]
    for options, relations in (([], 128), (["--drop-zeros"], 128 - 30 - 32)):
        told = json.loads(run(*asked, *options).out)
        assert (told["relations"], told["zeros"], told["weights"]) == (relations, 62, 128)
        assert assert_computes(tmp_path / "net", model).count().relations == relations


def test_a_part_of_a_larger_model(tmp_path, run):
    model = nn.ModuleDict({"encoder": nn.Conv2d(1, 4, 3), "head": mlp()})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    refused = run("convert", tmp_path / "model.safetensors", "-o", tmp_path / "net")
    assert refused.code == 2
    assert "encoder." in refused.err
    assert "--prefix" in refused.err
    done = run(
        "convert", tmp_path / "model.safetensors", "--prefix", "head.", "-o", tmp_path / "net"
    )
    assert done.code == 0
    assert_computes(tmp_path / "net", model["head"])


def test_double_precision_stays(tmp_path, run):
    model = mlp().double()
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    run("convert", tmp_path / "mlp.safetensors", "-o", tmp_path / "net")
    net = gn.load(tmp_path / "net")
    assert torch.equal(net.layers[1].biases, model.state_dict()["0.bias"])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"a.weight_orig": (3, 4), "a.weight_mask": (1, 4)},
            "a.weight_mask has shape [1, 4], and a.weight_orig [3, 4]",
        ),
        (
            {"a.weight_orig": (3, 4), "a.weight_mask": (4, 3)},
            "a.weight_mask has shape [4, 3], and a.weight_orig [3, 4]",
        ),
        (
            {"a.weight_orig": (3, 4), "a.weight_mask": (3, 4), "a.weight": (3, 4)},
            "a.weight stands beside a.weight_orig",
        ),
        ({"a.weight": (4, 5), "b.weight": (3, 7)}, "a gives 4 values and b takes 7"),
        (
            {"a.weight": (4, 5), "a.bias": (3,)},
            "a.bias has shape [3], and a.weight [4, 5] needs [4]",
        ),
        (
            {"a.weight": (4, 5), "norm.weight": (4,)},
            "norm.weight of shape [4] is no weight or bias",
        ),
        ({"a.weight": (4, 2, 3, 3)}, "a.weight of shape [4, 2, 3, 3] is no weight or bias"),
        ({"a.weight": (4, 4), "b.weight": (4, 4), "b.gamma": (2,)}, "b.gamma of shape [2]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(tmp_path, run, tensors, message):
    save_file(
        {key: torch.randn(shape) for key, shape in tensors.items()}, tmp_path / "mlp.safetensors"
    )
    done = run("convert", tmp_path / "mlp.safetensors", "-o", tmp_path / "net")
    assert (done.code, done.out) == (2, "")
    assert message in done.err.splitlines()[0]
    assert done.err.count("\n") <= 2
    assert not (tmp_path / "net").exists()


def test_bad_input_is_one_line_and_changes_nothing(checkpoint, tmp_path, run):
    good, numbers = tmp_path / "good.safetensors", tmp_path / "numbers.safetensors"
    save_file(mlp().state_dict(), good)
    save_file({"a.weight": torch.ones(2, 2, dtype=torch.int64)}, numbers)
    save_file({"a.weight": torch.full((2, 2), torch.nan)}, tmp_path / "nan.safetensors")
    save_file(
        {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2).half()},
        tmp_path / "mixed.safetensors",
    )
    (tmp_path / "damaged.safetensors").write_bytes(good.read_bytes()[:-5])
    (tmp_path / "damaged.pt").write_bytes(b"no archive")
    torch.save(mlp(), tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    before = content(tmp_path)
    for asked, message in (
        ([tmp_path / "missing.safetensors"], "no such file"),
        ([tmp_path], "is a folder"),
        ([checkpoint], "is a GrapNet checkpoint already"),
        ([tmp_path / "damaged.safetensors"], "not a whole safetensors file"),
        ([tmp_path / "damaged.pt"], "is damaged, or holds more than tensors"),
        ([tmp_path / "code.pt"], "is damaged, or holds more than tensors"),
        ([tmp_path / "list.pt"], "holds no state dict"),
        ([numbers], "a.weight is of torch.int64"),
        ([tmp_path / "nan.safetensors"], "a.weight holds NaN or infinity"),
        ([tmp_path / "mixed.safetensors"], "a net has one type"),
        ([good, "--activation", "bent"], "no activation is called 'bent'"),
        ([good, "--prefix", "head."], "no key begins with 'head.'"),
        ([good, "--keys", "0,5"], "'5' is no linear layer"),
        ([good, "--keys", ""], "'' is no linear layer"),
        ([good, "--keys", "0,2,2"], "--keys names '2' twice"),
        (
            [good, "--keys", "4,0"],
            "4 gives 3 values and 0 takes 5; --keys wants them in this order",
        ),
        ([good, "--device", "tpu9"], "--device tpu9 cannot be used"),
    ):
        done = run("convert", *asked, "-o", tmp_path / "net")
        assert (done.code, done.out) == (2, ""), asked
        assert message in done.err.splitlines()[0]
        assert done.err.count("\n") <= 2
    done = run("convert", good, "-o", numbers)
    assert (done.code, "exists already" in done.err) == (2, True)
    assert content(tmp_path) == before


def test_a_torch_file_with_one_bit_turned_is_refused(tmp_path, run):
    path = tmp_path / "mlp.pt"
    torch.save(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).state_dict(), path)
    assert run("convert", path, "-o", tmp_path / "sound").code == 0
    weights = torch.load(path)["0.weight"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weights) + 3] ^= 0x20
    path.write_bytes(content)
    code, _, err = run("convert", path, "-o", tmp_path / "damaged")
    assert code == 2
    assert "is damaged" in err
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda weight: weight.to_sparse(), "a.weight is a sparse tensor"),
        (lambda weight: weight.to_sparse_csr(), "a.weight is a sparse tensor"),
        (
            lambda weight: torch.nested.nested_tensor([weight, weight[:1]]),
            "a.weight is a nested tensor",
        ),
        (lambda weight: weight.to("meta"), "a.weight is on the meta device and holds no numbers"),
        (
            lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
            "a.weight is quantized",
        ),
        (
            lambda weight: weight[:1, :1].expand(10**6, 10**6),
            "a.weight has shape [1000000, 1000000]",
        ),
        (lambda weight: weight.new_empty(0, 10**15), "a.weight has shape [0, 1000000000000000]"),
    ],
)
def test_tensors_that_are_no_plain_arrays_are_refused(tmp_path, run, make, message):
    path = tmp_path / "mlp.pt"
    with warnings.catch_warnings(action="ignore"):  # torch's, of such kinds of tensors
        torch.save({"a.weight": make(torch.randn(3, 4))}, path)
    code, out, err = run("convert", path)
    assert (code, out, os.listdir(tmp_path)) == (2, "", ["mlp.pt"])
    first, hint = err.splitlines()
    assert message in first
    assert "TRACEBACK" not in hint


@pytest.mark.parametrize("path", [".", "/", "", "..", "pipe.pt"])
def test_what_is_no_file_is_refused(tmp_path, run, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.pt")
    code, out, err = run("convert", path)
    assert (code, out, os.listdir()) == (2, "", ["pipe.pt"])
    assert ("is no file of weights" if path == "pipe.pt" else "is a folder") in err.splitlines()[0]
    assert "TRACEBACK" not in err


def test_weights_whose_outputs_overflow_are_converted_and_told(tmp_path, run):
    torch.manual_seed(0)
    save_file(
        {"0.weight": torch.full((4, 4), 1e30), "2.weight": torch.full((2, 4), 1e30)},
        tmp_path / "mlp.safetensors",
    )
    done = run("convert", tmp_path / "mlp.safetensors", "--json")
    assert (done.code, json.loads(done.out)["difference"]) == (0, 0.0)
    text = run("convert", tmp_path / "mlp.safetensors", "--force").out
    assert "outputs are NaN or infinite, here and there alike" in text


def test_an_empty_layer_is_converted_without_a_warning(tmp_path, run):
    save_file(
        {"0.weight": torch.empty(0, 3), "2.weight": torch.empty(2, 0)}, tmp_path / "mlp.safetensors"
    )
    done = run("convert", tmp_path / "mlp.safetensors", "--json")
    assert (done.code, done.err, json.loads(done.out)["sizes"]) == (0, "", [3, 0, 2])
