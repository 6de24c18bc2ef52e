"""Faults are put into the package by its syntax tree: one that has no place in it any more tests nothing."""

import ast
import builtins
import copy
import functools
import symtable
from pathlib import Path

from tests.mutations.edits import ANY, as_python, find_definition
from tests.mutations.faults import FAULTS, Fault
from tests.mutations.run import PACKAGE, ROOT, find_place


def test_each_fault_has_its_place() -> None:
    """What a fault changes is in its function or class once."""
    assert [problem for fault in FAULTS if (problem := find_place(fault, ROOT)) is not None] == []


def test_each_fault_is_another_program() -> None:
    """A function or class with its fault can be compiled, and is not what it was."""
    for fault in FAULTS:
        definition = copy.deepcopy(find_definition(_tree(ROOT / PACKAGE / fault.module), fault.definition))
        assert definition is not None, fault.name
        before = ast.unparse(definition)
        fault.edit.apply(definition)
        after = ast.unparse(definition)
        assert after != before, fault.name
        compile(after, fault.name, "exec")


def test_each_test_is_there() -> None:
    """The tests that have to catch a fault are functions, not whole files, and have these names."""
    tests = {test.partition("[")[0] for fault in FAULTS for test in fault.tests}
    assert [test for test in sorted(tests) if not _is_there(*test.partition("::")[::2])] == []


def _is_there(file: str, name: str) -> bool:
    path = ROOT / file
    return path.exists() and isinstance(find_definition(_tree(path), name), ast.FunctionDef)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_faults_name_no_variables() -> None:
    """The names in a fault are builtins, `self`, or those that its module imports or defines: a variable may get another name."""
    assert {fault.name: names for fault in FAULTS if (names := _variables(fault))} == {}


def _variables(fault: Fault) -> set[str]:
    """The names in a fault that its module does not have outside functions, without those that the edit itself sets."""
    old, new = (ast.parse(edit) for edit in (as_python(fault.edit.old), as_python(fault.edit.new)))
    names = [node for tree in (old, new) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    set_names = {node.id for node in ast.walk(new) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    text = (ROOT / PACKAGE / fault.module).read_text(encoding="utf-8")
    known_names = {"self", *dir(builtins), *symtable.symtable(text, fault.module, "exec").get_identifiers()}
    return {node.id for node in names if not node.id.startswith(ANY)} - known_names - set_names
