"""`make notebook` opens a copy of a chapter in JupyterLab, on loopback, with this Python."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest

from labkit.book import notebook
from labkit.book.chapters import find, notebooks_of
from labkit.book.notebook import FIRST, copy_missing, place_of_copy
from labkit.launch.scripts import project_root

ROOT = project_root()
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/lab/tree/(\S+)\?token=(\w+)")


@pytest.mark.parametrize("name", ["book/surprises/museum.ipynb", "museum.ipynb", "museum"])
def test_a_notebook_is_found_by_its_path_and_by_its_name(name):
    assert find(name, ROOT) == Path("book/surprises/museum.ipynb")


def test_assignments_are_notebooks_too_and_an_unknown_name_gets_the_list():
    assert find("05_five_bugs", ROOT) == Path("labs/assignments/05_five_bugs.ipynb")
    assert Path(FIRST) in notebooks_of(ROOT)
    with pytest.raises(ValueError, match=r"no notebook opera\. There are:\n  book/"):
        find("opera", ROOT)


def test_copies_are_made_once_and_keep_what_the_reader_wrote(tmp_path):
    ours = ("start/one.ipynb", "start/one.py", "reference/glossary.md", "conftest.py")
    for name in (f"book/{name}" for name in ours):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("ours")
    copy_missing(tmp_path)
    folder = tmp_path / "notebooks"
    assert (folder / "reference/glossary.md").exists(), "chapters link to it"
    assert (folder / "start/one.py").exists(), "the chapter imports it"
    assert not (folder / "conftest.py").exists()
    (folder / "start/one.ipynb").write_text("the reader's")
    copy_missing(tmp_path)
    assert (folder / "start/one.ipynb").read_text() == "the reader's"
    assert (tmp_path / "book/start/one.ipynb").read_text() == "ours"


def test_an_interrupted_copy_is_made_again(tmp_path, monkeypatch):
    def interrupted(source: Path, target: Path) -> None:
        target.write_text("ou")
        raise KeyboardInterrupt

    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "one.ipynb").write_text("ours")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copy_missing(tmp_path)
    copy_missing(tmp_path)
    assert (tmp_path / "notebooks" / "one.ipynb").read_text() == "ours"


@pytest.mark.parametrize(
    ("given", "opened"),
    [(["--port", "9999"], FIRST), (["museum", "--port", "9999"], "book/surprises/museum.ipynb")],
)
def test_the_value_of_jupyterlabs_option_is_not_taken_for_a_chapter(given, opened, monkeypatch):
    started = []
    monkeypatch.setattr(sys, "argv", ["notebook", *given])
    monkeypatch.setattr(notebook, "copy_missing", lambda root: None)
    monkeypatch.setattr(notebook.os, "execve", lambda _, command, __: started.append(command))
    notebook.main()
    (command,) = started
    assert f"/lab/tree/{opened.removeprefix('book/')}" in " ".join(command)
    assert command[-2:] == ["--port", "9999"]


@pytest.mark.parametrize("path", notebooks_of(ROOT), ids=str)
def test_a_copy_is_as_deep_as_its_notebook_so_that_its_relative_paths_hold(path):
    assert len(place_of_copy(path).parts) == len(path.parts)
    assert place_of_copy(path).name == path.name


@pytest.fixture
def jupyterlab(tmp_path: Path) -> Iterator[tuple[psutil.Process, str]]:
    """JupyterLab on a project of one chapter, and the address that it printed."""
    chapter = tmp_path / FIRST
    chapter.parent.mkdir(parents=True)
    (tmp_path / "labs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    nbformat.write(nbformat.v4.new_notebook(), chapter)
    command = [sys.executable, "-m", "labkit.book.notebook", "--no-browser"]
    with open(tmp_path / "log", "w") as log:
        started = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    server = psutil.Process(started.pid)
    try:
        deadline = time.monotonic() + 120
        while not (said := ADDRESS.search((tmp_path / "log").read_text())):
            assert started.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        yield server, said[0]
    finally:
        family = [server, *server.children(recursive=True)]
        started.terminate()
        started.wait(60)
        assert psutil.wait_procs(family, 30)[1] == []


def test_jupyterlab_listens_on_loopback_and_its_kernel_is_this_python(jupyterlab):
    server, address = jupyterlab
    port, path, token = ADDRESS.fullmatch(address).groups()
    assert path == "start/what_is_averaged.ipynb"
    listening = [c.laddr for c in server.net_connections("tcp") if c.status == "LISTEN"]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert int(port) in {address.port for address in listening}

    def ask(what: str, body: bytes | None = None) -> dict:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/api/{what}", body)
        request.add_header("Authorization", f"token {token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    assert ask(f"contents/{path}?content=0")["type"] == "notebook"
    assert ask("kernels", b'{"name": "python3"}')["name"] == "python3"
    kernels = [one for one in server.children() if "ipykernel_launcher" in " ".join(one.cmdline())]
    assert [one.cmdline()[0] for one in kernels] == [sys.executable]
