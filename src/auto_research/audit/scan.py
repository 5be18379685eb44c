"""Which adapters have an explicit accelerator path: read from their syntax, without importing them.

An adapter has one when code reachable from its entry function, inside the adapter's own file, calls
`auto_research.runtime.device.device_for`. Reachable is what the entry function calls or refers to: functions,
classes, constants, decorators, nested functions and lambdas. Names are resolved as Python does (scopes,
order of bindings, import aliases, re-exports of the function by another module), so that a comment, a string,
a neighbour in the same flat file, a local function that is merely called `device_for`, or code that never runs
do not count.

Where a value cannot be followed the scanner is generous inside reachable code and silent outside of it: a method
counts as called when its class is reachable and reachable code mentions its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from auto_research.papers._registry import Adapter

DEVICE_FOR = "auto_research.runtime.device.device_for"

# Called by code outside the adapter's file: torch, and the shared loops of `tasks` and `study`.
PROTOCOL_METHODS = frozenset(
    ("forward", "loss", "scores", "generate", "batches", "evaluate", "on_step_end", "resample")
)
_TOO_DEEP = "{} is nested too deeply to be read"
# Callables that call the function they are given.
CALLING = frozenset(
    ("map", "starmap", "submit", "apply", "apply_async", "to_thread", "run_in_executor", "Thread", "Process")
)
LONGEST_PATH = 16  # parts of a dotted name; `node = node.parent` in a recursion would lengthen it without end


class Site(BaseModel):
    """One reachable call of `device_for`.

    Attributes:
        chain: what leads to it, from the entry function to `device_for`.
    """

    model_config = ConfigDict(extra="forbid")

    file: str
    line: int
    chain: list[str]


class Scan(BaseModel):
    """What the syntax of one adapter says.

    Attributes:
        explicit: whether there is a reachable call of `device_for`.
        note: why the file could not be judged, when it could not.
    """

    model_config = ConfigDict(extra="forbid")

    key: str
    explicit: bool
    sites: list[Site]
    note: str = ""


# Abstract values: what a name may be bound to, as far as it matters here.


@dataclass(frozen=True)
class Imported:
    """Something that another module defines, by its dotted path."""

    path: str


@dataclass(frozen=True)
class Function:
    """A function, method or lambda of this file."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope = field(compare=False)
    label: str = field(compare=False)
    method: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Class:
    """A class of this file."""

    node: ast.ClassDef
    scope: Scope = field(compare=False)
    label: str = field(compare=False)


@dataclass(frozen=True)
class Container:
    """What a dict, list, tuple or set display makes. Its elements are kept by display, in `_Analysis.elements`:
    a recursive function may put its own result into one, and so nest it without end."""

    node: ast.Dict | ast.List | ast.Tuple | ast.Set


@dataclass(frozen=True, eq=False)
class Constant:
    """A module-level assignment; evaluated, with the names bound before it, when reachable code refers to it."""

    label: str
    node: ast.expr
    env: dict[str, Values]


@dataclass(frozen=True, eq=False)
class Definition:
    """A module-level `def` or `class`; decorators see the names bound before it, its body the final ones."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    env: dict[str, Values]


Value: TypeAlias = Imported | Function | Class | Container | Constant | Definition
Values: TypeAlias = frozenset[Value]
Owner: TypeAlias = Function | Class | Constant
NOTHING: Values = frozenset()


@dataclass(eq=False)
class Scope:
    """Names of one function call, class body or module."""

    env: dict[str, Values]
    owner: Owner | None
    parent: Scope | None = None
    names: frozenset[str] = frozenset()
    outer: frozenset[str] = frozenset()  # declared `global` or `nonlocal`
    is_class: bool = False
    node: ast.AST | None = None  # of a function's scope
    returns: set[Value] = field(default_factory=set)


def scan(adapter: Adapter) -> Scan:
    """The scan of a registered adapter."""
    return scan_file(adapter.source, adapter.function, key=adapter.key, module=adapter.module)


def scan_file(path: Path, function: str = "run", *, key: str = "", module: str = "") -> Scan:
    """Scans one adapter: `function` of the file at `path`.

    Args:
        module: dotted name of the file, with which relative imports are resolved.

    A file that cannot be read or parsed has no explicit path and says why in `note`.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return Scan(key=key, explicit=False, sites=[], note=f"{path.name} cannot be read as Python: {error}")
    except (RecursionError, MemoryError):  # the parser's own limits
        return Scan(key=key, explicit=False, sites=[], note=_TOO_DEEP.format(path.name))
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    try:
        analysis = _Analysis(tree, package)
        found = analysis.follow(function)
    except RecursionError:
        return Scan(key=key, explicit=False, sites=[], note=_TOO_DEEP.format(path.name))
    sites = [Site(file=str(path), line=line, chain=chain) for (line, _), chain in sorted(found.items())]
    note = {
        "here": "",
        "nowhere": f"{path.name} does not define '{function}'",
        "elsewhere": f"'{function}' of {path.name} is defined in another file, which is not followed",
    }[analysis.entry]
    return Scan(key=key, explicit=bool(sites), sites=sites, note=note)


