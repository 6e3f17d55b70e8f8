"""Runs optimizers of torch and of other packages through edits, beside twins indexed by hand.

Run it in the root of the repository: `python -m tools.optimizers [--json PATH] [--docs PATH]`.

Every class takes three steps, then a cut, growth, and the undo of both, with three steps after
each. A twin has the same optimizer over plain Parameters, and its state is moved coordinate by
coordinate, by the uids of the nodes. Both have to agree to the last bit. A newborn coordinate has
to start from what the class starts from: a step without gradients shows whether that is the weight.

A class follows, is refused with a reason, cannot run here, or is SILENT: it went on with wrong
state, which makes the program fail.
"""

import argparse
import contextlib
import copy
import importlib
import io
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import grapnet as gn
from grapnet.following._state import is_near

MODULES = {
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "lion_pytorch": "lion-pytorch",
    "dadaptation": "dadaptation",
    "adabelief_pytorch": "adabelief-pytorch",
    "torch_optimizer": "torch-optimizer",
    "pytorch_ranger": "pytorch-ranger",
    "pytorch_optimizer": "pytorch-optimizer",
    "bitsandbytes.optim": "bitsandbytes",
}
BEGIN = "<!-- the table of tools/optimizers.py begins -->\n"
END = "<!-- the table of tools/optimizers.py ends -->\n"
Make = Callable[[gn.GrapNet, list[nn.Parameter]], Optimizer]
Key = tuple[int, ...]  # the uid of a bias's node, or the uids of both ends of a relation

# Entries that are not 0 after a step without any gradient, and are no copies of the weights: what
# the source code starts them from.
STARTS: dict[str, float | str] = {
    "AdaBelief.exp_avg_var": 0.0,
    "AdaMax.exp_inf": 0.0,
    "AdaMod.exp_avg_lr": 0.0,
    "Adagrad.sum": "initial_accumulator_value",
    "Adai.beta1_prod": 1.0,
    "Aida.exp_avg_var": 0.0,
    "BSAM.s": 1.0,
    "DAdaptAdaGrad.alpha_k": 1e-6,
    "DAdaptAdaGrad.alphak": 1e-6,
    "EmoFact.exp_avg_r": 0.0,
    "Gravity.v": 0.0,  # drawn from a normal distribution around 0
    "Kate.b": 0.0,
    "Rprop.step_size": "lr",
    "VSGD.bg": "pbg2",
    "VSGD.bhg": "pbhg2",
    "Yogi.exp_avg": "initial_accumulator",
    "Yogi.exp_avg_sq": "initial_accumulator",
}


def of_parameters(kind: Any, **options: Any) -> Make:
    """Returns what makes an optimizer from Parameters."""
    return lambda net, parameters: kind(parameters, **options)


def around_another(kind: Any, **options: Any) -> Make:
    """Returns what makes an optimizer around Adam."""
    return lambda net, parameters: kind(torch.optim.Adam(parameters, lr=0.01), **options)


def of_the_model(kind: Any, **options: Any) -> Make:
    """Returns what makes an optimizer from a model."""
    return lambda net, parameters: kind(Plain.of(net, parameters), **options)


def of_groups(kind: Any, **options: Any) -> Make:
    """Returns what makes an optimizer that treats matrices in a way of its own."""

    def make(net: gn.GrapNet, parameters: list[nn.Parameter]) -> Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() == 1]
        groups = [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]
        return kind(groups, **options)

    return make


class Plain(nn.Module):
    """A module with some Parameters by the names that they have in a net."""

    @classmethod
    def of(cls, net: gn.GrapNet, parameters: list[nn.Parameter]) -> nn.Module:
        """Returns the net itself for its own Parameters, and else a module with these."""
        if parameters[0] is next(net.parameters()):
            return net
        plain = cls()
        for (name, _), parameter in zip(net.named_parameters(), parameters, strict=True):
            plain.register_parameter(name.replace(".", "_"), parameter)
        return plain


WRAPPERS = {"Lookahead", "OrthoGrad", "PCGrad", "TRAC", "ScheduleFreeWrapper", "Magma"}
WRAPPERS |= {"SafeFP16Optimizer"}
SHARPNESS = {"SAM", "FriendlySAM", "LookSAM", "GSAM", "WSAM"}
GROUPED = {"Muon", "AdaMuon", "AdaGO", "NorMuon", "MuonClip", "DistributedMuon"}
MATRICES = {"SpectralSphere"}
OF_MODEL = {"AdaLOMO", "AdamMini", "LOMO"}
SECOND_ORDER = {"AdaHessian", "Adahessian", "SophiaH"}
OPTIONS: dict[str, dict[str, Any]] = {
    "BSAM": {"num_data": 8},
    "DAdaptSGD": {"momentum": 0.9},
    "Ranger21": {"num_iterations": 100},
    "SGDScheduleFree": {"lr": 0.05},
    "SGDScheduleFreeClosure": {"lr": 0.05},
    "SGDScheduleFreeReference": {"lr": 0.05},
    "ScheduleFreeSGD": {"lr": 0.05},
}


