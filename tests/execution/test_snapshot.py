"""Snapshots: what they hold, what they compute, and whether they know that the net went on without them."""

import copy
import gc
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn

CLOSE = 1.2e-7  # of float32, for numbers around one
MARK = 12345.678
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def cube(z: Tensor) -> Tensor:
    return z**3


gn.register_activation("test_snapshot.cube", cube)


def full(**kwargs) -> gn.GrapNet:
    return gn.GrapNet([6, 5, 4, 3], **kwargs)


def ragged(**kwargs) -> gn.GrapNet:
    return gn.GrapNet([6, 5, 4, 3], density=0.4, **kwargs)


def mixed(**kwargs) -> gn.GrapNet:
    net = gn.GrapNet([6, 5, 4, 3], activation="gelu", **kwargs)
    with net.edit() as edit:
        edit.set_activation(net.layers[1][::2], "tanh")
        edit.set_activation(net.layers[1][1], "test_snapshot.cube")
        edit.set_activation(net.layers[3][:1], "sigmoid")
    return net


def cut(**kwargs) -> gn.GrapNet:
    """Frozen, pruned, grown, with a node that nobody leads to and one that leads nowhere."""
    net = full(**kwargs)
    with net.edit() as edit:
        edit.freeze(net.layers[1][1:3])
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.3))
        edit.cut(net.layers[1][0].incoming())
        edit.cut(net.layers[2][1].outgoing())
        edit.connect(net.layers[1], edit.add_nodes(2, 2, bias="linear"))
    return net


def narrow(**kwargs) -> gn.GrapNet:
    return gn.GrapNet.from_relations([3, 0, 2], [([], []), ([], [])], biases=[[], [0.5, -1.5]], **kwargs)