def _constant_truth(test: ast.expr) -> bool | None:
    """Truth of a condition that is decided before the program runs; None when it is not."""
    match test:
        case ast.Constant():
            return bool(test.value)
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return False
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            truth = _constant_truth(operand)
            return None if truth is None else not truth
        case ast.BoolOp(op=op, values=values):
            truths = [_constant_truth(value) for value in values]
            decisive = isinstance(op, ast.Or)
            if decisive in truths:
                return decisive
            return None if None in truths else not decisive
        case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant("__main__")]):
            return False
    return None


def _arms(node: ast.If) -> tuple[list[ast.expr], list[list[ast.stmt]]]:
    """Tests and bodies of an `if` and its `elif`s, which the syntax tree nests; bodies that never run are left out."""
    tests: list[ast.expr] = []
    bodies: list[list[ast.stmt]] = []
    rest: list[ast.stmt] = [node]
    while len(rest) == 1 and isinstance(arm := rest[0], ast.If):
        truth = _constant_truth(arm.test)
        tests.append(arm.test)
        if truth is not False:
            bodies.append(arm.body)
        if truth:
            return tests, bodies
        rest = arm.orelse
    return tests, [*bodies, rest]


def _targets(node: ast.AST) -> Iterator[str]:
    """Names that an assignment target binds."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id


def _bound_names(body: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Names bound in a function's own block, and those it declares `global` or `nonlocal`."""
    bound: set[str] = set()
    outer: set[str] = set()
    stack = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
            continue  # its body is another scope
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Global | ast.Nonlocal):
            outer.update(node.names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            bound.add(node.rest)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            # Comprehension targets are the comprehension's own; only walrus targets leak out.
            bound.update(child.target.id for child in ast.walk(node) if isinstance(child, ast.NamedExpr))
            continue
        stack.extend(ast.iter_child_nodes(node))
    return bound - outer, outer


def _parameters(arguments: ast.arguments) -> list[str]:
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args)]


def _join(left: dict[str, Values], right: dict[str, Values]) -> dict[str, Values]:
    return {name: left.get(name, NOTHING) | right.get(name, NOTHING) for name in {**left, **right}}


def _settle(env: dict[str, Values], ends: Sequence[dict[str, Values]]) -> None:
    """Makes `env` what it may be after any one of several paths."""
    joined: dict[str, Values] = {}
    for end in ends:
        joined = _join(joined, end)
    env.clear()
    env.update(joined)


