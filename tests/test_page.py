"""The page that reports are written on: escaped, whole, and of one style."""

import re

from grapnet.page import (
    Html,
    Picture,
    bar,
    checked,
    facts,
    figure,
    heading,
    page,
    paragraph,
    table,
)

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"  # then the width, in four bytes


def picture(*widths: int) -> Picture:
    return Picture(*(PNG + width.to_bytes(4, "big") for width in widths))


def test_everything_but_html_is_escaped():
    wrong = "<script>&"
    made = [
        heading(wrong),
        paragraph(wrong),
        table([wrong, wrong], [[wrong, wrong]], right=[1]),
        facts([(wrong, wrong)]),
        checked({wrong: True}),
        figure(picture(1, 1, 1, 1), wrong + '"'),
    ]
    for text in (*made, page(wrong, [])):
        assert "&lt;script&gt;&amp;" in text
        assert "<script" not in text
    assert '"' not in re.search(r'alt="([^"]*)">', made[-1])[1]
    assert "<td><b>x</b></td>" in table(["a"], [[Html("<b>x</b>")]])
    assert "<td><span class" in table(["a"], [[bar(0.5)]])


def test_a_cell_of_numbers_breaks_between_them_and_never_inside():
    made = table(
        ["a"],
        [["48.26 ± 0.25, p = 6.8e-22"], ["[1.0, 2.0]"], ["1.9e-06"], [Html("<b>1 2</b>")]],
        right=[0],
    )
    cells = re.findall(r"<td class=right>(.*?)</td>", made)
    assert cells == [
        "<span>48.26</span> <span>± 0.25,</span> <span>p =</span> <span>6.8e-22</span>",
        "<span>[1.0,</span> <span>2.0]</span>",
        "1.9e-06",
        "<b>1 2</b>",
    ]


def test_numbers_among_texts_stay_whole_too():
    made = table(
        ["a"], [["80.91 ± 0.25"], ["+3.5 [1.0, 2.0], p = 3.3e-02"], ["96 relations of all 480"]]
    )
    assert re.findall(r"<td>(.*?)</td>", made) == [
        "<span>80.91</span> <span>± 0.25</span>",
        (
            "<span>+3.5</span> <span>[1.0,</span> <span>2.0],</span> <span>p =</span>"
            " <span>3.3e-02</span>"
        ),
        "96 relations of all 480",
    ]


def test_a_row_that_fell_stands_out():
    rows = re.findall(r"<tr[^>]*>", table(["a"], [["1"], ["2"], ["3"]], fallen=1))
    assert rows == ["<tr>", "<tr>", "<tr class=fallen>", "<tr>"]


def test_a_picture_follows_theme_and_width():
    made = figure(picture(1000, 1000, 500, 500), "a net")
    media = re.findall(r'media="([^"]*)"', made)
    assert media == [
        "(prefers-color-scheme: dark) and (max-width: 36rem)",
        "(max-width: 36rem)",
        media[2],
    ]
    # the first that holds is shown, the image where none does
    assert media[2] == "(prefers-color-scheme: dark)"
    assert 'width="700"' in made
