"""What a solution may use without a person's look: a list of what is allowed, with nothing built.

A solution's process belongs to the student, so nothing that it records is proof, and no list of
forbidden names is complete. Allowed are imports from a list, the public names of these modules and
of plain values, and what the solution defines for itself. Everything else that it names is told,
with its line: it is graded all the same.
"""

import ast
import builtins
import functools
import importlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from grader.source import parse


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MODULES = _words("""
torch torch.distributed torch.distributed.device_mesh torch.nn torch.nn.init torch.nn.functional
torch.nn.utils torch.autograd torch.optim torch.func torch.linalg torch.futures torch.cuda
torch.random torch.autograd.graph torch.autograd.functional torch.utils torch.utils.checkpoint
torch.utils.hooks numpy math functools itertools collections contextlib dataclasses typing
threading time random copy abc enum queue heapq bisect operator statistics concurrent.futures
collections.abc __future__ asyncio string numbers warnings
""")
# Functions on tensors whose names begin with an underscore all the same.
_PRIVATE = _words("""
_coalescing_manager _flatten_dense_tensors _functional_collectives _unflatten_dense_tensors
_utils
""")
# Names of these that reach files, processes, frames, code, other modules' names, communication that
# is not recorded, or torch's own answers.
_DENIED = _words("""
ABCMeta CUDAPluggableAllocator DataParallel DataSource DistributedDataParallel EnumMeta EnumType
FileStore Formatter ForwardRef FunctionType GroupMember HashStore Logger NamedTupleMeta PrefixStore
ProcessGroupGloo ProcessPoolExecutor PyTorchFileReader PyTorchFileWriter Reducer Store TCPStore
_bootstrap _bootstrap_inner _get_backend _invoke_excepthook attrgetter breakpoint call_soon
catch_warnings compile create_subprocess_exec create_subprocess_shell dispatch_table dump dumps
evaluate_forward_ref excepthook formatwarning from_file fromfile fromregex genfromtxt get_args
get_asyncgen_hooks get_file_path get_group_store get_origin get_type_hints global_enum
import_ir_module import_ir_module_from_buffer init_process_group load loadtxt make_dataclass memmap
methodcaller mro open_connection open_unix_connection register register_object
register_rendezvous_handler remote_parameters rendezvous safe_get_attr save savetxt savez
savez_compressed set_default_tensor_type set_module setprofile setprofile_all_threads settrace
settrace_all_threads showwarning singledispatch singledispatchmethod start_server start_unix_server
storage subprocess_exec subprocess_shell test tofile typename update_wrapper wraps
""")
_VALUES = (
    int,
    float,
    complex,
    str,
    bytes,
    list,
    dict,
    set,
    tuple,
    range,
    slice,
    Exception,
    property,
)
_NO_BUILTINS = _words("""
breakpoint compile dir eval exec globals help input locals memoryview open vars
""")
_BY_NAME = {"getattr", "setattr", "delattr", "hasattr"}
# Special methods and names that a solution may define and use.
_METHODS = _words("""
__add__ __aenter__ __aexit__ __aiter__ __all__ __anext__ __await__ __bool__ __call__
__contains__ __delitem__ __enter__ __eq__ __exit__ __float__ __ge__ __getitem__ __gt__ __hash__
__index__ __init__ __int__ __iter__ __le__ __len__ __lt__ __main__ __mul__ __name__ __ne__
__neg__ __new__ __next__ __post_init__ __radd__ __repr__ __rmul__ __rsub__ __setitem__ __slots__
__str__ __sub__ __truediv__
""")
_OF_BASES = {"__setattr__": 2, "__getattr__": 1, "__delattr__": 1}  # how many arguments
_GIVEN = {"torch", "dist", "nn"}
_MOST = 5  # that are told of one cell


