"""Faults are put into the package by its syntax tree: one that has no place in it any more tests nothing."""

import ast
import builtins
import copy
import functools
import re
import symtable
from pathlib import Path

from tests.mutations.edits import ANY, as_python, find_definition
from tests.mutations.faults import FAULTS, Fault
from tests.mutations.run import PACKAGE, ROOT, parse


def test_each_fault_is_another_program() -> None:
    """The code that a fault changes is in its function or class once. With the fault, the code can be compiled, and is not what it was."""
    for fault in FAULTS:
        definition = copy.deepcopy(find_definition(parse(ROOT / PACKAGE / fault.module), fault.definition))
        assert definition is not None, fault.name
        places = fault.edit.places(definition)
        assert len(places) == 1, f"{fault.name}: {fault.edit.old!r} is {len(places)} times in {fault.place}, not once"
        owner = places[0].owner
        before = ast.unparse(owner)
        fault.edit.apply(places[0])
        assert ast.unparse(owner) != before, fault.name
        compile(ast.unparse(definition), fault.name, "exec")


def test_each_test_is_there() -> None:
    """The tests that have to catch a fault are functions, not whole files, and have these names."""
    tests = {test.partition("[")[0] for fault in FAULTS for test in fault.tests}
    functions = {
        f"{file}::{name}"
        for file in {test.partition("::")[0] for test in tests}
        for name in re.findall(r"^def (\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert tests - functions == set()


def test_faults_name_no_variables() -> None:
    """The names in a fault are builtins, `self`, or those that its module imports or defines: a variable may get another name."""
    assert {fault.name: names for fault in FAULTS if (names := _variables(fault))} == {}


def _variables(fault: Fault) -> set[str]:
    """The names in a fault that its module does not have outside functions, without those that the edit itself sets."""
    old, new = (ast.parse(edit) for edit in (as_python(fault.edit.old), as_python(fault.edit.new)))
    names = [node for tree in (old, new) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    set_names = {node.id for node in ast.walk(new) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known_names = {"self", *dir(builtins), *_identifiers(ROOT / PACKAGE / fault.module)}
    return {node.id for node in names if not node.id.startswith(ANY)} - known_names - set_names


@functools.cache
def _identifiers(module: Path) -> set[str]:
    return {*symtable.symtable(module.read_text(encoding="utf-8"), module.name, "exec").get_identifiers()}