GRAPHS = {build.__name__: build for build in (full, ragged, mixed, cut, narrow)}
every_graph = pytest.mark.parametrize("build", GRAPHS.values(), ids=GRAPHS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def inputs(net: gn.GrapNet, *batch: int) -> Tensor:
    return torch.randn(*batch, net.sizes[0], dtype=net.transitions[0].weight.dtype, device=net.device)


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def addresses(module: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(module) if tensor.numel()}


@every_graph
@pytest.mark.parametrize("batch", [(), (7,), (2, 3), (0,)], ids=str)
def test_snapshot_and_module_compute_what_the_net_computes(build, batch):
    net = build(dtype=torch.float64)
    x = inputs(net, *batch)
    for model in (net.snapshot(), net.to_module()):
        torch.testing.assert_close(model(x), net(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_net_snapshot_module_and_matrix_network_agree_as_in_the_paper(activation):
    """16-32-8, batch 32, float32: values and weight gradients differ by at most 1.2e-7."""
    net, x, target = gn.GrapNet([16, 32, 8], activation=activation), torch.randn(32, 16), torch.randn(32, 8)
    middle = {"identity": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU}[activation]()
    plain = nn.Sequential(nn.Linear(16, 32), middle, nn.Linear(32, 8))
    with torch.no_grad():
        for t, linear in enumerate((plain[0], plain[2])):
            linear.weight.copy_(torch.cat([node.W_alloc for node in net.layers[t]]).T)
            linear.bias.copy_(net.layers[t + 1].biases)
    module = net.to_module()
    linears = [layer for layer in module if isinstance(layer, nn.Linear)]
    for model in (net, plain, module):
        nn.functional.mse_loss(model(x), target).backward()
    outputs = [model(x).detach() for model in (net, module, net.snapshot())]
    assert max((output - plain(x)).abs().max() for output in outputs) <= CLOSE
    for t, linear in enumerate((plain[0], plain[2])):
        of_net = net.transitions[t].weight.grad.view(linear.weight.T.shape).T
        for gradient in (of_net, linears[t].weight.grad):
            assert (gradient - linear.weight.grad).abs().max() <= CLOSE


def test_modules_are_those_of_torch_where_it_has_one():
    names = ["relu", "gelu", "tanh", "sigmoid", "silu", "leaky_relu", "elu", "softplus", "identity"]
    net = gn.GrapNet([2] * 10, activation=names)
    classes = [type(module).__name__ for module in net.snapshot() if not isinstance(module, nn.Linear)]
    assert classes == ["ReLU", "GELU", "Tanh", "Sigmoid", "SiLU", "LeakyReLU", "ELU", "Softplus"]
    plain = [module for module in net.to_module().modules() if type(module).__module__.startswith("grapnet")]
    assert plain == []
    own = [type(module).__name__ for module in mixed().snapshot() if type(module).__module__.startswith("grapnet")]
    assert own == ["MixedActivation", "MixedActivation"]


def test_matrix_is_zero_where_no_relation_is():
    net = gn.GrapNet.from_relations([2, 3], [([0, 1, 1], [2, 0, 1], [5.0, 6.0, 7.0])], biases=[[1.0, 2.0, 3.0]])
    linear = net.snapshot()[0]
    assert linear.weight.tolist() == [[0, 6], [0, 7], [5, 0]]
    assert linear.bias.tolist() == [1, 2, 3]
    assert (linear.in_features, linear.out_features) == (2, 3)


@every_graph
def test_snapshot_is_detached_and_taking_it_changes_nothing(build):
    net = build(dtype=torch.float64)
    random, before = torch.get_rng_state(), copy.deepcopy(net.state_dict())
    snapshot = net.snapshot()
    assert torch.equal(torch.get_rng_state(), random)
    assert not snapshot.training
    assert not any(tensor.requires_grad for tensor in tensors(snapshot))
    assert {parameter.dtype for parameter in snapshot.parameters()} == {torch.float64}
    assert not addresses(snapshot) & addresses(net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert snapshot.version == net.version


@every_graph
@pytest.mark.parametrize("device", DEVICES)
def test_snapshot_lives_and_follows_where_the_net_is(build, device):
    net = build(dtype=torch.float64).to(device)
    serve, twin, x = gn.SnapshotController(net), copy.deepcopy(net.snapshot()).cpu(), inputs(net, 5).to(device)
    assert {tensor.device for tensor in tensors(serve.snapshot)} == {net.device}
    assert not twin.is_stale(net)
    step(torch.optim.Adam, fused=True)(net)
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=0, atol=1e-12)
    assert (serve.refreshes, serve.rebuilds) == (1, 0)
    assert twin.is_stale(net)
    net.cpu()
    torch.testing.assert_close(serve(x.cpu()), net(x.cpu()).detach(), rtol=0, atol=1e-12)
    assert serve.rebuilds == (device != "cpu")


def step(optimizer: Callable[..., torch.optim.Optimizer], **kwargs) -> Callable[[gn.GrapNet], None]:
    def train(net: gn.GrapNet) -> None:
        made = optimizer(net.parameters(), lr=0.1, **kwargs)
        net(inputs(net, 4)).square().sum().backward()
        made.step()

    return train


def edited(operate) -> Callable[[gn.GrapNet], None]:
    def change(net: gn.GrapNet) -> None:
        with net.edit() as edit:
            operate(net, edit)

    return change


def trial(net: gn.GrapNet) -> None:
    version = net.version
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][0].outgoing())
        edit.commit()
    assert net.version == version


def load(net: gn.GrapNet) -> None:
    net.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in net.state_dict().items()})


def load_frozen_alone(net: gn.GrapNet) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["transitions.0.weight"][state["transitions.0.frozen"].long()] += 1
    net.load_state_dict(state)


def in_place(net: gn.GrapNet) -> None:
    with torch.no_grad():
        net.transitions[1].weight.mul_(2)


def in_inference_mode(net: gn.GrapNet) -> None:
    with torch.inference_mode():
        net.layers[1].bias.add_(1)


def assign(net: gn.GrapNet) -> None:
    net.layers[1][3].W_alloc = torch.ones(net.layers[1][3].degree)


def assign_biases(net: gn.GrapNet) -> None:
    net.layers[3].biases = 3.0


def replace_memory(net: gn.GrapNet) -> None:
    net.transitions[0].weight.data = net.transitions[0].weight.data + 1


