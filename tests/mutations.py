"""Wrong answers to an exercise, made from right ones: by a change of their code, or around them.

Each mutant belongs to a *dimension*, what a check may be blind to:

    world      a number of ranks that is written into the code, or an effort on two ranks only
    number     another number in the code
    reduction  a sum, a mean, and a maximum in the place of each other; rank 0's tensor for all
    frozen     frozen parameters are left out
    operator   another arithmetic operator or comparison, a condition that is negated
    control    an early return, `break`, a loop without its first or its last turn
    statement  a statement that is missing, or there twice; a list without its first or last element
    result     another value, on all ranks or on the last; another type, dtype, or shape; no NaN
    arguments  changed in place: the first, middle, or last of them, on all ranks or on the last
    calls      the second call returns what the first did

The last three are of a function, or of each method of a class.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

SWAPPED = {
    "sum": ["mean", "amax"],
    "mean": ["sum"],
    "amax": ["amin"],
    "amin": ["amax"],
    "max": ["min"],
    "min": ["max"],
    "any": ["all"],
    "all": ["any"],
    "MAX": ["MIN", "SUM"],
    "MIN": ["MAX"],
    "SUM": ["MAX"],
    "square": ["abs"],
}
_PAIRS = (
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.Mod, ast.FloorDiv),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
)
OPERATORS = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


class NoMutantError(Exception):
    """What is called has or returns nothing of the kind that this mutant changes."""


class Mutant(NamedTuple):
    """A wrong answer: what to do with the right one's source, and with the answer itself."""

    title: str
    source: str
    around: Callable[[Any], Any] = lambda answer: answer


def mutants_of(source: str) -> Iterator[Mutant]:
    """Changes of the code, one at a time."""
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        for dimension, changed in _changes(node):
            mutated = copy.deepcopy(tree)
            place = list(ast.walk(mutated))[number]
            vars(place).clear()
            vars(place).update(vars(copy.deepcopy(changed)))
            place.__class__ = type(changed)
            text = ast.unparse(ast.fix_missing_locations(mutated))
            line = getattr(node, "lineno", 0)
            yield Mutant(f"{dimension}, line {line}: {_short(node, changed)}", text)


