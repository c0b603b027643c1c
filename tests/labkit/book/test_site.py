"""The check of the built site finds what a reader would stumble over, and nothing else."""

from pathlib import Path

import pytest

from labkit.book.site import problems

PAGE = """<html><head><link rel="canonical" href="https://example.org/"/>
<link rel="stylesheet" href="_static/book.css?digest=1"/><script src="_static/a.js"></script></head>
<body><h1 id="top">Top</h1><a href="#top">up</a><a href="two.html#caf%C3%A9">two</a>
<a href="https://example.org/elsewhere">outside</a><a href="_static/book.css">a file</a>
<img src="figure%20one.png" alt="a figure"/></body></html>"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "book.css").write_text("")
    (tmp_path / "_static" / "a.js").write_text("")
    (tmp_path / "_static" / "template.html").write_text('<script src="{{ later }}"></script>')
    (tmp_path / "figure one.png").write_bytes(b"")
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "two.html").write_text('<h2 id="café">Café</h2><a href="index.html">back</a>')
    return tmp_path


def test_a_whole_site_has_no_problem(site):
    assert problems(site) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('href="#top"', 'href="#bottom"', "leads to #bottom, and that page has no such place"),
        ("two.html#caf%C3%A9", "two.html#tea", "leads to two.html#tea, and that page has no"),
        ("two.html#caf%C3%A9", "three.html", "leads to three.html, and there is no such file"),
        ("figure%20one.png", "figure.png", "<img> loads figure.png, and there is no such file"),
        ("_static/a.js", "https://cdn.example.org/a.js", "from another host"),
        ("_static/book.css?", "//cdn.example.org/b.css?", "from another host"),
        ('alt="a figure"', 'alt=" "', "has no alt text"),
    ],
)
def test_each_kind_of_damage_is_named(site, right, wrong, said):
    index = site / "index.html"
    assert right in PAGE
    index.write_text(PAGE.replace(right, wrong))
    (found,) = problems(site)
    assert found.startswith("index.html: ")
    assert said in found