def there_and_back(net: gn.GrapNet) -> None:
    net.half().float()


def replace_parameter(net: gn.GrapNet) -> None:
    net.transitions[0].weight = nn.Parameter(net.transitions[0].weight.data)


CHANGES: dict[str, Callable[[gn.GrapNet], None]] = {
    "cut": edited(lambda net, edit: edit.cut(net.layers[0][0].outgoing())),
    "activation": edited(lambda net, edit: edit.set_activation(net.layers[1][0], "elu")),
    "freeze": edited(lambda net, edit: edit.freeze(net.layers[2][0])),
    "undo": lambda net: net.undo(),
    "trial": trial,
    "load": load,
    "load_frozen_alone": load_frozen_alone,
    "in_place": in_place,
    "in_inference_mode": in_inference_mode,
    "assign": assign,
    "assign_biases": assign_biases,
    "replace_memory": replace_memory,
    "replace_parameter": replace_parameter,
    "there_and_back": there_and_back,
    "double": lambda net: net.double(),
    "sgd": step(torch.optim.SGD),
    "adam": step(torch.optim.Adam),
    "adam_loop": step(torch.optim.Adam, foreach=False),
    "adam_fused": step(torch.optim.Adam, fused=True),
    "adamw_fused": step(torch.optim.AdamW, fused=True),
    "sgd_fused": step(torch.optim.SGD, fused=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_makes_it_stale_and_the_controller_follow(change):
    net = cut()
    snapshot, serve, x = net.snapshot(), gn.SnapshotController(net), inputs(net, 5)
    assert not snapshot.is_stale(net)
    change(net)
    assert snapshot.is_stale(net)
    assert not net.snapshot().is_stale(net)
    x = x.to(net.transitions[0].weight)
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=0, atol=1e-6)
    assert serve.refreshes == 1
    assert not serve.snapshot.is_stale(net, exact=True)


def test_version_number_that_comes_back_does_not_make_it_fresh():
    net = full()
    with net.edit(trial=True) as edit:
        edit.set_activation(net.layers[1], "tanh")
        edit.commit()
        snapshot, serve = net.snapshot(), gn.SnapshotController(net)
    assert snapshot.is_stale(net)
    edited(lambda net, edit: edit.set_activation(net.layers[1], "elu"))(net)  # moves no coordinate
    assert snapshot.version == net.version
    assert snapshot.is_stale(net)
    x = inputs(net, 5)
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=0, atol=1e-6)
    assert serve.rebuilds == 1


def test_what_changes_nothing_leaves_it_fresh(tmp_path):
    net, other = cut(), full()
    snapshot = net.snapshot()
    net(inputs(net, 4).requires_grad_()).sum().backward()
    net.zero_grad()
    step(torch.optim.Adam, fused=True)(other)
    net.state_dict(), copy.deepcopy(net), gn.save(tmp_path / "net", net), net.eval(), net.train(), net.to("cpu")
    net.requires_grad_(False).requires_grad_()
    with net.edit(reason="nothing"):
        pass
    assert not snapshot.is_stale(net)
    assert not snapshot.is_stale(net, exact=True)


@pytest.mark.parametrize(
    "write",
    [lambda net: net.transitions[0].weight.data.add_(1), lambda net: net.layers[1].bias.detach().numpy().fill(7)],
    ids=["data", "numpy"],
)
def test_writes_behind_autograds_back_are_seen_by_reading_alone(write):
    net = full()
    snapshot, serve, x = net.snapshot(), gn.SnapshotController(net), inputs(net, 3)
    write(net)
    assert not snapshot.is_stale(net)
    assert snapshot.is_stale(net, exact=True)
    serve.refresh()
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=1e-6, atol=1e-6)


