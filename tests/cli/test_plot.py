"""`grapnet plot`: real files in, real pictures out, and every refusal in one line that changes
nothing.
"""

import json
from xml.dom import minidom

import pytest

import grapnet as gn
from grapnet.cli.main import main


@pytest.fixture
def file(tmp_path):
    net = gn.GrapNet([5, 4, 3])
    with net.edit(reason="cut the weakest") as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=3))
    gn.save(tmp_path / "net.safetensors", net, history="full")
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize(
    "kind", ["graph", "adjacency", "timeline", "degrees", "weights", "deletion"]
)
def test_every_kind_is_drawn_beside_the_file(file, kind, capsys):
    assert main(["plot", str(file), "--kind", kind]) == 0
    path = file.with_name(f"net-{kind}.png")
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_json_says_what_was_written(file, capsys):
    path = file.with_name("wiring.svg")
    arguments = [
        "plot",
        str(file),
        "--kind",
        "adjacency",
        "--transition",
        "1",
        "-o",
        str(path),
        "--json",
    ]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == {
        "path": str(path),
        "kind": "adjacency",
        "nodes": 12,
        "relations": 29,
        "version": 1,
    }
    assert "transition 1: 4 × 3" in path.read_text()


def test_a_net_of_a_model_is_drawn_by_its_place(model_checkpoint, capsys):
    path = model_checkpoint.with_name("wiring.svg")
    arguments = ["plot", str(model_checkpoint), "--kind", "adjacency", "-o", str(path)]
    assert main(arguments) == 2
    assert "say --net, one of: 0, 2" in capsys.readouterr().err
    assert not path.exists()
    assert main([*arguments, "--net", "2"]) == 0
    assert "transition 0: 4 × 2" in path.read_text()


def test_theme_and_cut_relations(file, capsys):
    plain, dark = file.with_name("plain.svg"), file.with_name("dark.svg")
    assert main(["plot", str(file), "-o", str(plain)]) == 0
    assert main(["plot", str(file), "-o", str(dark), "--theme", "dark", "--since", "0"]) == 0
    assert "cut (3)" in dark.read_text()
    assert "cut (3)" not in plain.read_text()
    assert "#14171c" in dark.read_text()


def test_a_picture_is_not_written_over_without_force(file, capsys):
    path = file.with_name("net-graph.png")
    path.write_bytes(b"mine")
    assert main(["plot", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_bytes() == b"mine"
    assert main(["plot", str(file), "--force"]) == 0
    assert path.read_bytes() != b"mine"


def test_a_link_is_written_through_and_every_process_has_its_own_partial_file(file, capsys):
    link, behind = file.with_name("link.png"), file.with_name("behind")
    behind.write_bytes(b"mine")
    link.symlink_to(behind)
    file.with_name(".link.png.partial").mkdir()  # of another process
    assert main(["plot", str(file), "-o", str(link), "--force"]) == 0
    assert link.is_symlink()
    assert behind.read_bytes().startswith(b"\x89PNG")
    assert len(list(file.parent.iterdir())) == 4


@pytest.mark.parametrize("strange", ["\x1b", "\x00", "\ud800", "<&"])
def test_whatever_the_names_the_picture_is_well_formed(tmp_path, strange, capsys):
    net = gn.GrapNet([3, 2])
    with net.edit(reason=f"na{strange}me") as edit:
        edit.set_owner(net.layers[0], f"a{strange}b")
    gn.save(tmp_path / "net.safetensors", net, history="full")
    for kind in ("graph", "timeline"):
        path = tmp_path / f"{kind}.svg"
        assert (
            main(["plot", str(tmp_path / "net.safetensors"), "--kind", kind, "-o", str(path)]) == 0
        )
        minidom.parse(str(path))
    assert capsys.readouterr().err == ""


def test_signs_that_the_font_lacks_are_told_in_one_line(tmp_path, capsys):
    net = gn.GrapNet([3, 2])
    with net.edit(reason="name") as edit:
        edit.set_owner(net.layers[0], "𒀀ab𒀁")  # matplotlib's own font has no cuneiform
    gn.save(tmp_path / "net.safetensors", net, history="full")
    assert main(["plot", str(tmp_path / "net.safetensors")]) == 0
    out, error = capsys.readouterr()
    assert out == f"wrote {tmp_path / 'net-graph.png'}\n"
    assert error == "grapnet: the font of the picture has no 𒀀𒀁; boxes stand for what it lacks\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.safetensors"], "no such file"),
        ([""], "is a folder"),
        ([".", "--kind", "weights"], "is a folder"),
        (["{file}", "-o", "{folder}/net.bmp"], "is no picture that can be written"),
        (["{file}", "-o", "{folder}/none/net.png"], "no such folder"),
        (
            ["{file}", "--kind", "adjacency", "--transition", "7"],
            "has transitions 0 to 1, got --transition 7",
        ),
        (["{file}", "--since", "9"], "there is no version 9"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_one_line(file, arguments, said, capsys):
    before = {path: path.read_bytes() for path in file.parent.iterdir()}
    given = [part.format(file=file, folder=file.parent) for part in arguments]
    assert main(["plot", *given]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert said in error.splitlines()[0]
    assert {path: path.read_bytes() for path in file.parent.iterdir()} == before


def test_a_damaged_file_and_a_net_without_relations(file, tmp_path, capsys):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(file.read_bytes()[:-7])
    assert main(["plot", str(damaged)]) == 2
    gn.save(tmp_path / "empty.safetensors", gn.GrapNet([3, 0, 2]))
    assert main(["plot", str(tmp_path / "empty.safetensors"), "--kind", "deletion"]) == 2
    assert "the net has no relations" in capsys.readouterr().err
    assert list(tmp_path.glob("*.png")) == []