def unusual(source: str, known: str = "") -> list[str]:
    """What `source` names beyond what is allowed: "line 3: open". The first few, in order.

    `known`: the teacher's code, whose names a solution may use, too.
    """
    try:
        tree, given = parse(source), parse(known)
        used = {node.attr for node in ast.walk(given) if isinstance(node, ast.Attribute)}
        found = set(_Solution(tree, _own(tree) | _own(given) | used).told())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it will not run either
        return []
    told = [f"line {line}: {what[:60]}" for line, what in sorted(found)]
    return told[:_MOST] + [f"{len(told) - _MOST} more"] * (len(told) > _MOST)


@functools.cache
def _allowed() -> frozenset[str]:
    """The public names of the allowed modules, of their classes, and of plain values.

    A module in them is allowed by its name only if it is on the list. Imports torch: 2 s.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.hooks import RemovableHandle

    found = {part for name in _MODULES for part in name.split(".")} | _PRIVATE
    for name in _MODULES:
        inside = vars(importlib.import_module(name))
        found |= {key for key, one in inside.items() if not issubclass(type(one), types.ModuleType)}
    found |= {"all_gather_tensor", "reduce_scatter_tensor", "wait_tensor", "all_to_all_single"}
    classes = [torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.nn.Embedding, torch.optim.SGD]
    classes += [torch.Generator, torch.Size, torch.dtype, torch.device, torch.futures.Future]
    classes += [torch.UntypedStorage, torch.autograd.Function, torch.autograd.function.FunctionCtx]
    classes += [torch.autograd.graph.Node, torch.nn.ModuleDict, torch.nn.ModuleList, dist.Work]
    classes += [dist.ReduceOp, dist.DeviceMesh, RemovableHandle, torch.finfo, dist.ProcessGroup]
    for name in ("threading", "collections", "queue", "concurrent.futures", "random"):
        public = vars(importlib.import_module(name)).values()
        classes += [one for one in public if isinstance(one, type)]
    for one in (*classes, *_VALUES):
        found |= set(dir(one))
    found |= {"next_functions", "variable", "group", "WORLD", "ndarray", "saved_tensors", "grad"}
    found.add("run_until_complete")
    found |= {"weight", "bias", "in_features", "out_features", "num_embeddings", "embedding_dim"}
    found |= {name for name in dir(torch) if name.startswith("_foreach_")}
    private = {one for one in found if one.startswith("_") and not one.startswith("_foreach_")}
    return frozenset(found - (private - _PRIVATE) - _DENIED)


@functools.cache
def _patched() -> frozenset[str]:
    """Functions of modules and of threads that a solution need not replace in any object."""
    import torch.distributed as dist

    places = (dist, importlib.import_module("torch.nn.functional"), threading.Thread)
    found = [(key, value) for one in places for key, value in vars(one).items()]
    return frozenset(key for key, value in found if type(value) is types.FunctionType)


@functools.cache
def _reserved() -> frozenset[str]:
    """Names that lead out of a solution wherever they stand: no own attribute may bear one."""
    import torch

    roots = ["sys", "os", "inspect", "gc", "ctypes", "builtins", "importlib", "threading", "pickle"]
    roots += ["traceback", "torch._C", "torch._C._distributed_c10d", "torch.nn.parallel"]
    parts = ("fsdp", "optim", "tensor", "tensor.parallel", "algorithms.join", "distributed_c10d")
    roots += ["torch.distributed", *(f"torch.distributed.{part}" for part in parts)]
    found = {name for name in sys.stdlib_module_names if name not in _MODULES}
    for name in roots:  # not what happens to be loaded: the mark depends on the text alone
        inside = vars(importlib.import_module(name))
        found |= {key for key, value in inside.items() if callable(value)}
        found.add(name.rpartition(".")[2])
    kinds = [types.FrameType, types.CodeType, types.TracebackType, types.FunctionType, type]
    kinds += [types.GeneratorType, types.CoroutineType, types.CellType, types.ModuleType]
    kinds += [torch.UntypedStorage]
    found |= {name for kind in kinds for name in dir(kind)} - set(dir(str)) | _DENIED
    # Modules inside of torch whose names are a solution's own words, too. What is in them stays.
    return frozenset(found - _allowed() - {"_shard", "_tensor", "shard", "run", "rank", "logger"})


def _own(tree: ast.AST) -> set[str]:
    """The attributes that the code defines: by a class's body, or by storing them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        if isinstance(node, ast.Call) and len(node.args) == 3:  # object.__setattr__(self, "x", x)
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            named = getattr(node.args[1], "value", None)
            if called in ("setattr", "__setattr__") and isinstance(named, str):
                found.add(named)
        for one in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(one.name)
            targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
            found |= {name.id for part in targets if part is not None
                      for name in ast.walk(part) if isinstance(name, ast.Name)}  # fmt: skip
    return found


