"""Chapters are executed whole, written whole, and never over something else."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from processes import all_end, becomes

from labkit.book.chapters import copy_pages, execute_book, update


def notebook(path: Path, *sources: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_update_stores_what_the_cells_print_one_output_a_stream_and_a_wanted_error(tmp_path):
    source = (
        "import sys\nfor i in range(2):\n    print(i, flush=True)\n    print(i, file=sys.stderr)"
    )
    chapter = notebook(tmp_path / "c.ipynb", "x = 6", source, "x * 7", "1 / 0")
    wanted = nbformat.read(chapter, as_version=4)
    wanted.cells[-1].metadata.tags = ["raises-exception"]
    nbformat.write(wanted, chapter)
    update([chapter])
    _, printed, shown, raised = nbformat.read(chapter, as_version=4).cells
    assert {o.name: o.text for o in printed.outputs} == {"stdout": "0\n1\n", "stderr": "0\n1\n"}
    assert shown.outputs[0].data["text/plain"] == "42"
    assert [printed.execution_count, shown.execution_count] == [2, 3]
    assert "execution" not in printed.metadata
    assert raised.outputs[0].ename == "ZeroDivisionError"


def test_execute_copies_the_book_and_leaves_no_stale_copy_of_a_chapter_that_fails(tmp_path):
    chapter = notebook(tmp_path / "book" / "c.ipynb", "print(6 * 7)")
    (tmp_path / "book" / "page.md").write_text("a page")
    before = chapter.read_bytes()
    execute_book(tmp_path / "book", tmp_path / "out")
    copy = nbformat.read(tmp_path / "out" / "c.ipynb", as_version=4)
    assert copy.cells[0].outputs[0].text == "42\n"
    assert (tmp_path / "out" / "page.md").read_text() == "a page"
    assert chapter.read_bytes() == before
    for failing, said in (
        ("raise ValueError('the reason')", "the reason"),
        ("import os; os._exit(1)", "died"),
    ):
        notebook(chapter, failing)
        with pytest.raises(SystemExit, match=f"c.ipynb.*(?s:.*){said}"):
            execute_book(tmp_path / "book", tmp_path / "out")
        assert not (tmp_path / "out" / "c.ipynb").exists()


def test_ctrl_c_says_so_and_ends_the_chapters_that_run_within_seconds(tmp_path):
    waits = "import os, pathlib, time\npathlib.Path('pid').write_text(f'{os.getpid()}.')\n"
    for name in ("one", "two"):
        notebook(tmp_path / name / "c.ipynb", waits + "time.sleep(280)")
    command = [sys.executable, "-m", "labkit.book.chapters", "update", *tmp_path.glob("*/c.ipynb")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        pids = [tmp_path / name / "pid" for name in ("one", "two")]
        assert becomes(lambda: all(p.exists() and p.read_text()[-1:] == "." for p in pids), 200)
        kernels = [psutil.Process(int(p.read_text()[:-1])).pid for p in pids]
        running.send_signal(signal.SIGINT)
        began = time.monotonic()
        try:
            assert running.wait(60) == 130
        finally:
            running.kill()
        assert time.monotonic() - began < 20  # 3 on a quiet machine
        assert "Interrupted: ending the chapters that run." in running.stderr.read()
    assert all_end(kernels)


def test_copies_of_pages_lose_what_the_book_lost(tmp_path):
    book, out = tmp_path / "book", tmp_path / "out"
    (book / "sub").mkdir(parents=True)
    (book / "kept.md").write_text("kept")
    (book / "sub" / "chapter.ipynb").write_text("{}")
    copy_pages(book, out)
    (out / "old.ipynb").write_text("{}")
    (out / "gone").mkdir()
    (out / "gone" / "page.md").write_text("gone")
    copy_pages(book, out)
    assert [path.name for path in out.rglob("*") if path.is_file()] == ["kept.md"]
