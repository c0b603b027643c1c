"""What a solution may use without a person's look: a list of what is allowed, with nothing built.

A solution's process belongs to the student, so nothing that it records is proof, and no list of
forbidden names is complete. Allowed are imports from a list, the public names of these modules and
of plain values, and what the solution defines for itself. Everything else that it names is told,
with its line: it is graded all the same.
"""

import ast
import asyncio
import functools
import importlib
import re
import sys
import types
from collections.abc import Iterator, Set

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
ABCMeta Backend CUDAPluggableAllocator DataParallel DataSource DistributedDataParallel EnumMeta
EnumType FileStore Formatter ForwardRef FunctionType GroupMember HashStore Logger NamedTupleMeta
PrefixStore ProcessGroupGloo ProcessPoolExecutor PyTorchFileReader PyTorchFileWriter Reducer Store
TCPStore _bootstrap _bootstrap_inner _get_backend _invoke_excepthook attrgetter breakpoint
call_soon catch_warnings compile create_subprocess_exec create_subprocess_shell dispatch_table dump
dumps evaluate_forward_ref excepthook formatwarning from_file fromfile fromregex genfromtxt
get_args get_asyncgen_hooks get_file_path get_group_store get_origin get_type_hints global_enum
import_ir_module import_ir_module_from_buffer init_process_group load loadtxt make_dataclass memmap
methodcaller mro open_connection open_unix_connection register register_object
register_rendezvous_handler remote_parameters rendezvous safe_get_attr save savetxt savez
savez_compressed set_default_tensor_type set_module setprofile setprofile_all_threads settrace
settrace_all_threads showwarning singledispatch singledispatchmethod start_server start_unix_server
storage subprocess_exec subprocess_shell test tofile typename update_wrapper wraps
""")
_VALUES = [int, float, complex, str, bytes, list, dict, set, tuple, range, slice, Exception]
_NO_BUILTINS = _words("""
breakpoint compile copyright credits dir eval exec globals help input license locals memoryview open
vars
""")
# Messages that no record shows. A method of the solution's own may have such a name.
_UNRECORDED = _words("""
P2POp batch_isend_irecv irecv isend recv recv_anysource recv_object_list send send_object_list
""")
_ENUMS = _words("Enum Flag IntEnum IntFlag ReprEnum StrEnum")  # called, each makes a class
_BY_NAME = {"getattr", "setattr", "delattr", "hasattr"}
# Special methods and names that a solution may define and use.
_METHODS = _words("""
__add__ __aenter__ __aexit__ __aiter__ __all__ __anext__ __await__ __bool__ __call__
__contains__ __delitem__ __enter__ __eq__ __exit__ __float__ __ge__ __getitem__ __gt__ __hash__
__index__ __init__ __int__ __iter__ __le__ __len__ __lt__ __main__ __mul__ __name__ __ne__
__neg__ __new__ __next__ __post_init__ __radd__ __repr__ __rmul__ __rsub__ __setitem__ __slots__
__str__ __sub__ __truediv__
""")
_SUBMODULES = {name.rpartition(".")[2] for name in _MODULES if "." in name}
_LOOKS_UP = re.compile(r"\{[^{}:!]*[.\[]")  # a format that reads an attribute or an item
_OF_BASES = {"__setattr__": 2, "__getattr__": 1, "__delattr__": 1}  # how many arguments
_GIVEN = {"torch", "dist", "nn"}


def unusual(source: str, known: str = "") -> list[str]:
    """What `source` names beyond what is allowed: "line 3: open". The first few, in order.

    `known`: the teacher's code, whose names a solution may use, too.
    """
    try:
        tree, given = parse(source), parse(known)
    except (SyntaxError, ValueError):  # it will not run either
        return []
    except (RecursionError, MemoryError):
        return ["nested too deeply to be read"]
    found = set(_Solution(tree, given).told())
    return first_few([f"line {line}: {what[:60]}" for line, what in sorted(found)])


def first_few(told: list[str]) -> list[str]:
    """The first five, and how many more there are."""
    return told[:5] + [f"{len(told) - 5} more"] * (len(told) > 5)


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
    for one in (*classes, *_VALUES, property):
        found |= set(dir(one))
    found |= {"next_functions", "variable", "group", "WORLD", "ndarray", "saved_tensors", "grad"}
    found.add("run_until_complete")
    found |= {"weight", "bias", "in_features", "out_features", "num_embeddings", "embedding_dim"}
    found |= {name for name in dir(torch) if name.startswith("_foreach_")}
    private = {one for one in found if one.startswith("_") and not one.startswith("_foreach_")}
    return frozenset(found - (private - _PRIVATE) - _DENIED - _UNRECORDED)


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
    own = {"_shard", "_tensor", "shard", "run", "rank", "logger"} | _UNRECORDED
    return frozenset(found - _allowed() - own)


@functools.cache
def _theirs() -> frozenset[str]:
    """What objects of torch and of event loops have: of others than itself, not a solution's own.

    Whether `other._x` is an object of the solution's own, the text does not say.
    """
    import torch

    classes = [torch.Tensor, torch.nn.Module, torch.autograd.graph.Node]
    for name in ("torch._C._distributed_c10d", "torch.distributed", "asyncio", "threading"):
        found = vars(importlib.import_module(name)).values()
        classes += [one for one in found if issubclass(type(one), type)]
    names = {name for one in classes for name in dir(one) if name.startswith("_")}
    loops = [asyncio.AbstractEventLoop, asyncio.Transport, asyncio.StreamWriter, asyncio.Task]
    return frozenset(names.union(_UNRECORDED, *map(dir, loops)))


class _Bound:
    """What a text binds: names, and the attributes of its own objects."""

    def __init__(self, tree: ast.AST) -> None:
        self.own: set[str] = set()  # attributes: by a class's body, or by storing them
        self.modules, self.taken = set(_GIVEN), set(_GIVEN)  # names of modules; and from them
        self.methods: set[str] = set()  # "Class.method"
        self.receivers: set[int] = set()  # places where a method names its own object
        for node in [*ast.walk(tree)] * 2:  # an import may be further in than its use
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {(one.asname or one.name).partition(".")[0] for one in node.names}
                self.taken |= names
                self.modules |= names if isinstance(node, ast.Import) else set()
            elif isinstance(node, ast.Assign):
                names = {one.id for one in node.targets if isinstance(one, ast.Name)}
                self.taken |= names if _root(node.value) in self.taken else set()
                self.modules |= names if getattr(node.value, "id", "") in self.modules else set()
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.own.add(node.attr)
            elif isinstance(node, ast.Call) and len(node.args) == 3:  # setattr(x, "name", value)
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                self.own |= {_text(node.args[1])} if called in ("setattr", "__setattr__") else set()
            elif isinstance(node, ast.ClassDef):
                self._read_class(node)

    def _read_class(self, node: ast.ClassDef) -> None:
        for one in node.body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.own.add(one.name)
            targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
            self.own |= {name.id for part in targets if part is not None
                         for name in ast.walk(part) if isinstance(name, ast.Name)}  # fmt: skip
            by = {getattr(name, "id", "") for name in getattr(one, "decorator_list", ())}
            arguments = getattr(getattr(one, "args", None), "args", ())
            if arguments and not by & {"staticmethod", "classmethod"}:
                self.methods.add(f"{node.name}.{one.name}")
                names = [name for name in ast.walk(one) if isinstance(name, ast.Name)]
                self.receivers |= {id(name) for name in names if name.id == arguments[0].arg}


class _Solution(_Bound):
    """A solution's text, for the judgement of each place in it."""

    def __init__(self, tree: ast.AST, given: ast.AST) -> None:
        super().__init__(tree)
        theirs = _Bound(given).own
        self.tree, self.given = tree, theirs - _allowed()
        self.own |= theirs | {one.attr for one in ast.walk(given) if isinstance(one, ast.Attribute)}
        self.of_others = self.own - _theirs()
        self.looped = _looped(tree)
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
            elif isinstance(node, ast.Constant) and _leads_out(_text(node)):
                if not isinstance(self.above[id(node)], ast.Expr):  # a docstring
                    yield line, repr(node.value)
            elif isinstance(node, ast.Call) and len(node.args + node.keywords) > 1:
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                yield from [(line, f"{called}(…)")] * (called in _ENUMS)

    def _call(self, node: ast.AST) -> ast.Call | None:
        """The call of `node`, if it is called."""
        above = self.above.get(id(node))
        return above if isinstance(above, ast.Call) and above.func is node else None

    def _of_attribute(self, node: ast.Attribute) -> Iterator[str]:
        root, mine, call = _root(node), id(node.value) in self.receivers, self._call(node)
        theirs = root in self.taken  # a module's names are never the solution's own
        own = set() if theirs else self.own if mine else self.of_others
        if not _may(node.attr, own) and not self._is_own_base(node, call):
            yield f".{node.attr}"
        elif isinstance(node.ctx, ast.Store | ast.Del):
            of_class = getattr(getattr(node.value, "func", None), "id", "") == "type"
            if theirs or of_class or (node.attr in self.given and not mine):
                yield f"changes {root}.{node.attr}"
        elif node.attr in ("format", "format_map") and not isinstance(node.value, ast.Constant):
            yield f".{node.attr} of a text that is not written out"
        elif f"{root}.{node.attr}" in self.methods and not (call and self._is_given_self(call)):
            yield f"{root}.{node.attr} of any object"
        elif node.attr in _SUBMODULES and root in self.modules and self._is_passed_on(node):
            yield f"{root}.{node.attr} passed on"

    def _is_given_self(self, call: ast.Call) -> bool:
        return bool(call.args) and id(call.args[0]) in self.receivers

    def _is_passed_on(self, node: ast.AST) -> bool:
        """Whether a module goes where the text does not follow it."""
        above = self.above.get(id(node))
        if isinstance(above, ast.Assign):
            return not all(isinstance(one, ast.Name) for one in above.targets)
        by_name = isinstance(above, ast.Call) and getattr(above.func, "id", "") in _BY_NAME
        called = isinstance(above, ast.Call) and above.func is node
        return not (isinstance(above, ast.Attribute) or by_name or called)

    def _of_name(self, node: ast.Name) -> Iterator[str]:
        word, call, loads = node.id, self._call(node), isinstance(node.ctx, ast.Load)
        if word in _BY_NAME:
            may = call is not None and self._may_by_name(word, call)
        elif word == "type":
            may = call is not None and len(call.args) == 1 and self._only_compared(call)
        elif word.startswith("__") and word.endswith("__"):
            may = word in _METHODS
        else:
            may = not (loads and word in _NO_BUILTINS)
        if not may:
            yield word
        elif word in self.modules and loads and self._is_passed_on(node):
            yield f"{word} passed on"

    def _may_by_name(self, word: str, call: ast.Call) -> bool:
        """Whether `getattr(x, "name")` and the like may: with a name that is written out."""
        if len(call.args) < 2:
            return False
        given, name, theirs = call.args[1], _text(call.args[1]), _root(call.args[0]) in self.taken
        changes = word in ("setattr", "delattr") and not self._is_given_self(call)
        if (changes and (theirs or name in self.given)) or name in ("format", "format_map"):
            return False
        if isinstance(given, ast.Name):
            return given.id in self.looped
        return bool(name) and _may(name, set() if theirs else self.of_others)

    def _only_compared(self, call: ast.AST | None) -> bool:
        """Whether the class that `type(x)` returns is compared, named, or an index.

        Kept or called, it could be `type` itself, which makes classes with methods of any name.
        """
        user = self.above.get(id(call))
        if isinstance(user, ast.Call):
            return getattr(user.func, "id", "") in ("isinstance", "issubclass")
        if isinstance(user, ast.Subscript):
            return user.slice is call
        return isinstance(user, ast.Compare | ast.Attribute | ast.FormattedValue)

    def _is_own_base(self, node: ast.Attribute, call: ast.Call | None) -> bool:
        """Whether it calls `super().__setattr__(name, value)` and the like, of its own object.

        With another number of arguments, `super()` in a class method gives these for any object.
        """
        if call is None or any(isinstance(one, ast.Starred) for one in call.args):
            return False
        if getattr(getattr(node.value, "func", None), "id", "") == "super":
            return len(call.args) == _OF_BASES.get(node.attr)
        return _root(node) + node.attr == "object__setattr__" and self._is_given_self(call)