class _Analysis:
    """Follows one entry function through one file until nothing new is found."""

    def __init__(self, tree: ast.Module, package: str) -> None:
        self.package = package
        self.roots = frozenset(("auto_research", package.split(".")[0]))
        self.module = Scope({}, None)
        self.found: dict[tuple[int, int], list[str]] = {}
        self.reached: dict[Function | Class | Constant, tuple[Owner | None, int]] = {}
        self.returns: dict[ast.AST, Values] = {}
        self.arguments: dict[tuple[ast.AST, str], Values] = {}
        self.attributes: dict[str, Values] = {}
        self.elements: dict[ast.AST, dict[Any, Values]] = {}  # of each container; a key that is no constant is None
        self.mentioned: set[str] = set()
        self.forced: dict[int, Values] = {}
        self.forcing: set[int] = set()
        self.finals: dict[int, Scope] = {}
        self.entry: Literal["nowhere", "here", "elsewhere"] = "nowhere"
        self._bind_module(tree.body, self.module.env)

    # Module level: nothing runs, names are bound to what they would be bound to.

    def _bind_module(self, body: Sequence[ast.stmt], env: dict[str, Values]) -> None:
        for statement in body:
            match statement:
                case ast.Import() | ast.ImportFrom():
                    self._import(statement, env)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    env[statement.name] = frozenset([Definition(statement, dict(env))])
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._bind_constant(target, value, env)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._bind_constant(target, value, env)
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    env[name] = env.get(name, NOTHING) | {Constant(name, value, dict(env))}
                case ast.If():
                    self._branches(env, _arms(statement)[1])
                case ast.Try(body=tried, handlers=handlers, orelse=orelse, finalbody=final):
                    self._branches(env, [[*tried, *orelse], *(handler.body for handler in handlers)])
                    self._bind_module(final, env)
                case ast.With(body=inner) | ast.AsyncWith(body=inner):
                    self._bind_module(inner, env)
                case ast.For(target=target, iter=iterable, body=inner, orelse=orelse):
                    for name in _targets(target):
                        env[name] = frozenset([Constant(name, iterable, dict(env))])
                    self._branches(env, [inner, orelse])
                case ast.While(body=inner, orelse=orelse, test=test):
                    if _constant_truth(test) is not False:
                        self._branches(env, [inner, orelse])
                case ast.Delete(targets=targets):
                    for target in targets:
                        if isinstance(target, ast.Name):
                            env.pop(target.id, None)
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=args)) if name in env:
                    # `REGISTRY.append(helper)` changes a constant.
                    for argument in args:
                        env[name] = env[name] | {Constant(name, argument, dict(env))}

    def _branches(self, env: dict[str, Values], bodies: Sequence[Sequence[ast.stmt]]) -> None:
        results = []
        for body in bodies:
            branch = dict(env)
            self._bind_module(body, branch)
            results.append(branch)
        if results:
            _settle(env, results)

    def _bind_constant(self, target: ast.expr, value: ast.expr, env: dict[str, Values]) -> None:
        match target, value:
            case ast.Name(id=name), _:
                env[name] = frozenset([Constant(name, value, dict(env))])
            case ((ast.Tuple(elts=names) | ast.List(elts=names)), (ast.Tuple(elts=values) | ast.List(elts=values))) if (
                len(names) == len(values)
            ):
                before = dict(env)
                for name_node, element in zip(names, values):
                    if isinstance(name_node, ast.Name):
                        env[name_node.id] = frozenset([Constant(name_node.id, element, before)])
            case _:
                for name in _targets(target):
                    env[name] = frozenset([Constant(name, value, dict(env))])
                if isinstance(target, ast.Attribute | ast.Subscript) and isinstance(target.value, ast.Name):
                    base = target.value.id
                    if base in env:
                        env[base] = env[base] | {Constant(base, value, dict(env))}

    def _import(self, node: ast.Import | ast.ImportFrom, env: dict[str, Values]) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.split(".")[0]
                env[alias.asname or path] = frozenset([Imported(path)])
            return
        origin = _absolute(node, self.package)
        for alias in node.names:
            if alias.name == "*":
                for name in _public_names(origin):
                    env[name] = frozenset([Imported(f"{origin}.{name}")])
            else:
                env[alias.asname or alias.name] = frozenset([Imported(f"{origin}.{alias.name}")])

    # Reachable code: a worklist of functions, repeated until nothing changes.

    def follow(self, function: str) -> dict[tuple[int, int], list[str]]:
        """Calls of `device_for` reachable from `function`: (line, column) -> chain."""
        if function not in self.module.env:
            return {}
        self.entry = "here"
        before = -1
        while before != (before := self._size()):
            self.forced.clear()
            self.finals.clear()
            entry = self._force_all(self.module.env[function], None, 0)
            self.entry = "elsewhere" if entry and all(isinstance(v, Imported) for v in entry) else "here"
            for value in entry:
                self._reach(value, None, 0)
            done: set[Function | Class | Constant] = set()
            while waiting := [item for item in self.reached if item not in done]:
                for item in waiting:
                    done.add(item)
                    if isinstance(item, Function):
                        self._run_function(item)
                    elif isinstance(item, Class):
                        self._run_class(item)
        return self.found

    def _size(self) -> int:
        """Grows whenever the analysis learns something; equal sizes of two rounds mean a fixed point."""
        tables: Sequence[dict[Any, Values]] = (
            *(self.returns, self.arguments, self.attributes, self.module.env),
            *self.elements.values(),
        )
        return (
            len(self.reached)
            + len(self.mentioned)
            + len(self.found)
            + sum(len(values) for table in tables for values in table.values())
        )

    def _reach(self, value: Value, owner: Owner | None, line: int) -> None:
        for inner in self._spread(frozenset([value])):
            if isinstance(inner, Function | Class) and inner not in self.reached:
                self.reached[inner] = (owner, line)

    def _chain(self, owner: Owner | None) -> list[str]:
        chain: list[str] = []
        seen: set[Owner] = set()
        while owner is not None and owner not in seen:
            seen.add(owner)
            if not (chain and chain[-1].startswith(f"{owner.label}.")):  # `T.fit` says enough without `T`
                chain.append(owner.label)
            owner = self.reached.get(owner, (None, 0))[0]
        return chain[::-1]

    def _record(self, node: ast.AST, scope: Scope) -> None:
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        if place not in self.found:
            self.found[place] = [*self._chain(scope.owner), "device_for"]

    def _run_function(self, function: Function) -> None:
        node = function.node
        body: list[ast.stmt] = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
        parameters = [
            *_parameters(node.args),
            *(a.arg for a in node.args.kwonlyargs),
            *(a.arg for a in (node.args.vararg, node.args.kwarg) if a),
        ]
        bound, outer = _bound_names(body)
        env = {name: self.arguments.get((node, name), NOTHING) for name in parameters}
        scope = Scope(env, function, function.scope, frozenset({*bound, *parameters}), frozenset(outer), node=node)
        self.finals[id(node)] = scope
        for name, default in _defaults(node.args):
            env[name] = env[name] | self._value(default, self._owned(function.scope, function))
        self._block(body, scope)
        self.returns[node] = self.returns.get(node, NOTHING) | scope.returns

    def _owned(self, scope: Scope, owner: Owner) -> Scope:
        """The same names, with calls made there attributed to `owner`."""
        return Scope(scope.env, owner, scope.parent, scope.names, scope.outer, scope.is_class)

    def _run_class(self, owner: Class) -> None:
        node = owner.node
        scope = Scope({}, owner, owner.scope, _all_bound(node.body), is_class=True)
        outside = self._owned(owner.scope, owner)
        for base in (*node.bases, *(keyword.value for keyword in node.keywords)):
            self._value(base, outside)
        self._block(node.body, scope)
        for name, values in scope.env.items():
            for value in values:
                if isinstance(value, Function):
                    called = name in self.mentioned or name in PROTOCOL_METHODS
                    if called or (name.startswith("__") and name.endswith("__")):
                        self._reach(value, owner, value.node.lineno)
            self.attributes[name] = self.attributes.get(name, NOTHING) | values

    # Statements.

    def _block(self, body: Sequence[ast.stmt], scope: Scope) -> bool:
        """Runs statements in order; returns whether control can reach the end. After a return nothing runs."""
        return all(self._statement(statement, scope) for statement in body)

    def _fork(self, scope: Scope, bodies: Sequence[Sequence[ast.stmt]], *, may_skip: bool = False) -> bool:
        before = dict(scope.env)
        ends: list[dict[str, Values]] = [before] if may_skip else []
        for body in bodies:
            scope.env.clear()
            scope.env.update(before)
            if self._block(body, scope):
                ends.append(dict(scope.env))
        _settle(scope.env, ends or [before])
        return bool(ends)

    def _statement(self, node: ast.stmt, scope: Scope) -> bool:
        match node:
            case ast.Import() | ast.ImportFrom():
                bound: dict[str, Values] = {}
                self._import(node, bound)
                for name, values in bound.items():
                    self._bind(name, values, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._bind(node.name, self._define(node, scope), scope)
            case ast.Return(value=value):
                if value is not None:
                    scope.returns |= self._value(value, scope)
                return False
            case ast.Raise() | ast.Break() | ast.Continue():
                self._children(node, scope)
                return False
            case ast.If():
                tests, bodies = _arms(node)
                for test in tests:
                    self._value(test, scope)
                return self._fork(scope, bodies)
            case ast.While(test=test, body=body, orelse=orelse):
                self._value(test, scope)
                if _constant_truth(test) is not False:
                    for _ in range(2):  # a name bound late in the body is seen by the next turn
                        self._fork(scope, [body], may_skip=True)
                self._block(orelse, scope)
            case ast.For() | ast.AsyncFor():
                self._assign(node.target, self._elements(node.iter, scope), scope)
                for _ in range(2):
                    self._fork(scope, [node.body], may_skip=True)
                self._block(node.orelse, scope)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    values = self._value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, values, scope)
                return self._block(node.body, scope)
            case ast.Try() | ast.TryStar():
                return self._try(node, scope)
            case ast.Match(subject=subject, cases=cases):
                self._value(subject, scope)
                for case in cases:
                    if case.guard is not None:
                        self._value(case.guard, scope)
                self._fork(scope, [case.body for case in cases], may_skip=True)
            case ast.Assign(targets=targets, value=value):
                values = self._value(value, scope)
                for target in targets:
                    self._assign(target, values, scope, value)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:  # the annotation is not run
                    self._assign(target, self._value(value, scope), scope, value)
            case ast.AugAssign(target=target, value=value):
                values = self._value(value, scope)
                if isinstance(target, ast.Name):
                    self._bind(target.id, self._lookup(target.id, scope) | values, scope)
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        scope.env.pop(target.id, None)
            case ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case _:
                self._children(node, scope)
        return True

    def _try(self, node: ast.Try | ast.TryStar, scope: Scope) -> bool:
        before = dict(scope.env)
        through = self._block(node.body, scope)
        interrupted = _join(before, scope.env)  # a handler starts anywhere in the body
        ends = [dict(scope.env)] if through and self._block(node.orelse, scope) else []
        for handler in node.handlers:
            scope.env.clear()
            scope.env.update(interrupted)
            if handler.type is not None:
                self._value(handler.type, scope)
            if self._block(handler.body, scope):
                ends.append(dict(scope.env))
        _settle(scope.env, ends or [interrupted])
        return self._block(node.finalbody, scope) and bool(ends)

    def _children(self, node: ast.AST, scope: Scope) -> Values:
        values: Values = NOTHING
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                values |= self._value(child, scope)
            elif isinstance(child, ast.AST):
                values |= self._children(child, scope)
        return values

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, scope: Scope) -> Values:
        """The value of a `def` or `class` statement: what its decorators make of it."""
        prefix = f"{scope.owner.label}." if scope.is_class and scope.owner is not None else ""
        label = prefix + node.name
        made: Value
        if isinstance(node, ast.ClassDef):
            made = Class(node, scope, label)
        else:
            static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
            made = Function(node, scope, label, method=scope.is_class and not static)
        values: Values = frozenset([made])
        for decorator in reversed(node.decorator_list):
            callee = self._value(decorator, scope)
            results = self._apply(callee, [values], {}, decorator, scope)
            # A decorator that this file does not define is taken to call what it decorates.
            local = any(isinstance(v, Function | Class) for v in callee)
            values = results if local and results else values | results
        return values

    def _bind(self, name: str, values: Values, scope: Scope) -> None:
        if name not in scope.outer:
            scope.env[name] = values
            return
        target = scope.parent
        while target is not None and target.parent is not None and (target.is_class or name not in target.names):
            target = target.parent
        if target is not None:  # another function may have bound it as well
            target.env[name] = target.env.get(name, NOTHING) | values

    def _assign(self, target: ast.expr, values: Values, scope: Scope, value: ast.expr | None = None) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(name, values, scope)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                literal = value.elts if isinstance(value, ast.Tuple | ast.List) else []
                if len(literal) == len(targets):
                    evaluated = [self._value(element, scope) for element in literal]
                    for inner, each in zip(targets, evaluated):
                        self._assign(inner, each, scope)
                else:
                    spread = self._spread(values)
                    for inner in targets:
                        self._assign(inner, spread, scope)
            case ast.Starred(value=inner):
                self._assign(inner, values, scope)
            case ast.Attribute(value=base, attr=name):
                self._value(base, scope)
                self.attributes[name] = self.attributes.get(name, NOTHING) | values
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                self._value(index, scope)
                home = scope if name in scope.names else self.module
                home.env[name] = home.env.get(name, NOTHING) | values
            case _:
                self._children(target, scope)

    # Expressions.

    def _value(self, node: ast.expr, scope: Scope) -> Values:
        """What an expression may be; everything it mentions of this file becomes reachable."""
        values = self._evaluate(node, scope)
        if scope.owner is not None:
            for value in values:
                self._reach(value, scope.owner, getattr(node, "lineno", 0))
        return values

    def _evaluate(self, node: ast.expr, scope: Scope) -> Values:
        match node:
            case ast.Name(id=name):
                return self._lookup(name, scope)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.Lambda():
                # At module level the body sees the final names, like that of a `def`.
                return frozenset([Function(node, scope if scope.parent else self.module, "<lambda>")])
            case ast.NamedExpr(target=target, value=value):
                values = self._value(value, scope)
                self._bind(target.id, values, scope)
                return values
            case ast.Dict(keys=keys, values=elements):
                for key in keys:
                    if key is not None:
                        self._value(key, scope)
                names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
                return self._container(node, names, elements, scope)
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return self._container(node, range(len(elements)), elements, scope)
            case ast.Subscript(value=base, slice=index):
                self._value(index, scope)
                return self._subscript(self._evaluate(base, scope), index)
            case ast.IfExp(test=test, body=then, orelse=orelse):
                self._value(test, scope)
                truth = _constant_truth(test)
                chosen = [then, orelse] if truth is None else [then if truth else orelse]
                return frozenset().union(*(self._value(branch, scope) for branch in chosen))
            case ast.BoolOp(op=op, values=operands):
                values = NOTHING
                for operand in operands:
                    values |= self._value(operand, scope)
                    if _constant_truth(operand) is isinstance(op, ast.Or):
                        break  # the rest is never evaluated
                return values
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, scope)
            case ast.BinOp():
                operands = []
                left: ast.expr = node
                while isinstance(left, ast.BinOp):  # a long sum nests to the left
                    operands.append(left.right)
                    left = left.left
                return frozenset().union(*(self._value(operand, scope) for operand in (left, *reversed(operands))))
            case ast.Yield(value=value) | ast.YieldFrom(value=value):
                if value is not None:
                    scope.returns |= self._value(value, scope)
                return NOTHING
            case _:
                return self._children(node, scope)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope
    ) -> Values:
        names = frozenset(name for generator in node.generators for name in _targets(generator.target))
        inner = Scope({}, scope.owner, scope, names)
        dead = False
        for generator in node.generators:
            self._assign(generator.target, self._elements(generator.iter, inner), inner)
            for test in generator.ifs:
                self._value(test, inner)
                dead |= _constant_truth(test) is False
        if dead:
            return NOTHING
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return frozenset().union(*(self._value(part, inner) for part in parts))

    def _elements(self, node: ast.expr, scope: Scope) -> Values:
        return self._spread(self._value(node, scope))

    def _container(
        self,
        node: ast.Dict | ast.List | ast.Tuple | ast.Set,
        keys: Iterable[Any],
        elements: Iterable[ast.expr],
        scope: Scope,
    ) -> Values:
        held = self.elements.setdefault(node, {})
        for key, element in zip(keys, elements):
            held[key] = held.get(key, NOTHING) | self._evaluate(element, scope)
        return frozenset([Container(node)])

    def _spread(self, values: Values) -> Values:
        """Elements of containers, and of those in them; other values as they are."""
        seen: set[Value] = set()
        waiting = set(values)
        while waiting:
            value = waiting.pop()
            seen.add(value)
            if isinstance(value, Container):
                waiting.update(*self.elements[value.node].values())
                waiting -= seen
        return frozenset(value for value in seen if not isinstance(value, Container))

    def _subscript(self, base: Values, index: ast.expr) -> Values:
        found: Values = NOTHING
        for value in base:
            if not isinstance(value, Container):
                found |= {value}
                continue
            held = self.elements[value.node]
            known = isinstance(index, ast.Constant) and None not in held
            for key, values in held.items():
                if not known or (isinstance(index, ast.Constant) and key == index.value):
                    found |= values
        return found

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Values:
        base = self._value(node.value, scope)
        imported = frozenset(
            Imported(f"{v.path}.{node.attr}")
            for v in base
            if isinstance(v, Imported) and v.path.count(".") < LONGEST_PATH
        )
        if imported and all(isinstance(v, Imported) for v in base):
            return imported
        self.mentioned.add(node.attr)
        return imported | self.attributes.get(node.attr, NOTHING)

    def _lookup(self, name: str, scope: Scope) -> Values:
        current: Scope | None = scope
        while current is not None:
            if current.parent is None:
                return self._force_all(current.env.get(name, NOTHING), scope.owner, 0)
            visible = current is scope or not current.is_class
            if visible and name not in current.outer and name in current.names:
                final = current
                if current is not scope and current.node is not None:
                    final = self.finals.get(id(current.node), current)
                values = final.env.get(name, NOTHING)
                if values or not current.is_class:
                    return values
            current = current.parent
        return NOTHING

    def _force_all(self, values: Values, owner: Owner | None, line: int) -> Values:
        return frozenset().union(*(self._force(value, owner, line) for value in values)) if values else NOTHING

    def _force(self, value: Value, owner: Owner | None, line: int) -> Values:
        """Evaluates a module-level binding, now that reachable code refers to it."""
        if not isinstance(value, Constant | Definition):
            return frozenset([value])
        if id(value) in self.forced:
            return self.forced[id(value)]
        if id(value) in self.forcing:
            return NOTHING
        self.forcing.add(id(value))
        try:
            if isinstance(value, Constant):
                self.reached.setdefault(value, (owner, line))
                result = self._evaluate(value.node, Scope(value.env, value))
            else:
                result = self._definition(value, owner)
        finally:
            self.forcing.discard(id(value))
        self.forced[id(value)] = result
        return result

    def _definition(self, value: Definition, owner: Owner | None) -> Values:
        node = value.node
        made: Function | Class
        if isinstance(node, ast.ClassDef):
            made = Class(node, self.module, node.name)
        else:
            made = Function(node, self.module, node.name)
        if not node.decorator_list:
            return frozenset([made])
        self.reached.setdefault(made, (owner, node.lineno))
        decorators = Scope(value.env, made)
        plain = self._define(node, decorators)
        # `_define` made the undecorated value in the decorators' scope; its body sees the final names.
        return frozenset(made if isinstance(v, Function | Class) and v.node is node else v for v in plain)

    def _call(self, node: ast.Call, scope: Scope) -> Values:
        callee = self._value(node.func, scope)
        positional: list[Values] = [self._value(a.value if isinstance(a, ast.Starred) else a, scope) for a in node.args]
        keywords: dict[str, Values] = {}
        for keyword in node.keywords:
            values = self._value(keyword.value, scope)
            if keyword.arg is not None:
                keywords[keyword.arg] = values
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop", "setdefault", "values", "items"):
            base = self._evaluate(node.func.value, scope)
            if any(isinstance(value, Container) for value in base):
                return self._subscript(base, node.args[0] if node.args else node) | frozenset().union(*positional[1:])
        special = self._reflection(callee, node, positional)
        if special is not None:
            return special
        return self._apply(callee, positional, keywords, node, scope)

    def _reflection(self, callee: Values, node: ast.Call, positional: Sequence[Values]) -> Values | None:
        """`importlib.import_module("a.b")` and `getattr(module, "name")` with constant names."""
        text = next((a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)), None)
        if text is None:
            return None
        if Imported("importlib.import_module") in callee:
            return frozenset([Imported(text)])
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and not callee:
            self.mentioned.add(text)
            modules = frozenset(Imported(f"{v.path}.{text}") for v in positional[0] if isinstance(v, Imported))
            return modules or self.attributes.get(text, NOTHING)
        return None

    def _apply(
        self, callee: Values, positional: Sequence[Values], keywords: dict[str, Values], node: ast.AST, scope: Scope
    ) -> Values:
        """Calls each thing that `callee` may be; returns what may come back."""
        results: Values = NOTHING
        known = False
        for value in callee:
            if self._is_device_for(value):
                known = True
                self._record(node, scope)
            elif isinstance(value, Function):
                known = True
                self._pass_arguments(value, positional, keywords)
                if scope.owner is not None:
                    self._reach(value, scope.owner, getattr(node, "lineno", 0))
                results |= self.returns.get(value.node, NOTHING)
            elif isinstance(value, Class):
                known = True
                for name, values in keywords.items():
                    self.attributes[name] = self.attributes.get(name, NOTHING) | values
                for method in value.node.body:
                    if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__new__"):
                        self._pass_arguments(Function(method, self.module, "", True), positional, keywords)
        if known:
            return results
        # Something of another file: it may wrap the functions it is given (`partial`, `wraps`), or call them.
        given = frozenset().union(*positional, *keywords.values())
        functions = frozenset(v for v in self._spread(given) if isinstance(v, Function | Imported))
        if _called_name(node) in CALLING and any(map(self._is_device_for, functions)):
            self._record(node, scope)
        return frozenset(v for v in functions if isinstance(v, Function) or self._is_device_for(v))

    def _is_device_for(self, value: Value) -> bool:
        return isinstance(value, Imported) and _is_device_for(value.path, self.roots)

    def _pass_arguments(self, function: Function, positional: Sequence[Values], keywords: dict[str, Values]) -> None:
        arguments = function.node.args
        names = _parameters(arguments)[1 if function.method else 0 :]
        passed = [*zip(names, positional), *keywords.items()]
        if arguments.vararg is not None:
            passed += [(arguments.vararg.arg, values) for values in positional[len(names) :]]
        if arguments.kwarg is not None:
            passed += [(arguments.kwarg.arg, values) for values in keywords.values()]
        for name, values in passed:
            key = (function.node, name)
            self.arguments[key] = self.arguments.get(key, NOTHING) | values


