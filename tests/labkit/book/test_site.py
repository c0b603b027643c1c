"""The check of the built site finds what a reader would stumble over, and nothing else."""

from pathlib import Path

import pytest
import yaml

from labkit.book.site import configuration, problems

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


def test_a_folder_without_pages_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="make book builds them"):
        problems(tmp_path)


BASE = """title: A book
copyright: "2026"
repository:
  url: ""
  branch: main
  path_to_book: book
"""
CFF = 'title: "A title"\nauthors:\n  - name: "Some authors"\n'
ADDRESS = "https://github.com/owner/name"


def test_without_an_address_no_page_names_one():
    text = configuration(BASE, CFF)
    assert "http" not in text
    config = yaml.safe_load(text)
    assert "launch_buttons" not in config
    # Jupyter Book's default is an address of its own.
    assert config["repository"]["url"] == ""
    words = config["parse"]["myst_substitutions"]
    for name in ("get_the_code", "install_it"):
        assert "the folder that this book came in" in words[name]
    assert "pip install ." in words["install_it"].splitlines()
    assert "url" not in words["citation"]
    assert "title  = {A title}" in words["citation"]


def test_the_address_reaches_the_header_the_launch_buttons_the_front_page_and_the_citation():
    stored = BASE.replace('url: ""', f'url: "{ADDRESS}"')
    for text in (configuration(stored, CFF), configuration(BASE, CFF, ADDRESS)):
        config = yaml.safe_load(text)
        assert config["repository"] == {"url": ADDRESS, "path_to_book": "book", "branch": "main"}
        assert config["html"]["use_repository_button"] is True
        assert config["launch_buttons"]["binderhub_url"].startswith("https://")
        words = config["parse"]["myst_substitutions"]
        commands = words["get_the_code"].partition("```bash\n")[2].splitlines()
        assert commands[0] == f"git clone {ADDRESS} && cd name"
        assert [line.split()[:2] for line in commands[1:3]] == [
            ["make", "book"],
            ["make", "notebook"],
        ]
        assert f"pip install git+{ADDRESS}" in words["install_it"].splitlines()
        assert f"url    = {{{ADDRESS}}}" in words["citation"]


def test_the_environment_overrides_the_stored_address_and_branch():
    stored = BASE.replace('url: ""', f'url: "{ADDRESS}"')
    config = yaml.safe_load(configuration(stored, CFF, "https://github.com/fork/name", "trunk"))
    assert config["repository"]["url"] == "https://github.com/fork/name"
    assert config["repository"]["branch"] == "trunk"


@pytest.mark.parametrize(
    "address",
    ["github.com/owner/name", "https://example.org/owner/name", "https://github.com/owner"],
)
def test_an_address_that_binder_cannot_start_from_is_refused(address):
    with pytest.raises(ValueError, match=r"need https://github\.com/OWNER/NAME"):
        configuration(BASE, CFF, address)