def makers(name: str, kind: type[Optimizer]) -> list[Make]:
    """Returns the ways to make an optimizer of a class, of which the first that works is taken."""
    if name in WRAPPERS:
        return [around_another(kind)]
    if name in SHARPNESS:
        return [of_parameters(kind, base_optimizer=torch.optim.SGD, lr=0.01, momentum=0.9)]
    if name in GROUPED:
        return [of_groups(kind)]
    if name in MATRICES:
        return [of_matrices(kind, {})]
    if name in OF_MODEL:
        return [of_the_model(kind)]
    options = OPTIONS.get(name, {})
    found = []
    if name.endswith("8bit"):
        # Small tensors are kept in 32 bits unless told otherwise.
        options = {**options, "min_8bit_size": 1}
    for more in ({}, {"momentum": 0.9}, {"lr": 0.01}, {"lr": 0.01, "momentum": 0.9}):
        found.append(of_parameters(kind, **{**more, **options}))
    return found


class Side:
    """A net, or its twin, with an optimizer and the batches that both see."""

    optimizer: Optimizer
    is_second_order: bool
    needs_closure: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs."""
        raise NotImplementedError

    def step(self, seed: int) -> None:
        """Takes one step."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 6, generator=generator)

        @torch.enable_grad()
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.forward(x).square().mean()
            loss.backward(create_graph=self.is_second_order)
            return loss

        torch.manual_seed(seed)
        closure()
        step: Any = self.optimizer.step
        if self.needs_closure:
            step(closure)
        else:
            step()


class Followed(Side):
    """A net and an attached optimizer."""

    def __init__(self, make: Make, *, is_second_order: bool) -> None:
        torch.manual_seed(0)
        self.net = gn.GrapNet([6, 5, 4], activation="tanh")
        # A backend whose sums are the same for the twin.
        self.net.execution.use("reference")
        self.is_second_order = is_second_order
        self.optimizer = make(self.net, list(self.net.parameters()))
        train(self.optimizer)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Twin(Side):
    """The same optimizer over plain Parameters, moved by hand."""

    def __init__(self, followed: Followed) -> None:
        self.is_second_order = followed.is_second_order
        self.needs_closure = followed.needs_closure
        self._wiring = copy.deepcopy(followed.net)
        self._keys = keys_of(followed.net)
        memo: dict[int, Any] = {}
        self.parameters = {}
        for name, parameter in followed.net.named_parameters():
            plain = nn.Parameter(parameter.detach().clone())
            memo[id(parameter)] = plain
            self.parameters[name] = plain
        self.optimizer = cloned(followed.optimizer, memo)

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self._wiring, self.parameters, (x,))

    def slots(self) -> dict[str, dict[str, dict[Key, Tensor]]]:
        """Returns Parameter, entry and coordinate with their numbers; the values are "value"."""
        found = {}
        for name, parameter in self.parameters.items():
            found[name] = {"value": by_key(self._keys[name], parameter.detach())}
            for entry, value in entries_of(self.optimizer, parameter).items():
                if is_whole(value, parameter):
                    found[name][entry] = by_key(self._keys[name], value)
        return found

    def follow(
        self,
        net: gn.GrapNet,
        start: Callable[[str, Tensor], Tensor],
        returning: dict[str, dict[str, dict[Key, Tensor]]] | None = None,
    ) -> None:
        """Moves values and state to the coordinates that a net has; `returning` are those of the
        time when what undo brings back left.
        """
        present = self.slots()
        keys = keys_of(net)
        for name, parameter in self.parameters.items():
            weights = dict(net.named_parameters())[name].detach()
            moved = {}
            for entry, old in present[name].items():
                back = {}
                if returning is not None:
                    back = returning[name].get(entry, {})
                rows = []
                for key, weight in zip(keys[name], weights, strict=True):
                    if key in old:
                        rows.append(old[key])
                    elif key in back:
                        rows.append(back[key])
                    elif entry == "value":
                        rows.append(weight)
                    else:
                        rows.append(start(entry, weight))
                moved[entry] = rows
            for owner in optimizers_in(self.optimizer):
                if parameter not in owner.state:
                    continue

                def replaced(
                    path: Any, value: Any, parameter: Any = parameter, moved: Any = moved
                ) -> Any:
                    if not is_whole(value, parameter):
                        return value
                    rows = [row.reshape(value.shape[1:]) for row in moved[pytree.keystr(path)]]
                    return torch.stack(rows).to(value)

                state = dict(owner.state[parameter])
                owner.state[parameter] = pytree.tree_map_with_path(replaced, state)
            parameter.grad = None
            parameter.data = torch.stack(moved["value"])
        self._keys = keys
        self._wiring = copy.deepcopy(net)