def _called_name(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def _all_bound(body: Sequence[ast.stmt]) -> frozenset[str]:
    return frozenset(_bound_names(body)[0])


def _defaults(arguments: ast.arguments) -> list[tuple[str, ast.expr]]:
    names = _parameters(arguments)
    pairs = list(zip(names[len(names) - len(arguments.defaults) :], arguments.defaults))
    pairs += [(a.arg, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None]
    return pairs


# Names of other files: only to learn whether one of them is `device_for` under another name.


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


@cache
def _module_file(module: str) -> Path | None:
    """File of a module, found without importing it or its packages."""
    search: Sequence[str] | None = None
    origin: str | None = None
    for i, _ in enumerate(parts := module.split(".")):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), search)
        if spec is None:
            return None
        origin, search = spec.origin, list(spec.submodule_search_locations or [])
    return Path(origin) if origin and origin.endswith(".py") else None


@cache
def _exports(module: str) -> dict[str, str]:
    """Names that a module binds by importing them, or as aliases of such names: name -> dotted path."""
    file = _module_file(module)
    if file is None:
        return {}
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    names: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    path = alias.name if alias.asname else alias.name.split(".")[0]
                    names[alias.asname or path] = path
            case ast.ImportFrom(names=aliases):
                origin = _absolute(node, package)
                for alias in aliases:
                    if alias.name != "*":
                        names[alias.asname or alias.name] = f"{origin}.{alias.name}"
                    elif origin != module:
                        names.update({name: f"{origin}.{name}" for name in _public_names(origin)})
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] = f"{module}.{name}"
            case ast.Assign(targets=[ast.Name(id=name)], value=(ast.Name() | ast.Attribute()) as value):
                head, _, rest = ast.unparse(value).partition(".")
                if head in names:
                    names[name] = names[head] + (f".{rest}" if rest else "")
    return names


def _public_names(module: str) -> list[str]:
    return [name for name in _exports(module) if not name.startswith("_")]


def _is_device_for(path: str, roots: frozenset[str]) -> bool:
    """Whether a dotted path is `device_for`, perhaps re-exported by modules below the packages `roots`."""
    for _ in range(16):  # a longer chain of re-exports is circular
        if path == DEVICE_FOR:
            return True
        parts = path.split(".")
        if parts[0] not in roots:
            return False
        for cut in range(len(parts) - 1, 0, -1):
            target = _exports(".".join(parts[:cut])).get(parts[cut])
            if target is not None:
                break
        else:
            return False
        following = ".".join([target, *parts[cut + 1 :]])
        if following == path:  # defined there, by that name
            return False
        path = following
    return False