class _Solution:
    """What a solution's text binds, for the judgement of each place in it."""

    def __init__(self, tree: ast.AST, own: set[str]) -> None:
        self.tree, self.own, self.taken = tree, own, _taken(tree)
        self.plain = own | _looped(tree)
        self.above = {
            id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }

    def told(self) -> Iterator[tuple[int, str]]:
        """Each place, (line, what), where the code names something that is not allowed."""
        for node in ast.walk(self.tree):
            line = getattr(node, "lineno", 0)
            for key in ("name", "asname", "rest", "arg"):  # of whatever binds a name
                word = str(getattr(node, key, ""))
                if word.startswith("__") and word.endswith("__") and word not in _METHODS:
                    yield line, word
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((line, name) for name in _imported(node))
            elif isinstance(node, ast.Attribute):
                yield from ((line, what) for what in self._of_attribute(node))
            elif isinstance(node, ast.Name):
                yield from ((line, what) for what in self._of_name(node))
            elif isinstance(node, ast.MatchClass):
                yield from ((line, f".{key}") for key in node.kwd_attrs if not _may(key, self.own))
            elif isinstance(node, ast.ClassDef):
                yield from ((line, str(one.arg)) for one in node.keywords)
            elif isinstance(node, ast.Constant) and _leads_out(node.value):
                yield line, repr(node.value)

    def _call(self, node: ast.AST) -> ast.Call | None:
        """The call of `node`, if it is called."""
        above = self.above.get(id(node))
        return above if isinstance(above, ast.Call) and above.func is node else None

    def _of_attribute(self, node: ast.Attribute) -> Iterator[str]:
        root = _root(node)
        theirs = root in self.taken  # a module's names are never the solution's own
        may = _may(node.attr, set() if theirs else self.own)
        if not may and not _is_own_base(node, self._call(node)):
            yield f".{node.attr}"
        elif isinstance(node.ctx, ast.Store | ast.Del):
            of_class = ast.unparse(node.value).startswith("type(")
            if theirs or of_class or (node.attr in _patched() and root != "self"):
                yield f"changes {root}.{node.attr}"

    def _of_name(self, node: ast.Name) -> Iterator[str]:
        above, call = self.above.get(id(node)), self._call(node)
        user = getattr(getattr(above, "func", None), "id", "")
        if not _may_name(node, call, self.plain, above):
            yield node.id
        elif node.id == "type" and not self._only_compared(above):
            yield "type(…) kept"
        elif node.id in _GIVEN and isinstance(above, ast.Call) and user not in _BY_NAME:
            yield f"{node.id} passed on"

    def _only_compared(self, call: ast.AST | None) -> bool:
        """Whether the class that `type(x)` returns is compared, named, or called with one argument.

        Kept, it could be `type` itself, which makes classes with methods of any name.
        """
        user = self.above.get(id(call))
        if isinstance(user, ast.Call):
            by = getattr(user.func, "id", "")
            return by in ("isinstance", "issubclass") or (user.func is call and len(user.args) < 2)
        kinds = ast.Compare | ast.Attribute | ast.FormattedValue | ast.Subscript
        return not isinstance(call, ast.Call) or isinstance(user, kinds)