def cloned(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Returns a copy of an optimizer with all of its attributes, which deepcopy leaves out."""
    kind: Any = type(optimizer)
    twin = kind.__new__(kind)
    memo[id(optimizer)] = twin
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            cloned(value, memo)
    twin.__dict__.update(copy.deepcopy(vars(optimizer), memo))
    # Some keep numbers by the id of a Parameter.
    ids = {key: id(value) for key, value in memo.items() if isinstance(value, nn.Parameter)}
    for name, value in vars(twin).items():
        if isinstance(value, dict) and value.keys() & ids.keys():
            vars(twin)[name] = {ids.get(key, key): part for key, part in value.items()}
    return twin


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it wraps, each state once."""
    found = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if hasattr(optimizer, "state") and all(one.state is not optimizer.state for one in found):
        found.append(optimizer)
    return found


def entries_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns what the state of a Parameter holds, by name."""
    found = {}
    for owner in optimizers_in(optimizer):
        leaves, _ = pytree.tree_flatten_with_path(dict(owner.state.get(parameter, {})))
        found |= {pytree.keystr(path): value for path, value in leaves}
    return found


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the numbers of several tensors in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def is_whole(value: Any, parameter: Tensor) -> bool:
    """Returns whether something is a tensor of one number per coordinate."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return False
    return value.shape in (parameter.shape, (parameter.numel(),))


def by_key(keys: list[Key], values: Tensor) -> dict[Key, Tensor]:
    """Returns one row per coordinate."""
    return dict(zip(keys, values.detach().clone().unbind(), strict=True))


def keys_of(net: gn.GrapNet) -> dict[str, list[Key]]:
    """Returns who each coordinate is, Parameter by Parameter, by uids alone."""
    found: dict[str, list[Key]] = {}
    for t, (source, target) in enumerate(net.ends):
        relations = net.layers[source].outgoing(to=net.layers[target])
        pairs = zip(relations.parents.tolist(), relations.children.tolist(), strict=True)
        found[f"transitions.{t}.weight"] = list(pairs)
        found[f"layers.{target}.bias"] = [(uid,) for uid in net.layers[target].uids.tolist()]
    return found


def train(optimizer: Any) -> None:
    """Puts schedule-free optimizers into the mode for training."""
    if hasattr(optimizer, "train"):
        optimizer.train()


class Refusal(Exception):
    """A class that cannot run here."""


def made(name: str, ways: list[Make]) -> Followed:
    """Returns a net and an optimizer that has taken a step, by the first way that works."""
    errors = []
    for make in ways:
        for needs_closure in (False, True):
            try:
                followed = Followed(make, is_second_order=name in SECOND_ORDER)
                followed.needs_closure = needs_closure
                followed.step(0)
                followed = Followed(make, is_second_order=name in SECOND_ORDER)
                followed.needs_closure = needs_closure
            except Exception as error:
                errors.append(error)
            else:
                return followed
    raise Refusal(f"{type(errors[-1]).__name__}: {errors[-1]}")


def is_sound(parameter: Tensor, optimizer: Optimizer) -> bool:
    """Returns whether a step has left state, and finite numbers."""
    entries = entries_of(optimizer, parameter)
    tensors = [value for value in entries.values() if isinstance(value, Tensor)]
    return bool(entries) and all(bool(t.isfinite().all()) for t in [parameter, *tensors])


class Starts:
    """What entries start from, found by a step without gradients of another such optimizer."""

    def __init__(self, name: str, ways: list[Make]) -> None:
        self._name = name
        probe = made(name, ways)
        self.copies: set[str] = set()
        self._options: dict[str, Any] = {}
        if hasattr(probe.optimizer, "param_groups"):
            self._options = probe.optimizer.param_groups[0]
        starts = {n: p.detach().clone() for n, p in probe.net.named_parameters()}
        for parameter in probe.net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        has_stepped = False
        with contextlib.suppress(Exception):
            probe.optimizer.step()
            has_stepped = True
        if not has_stepped or not all(is_sound(p, probe.optimizer) for p in probe.net.parameters()):
            # It divides by the gradient, differentiates twice, or waits for a gradient.
            probe = made(name, ways)
            probe.step(0)
        found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for n, parameter in probe.net.named_parameters():
            for entry, value in entries_of(probe.optimizer, parameter).items():
                if is_whole(value, parameter) and value.is_floating_point():
                    row = (value.float(), parameter.detach(), starts[n])
                    found.setdefault(entry, []).append(row)
        for entry, rows in found.items():
            value, weight, before = (joined(part) for part in zip(*rows, strict=True))
            is_copy = torch.allclose(value, weight, atol=1e-2)
            is_copy = is_copy or torch.allclose(value, before, atol=1e-2)
            if is_copy and bool(value.ne(0).any()):
                self.copies.add(entry)

    def __call__(self, entry: str, weight: Tensor) -> Tensor:
        """Returns what an entry of a newborn coordinate starts from."""
        if entry in self.copies:
            return weight
        for known, start in STARTS.items():
            kind, _, plain = known.partition(".")
            if self._name.endswith(kind) and entry == f"['{plain}']":
                if isinstance(start, str):
                    start = self._options[start]
                return torch.full_like(weight, start)
        return torch.zeros_like(weight)


def require_equal(followed: Followed, twin: Twin, when: str) -> None:
    """Raises AssertionError, with what differs, unless both sides agree to the last bit."""
    for name, parameter in followed.net.named_parameters():
        other = twin.parameters[name]
        if not equal(parameter, other):
            raise AssertionError(f"{name} differs {when}")
        mine = entries_of(followed.optimizer, parameter)
        theirs = entries_of(twin.optimizer, other)
        if mine.keys() != theirs.keys():
            raise AssertionError(f"the state of {name} has other entries {when}")
        for entry, value in mine.items():
            if isinstance(value, Tensor) and not equal(value, theirs[entry]):
                raise AssertionError(f"{entry} of {name} differs {when}")


def equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are equal; NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def steps(followed: Followed, twin: Twin, seeds: range, when: str) -> None:
    """Takes the same steps on both sides, and compares them."""
    for seed in seeds:
        followed.step(seed)
        twin.step(seed)
    require_equal(followed, twin, f"after steps {when}")


def outcome(name: str, ways: list[Make]) -> dict[str, Any]:
    """Returns what becomes of one optimizer: a status and a reason."""
    try:
        followed = made(name, ways)
        start = Starts(name, ways)
    except Refusal as error:
        return refused_unrun(ways[0]) or {"status": "not run", "reason": short(error)}
    found: dict[str, Any] = {}
    try:
        net = followed.net
        gn.attach(followed.optimizer, net)
        followed.step(0)
        found["near"] = near_entries(followed)
        found["copies"] = sorted(start.copies)
        twin = Twin(followed)
        steps(followed, twin, range(1, 3), "before any edit")
        before = twin.slots()
        with net.edit(reason="cut") as edit:
            edit.cut(net.layers[0].outgoing()[[1, 4, 7, 8, 22]])
            edit.cut(net.layers[1].outgoing()[[0, 3]])
            edit.remove_nodes(net.layers[1][2])
        twin.follow(net, start)
        require_equal(followed, twin, "after the cut")
        steps(followed, twin, range(3, 6), "after the cut")
        with net.edit(reason="grow") as edit:
            new = edit.add_nodes(1, 2)
            edit.connect(net.layers[0][:4], new)
            edit.connect(new, net.layers[2])
            edit.connect(net.layers[0][0], net.layers[1][1], weights=torch.tensor([0.7]))
        twin.follow(net, start)
        require_equal(followed, twin, "after the growth")
        steps(followed, twin, range(6, 9), "after the growth")
        net.undo()
        twin.follow(net, start)
        require_equal(followed, twin, "after the undo of the growth")
        net.undo()
        twin.follow(net, start, returning=before)
        require_equal(followed, twin, "after the undo of the cut")
        steps(followed, twin, range(9, 12), "after both undos")
    except gn.errors.OptimizerError as error:
        return {"status": "refused", "reason": short(error), **found}
    except AssertionError as error:
        return {"status": "SILENT", "reason": short(error), **found}
    except Exception as error:
        return {"status": "breaks", "reason": f"{type(error).__name__}: {short(error)}", **found}
    return {"status": "follows", **found}


def refused_unrun(make: Make) -> dict[str, Any]:
    """Returns the refusal of an optimizer that cannot take a step; empty when there is none."""
    with contextlib.suppress(Exception):
        followed = Followed(make, is_second_order=False)
        try:
            gn.attach(followed.optimizer, followed.net)
        except gn.errors.OptimizerError as error:
            return {"status": "refused", "reason": short(error)}
    return {}


def near_entries(followed: Followed) -> list[str]:
    """Returns the entries that look like copies of the weights to the library."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for parameter in followed.net.parameters():
        for entry, value in entries_of(followed.optimizer, parameter).items():
            if is_whole(value, parameter) and value.is_floating_point():
                row = (value.detach().float(), parameter.detach())
                found.setdefault(entry, []).append(row)
    near = []
    for entry, rows in found.items():
        values, weights = (joined(part) for part in zip(*rows, strict=True))
        if is_near(values, weights):
            near.append(entry)
    return sorted(near)


def short(error: Exception) -> str:
    """Returns the first line of an error, without addresses."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text[:160]


def classes(module: str) -> Iterator[tuple[str, type[Optimizer]]]:
    """Yields the optimizers of a package by name."""
    for name, kind in sorted(vars(importlib.import_module(module)).items()):
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            yield name, kind


def third_party() -> dict[str, dict[str, Any]]:
    """Returns the outcome of every class of every package, by package and class."""
    found: dict[str, dict[str, Any]] = {}
    for module, package in MODULES.items():
        found[package] = {}
        for name, kind in classes(module):
            if kind.__module__.startswith("torch.optim"):
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                found[package][name] = outcome(name, makers(name, kind))
            print(f"{package} {name}: {found[package][name]}", file=sys.stderr, flush=True)
    return found


def of_torch() -> dict[str, Any]:
    """Returns the outcome of every configuration in the database of torch's own tests."""
    from torch.testing._internal.common_optimizers import optim_db

    found = {}
    infos: list[Any] = optim_db
    for info in infos:
        for number, given in enumerate(info.optim_inputs_func(device="cpu")):
            forms = [""]
            if "foreach" in info.supported_impls:
                forms.append("foreach")
            if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
                forms.append("fused")
            for form in forms:
                options = dict(given.kwargs)
                if form:
                    options[form] = True
                name = f"{info.optim_cls.__name__} {number} {given.desc} {form}".strip()
                make = of_parameters(info.optim_cls, **options)
                if info.optim_cls.__name__ == "Muon":
                    make = of_matrices(info.optim_cls, options)
                found[name] = outcome(info.optim_cls.__name__, [make])
    return found


def of_matrices(kind: Any, options: dict[str, Any]) -> Make:
    """Returns what makes an optimizer for the weights alone."""
    return lambda net, parameters: kind([p for p in parameters if p.dim() > 1], **options)


def table(results: dict[str, Any]) -> str:
    """Returns the table of the documentation."""
    lines = ["| package | follow | refused |", "|---|---|---|"]
    for package, kinds in results["packages"].items():
        following = [name for name, kind in kinds.items() if kind["status"] == "follows"]
        refused = [name for name, kind in kinds.items() if kind["status"] == "refused"]
        cells = [f"{package} {results['versions'][package]}", ", ".join(following)]
        lines.append(f"| {' | '.join([*cells, ', '.join(refused) or 'none'])} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, results: dict[str, Any]) -> str:
    """Returns a page with the table of these results."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.optimizers")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--docs", type=Path, help="a page whose table to renew")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    packages = third_party()
    torchs = of_torch()
    counts = Counter(kind["status"] for kinds in packages.values() for kind in kinds.values())
    counts_of_torch = Counter(kind["status"] for kind in torchs.values())
    results = {
        "versions": {package: version(package) for package in MODULES.values()},
        "torch": torch.__version__.split("+")[0],
        "counts": dict(counts),
        "counts of torch": dict(counts_of_torch),
        "packages": packages,
        "of torch": torchs,
    }
    print(f"packages: {dict(counts)}; torch: {dict(counts_of_torch)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.docs:
        arguments.docs.write_text(with_table(arguments.docs.read_text(), results))
    wrong = counts["SILENT"] + counts["breaks"]
    wrong += counts_of_torch["SILENT"] + counts_of_torch["breaks"]
    if wrong or counts["follows"] + counts["refused"] < 80:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