def _short(node: ast.AST, changed: ast.AST) -> str:
    before, after = (ast.unparse(one).replace("\n", " ⏎ ") for one in (node, changed))
    pairs = enumerate(zip(before, after, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
    return f"{before[max(0, same - 20) :][:50]} → {after[max(0, same - 20) :][:50]}"


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Call(func=ast.Attribute(attr="get_world_size")):
            yield from (("world", ast.Constant(n)) for n in (2, 3))
        case ast.Call(func=ast.Attribute(attr="get_rank")):
            yield "world", ast.Constant(0)
        case ast.Call(func=ast.Attribute(ast.Name("dist"), "all_reduce"), args=[tensor, *_]):
            options = [option for option in node.keywords if option.arg != "op"]
            function = _expression("dist.broadcast")
            yield "reduction", ast.Call(function, [tensor, ast.Constant(0)], options)
        case ast.Call(func=ast.Attribute(attr="parameters" | "named_parameters" as name), args=[]):
            one, of = ("p", "p") if name == "parameters" else ("(n, p)", "n, p")
            trained = f"({one} for {of} in {ast.unparse(node)} if p.requires_grad)"
            yield "frozen", _expression(trained)
        case ast.Constant(value=bool() | None):
            return
        case ast.Constant(value=int(value) | float(value)):
            yield "number", ast.Constant(value + 1)
            if value:
                yield "number", ast.Constant(value - 1 if isinstance(value, int) else value / 2)
        case ast.Attribute(attr=name) if name in SWAPPED:
            for other in SWAPPED[name]:
                yield "reduction", _with(node, attr=other)
        case ast.Name(id="sum" | "max" | "min" | "any" | "all" as name):
            yield "reduction", _with(node, id="max" if name == "sum" else SWAPPED[name][0])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            yield "operator", _with(node, op=OPERATORS[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            yield "operator", _with(node, ops=[OPERATORS[type(op)]()])
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "operator", operand
        case ast.If(test=test):
            yield "operator", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.For(iter=over, body=body):
            for part in ("[1:]", "[:-1]"):
                yield "control", _with(node, iter=_expression(f"list({ast.unparse(over)}){part}"))
            yield "control", _with(node, body=[*body, ast.Break()])
        case ast.Set(elts=[_, _, *_]) | ast.List(elts=[_, _, *_], ctx=ast.Load()):
            yield from (("statement", _with(node, elts=e)) for e in (node.elts[1:], node.elts[:-1]))
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if isinstance(block, list) and not isinstance(node, ast.Module | ast.ClassDef):
            yield from _other_statements(node, field, block)


def _other_statements(
    node: ast.AST, field: str, block: list[ast.stmt]
) -> Iterator[tuple[str, ast.AST]]:
    for n, statement in enumerate(block):
        rest = [*block[:n], *block[n + 1 :]] or [ast.Pass()]
        if not isinstance(statement, ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Pass):
            yield "statement", _with(node, **{field: rest})
        if isinstance(statement, ast.AugAssign) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        ):
            yield "statement", _with(node, **{field: [*block[:n], statement, *block[n:]]})
        if n and isinstance(node, ast.FunctionDef):
            returns = [*block[:n], ast.Return(None), *block[n:]]
            yield "control", _with(node, **{field: returns})


def _with(node: ast.AST, **changed: Any) -> ast.AST:
    other = copy.copy(node)
    vars(other).update(changed)
    return other


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


# --- around an answer -----------------------------------------------------------------------------


WHERE: dict[str, Callable[[int, int], bool]] = {
    "on all ranks": lambda rank, world: True,
    "on the last rank": lambda rank, world: rank == world - 1,
    "on three ranks or more": lambda rank, world: world > 2,
}


def mutants_around(source: str) -> Iterator[Mutant]:
    """What else is done with the arguments of a function, and with what it returns, if anything.

    If `source` ends with a class, of each of its methods.
    """
    answer = ast.parse(source).body[-1]
    if isinstance(answer, ast.FunctionDef):
        yield from _around(answer)
    for method in answer.body if isinstance(answer, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef) and method.name != "__init__":
            for mutant in _around(method):
                around = _of_method(method.name, mutant.around)
                yield mutant._replace(title=f"{method.name}, {mutant.title}", around=around)


def _of_method(name: str, around: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda answer: type(answer.__name__, (answer,), {name: around(getattr(answer, name))})


def _around(function: ast.FunctionDef) -> Iterator[Mutant]:
    nodes = list(ast.walk(function))
    held = {"", *(getattr(n, "attr", "").removeprefix("named_") for n in nodes)}
    returns = any(isinstance(n, ast.Return) and n.value is not None for n in nodes)
    for name, change in RESULTS.items() if returns else ():
        places = list(WHERE) if name in ("a little more", "another last element") else None
        for where in places or ["on all ranks"]:
            around = _then(lambda args, found, change=change: change(found), where)
            yield Mutant(f"result: {name}, {where}", "", around)
    for name, (of, damage) in DAMAGES.items():
        for where in ("on all ranks", "on the last rank") if of in held else ():
            yield Mutant(f"arguments: {name}, {where}", "", _then(damage, where))
    yield Mutant("calls: the second returns what the first did", "", _cached)


def _then(change: Callable[[Any, Any], Any], where: str) -> Callable[[Any], Any]:
    """An answer that then changes its arguments, or what it returns."""

    def around(answer: Any) -> Any:
        def mutant(*args: Any, **options: Any) -> Any:
            found, ranks = answer(*args, **options), dist.is_initialized()
            if not ranks and where == "on three ranks or more":
                raise NoMutantError
            rank, world = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
            return change(args, found) if WHERE[where](rank, world) else found

        return mutant

    return around


def _without_nan(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.nan_to_num()
    return found if found == found else 0.0


def _cached(answer: Any) -> Any:
    seen: list[Any] = []

    def mutant(*args: Any, **options: Any) -> Any:
        if not seen:
            seen.append(answer(*args, **options))
        return seen[0]

    return mutant


def _each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`change` of a number or a tensor, or of the first one in a tuple."""

    def changed(found: Any) -> Any:
        if isinstance(found, tuple) and found and not hasattr(found, "_fields"):
            return (changed(found[0]), *found[1:])
        if isinstance(found, Tensor | float | int) and not isinstance(found, bool):
            return change(found)
        raise NoMutantError

    return changed


def _element(place: int) -> Callable[[Any], Any]:
    def change(found: Any) -> Any:
        if isinstance(found, Tensor) and found.numel():
            changed = found.clone()
            changed.view(-1)[place] += 1
            return changed
        return found if isinstance(found, Tensor) else found + 1

    return change


def _tensors(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    def of_tensor(found: Any) -> Any:
        if isinstance(found, Tensor):
            return change(found)
        raise NoMutantError

    return _each(of_tensor)


RESULTS: dict[str, Callable[[Any], Any]] = {
    "a little more": _each(lambda found: found + found / 8 + 1e-3),
    "another first element": _each(_element(0)),
    "another last element": _each(_element(-1)),
    "NaN becomes a number": _each(_without_nan),
    "nothing": lambda found: None,
    "another dtype": _tensors(lambda t: t.half() if t.is_floating_point() else t.float()),
    "another shape": _tensors(lambda t: t.unsqueeze(-1)),
    "detached": _tensors(lambda t: t.detach()),
}


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a function's arguments; those of a module are its weights and buffers.

    An object with a module, or with a list of parameters, stands for these.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in tensors_in(one)]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    held = getattr(value, "module", None) or getattr(value, "parameters", None)
    return tensors_in(held) if isinstance(held, nn.Module | list) else []


def _element_of(of: str, tensor: float, element: float) -> tuple[str, Any]:
    """Changes one element: of the tensors and of its elements, 0 is the first and 1 the last."""

    @torch.no_grad()
    def damage(args: Any, found: Any) -> Any:
        if tensors := [t for t in _tensors_of(of, args) if t.numel()]:
            flat = tensors[int(tensor * (len(tensors) - 1))].view(-1)
            part = flat[int(element * (len(flat) - 1))]
            part += 1 + part.abs()
        return found

    return of, damage


def _tensors_of(of: str, args: Any) -> list[Tensor]:
    tensors = tensors_in(args)
    if not tensors:
        raise NoMutantError
    return [t.grad for t in tensors if t.grad is not None] if of == "grad" else tensors


def _every(of: str, change: Callable[[Tensor], Any]) -> tuple[str, Any]:
    def damage(args: Any, found: Any) -> Any:
        for tensor in _tensors_of(of, args):
            change(tensor)
        return found

    return of, damage


# What the code has to have, and what is done with the arguments.
DAMAGES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "the first element of the first tensor": _element_of("", 0, 0),
    "a middle element of a middle tensor": _element_of("", 0.5, 0.5),
    "the last element of the last tensor": _element_of("", 1, 1),
    "the last element of the first gradient": _element_of("grad", 0, 1),
    "the first element of the last gradient": _element_of("grad", 1, 0),
    "frozen parameters are trainable": _every(
        "parameters", lambda t: isinstance(t, nn.Parameter) and t.requires_grad_(True)
    ),
    "gradients without NaN": _every("grad", lambda t: t.nan_to_num_()),
    "gradients are clamped": _every("grad", lambda t: t.clamp_(-10, 10)),
}
