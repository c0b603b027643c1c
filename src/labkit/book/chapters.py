"""Run the book's chapters, either into a copy for the build or in place to store their outputs.

    python -m labkit.book.chapters execute             write an executed copy to _build/executed
    python -m labkit.book.chapters update [CHAPTER…]   run in place and store the outputs

`make test` compares the stored text of a chapter with the text it prints (nbval). `update`
stores outputs; nobody edits them by hand.
"""

import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from labkit.book import minutes
from labkit.launch.arguments import explained_by
from labkit.launch.forks import shared_server
from labkit.launch.kernels import AsyncKernelThroughFiles
from labkit.launch.memory import workers
from labkit.launch.scripts import project_root

EXECUTED = Path("_build/executed")  # from the project's root
# Longer than any cell should take, for a machine that is loaded.
CELL_TIMEOUT = 300
_END_WITHIN = 2.0  # seconds; then this process ends without its kernels' files being removed


def chapters_of(book: Path) -> list[Path]:
    """The chapters below `book`, sorted by name."""
    return sorted(p for p in book.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def notebooks_of(root: Path) -> list[Path]:
    """Every chapter and every assignment, relative to `root`."""
    found = [*chapters_of(root / "book"), *sorted((root / "labs/assignments").glob("*.ipynb"))]
    return [path.relative_to(root) for path in found]


def find(name: str, root: Path) -> Path:
    """The notebook that `name` stands for: its path, or its name with or without the suffix.

    Raises ValueError with all of them if there is no such notebook.
    """
    known = notebooks_of(root)
    for path in known:
        if name in (str(path), path.name, path.stem):
            return path
    names = "\n".join(f"  {path}" for path in known)
    raise ValueError(f"There is no notebook {name}. There are:\n{names}")


def execute(chapter: Path, clients: list[NotebookClient] | None = None) -> NotebookNode:
    """Run a chapter from its first to its last cell, in its own folder; return it with outputs.

    The kernel has one thread unless OMP_NUM_THREADS says otherwise: chapters run at once, and each
    starts several processes. Threads of several processes on one core would slow each other
    down.

    The client that runs it is appended to `clients`, so that another thread can end its kernel.
    Raises nbclient's CellExecutionError if a cell raises that is not tagged `raises-exception`.
    """
    notebook = nbformat.read(chapter, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(chapter.parent)}},
        kernel_manager_class=AsyncKernelThroughFiles,
    )
    if clients is not None:
        clients.append(client)
    client.execute(env={"OMP_NUM_THREADS": "1", **os.environ})
    return normalize(notebook)


