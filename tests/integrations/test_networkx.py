"""networkx: the graph says what the net says, and a GraphML file gives it back."""

from itertools import pairwise

import networkx
import numpy as np
import pytest
import torch

import grapnet as gn
from grapnet.integrations.networkx import from_networkx, to_networkx, write_graphml


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def edited(**kwargs) -> gn.GrapNet:
    """A net with cuts, owners, frozen relations, two activations in a layer, and a removed node."""
    net = gn.GrapNet([4, 5, 3], activation="gelu", **kwargs)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.3))
        edit.remove_nodes(net.layers[1][1])
        edit.freeze(net.layers[1][2:4], outgoing=False)
        edit.set_owner(net.layers[1][:2], 'task "1" <é & co>')
        edit.set_activation(net.layers[1][3], "tanh")
        grown = edit.add_nodes(1, 2, owner="late")
        edit.connect(net.layers[0][[3, 0, 2]], grown)
    net.layers[1].dropout = 0.25
    return net


def bare(**kwargs) -> gn.GrapNet:
    """One layer is empty, and nothing leads anywhere."""
    return gn.GrapNet([3, 0, 2], **kwargs)


def full(**kwargs) -> gn.GrapNet:
    return gn.GrapNet([3, 4, 4, 2], **kwargs)


NETS = {build.__name__: build for build in (edited, bare, full)}
every_net = pytest.mark.parametrize("build", NETS.values(), ids=NETS)


def assert_same(net: gn.GrapNet, other: gn.GrapNet) -> None:
    """Everything but uids and history is equal, coordinates bit by bit and slots in order."""
    gn.check(other)
    assert net.sizes == other.sizes
    for mine, theirs in zip(net.layers, other.layers, strict=True):
        assert (mine.owners, mine.activations) == (theirs.owners, theirs.activations)
        assert (mine.default_activation, mine.dropout) == (
            theirs.default_activation,
            theirs.dropout,
        )
        assert mine.is_sensory or torch.equal(mine.biases, theirs.biases)
        assert mine.is_sensory or torch.equal(mine.frozen_at, theirs.frozen_at)
    for mine, theirs in zip(net.transitions, other.transitions, strict=True):
        assert torch.equal(mine.ptr, theirs.ptr)
        assert torch.equal(mine.child, theirs.child)
        assert torch.equal(mine.values(), theirs.values())
        assert torch.equal(mine.frozen_at, theirs.frozen_at)


@every_net
def test_every_node_and_relation_says_what_its_handle_says(build):
    net = build()
    graph = to_networkx(net)
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (
        net.count().nodes,
        net.count().relations,
    )
    assert (graph.graph["version"], graph.graph["layers"]) == (net.version, len(net.layers))
    for uid, data in graph.nodes.items():
        node = net.node(uid)
        bias = None if node.bias is None else node.bias.item()
        expected = {
            "layer": node.layer,
            "row": node.row,
            "owner": node.owner,
            "activation": node.activation,
            "bias": bias,
        }
        held = node.layer > 0 and node.row in net.layers[node.layer].frozen_at.tolist()
        assert data == {**expected, "bias_frozen": held, "frozen": node.frozen}
        assert list(graph.successors(uid)) == node.children.uids.tolist()
        weights = [graph.edges[uid, child]["weight"] for child in graph.successors(uid)]
        assert weights == node.W_alloc.view(-1).tolist()
        assert [
            graph.edges[uid, c]["frozen"] for c in graph.successors(uid)
        ] == node.outgoing().frozen.tolist()
        assert {graph.edges[uid, c]["transition"] for c in graph.successors(uid)} <= {node.layer}
    assert net.to_networkx().nodes == graph.nodes


@every_net
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_net_comes_back_from_its_graph(build, dtype):
    net = build(dtype=dtype)
    back = from_networkx(to_networkx(net), dtype=dtype)
    assert_same(net, back)
    x = torch.randn(5, net.sizes[0], dtype=dtype)
    assert torch.equal(net.eval()(x), back.eval()(x))


