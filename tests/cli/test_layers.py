"""The order of the layers of a state dict: told by numbers, by shapes that fit in one order alone,
or by --keys.
"""

import json
import random
from collections import Counter
from itertools import pairwise, permutations

import pytest
import torch
from safetensors.torch import save_file

import grapnet as gn
from grapnet.cli.layers import Part, fitting_order


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


@pytest.mark.parametrize(("one", "other"), [("1", "01"), ("3", "\N{ARABIC-INDIC DIGIT THREE}")])
def test_equal_numbers_tell_no_order(tmp_path, run, one, other):
    asked = ["convert", tmp_path / "mlp.pt", "-o", tmp_path / "net"]
    torch.save(
        {f"{one}.weight": torch.randn(4, 4), f"{other}.weight": torch.randn(4, 4)},
        tmp_path / "mlp.pt",
    )
    code, _, err = run(*asked)
    assert code == 2
    assert f"{one}, {other} fit in several orders" in err
    assert not (tmp_path / "net").exists()
    assert run(*asked, "--keys", f"{other},{one}").code == 0
    torch.save(
        {f"{one}.weight": torch.randn(3, 4), f"{other}.weight": torch.randn(4, 5)},
        tmp_path / "mlp.pt",
    )
    # the only order that fits
    assert json.loads(run(*asked, "--force", "--json").out)["keys"] == [
        other,
        one,
    ]


def test_numbers_of_any_length_tell_the_order(tmp_path, run):
    long, longer = "9" * 5000, "1" + "0" * 5000
    torch.save(
        {f"{longer}.weight": torch.randn(4, 4), f"{long}.weight": torch.randn(4, 4)},
        tmp_path / "mlp.pt",
    )
    done = run("convert", tmp_path / "mlp.pt", "-o", tmp_path / "net", "--json")
    assert json.loads(done.out)["keys"] == [long, longer]


def test_many_layers_of_equal_shape_are_no_long_search(tmp_path, run):
    tensors = {f"{name}x.weight": torch.randn(3, 3) for name in "abcdefghijklmnop"}
    tensors |= {"z.weight": torch.randn(2, 3), "A.weight": torch.randn(3, 5)}
    torch.save(tensors, tmp_path / "mlp.pt")
    code, _, err = run("convert", tmp_path / "mlp.pt", "-o", tmp_path / "net")
    assert code == 2
    assert "fit in several orders" in err
    natural = ",".join(["A", *(f"{name}x" for name in "abcdefghijklmnop"), "z"])
    assert f"--keys {natural}" in err
    assert run("convert", tmp_path / "mlp.pt", "-o", tmp_path / "net", "--keys", natural).code == 0


def test_an_order_is_found_and_known_to_be_the_only_one():
    draw, counts = random.Random(0), Counter()
    for _ in range(300):
        shapes = [(draw.randint(1, 3), draw.randint(1, 3)) for _ in range(draw.randint(1, 5))]
        parts = [Part(str(n), torch.empty(shape), None) for n, shape in enumerate(shapes)]
        fit = [
            order
            for order in permutations(parts)
            if all(a.gives == b.takes for a, b in pairwise(order))
        ]
        found, is_only = fitting_order(parts)
        counts[min(len(fit), 2)] += 1
        assert (found is None, is_only) == (not fit, len(fit) == 1)
        assert found is None or [part.key for part in found] == [part.key for part in fit[0]]
    assert min(counts[n] for n in range(3)) > 20
