"""Weights of plain MLPs become nets that compute the same; what is no MLP is refused by key."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

import grapnet as gn


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


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 8, bias=False), activation(), nn.Linear(8, 3))


def assert_computes(path: Path, model: nn.Module) -> gn.GrapNet:
    net, x = gn.load(path), torch.randn(6, 5)
    torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-6)
    return net


def test_a_sequential_becomes_a_net(tmp_path, run):
    model = mlp()
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    done = run("convert", tmp_path / "mlp.safetensors", "--json")
    told = json.loads(done.out)
    assert (done.code, done.err, told["sizes"], told["keys"]) == (0, "", [5, 8, 8, 3], ["0", "2", "4"])
    assert told["difference"] < 1e-6
    net = assert_computes(tmp_path / "mlp.grapnet.safetensors", model)
    assert (net.count().frozen, net.version) == (8, 0)  # the biases that one layer does not have
    text = run("convert", tmp_path / "mlp.safetensors", "--force").out
    assert "2: 8 -> 8, 64 relations, no bias" in text


@pytest.mark.parametrize("names", [("fc1", "fc2", "fc10"), ("enter", "hidden", "leave"), ("l3", "l1", "l2")])
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
    done = run("convert", tmp_path / "model.safetensors", "--prefix", "head.", "-o", tmp_path / "net")
    assert done.code == 0
    assert_computes(tmp_path / "net", model["head"])


def test_double_precision_stays(tmp_path, run):
    model = mlp().double()
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    run("convert", tmp_path / "mlp.safetensors", "-o", tmp_path / "net")
    net = gn.load(tmp_path / "net")
    assert torch.equal(net.layers[1].biases, model.state_dict()["0.bias"])


def test_an_unclear_order_is_asked_for(tmp_path, run):
    weights = {name: torch.randn(4, 4) for name in ("a.weight", "b.weight")}
    save_file(weights, tmp_path / "mlp.safetensors")
    asked = ["convert", tmp_path / "mlp.safetensors", "-o", tmp_path / "net"]
    refused = run(*asked)
    assert refused.code == 2
    assert "a, b fit in several orders" in refused.err
    assert "--keys a,b" in refused.err
    assert not (tmp_path / "net").exists()
    assert run(*asked, "--keys", "b,a").code == 0
    x = torch.randn(2, 4)
    expected = (x @ weights["b.weight"].T).relu() @ weights["a.weight"].T
    torch.testing.assert_close(gn.load(tmp_path / "net")(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight": (4, 5), "b.weight": (3, 7)}, "a gives 4 values and b takes 7"),
        ({"a.weight": (4, 5), "a.bias": (3,)}, "a.bias has shape [3], and a.weight [4, 5] needs [4]"),
        ({"a.weight": (4, 5), "norm.weight": (4,)}, "norm.weight of shape [4] is no weight or bias"),
        ({"a.weight": (4, 2, 3, 3)}, "a.weight of shape [4, 2, 3, 3] is no weight or bias"),
        ({"a.weight": (4, 4), "b.weight": (4, 4), "b.gamma": (2,)}, "b.gamma of shape [2]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(tmp_path, run, tensors, message):
    save_file({key: torch.randn(shape) for key, shape in tensors.items()}, tmp_path / "mlp.safetensors")
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
    save_file({"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2).half()}, tmp_path / "mixed.safetensors")
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
        ([good, "--keys", "0,5"], "'5' is no layer"),
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