def normalize(notebook: NotebookNode) -> NotebookNode:
    """Drop what differs between runs without meaning: times, kernel details, split streams."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _merge_streams(cell.outputs)
    notebook.metadata = NotebookNode(
        kernelspec=NotebookNode(display_name="Python 3", language="python", name="python3"),
        language_info=NotebookNode(name="python"),
    )
    return notebook


def _merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """One output per stream: timing decides how prints are split into messages."""
    merged: list[NotebookNode] = []
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        if output.output_type == "stream" and output.name in streams:
            streams[output.name].text += output.text
            continue
        if output.output_type == "stream":
            streams[output.name] = output
        merged.append(output)
    return merged


def write_chapter(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    nbformat.write(notebook, unfinished)
    unfinished.replace(path)


def copy_pages(book: Path, out: Path) -> None:
    """Copy the book without its chapters; remove pages that the book no longer has."""
    for path in out.rglob("*"):
        if path.is_file() and not (book / path.relative_to(out)).exists():
            path.unlink()
    ignore = shutil.ignore_patterns(
        "*.ipynb", "*.unfinished", "conftest.py", "ruff.toml", "__pycache__", ".*"
    )
    shutil.copytree(book, out, ignore=ignore, dirs_exist_ok=True)


def execute_book(book: Path, out: Path) -> None:
    """Copy `book` to `out` with every chapter executed. Exits with the name of a chapter that
    fails.
    """
    copy_pages(book, out)
    # The last parts have the longest chapters. They start first, so that no core is left with one.
    jobs = [(chapter, out / chapter.relative_to(book)) for chapter in reversed(chapters_of(book))]
    for _, target in jobs:
        target.unlink(missing_ok=True)  # what is stale must not be rendered after an interruption
    _run_all(jobs)


def update(chapters: Sequence[Path]) -> None:
    """Run chapters in place, store their outputs, and write their minutes."""
    _run_all([(chapter, chapter) for chapter in chapters])
    minutes.write([*chapters, project_root() / "book" / "index.md"])


def progress(done: int, jobs: int, name: str, seconds: float, elapsed: float) -> str:
    """One line for a chapter that has run: `[ 3/12] name … 16 s, about 40 s left`.

    `elapsed` is the time since the first chapter began. The remaining ones are assumed to take as
    long as the finished ones.
    """
    left = elapsed / done * (jobs - done)
    rounded = f"{left / 60:.0f} min" if left >= 90 else f"{max(5, round(left / 5) * 5)} s"
    ahead = f", about {rounded} left" if done < jobs else ""
    return f"[{done:{len(str(jobs))}}/{jobs}] {name} … {seconds:.0f} s{ahead}"


def _run_all(jobs: Sequence[tuple[Path, Path]]) -> None:
    began = time.monotonic()
    finished = itertools.count(1)
    one_line = threading.Lock()
    clients: list[NotebookClient] = []
    interrupted = threading.Event()

    def run(job: tuple[Path, Path]) -> str | None:
        chapter, target = job
        start = time.monotonic()
        failure = None
        try:
            write_chapter(execute(chapter, clients), target)
        except CellExecutionError as error:
            failure = f"{chapter}: a cell failed\n{error}"
        except Exception as error:  # a file that is no notebook has many ways to fail
            failure = f"{chapter}: {type(error).__name__}: {error}"
        now = time.monotonic()
        with one_line:
            if interrupted.is_set():
                return None
            name = chapter.stem + " failed" * (failure is not None)
            print(progress(next(finished), len(jobs), name, now - start, now - began), flush=True)
        return failure

    with shared_server(), ThreadPoolExecutor(max_workers=workers()) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        try:
            failures = [failure for future in futures if (failure := future.result())]
        except KeyboardInterrupt:
            interrupted.set()
            print("\nInterrupted: ending the chapters that run.", file=sys.stderr, flush=True)
            pool.shutdown(wait=False, cancel_futures=True)
            _end_kernels(clients, futures)
            sys.exit(130)
    if failures:
        sys.exit("\n\n".join(failures))


def _end_kernels(clients: Sequence[NotebookClient], running: Sequence[Future]) -> None:
    """Kill all kernels, and wait for the threads that run them; leave, if they take too long."""
    deadline = time.monotonic() + _END_WITHIN
    while not all(future.done() for future in running):
        for client in clients:
            process = getattr(getattr(client.km, "provisioner", None), "process", None)
            if process is not None:
                process.kill()
        if time.monotonic() > deadline:
            os._exit(130)  # the kernels end with this process
        time.sleep(0.1)


def main() -> None:
    parser = explained_by(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("execute", help="make an executed copy of the book")
    to_update = commands.add_parser("update", help="run chapters in place and store their outputs")
    to_update.add_argument("chapters", nargs="*", help="names or paths; default: all of them")
    arguments = parser.parse_args()
    try:
        root = project_root()
        if arguments.command == "execute":
            execute_book(root / "book", root / EXECUTED)
        else:
            update([_path(name, root) for name in arguments.chapters] or chapters_of(root / "book"))
    except (ValueError, OSError) as error:
        sys.exit(str(error))


def _path(name: str, root: Path) -> Path:
    path = Path(name)
    return path if path.exists() or len(path.parts) > 1 else root / find(name, root)


if __name__ == "__main__":
    main()