def _may(name: str, own: Set[str]) -> bool:
    """Whether an attribute may be named: public and known, or the solution's own."""
    if name.startswith("__") and name.endswith("__"):
        return name in _METHODS
    return name in _allowed() or (name in own and name not in _reserved())


def _text(node: ast.AST) -> str:
    """The string that is written here; empty if none is."""
    text = getattr(node, "value", None)
    return text if isinstance(node, ast.Constant) and isinstance(text, str) else ""


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _looped(tree: ast.AST) -> set[str]:
    """Variables that only loops bind; none where a string could be built of parts.

    Such as `for name in names: delattr(layer, name)`.
    """
    import torch

    of_text = set(dir(str)) - set(dir(torch.Tensor))
    known = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    known |= {id(n.args[1]) for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args[1:]}
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        made = getattr(node, "id", "") in ("chr", "str", "repr", "bytes", "bytearray")
        made = made or isinstance(node, ast.JoinedStr) or getattr(node, "attr", "") in of_text
        if made or (text and id(node) not in known):
            return set()
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For | ast.comprehension)]
    bound = {id(n): n.id for one in loops for n in ast.walk(one.target) if isinstance(n, ast.Name)}
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return set(bound.values()) - {n.id for n in stored if id(n) not in bound}


def _leads_out(text: str) -> bool:
    """Whether a string is such a name, or a format that names one."""
    whole = text.startswith("__") and text.endswith("__") and text not in _METHODS
    return whole or bool(_LOOKS_UP.search(text)) or (text[:1] == "_" and text in _reserved())


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names that an import takes and may not."""
    allowed = {*_MODULES, "torch.distributed._functional_collectives", "torch._utils"}
    if isinstance(node, ast.Import):
        return [one.name for one in node.names if one.name not in allowed]
    known = _allowed() if not node.level and node.module in allowed else ()
    names = {f"{node.module}.{one.name}": one.name in known for one in node.names}
    return [name for name, may in names.items() if not may and not (known and name in allowed)]
