"""Protects a forked child from locks that a thread of its parent held, and from state that was half changed under such a lock.

Only the thread that forks goes on in the child. A lock that another thread held would stay locked for ever. So locks are in objects that each
process makes for itself (`lookup.runtime`), or are a `ForkSafeLock`. Before Python 3.12, each `functools.cached_property` has a lock that all
objects share; the `cached_property` here has none. If another thread was importing a module during the fork, the child imports that module
again.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, overload

T = TypeVar("T")

_LOCKED_PROPERTIES_IN = ("fsspec", "pyiceberg")  # packages with cached properties that we call in threads


class Inherited(Protocol):
    """An object that is reset in a forked child: `reset_in_child` is called there before other code runs."""

    def reset_in_child(self) -> None: ...


_inherited: weakref.WeakValueDictionary[int, Inherited] = weakref.WeakValueDictionary()


def living(objects: weakref.WeakValueDictionary[Any, T]) -> list[T]:
    """The objects that still exist. Other threads may add some meanwhile: `valuerefs` copies the references in one step, `values` does not."""
    return [living_object for reference in objects.valuerefs() if (living_object := reference()) is not None]


def resets_in_child(owner: Inherited) -> None:
    """Register an object. It is reset in each child that this process forks while the object exists."""
    _inherited[id(owner)] = owner


class ForkSafeLock:
    """A lock for objects that outlive a fork, such as a module's globals. In a forked child it is free, even if a thread held it in the
    parent."""

    def __init__(self) -> None:
        self.reset_in_child()
        resets_in_child(self)

    def reset_in_child(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        if self._depth:  # depth 0: the thread that held the lock has forked, and this is the child
            self._depth -= 1
            self._lock.release()


class ForkGate:
    """A lock for work that must not be under way while this process forks: the process forks only when no thread has it.

    Such work is, for instance, that of a library which remembers outside of its objects what it does with a file. `in_child`: called in a
    forked child, before other code runs there. If a thread has the lock for longer than `wait_s`, the process forks nevertheless.
    """

    def __init__(self, in_child: Callable[[], None], wait_s: float = 30.0) -> None:
        self._in_child = in_child
        self._wait_s = wait_s
        self._lock = threading.RLock()
        self._locked_for_fork = False
        _gates[id(self)] = self
        resets_in_child(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def before_fork(self) -> None:
        self._locked_for_fork = self._lock.acquire(timeout=self._wait_s)

    def after_fork(self) -> None:
        if self._locked_for_fork:
            self._locked_for_fork = False
            self._lock.release()

    def reset_in_child(self) -> None:
        self._lock = threading.RLock()
        self._locked_for_fork = False
        self._in_child()


_gates: weakref.WeakValueDictionary[int, ForkGate] = weakref.WeakValueDictionary()


def _close_gates() -> None:
    for gate in living(_gates):
        gate.before_fork()


def _open_gates() -> None:
    for gate in living(_gates):
        gate.after_fork()


class cached_property(Generic[T]):  # noqa: N801 # the name that functools uses
    """A property that is computed once for each object, without a lock.

    The race: threads that read the property at the same time may each compute it. All of them get the same value.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        value: T = vars(instance).setdefault(self._name, self._make(instance))
        return value


def _reset_all() -> None:
    _leave_imports()
    for owner in living(_inherited):
        owner.reset_in_child()
    if sys.version_info < (3, 12):
        _unlock_properties()


def _leave_imports() -> None:
    """Forget the modules that other threads were importing during the fork. No thread would finish these imports in the child."""
    locks = getattr(importlib._bootstrap, "_module_locks", {})  # Python does not reset these locks
    for name, reference in list(locks.items()):
        lock = reference()
        if lock is not None and lock.owner not in (None, threading.get_ident()):
            del locks[name]
            sys.modules.pop(name, None)


def _unlock_properties() -> None:
    """Give the cached properties of other packages new locks."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LOCKED_PROPERTIES_IN:
            for kind in [value for value in vars(module).values() if isinstance(value, type)]:
                for value in vars(kind).values():
                    if isinstance(value, functools.cached_property):
                        value.lock = threading.RLock()  # type: ignore[attr-defined]


os.register_at_fork(before=_close_gates, after_in_parent=_open_gates, after_in_child=_reset_all)
