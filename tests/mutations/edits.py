"""Edits of a module's syntax tree. Patterns say where; variables have no names in them, and may be renamed."""

import ast
import copy
import dataclasses
import re
import textwrap
from collections.abc import Iterator
from typing import Any

__all__ = ["ANY", "Edit", "as_python", "find_definition", "remove", "replace"]

ANY = "any_"  # in place of the $, so that Python can parse a pattern
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a pattern matches: in a field of a node, which is one child or a list of them. `names`: what each `$name` stands for."""

    owner: ast.AST
    field: str
    first: int  # place in the list
    names: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Edit:
    """Puts `new` in the place of `old`, which is there once.

    Both are patterns: an expression or statements of Python, in which `$name` stands for any expression, statement or name, and for
    the same one wherever it is repeated.
    """

    old: str
    new: str

    def places(self, tree: ast.AST) -> list[Place]:
        """All places in a tree that match `old`."""
        return list(_places(_parse(self.old), tree))

    def apply(self, place: Place) -> None:
        """Edit a place."""
        new = [_Substitution(place.names).visit(node) for node in _parse(self.new)]
        siblings = getattr(place.owner, place.field)
        if not isinstance(siblings, list):
            setattr(place.owner, place.field, *new)
            return
        if isinstance(siblings[place.first], ast.stmt):
            new = [ast.Expr(node) if isinstance(node, ast.expr) else node for node in new]
        siblings[place.first : place.first + len(_parse(self.old))] = new
        if not siblings and place.field == "body":
            siblings.append(ast.Pass())


replace = Edit


def remove(old: str) -> Edit:
    """An edit that drops a statement, an argument, an element, a condition, or one side of `and` or `or`."""
    return Edit(old, "")


def find_definition(tree: ast.AST, name: str) -> ast.AST | None:
    """The function or class of a qualified name, such as `Claims.hold`; the whole tree for an empty name."""
    definition: ast.AST | None = tree
    for part in name.split(".") if name else ():
        nodes = ast.walk(definition) if definition else ()
        definition = next((node for node in nodes if isinstance(node, _DEFINITIONS) and node.name == part), None)
    return definition


def as_python(pattern: str) -> str:
    """A pattern as Python's parser takes it."""
    return re.sub(r"\$(\w+)", rf"{ANY}\1", textwrap.dedent(pattern))


def _parse(pattern: str) -> list[ast.AST]:
    """The expression or the statements of a pattern."""
    nodes = ast.parse(as_python(pattern)).body
    return [nodes[0].value] if len(nodes) == 1 and isinstance(nodes[0], ast.Expr) else [*nodes]


def _places(pattern: list[ast.AST], tree: ast.AST) -> Iterator[Place]:
    kinds = (ast.AST,) if _placeholder(pattern[0]) else (type(pattern[0]), ast.Expr)
    for owner in ast.walk(tree):
        if isinstance(owner, ast.Expr):
            continue  # found as the statement that it is
        for field, child in ast.iter_fields(owner):
            siblings = child if isinstance(child, list) else [child]
            for first in range(len(siblings) - len(pattern) + 1):
                if not isinstance(siblings[first], kinds):
                    continue  # as most are: faster than `_matches`
                names: dict[str, Any] = {}
                if all(_matches(*pair, names) for pair in zip(pattern, siblings[first:], strict=False)):
                    yield Place(owner, field, first, names)


def _matches(pattern: Any, node: Any, names: dict[str, Any]) -> bool:
    """Whether a part of a tree matches; puts what each `$name` stands for into `names`."""
    if isinstance(pattern, ast.expr) and isinstance(node, ast.Expr):
        node = node.value
    name = _placeholder(pattern)
    if name is not None:
        kind = {ast.Name: ast.expr, ast.Expr: ast.stmt, str: str}[type(pattern)]
        return isinstance(node, kind) and _text(names.setdefault(name, node)) == _text(node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.AST):
        # Without `ctx`: a variable is the same where it is set and where it is read.
        fields = [field for field in pattern._fields if field != "ctx"]
        pattern, node = ([getattr(side, field, None) for field in fields] for side in (pattern, node))
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(_matches(*pair, names) for pair in zip(pattern, node, strict=True))
    return bool(pattern == node)


def _placeholder(pattern: Any) -> str | None:
    """The name in a tree of a `$name`; None for anything else."""
    node = pattern.value if isinstance(pattern, ast.Expr) else pattern
    text = node.id if isinstance(node, ast.Name) else node
    return text if isinstance(text, str) and text.startswith(ANY) else None


def _text(node: Any) -> str:
    return node if isinstance(node, str) else ast.unparse(node)


class _Substitution(ast.NodeTransformer):
    """Puts what they stand for in the place of each `$name`."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> Any:
        name = _placeholder(node)
        if name is not None:
            value = copy.deepcopy(self._names[name])
            return ast.Name(value) if isinstance(value, str) else value
        for field, text in ast.iter_fields(node):
            if _placeholder(text) is not None and isinstance(text, str):
                setattr(node, field, _text(self._names[text]))
        return self.generic_visit(node)