def through_a_file(snapshot: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(snapshot, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {
    "pickle": lambda snapshot: pickle.loads(pickle.dumps(snapshot)),
    "deepcopy": copy.deepcopy,
    "torch.save": through_a_file,
}


@every_graph
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_compares_what_it_holds(build, copied):
    net = build()
    twin = copied(net.snapshot())
    assert twin.version == net.version
    assert not twin.is_stale(net)
    assert not twin.is_stale(copy.deepcopy(net))
    assert not twin.update(net)
    net.layers[-1].biases = 9.0
    assert twin.is_stale(net)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_copy_never_claims_to_be_fresh_after_a_change(change):
    net = cut()
    twin, state = copy.deepcopy(net.snapshot()), copy.deepcopy(net.state_dict())
    change(net)
    pairs = [(value, state[name]) for name, value in net.state_dict().items()]
    same = net.version == twin.version and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    assert twin.is_stale(net) is not same  # the end of a trial brings every coordinate back
    assert not same or change in (trial, replace_parameter)


def test_copy_of_net_and_snapshot_together_compares_too():
    net, snapshot = copy.deepcopy((net := full(), net.snapshot()))
    assert not snapshot.is_stale(net)
    net.transitions[0].weight.data.add_(1)
    assert snapshot.is_stale(net)


def test_copy_with_other_modules_is_stale():
    net = mixed()
    changed = [copy.deepcopy(net.snapshot()) for _ in range(5)]
    changed[0].append(nn.ReLU())
    changed[1].pop(-1)
    changed[2][1].order.copy_(changed[2][1].order.flip(0))
    changed[3][0].weight.mul_(-1)
    changed[4][3] = nn.Tanh()
    assert [snapshot.is_stale(net) for snapshot in changed] == [True] * 5
    sparse = ragged()
    twin = copy.deepcopy(sparse.snapshot())
    twin[0].weight[twin[0].weight == 0] = 1.0  # where no relation is
    assert twin.is_stale(sparse)
    assert net.snapshot()[:2].is_stale(net)
    assert net.snapshot()[:2].version is None


def test_snapshot_of_another_net_is_stale():
    assert full().snapshot().is_stale(full())
    assert full().snapshot().is_stale(gn.GrapNet([6, 3]))


def test_copy_in_another_dtype_is_stale_and_the_snapshot_itself_is_not():
    net = full(dtype=torch.float64)
    assert copy.deepcopy(net.snapshot()).float().is_stale(net)
    assert not net.snapshot().float().is_stale(net)


def test_step_of_an_optimizer_that_is_gone_is_found_by_reading():
    net, other = full(), full()
    snapshot = net.snapshot()
    step(torch.optim.Adam, fused=True)(other)
    gc.collect()
    assert not snapshot.is_stale(net)
    step(torch.optim.Adam, fused=True)(net)
    gc.collect()
    assert snapshot.is_stale(net)
    kept = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    snapshot = net.snapshot()
    kept.step()
    assert snapshot.is_stale(net)


def test_controller_writes_in_place_until_an_edit_and_counts():
    net = cut()
    serve, train, x = gn.SnapshotController(net), step(torch.optim.SGD), inputs(net, 5)
    first = serve.snapshot
    places = addresses(first)
    serve(x), serve(x)
    assert (serve.refreshes, serve.rebuilds) == (0, 0)
    for _ in range(2):
        train(net)
        serve(x), serve(x)
    assert serve.snapshot is first
    assert addresses(first) == places
    assert (serve.refreshes, serve.rebuilds) == (2, 0)
    edited(lambda net, edit: edit.cut(net.layers[0].outgoing()[:2]))(net)
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=0, atol=1e-6)
    assert serve.snapshot is not first
    assert (serve.refreshes, serve.rebuilds) == (3, 1)
    assert repr(serve) == "SnapshotController(version 2, 3 refreshes)"


def test_training_is_the_same_beside_a_controller():
    net = full()
    alone, beside = net, copy.deepcopy(net)
    serve, x = gn.SnapshotController(beside), inputs(net, 8)
    for n in (alone, beside):
        optimizer = torch.optim.Adam(n.parameters(), lr=0.05)
        gn.attach(optimizer, n)
        for round_ in range(4):
            optimizer.zero_grad()
            loss = n(x).square().sum()
            if n is beside:
                serve(x)
            loss.backward()
            optimizer.step()
            if round_ == 1:
                edited(lambda net, edit: edit.cut(net.layers[0].outgoing()[::3]))(n)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), beside.parameters(), strict=True))
    assert serve.refreshes == 3


