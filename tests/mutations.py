"""Wrong answers to an exercise, made from right ones: by a change of their code, or around them.

Each mutant belongs to a *dimension*, what a check may be blind to:

    world      a number of ranks that is written into the code, or an effort on two ranks only
    number     another number in the code
    reduction  a sum, a mean, and a maximum in the place of each other
    operator   another arithmetic operator or comparison, a condition that is negated
    control    an early return, `break`, a loop without its first or its last turn
    statement  a statement that is missing
    result     another value, on all ranks or on the last; another type, dtype, or shape; no NaN
    arguments  changed in place: the first or last of them, on all ranks or on the last
    calls      the second call returns what the first did
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


class Mutant(NamedTuple):
    """A wrong answer: what to do with the right one's source, and with the answer itself."""

    dimension: str
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
            yield Mutant(dimension, f"{dimension}, line {line}: {_short(node, changed)}", text)


def _short(node: ast.AST, changed: ast.AST) -> str:
    before, after = (ast.unparse(one).replace("\n", " ⏎ ") for one in (node, changed))
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
    return f"{before[max(0, same - 20) :][:50]} → {after[max(0, same - 20) :][:50]}"


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Call(func=ast.Attribute(attr="get_world_size")):
            yield from (("world", ast.Constant(n)) for n in (2, 3))
        case ast.Call(func=ast.Attribute(attr="get_rank")):
            yield "world", ast.Constant(0)
        case ast.Constant(value=bool() | None):
            return
        case ast.Constant(value=int(value) | float(value)):
            yield "number", ast.Constant(value + 1)
            if value:
                yield "number", ast.Constant(value - 1 if isinstance(value, int) else value / 2)
        case ast.Attribute(attr=name) if name in SWAPPED:
            for other in SWAPPED[name]:
                yield "reduction", _with(node, attr=other)
        case ast.Name(id=name, ctx=ast.Load()) if name in ("sum", "max", "min", "any", "all"):
            yield "reduction", _with(node, id={"sum": "max", **_FIRST}[name])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield "operator", _with(node, op=OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield "operator", _with(node, op=OPERATORS[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            yield "operator", _with(node, ops=[OPERATORS[type(op)]()])
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "operator", operand
        case ast.If(test=test):
            yield "operator", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.For(iter=over, body=body):
            for part in ("[1:]", "[:-1]"):
                yield "control", _with(node, iter=ast.parse(f"list({ast.unparse(over)}){part}"))
            yield "control", _with(node, body=[*body, ast.Break()])
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if isinstance(block, list) and not isinstance(node, ast.Module | ast.ClassDef):
            yield from _without_statements(node, field, block)


_FIRST = {name: others[0] for name, others in SWAPPED.items() if name != "sum"}


def _without_statements(
    node: ast.AST, field: str, block: list[ast.stmt]
) -> Iterator[tuple[str, ast.AST]]:
    for n, statement in enumerate(block):
        rest = [*block[:n], *block[n + 1 :]] or [ast.Pass()]
        if not isinstance(statement, ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Pass):
            yield "statement", _with(node, **{field: rest})
        if n and isinstance(node, ast.FunctionDef):
            returns = [*block[:n], ast.Return(None), *block[n:]]
            yield "control", _with(node, **{field: returns})


def _with(node: ast.AST, **changed: Any) -> ast.AST:
    fields = {name: changed.get(name, value) for name, value in ast.iter_fields(node)}
    for name, value in fields.items():
        if isinstance(value, ast.Module):
            fields[name] = value.body[0].value
    return ast.copy_location(type(node)(**fields), node)


# --- around an answer -----------------------------------------------------------------------------


def _last() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def _many() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 2


WHERE = {
    "on all ranks": lambda: True,
    "on the last rank": _last,
    "on three ranks or more": _many,
}


def mutants_around(source: str) -> Iterator[Mutant]:
    """What else is done with the arguments of a function, and with what it returns, if anything."""
    nodes = list(ast.walk(ast.parse(source)))
    returns = any(isinstance(n, ast.Return) and n.value is not None for n in nodes)
    for name, change in RESULTS.items() if returns else ():
        places = WHERE if name in ("a little more", "another last element") else ["on all ranks"]
        for where in places:
            yield Mutant("result", f"result: {name}, {where}", "", _returning(change, WHERE[where]))
    modules = any(getattr(n, "attr", "") in ("parameters", "named_parameters") for n in nodes)
    gradients = any(getattr(n, "attr", "") == "grad" for n in nodes)
    for name, damage in DAMAGES.items():
        if (damage in OF_MODULES and not modules) or (damage in OF_GRADIENTS and not gradients):
            continue
        for where in ("on all ranks", "on the last rank"):
            around = _damaging(damage, WHERE[where])
            yield Mutant("arguments", f"arguments: {name}, {where}", "", around)
    yield Mutant("calls", "calls: the second returns what the first did", "", _cached)


def _returning(change: Callable[[Any], Any], where: Callable[[], bool]) -> Callable[[Any], Any]:
    def around(answer: Any) -> Any:
        def mutant(*args: Any, **options: Any) -> Any:
            found = answer(*args, **options)
            return change(found) if where() else found

        return mutant

    return around


def _damaging(damage: Callable[[Any], None], where: Callable[[], bool]) -> Callable[[Any], Any]:
    def around(answer: Any) -> Any:
        def mutant(*args: Any, **options: Any) -> Any:
            found = answer(*args, **options)
            if where():
                with torch.no_grad():
                    damage(args)
            return found

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
    """`change` of a number or a tensor, or of the first one in a tuple; anything else stays."""

    def changed(found: Any) -> Any:
        if isinstance(found, tuple) and found and not hasattr(found, "_fields"):
            return (changed(found[0]), *found[1:])
        number = isinstance(found, Tensor | float | int) and not isinstance(found, bool)
        return change(found) if number else found

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
    return _each(lambda found: change(found) if isinstance(found, Tensor) else found)


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
    """All tensors of a function's arguments; those of a module are its weights and buffers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in tensors_in(one)]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    return []


def _damage(pick: Callable[[Any], list[Tensor]], tensor: int, element: int) -> Any:
    def damage(args: Any) -> None:
        if found := [t for t in pick(args) if t.numel()]:
            part = found[tensor].view(-1)[element]
            part += 1 + part.abs()

    return damage


def _gradients_in(value: Any) -> list[Tensor]:
    return [t.grad for t in tensors_in(value) if t.grad is not None]


def _floats_in(value: Any) -> list[Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point()]


_last_of_first_gradient = _damage(_gradients_in, 0, -1)
_first_of_last_gradient = _damage(_gradients_in, -1, 0)


def _unfreeze(args: Any) -> None:
    for tensor in _floats_in(args):
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(True)


def _flush(args: Any) -> None:
    for tensor in _gradients_in(args):
        tensor.nan_to_num_()


def _clamp(args: Any) -> None:
    for tensor in _gradients_in(args):
        tensor.clamp_(-10, 10)


DAMAGES: dict[str, Callable[[Any], None]] = {
    "the first element of the first tensor": _damage(tensors_in, 0, 0),
    "the last element of the last tensor": _damage(tensors_in, -1, -1),
    "the last element of the first gradient": _last_of_first_gradient,
    "the first element of the last gradient": _first_of_last_gradient,
    "frozen parameters are trainable": _unfreeze,
    "gradients without NaN": _flush,
    "gradients are clamped": _clamp,
}
OF_MODULES = {_unfreeze}
OF_GRADIENTS = {_flush, _clamp, _last_of_first_gradient, _first_of_last_gradient}
