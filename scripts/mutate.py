"""Mutants of a Python file: copies of its syntax tree in which one operator, index, comparison or number is changed."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import CodeType, FunctionType

Node = TypeVar("Node", bound=ast.AST)

OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMPARISON: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SHORT = 16  # an expression with fewer characters is shown as part of the expression that contains it


@dataclass(frozen=True)
class Mutant:
    """One change of one expression. Only tests that run at least one of the `lines` can notice the change."""

    file: Path
    function: str
    line: int
    lines: range
    before: str
    after: str
    tree: ast.Module


def replacement_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may replace a node in a mutant."""
    match node:
        case ast.BinOp(left=ast.Constant(value=str())):
            return
        case ast.BinOp(op=ast.MatMult()):
            yield copy_with(node, left=node.right, right=node.left)
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATOR:
            yield copy_with(node, op=OPERATOR[type(node.op)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield node.operand
        case ast.BoolOp():
            yield copy_with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for other in COMPARISON[type(op)]:
                    yield copy_with(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            yield ast.Constant(node.value + 1)
        case ast.Slice():
            for bound in ("lower", "upper", "step"):
                if getattr(node, bound):
                    yield copy_with(node, **{bound: None})
        case ast.Subscript(ctx=ast.Load(), slice=ast.Name() | ast.Attribute() | ast.Call()):
            yield copy_with(node, slice=ast.BinOp(node.slice, ast.Sub(), ast.Constant(1)))


def executed_children(node: ast.AST) -> Iterable[ast.AST]:
    """Return the children that run when the function is called, without decorators, defaults, annotations and texts."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.body
        case ast.Lambda():
            return [node.body]
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case ast.JoinedStr():
            return []
        case ast.Call(func=ast.Name(id="cast")):
            return node.args[1:]
    return ast.iter_child_nodes(node)


def mutants(file: Path) -> list[Mutant]:
    """Return all mutants of the functions in a file, sorted by line."""
    tree = ast.parse(file.read_text())

    def walk(node: ast.AST, path: tuple[ast.AST, ...]) -> Iterator[Mutant]:
        if any(isinstance(p, FUNCTION) for p in path):
            for new in replacement_nodes(node):
                yield make_mutant(file, tree, path, node, new)
        for child in executed_children(node):
            yield from walk(child, (*path, node))

    return sorted(walk(tree, ()), key=lambda m: m.line)


def make_mutant(file: Path, tree: ast.Module, path: tuple[ast.AST, ...], node: ast.AST, new: ast.AST) -> Mutant:
    """Return the mutant in which `new` replaces `node`. The ancestors of `node` are given by `path`."""
    whole = shown = node  # the whole expression, and the part of it that is shown to users
    for parent in reversed(path):
        if isinstance(parent, ast.stmt):
            if not hasattr(parent, "body") and len(ast.unparse(shown)) < SHORT:
                shown = parent
            break
        if isinstance(parent, ast.expr):
            if len(ast.unparse(shown)) < SHORT:
                shown = parent
            whole = parent
    return Mutant(
        file=file,
        function=".".join(p.name for p in path if isinstance(p, NAMED)) or "<lambda>",
        line=node.lineno,
        lines=range(whole.lineno, whole.end_lineno + 1),
        before=ast.unparse(shown),
        after=ast.unparse(replace_node(shown, node, new)),
        tree=replace_node(tree, node, new),
    )


def copy_with(node: Node, **fields: object) -> Node:
    """Return a copy of a node with some fields replaced."""
    out = copy.copy(node)
    vars(out).update(fields)
    return out


def replace_node(tree: Node, node: ast.AST, new: ast.AST) -> Node:
    """Return a tree in which a node is replaced. Subtrees that do not contain the node are shared with the original."""
    if tree is node:
        return ast.fix_missing_locations(ast.copy_location(new, node))
    fields: dict[str, object] = {}
    for name, value in ast.iter_fields(tree):
        if isinstance(value, ast.AST):
            out = replace_node(value, node, new)
            if out is not value:
                fields[name] = out
        elif isinstance(value, list):
            outs = [replace_node(v, node, new) if isinstance(v, ast.AST) else v for v in value]
            if any(a is not b for a, b in zip(outs, value, strict=True)):
                fields[name] = outs
    return copy_with(tree, **fields) if fields else tree


def exchange(file: Path, tree: ast.Module) -> dict[CodeType, CodeType]:
    """Map the code of every function in a file to the code that the function has in `tree`."""
    old, new = (
        code_objects(compile(t, str(file), "exec", dont_inherit=True)) for t in (ast.parse(file.read_text()), tree)
    )
    return dict(zip(old, new, strict=True))


def install(table: dict[CodeType, CodeType], live: Iterable[FunctionType]) -> None:
    """Replace the code of functions, except functions that would close over other variables."""
    for function in live:
        code = table.get(function.__code__)
        if code and code.co_freevars == function.__code__.co_freevars:
            function.__code__ = code


def code_objects(code: CodeType) -> list[CodeType]:
    """Return a code object and all code objects inside it, in order."""
    inner = [c for c in code.co_consts if isinstance(c, type(code))]
    return [code, *(c for i in inner for c in code_objects(i))]