@every_net
@pytest.mark.parametrize("name", ["net.graphml", "net.graphml.gz"])
def test_a_graphml_file_holds_equal_data_and_gives_the_net_back(build, name, tmp_path):
    net = build(dtype=torch.float64)
    write_graphml(net, tmp_path / name)
    read = networkx.read_graphml(tmp_path / name, node_type=int)
    graph = to_networkx(net)
    assert list(read.nodes) == list(graph.nodes)
    for uid, data in graph.nodes.items():
        known = {key: value for key, value in data.items() if value is not None}
        known["label"] = f"{data['layer']}:{data['row']}"
        assert {
            key: value for key, value in read.nodes[uid].items() if key not in ("x", "y")
        } == known
    for ends, data in graph.edges.items():
        assert read.edges[ends] == {**data, "strength": abs(data["weight"])}
    assert read.graph == {"node_default": {}, "edge_default": {}, **graph.graph}
    assert_same(net, from_networkx(networkx.read_graphml(tmp_path / name), dtype=torch.float64))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_graphml_file_places_layers_as_columns_and_rows_from_the_top(tmp_path):
    write_graphml(full(), tmp_path / "net.graphml")
    nodes = networkx.read_graphml(tmp_path / "net.graphml", node_type=int).nodes
    columns = [[data for data in nodes.values() if data["layer"] == n] for n in range(4)]
    assert [len({data["x"] for data in column}) for column in columns] == [1, 1, 1, 1]
    assert sorted(column[0]["x"] for column in columns) == [column[0]["x"] for column in columns]
    assert all(a["y"] > b["y"] for column in columns for a, b in pairwise(column))


def test_a_part_of_the_graph_is_written_and_stays_as_it_is(tmp_path):
    graph = to_networkx(edited(dtype=torch.float64))
    part = graph.subgraph([0, 1, *graph.successors(0)])
    write_graphml(part, tmp_path / "part.graphml")
    read = networkx.read_graphml(tmp_path / "part.graphml", node_type=int)
    assert list(read.nodes) == list(part.nodes)
    assert {ends: data["weight"] for ends, data in read.edges.items()} == dict(
        networkx.get_edge_attributes(part, "weight")
    )
    assert "label" not in part.nodes[0]


def test_a_graph_drawn_by_hand_becomes_a_net():
    graph = networkx.DiGraph([("a", "h"), ("b", "h"), ("h", "y")])
    networkx.set_node_attributes(graph, {"a": 0, "b": 0, "h": np.int64(1), "y": 2}, "layer")
    graph.nodes["b"]["row"] = -1  # before a, which says nothing
    for parent, child, weight in [("a", "h", 2.0), ("b", "h", -1.0), ("h", "y", 3)]:
        graph.edges[parent, child]["weight"] = weight
    graph.nodes["h"]["bias"] = 0.5
    graph.nodes["y"]["bias"] = 1
    net = from_networkx(graph)
    x = torch.tensor([[1.0, 2.0], [5.0, 1.0]])  # b, a
    assert net(x).view(-1).tolist() == [3 * (-1 + 4 + 0.5) + 1, 1.0]
    assert [layer.activations for layer in net.layers] == [["identity"] * 2, ["relu"], ["identity"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.add_node(99), "node 99"),
        (lambda g: g.add_node(99, layer=-1), "node 99"),
        (lambda g: g.add_edge(8, 9), "layer 2 to layer 2"),
        (lambda g: g.add_edge(4, 0), "layer 1 to layer 0"),
        (lambda g: g.edges[0, 3].pop("weight"), "1 of 12 weights"),
        (lambda g: g.nodes[8].pop("bias"), "1 of 3 biases"),
        (lambda g: g.nodes[3].update(activation="nothing"), "nothing"),
    ],
)
def test_a_graph_that_is_no_net_is_refused(change, message):
    graph = to_networkx(gn.GrapNet([3, 4, 3]))
    change(graph)
    with pytest.raises(ValueError, match=message):
        from_networkx(graph)


def test_an_undirected_graph_and_a_relation_named_twice_are_refused():
    graph = to_networkx(full())
    with pytest.raises(ValueError, match="DiGraph"):
        from_networkx(graph.to_undirected())
    twice = networkx.MultiDiGraph(graph)
    assert_same(from_networkx(graph), from_networkx(twice))
    twice.add_edge(0, 3, weight=1.0)
    with pytest.raises(ValueError, match="twice"):
        from_networkx(twice)