def _taken(tree: ast.AST) -> set[str]:
    """The names of modules, and of what is taken from them: by an import, or `F = torch.nn`."""
    found = set(_GIVEN)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _root(node.value) in found:
            found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return found


def _may(name: str, own: set[str]) -> bool:
    """Whether an attribute may be named: public and known, or the solution's own."""
    if name.startswith("__") and name.endswith("__"):
        return name in _METHODS
    return name in _allowed() or (name in own and name not in _reserved())


def _is_own_base(node: ast.Attribute, call: ast.Call | None) -> bool:
    """Whether it calls `super().__setattr__(name, value)` and the like, or `object.__setattr__`.

    With another number of arguments, `super()` in a class method gives these for any object.
    """
    if call is None or any(isinstance(one, ast.Starred) for one in call.args):
        return False
    if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
        return len(call.args) == _OF_BASES.get(node.attr)
    base = getattr(node.value, "id", "")
    return base == "object" and node.attr == "__setattr__" and not _changes_theirs(call)


def _changes_theirs(call: ast.Call) -> bool:
    """Whether `setattr(x, "all_reduce", …)` replaces a function of a module or of a thread."""
    return len(call.args) < 2 or getattr(call.args[1], "value", None) in _patched()


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _looped(tree: ast.AST) -> set[str]:
    """Variables that only loops bind, each with a "$"; none where a string could be built of parts.

    Such as `for name in names: delattr(layer, name)`.
    """
    import torch

    known, of_text = _own(tree) | _allowed(), set(dir(str)) - set(dir(torch.Tensor))
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        unknown = isinstance(text, str | bytes) and id(node) not in docs and text not in known
        by_call = getattr(node, "id", "") in ("chr", "str", "repr", "bytes", "bytearray")
        by_method = isinstance(node, ast.Attribute) and node.attr in of_text
        if unknown or by_call or by_method or isinstance(node, ast.JoinedStr):
            return set()
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For | ast.comprehension)]
    bound = {id(n): n.id for one in loops for n in ast.walk(one.target) if isinstance(n, ast.Name)}
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names = set(bound.values()) - {n.id for n in stored if id(n) not in bound}
    return {f"${name}" for name in names}


def _leads_out(text: Any) -> bool:
    """Whether a string is such a name, or a format that names one."""
    if not isinstance(text, str):
        return False
    whole = text.startswith("__") and text.endswith("__") and text not in _METHODS
    return whole or ("{" in text and "._" in text) or (text.startswith("_") and text in _reserved())


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names that an import takes and may not."""
    allowed = {*_MODULES, "torch.distributed._functional_collectives", "torch._utils"}
    if isinstance(node, ast.Import):
        return [one.name for one in node.names if one.name not in allowed]
    names = [f"{node.module}.{one.name}" for one in node.names]
    if node.level or node.module not in allowed:
        return names
    last = [name.rpartition(".")[2] for name in names]
    return [a for a, b in zip(names, last, strict=True) if b not in _allowed() and a not in allowed]


def _may_name(node: ast.Name, call: ast.Call | None, own: set[str], above: ast.AST | None) -> bool:
    """Whether a name may stand here. `getattr` may with a name that is written out."""
    if node.id in _BY_NAME:
        if call is None or len(call.args) < 2 or not _is_written_out(call.args[1], own):
            return False
        return node.id in ("getattr", "hasattr") or not _changes_theirs(call)
    if node.id == "type":
        return isinstance(above, ast.Subscript) or (call is not None and len(call.args) == 1)
    if node.id.startswith("__") and node.id.endswith("__"):
        return node.id in _METHODS
    return not (node.id in _NO_BUILTINS and hasattr(builtins, node.id)) or isinstance(
        node.ctx, ast.Store
    )


def _is_written_out(name: ast.AST, own: set[str]) -> bool:
    if isinstance(name, ast.Name):
        return f"${name.id}" in own
    return isinstance(name, ast.Constant) and isinstance(name.value, str) and _may(name.value, own)