def test_controller_works_in_and_after_inference_mode():
    net = full()
    x = inputs(net, 2)
    with torch.inference_mode():
        serve = gn.SnapshotController(net)
        serve(x)
    in_place(net)
    given = x.clone().requires_grad_()
    serve(given).sum().backward()
    net(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(given.grad, x.grad)
    with torch.inference_mode():
        made = full()
        snapshot = made.snapshot()
        assert not snapshot.is_stale(made)
        in_place(made)
        assert snapshot.is_stale(made)


def test_controller_does_not_keep_the_net_alive():
    net = full()
    serve, x = gn.SnapshotController(net), inputs(net, 2)
    expected = net(x).detach()
    del net
    gc.collect()
    with pytest.raises(gn.PlanError, match=r"is gone.*controller\.snapshot \(version 0\)"):
        serve(x)
    torch.testing.assert_close(serve.snapshot(x), expected)


def test_controller_cannot_be_copied():
    serve = gn.SnapshotController(full())
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save controller\.snapshot"):
            attempt(serve)


def test_trial_that_waits_is_not_run():
    net = full()
    serve = gn.SnapshotController(net)
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][0].outgoing())
        for attempt in (net.snapshot, net.to_module, lambda: serve(inputs(net, 1))):
            with pytest.raises(gn.EditError, match=r"edit\.commit\(\)"):
                attempt()
        edit.commit()
        assert net.snapshot()[0].weight[:, 0].count_nonzero() == 0


@every_graph
def test_module_trains_on_its_own(build):
    net = build()
    module, x, before = net.to_module(), inputs(net, 4), copy.deepcopy(net.state_dict())
    assert type(module) is nn.Sequential
    assert module.training
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in module.parameters())
    assert not addresses(module) & addresses(net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module(x), net(x))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_large_matrix_is_refused_and_the_message_says_what_to_do():
    net = gn.GrapNet([3, 2, 10])
    for make in (net.snapshot, net.to_module):
        with pytest.raises(gn.PlanError, match=r"transition 1 would hold 20 cells \(limit 19\) .* most_cells=20"):
            make(most_cells=19)
        make(most_cells=20)
    serve = gn.SnapshotController(net, most_cells=20)
    edited(lambda net, edit: edit.add_nodes(2, 1))(net)
    with pytest.raises(gn.PlanError, match="22 cells"):
        serve(inputs(net, 1))
    wide = gn.GrapNet.from_relations([2**15, 2**14], [([0], [0])])
    with pytest.raises(gn.PlanError, match=r"536,870,912 cells .* 2\.0 GiB"):
        wide.snapshot()


def test_attention_is_refused_by_name(monkeypatch):
    net = full()
    serve, snapshot = gn.SnapshotController(net), net.snapshot()
    monkeypatch.setattr(net.execution, "choices", lambda: ["reference", "attention", "reference"])
    assert snapshot.is_stale(net)
    for attempt in (net.snapshot, net.to_module, serve.refresh, lambda: serve(inputs(net, 1))):
        with pytest.raises(gn.PlanError, match="transition 1 runs with attention"):
            attempt()


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_no_snapshot_holds_a_cut_coordinate(density):
    net = gn.GrapNet([5, 4, 3], density=density)
    net.layers[0].outgoing()[3:4].weights = MARK
    serve, module = gn.SnapshotController(net), net.to_module()

    def holders() -> list[bool]:
        serve(inputs(net, 1))
        return [
            any(holds_mark(tensor) for tensor in tensors(m)) for m in (serve.snapshot, net.snapshot(), net.to_module())
        ]

    assert holders() == [True] * 3
    edited(lambda net, edit: edit.cut(net.layers[0].outgoing()[3:4]))(net)
    assert holders() == [False] * 3
    assert any(holds_mark(tensor) for tensor in module.parameters())  # made once: it follows nothing


def holds_mark(tensor: Tensor) -> bool:
    return bool((tensor == torch.tensor(MARK, dtype=tensor.dtype)).any())
