"""The built book is served at one quiet address."""

import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from labkit.book.serve import server


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("the front page")
    return tmp_path


def test_a_port_that_is_taken_is_replaced_by_a_free_one(site):
    with server(site, 0) as first, server(site, first.server_port) as second:
        assert second.server_port != first.server_port
        threading.Thread(target=second.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{second.server_port}/") as answer:
            assert answer.read() == b"the front page"
        second.shutdown()


def test_it_prints_one_line_with_the_address_and_nothing_for_requests(site):
    command = [sys.executable, "-m", "labkit.book.serve", str(site), "--port", "0"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as running:
        line = running.stdout.readline()
        address = line.split()[2]
        with urllib.request.urlopen(address) as answer:
            assert answer.read() == b"the front page"
        running.send_signal(signal.SIGINT)
        rest, errors = running.communicate(timeout=20)
    assert line == f"The book: {address} (Ctrl-C ends it)\n"
    assert (rest.strip(), errors, running.returncode) == ("", "", 0)


def test_a_port_that_does_not_exist_is_refused_in_words(site):
    command = [sys.executable, "-m", "labkit.book.serve", str(site), "--port", "99999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Port 99999 cannot be used: ")
    assert "Traceback" not in done.stderr


def test_a_download_that_the_browser_gives_up_prints_nothing(site, capfd):
    with server(site, 0) as running:
        for error in (ConnectionResetError, ValueError):
            try:
                raise error
            except error:
                running.handle_error(None, ("127.0.0.1", 1))
    printed = capfd.readouterr().err
    assert "ConnectionResetError" not in printed
    assert "ValueError" in printed


def test_without_a_book_it_says_how_to_build_one(tmp_path):
    command = [sys.executable, "-m", "labkit.book.serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "make book builds it" in done.stderr
