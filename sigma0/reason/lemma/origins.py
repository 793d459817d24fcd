"""Where the values of a program come from, as far as its text tells: out of literals alone, or out of a computation.

Strangers' code is looked at here and never run. What a name holds is followed in the order of the statements: a later
binding takes the place of an earlier one, branches and loops are joined, and a value that is bound or changed under a
computed condition is computed, too. It is a judgement on careless code: one that sets out to deceive it can.
"""

import ast
import itertools
from collections.abc import Collection, Iterator
from enum import IntFlag

Environment = dict[str, "Origin"]


class Origin(IntFlag):
    """What a value depends on; of several all count.

    Attributes:
        LITERAL: Nothing but what is written down.
        COMPUTED: A call, a comprehension, arithmetic, or a loop.
        ENUMERATED: A loop, a comprehension, or `itertools`, `map` and `filter`.
        CONTAINER: A list, dictionary or set that is written down, and may be changed later.
        VERIFIED: A value that was enumerated and verified before: by its name, or written down anew.
    """

    LITERAL = 0
    COMPUTED = 1
    ENUMERATED = 2
    CONTAINER = 4
    VERIFIED = 8


# over the whole program, until nothing is news; ordinary code takes three or four
MAX_PASSES = 40
LOOPED = Origin.COMPUTED | Origin.ENUMERATED
# what these say of a value is no more computed than it
_PASS_ON = frozenset(
    ("bool", "complex", "dict", "float", "frozenset", "int", "iter", "list", "repr", "reversed", "set", "str", "tuple")
) | {"all", "any", "id", "print"}
# facts about kinds say nothing of a value
_OF_KINDS = frozenset(("callable", "hasattr", "isinstance", "issubclass", "type"))
_LOOPING = frozenset(("map", "filter"))
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Origins:
    """Of everything in a program.

    Args:
        tree: The program.
        given: Names that hold verified values before it begins.
        restated: Numbers that are such values where a name is bound to them.

    Attributes:
        ends: What its names at the top level hold at its end.

    Raises:
        ValueError: If values are handed on in more steps than `MAX_PASSES`.
    """

    def __init__(self, tree: ast.Module, given: Collection[str] = (), restated: Collection[int] = ()) -> None:
        self.functions: dict[str, list[_Function]] = {}
        self.modules: set[str] = set()
        self.looping: set[str] = set(_LOOPING)
        before = dict.fromkeys(given, Origin.COMPUTED | Origin.VERIFIED)
        self.restated = frozenset(restated)
        self.anywhere: Environment = dict(before)
        self.returned: Environment = {}
        self.given: Environment = {}
        self.changed_inside: Environment = {}
        self.heads: dict[ast.AST, Environment] = {}
        self.in_loops: set[str] = set()
        self.settled = False
        self._scopes: dict[ast.Assert, Scope] = {}
        self._collect(tree)
        for _ in range(MAX_PASSES):
            self.settled = True
            self.ends = Scope(self, None, dict(before)).walk(tree.body)
            for name, function in self._each_function():
                self._inside(name, function)
            if self.settled:
                return
        raise ValueError("its functions and loops hand values on in too many steps")

    def at(self, assertion: ast.Assert, expression: ast.expr) -> Origin:
        """Of an expression where an assertion stands; of one that can never be reached it is a literal."""
        scope = self._scopes.get(assertion)
        return Origin.LITERAL if scope is None else scope.of(expression)

    def at_end(self, name: str) -> Origin | None:
        """Of a name of the top level at the program's end; None where it is not bound there."""
        inside = self.changed_inside.get(name)
        if name not in self.ends:
            return inside
        return self.ends[name] | (inside or Origin.LITERAL)

    def join(self, where: Environment, name: str, origin: Origin) -> None:
        """Adds what a name may hold to what is known of it; where that is news, all is looked at once more."""
        before = where.get(name)
        if before is None or before | origin != before:
            where[name] = (before or Origin.LITERAL) | origin
            self.settled = False

    def keep(self, assertion: ast.Assert, scope: "Scope") -> None:
        """Notes what is known where an assertion stands."""
        self._scopes[assertion] = scope

    def _each_function(self) -> Iterator[tuple[str, _Function]]:
        return ((name, function) for name, functions in self.functions.items() for function in functions)

    def _collect(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._add(node.name, node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self._add(target.id, node.value)
            elif isinstance(node, ast.Import):
                self.modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
                self.looping |= {alias.asname or alias.name for alias in node.names if alias.name == "itertools"}
            elif isinstance(node, ast.ImportFrom) and node.module == "itertools":
                for alias in node.names:
                    self.looping |= set(dir(itertools)) if alias.name == "*" else {alias.asname or alias.name}

    def _add(self, name: str, function: _Function) -> None:
        self.functions.setdefault(name, []).append(function)
        body = [function.body] if isinstance(function, ast.Lambda) else function.body
        nodes = [node for statement in body for node in ast.walk(statement)]
        loops = any(isinstance(node, ast.For | ast.AsyncFor | ast.While | _COMPREHENSIONS) for node in nodes)
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        # a function that calls itself twice goes through a tree of cases
        if loops or sum(isinstance(called, ast.Name) and called.id == name for called in calls) > 1:
            self.in_loops.add(name)

    def _inside(self, name: str, function: _Function) -> None:
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        given = self.given.get(name, Origin.LITERAL)
        scope = Scope(self, name, {argument.arg: given for argument in every if argument is not None})
        if isinstance(function, ast.Lambda):
            self.join(self.returned, name, scope.of(function.body))
        else:
            scope.walk(function.body)


class Scope:
    """The statements of a program or of a function, one after another.

    Args:
        origins: Of the whole program.
        function: Its name; None at the top level.
        names: What names hold at the beginning.
    """

    def __init__(self, origins: Origins, function: str | None, names: Environment) -> None:
        self.origins = origins
        self.function = function
        self.names = names
        self.control = Origin.LITERAL
        self.in_loop = function in origins.in_loops
        self.foreign: set[str] = set()

    def walk(self, body: list[ast.stmt]) -> Environment:
        """Goes through statements; returns what names hold after them."""
        for statement in body:
            self._statement(statement)
        return self.names

    def of(self, node: ast.expr | None) -> Origin:
        """Where an expression's value comes from."""
        if node is None or isinstance(node, ast.Constant | ast.Lambda):
            return Origin.LITERAL
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, _COMPREHENSIONS):
            return self._comprehension(node)
        if isinstance(node, ast.NamedExpr):
            origin = self.of(node.value)
            self._bind(node.target, origin)
            return origin
        return self._composed(node)

    def _composed(self, node: ast.expr) -> Origin:
        parts = [self.of(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        origin = joined(*parts)
        if isinstance(node, ast.BinOp) or (isinstance(node, ast.Slice) and parts):
            return origin | Origin.COMPUTED
        if isinstance(node, ast.BoolOp):
            return origin if self._is_open(node, parts) else Origin.LITERAL
        if isinstance(node, ast.Yield | ast.YieldFrom) and self.function is not None:
            self.origins.join(self.origins.returned, self.function, self._here(origin | Origin.COMPUTED))
            return Origin.COMPUTED
        if isinstance(node, ast.Compare):
            return origin & ~Origin.CONTAINER
        if isinstance(node, ast.IfExp) and not parts[0] & Origin.COMPUTED:
            # which of the two it is stands written down, but not here
            return parts[1] & parts[2]
        if isinstance(node, ast.List | ast.Dict | ast.Set):
            return origin | Origin.CONTAINER
        return origin

    def _is_open(self, node: ast.BoolOp, parts: list[Origin]) -> bool:
        """Whether a computed part can make a difference: True or f() is no more than True."""
        if all(part & Origin.COMPUTED for part in parts):
            return True
        decides = isinstance(node.op, ast.Or)
        if any(isinstance(value, ast.Constant) and bool(value.value) is decides for value in node.values):
            return False
        # found = found or ..., ok = ok and ...: what it begins with is written down, what it becomes is not
        return self.in_loop or not decides

    def _name(self, name: str) -> Origin:
        inside = self.origins.changed_inside.get(name, Origin.LITERAL)
        if name in self.names and name not in self.foreign:
            return self.names[name] | inside
        return self.origins.anywhere.get(name, Origin.LITERAL) | inside

    def _call(self, node: ast.Call) -> Origin:
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        given = joined(*map(self.of, values)) & ~Origin.CONTAINER
        for value in values:
            if isinstance(value, ast.Name) and value.id in self.origins.functions:
                # handed over to be called, nobody knows with what
                self.origins.join(self.origins.given, value.id, Origin.COMPUTED)
        function = node.func
        if isinstance(function, ast.Attribute):
            return self._method(function, values, given)
        if not isinstance(function, ast.Name):
            return given | self.of(function) | Origin.COMPUTED
        name = function.id
        if name in self.origins.functions:
            return self._own_function(name, values, given)
        if name in _OF_KINDS:
            return Origin.LITERAL
        if name in _PASS_ON:
            return given
        return given | (LOOPED if name in self.origins.looping else Origin.COMPUTED)

    def _own_function(self, name: str, values: list[ast.expr], given: Origin) -> Origin:
        self.origins.join(self.origins.given, name, given)
        if self.in_loop and name not in self.origins.in_loops:
            self.origins.in_loops.add(name)
            self.origins.settled = False
        self._may_change(values, LOOPED if name in self.origins.in_loops else Origin.COMPUTED)
        return given | self.origins.returned.get(name, Origin.LITERAL)

    def _method(self, function: ast.Attribute, values: list[ast.expr], given: Origin) -> Origin:
        base = function.value
        if isinstance(base, ast.Name) and base.id in self.origins.modules:
            self._may_change(values, Origin.COMPUTED)
            return given | (LOOPED if base.id in self.origins.looping else Origin.COMPUTED)
        origin = given | self.of(base) | Origin.COMPUTED
        self._change(base, LOOPED if self.in_loop else given)
        if function.attr in self.origins.functions:
            self.origins.join(self.origins.given, function.attr, Origin.COMPUTED)
            origin |= self.origins.returned.get(function.attr, Origin.LITERAL)
        return origin & ~Origin.CONTAINER

    def _may_change(self, values: list[ast.expr], origin: Origin) -> None:
        for value in values:
            if isinstance(value, ast.Name) and self._name(value.id) & Origin.CONTAINER:
                self._change(value, origin)

    def _comprehension(self, node: ast.expr) -> Origin:
        outer, self.names = self.names, dict(self.names)
        assert isinstance(node, _COMPREHENSIONS)
        origin = LOOPED
        for generator in node.generators:
            origin |= self.of(generator.iter)
            self._bind(generator.target, LOOPED)
            for test in generator.ifs:
                self.of(test)
        parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        origin |= joined(*map(self.of, parts))
        self.names = outer
        return origin & ~Origin.CONTAINER

    def _here(self, origin: Origin) -> Origin:
        """With what is known of the place: a condition that is computed, a loop around it."""
        here = origin | self.control
        return here | Origin.ENUMERATED if self.in_loop and here & Origin.COMPUTED else here

    def _bind(self, target: ast.expr, origin: Origin) -> None:
        if isinstance(target, ast.Name):
            bound = self._here(origin)
            self.names[target.id] = bound
            self.origins.join(self.origins.anywhere, target.id, bound)
            if target.id in self.foreign:
                self.origins.join(self.origins.changed_inside, target.id, bound)
        elif isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._bind(element, origin)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, origin)
        elif isinstance(target, ast.Subscript):
            self._change(target.value, LOOPED if self.in_loop else origin | self.of(target.slice))
        elif isinstance(target, ast.Attribute):
            self._change(target.value, origin)

    def _change(self, base: ast.expr, origin: Origin) -> None:
        """Something inside a value was changed: it is what it was, and that, too."""
        while isinstance(base, ast.Subscript | ast.Attribute):
            base = base.value
        if not isinstance(base, ast.Name):
            return
        changed = self._name(base.id) | self._here(origin)
        if base.id in self.names:
            self.names[base.id] = changed
        if self.function is not None and (base.id not in self.names or base.id in self.foreign):
            self.origins.join(self.origins.changed_inside, base.id, changed & ~Origin.CONTAINER)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self._assignment(node)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self._loop(node)
        elif isinstance(node, ast.If):
            self._branches(self.of(node.test), [node.body, node.orelse])
        elif isinstance(node, ast.Match):
            self._match(node)
        elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            self._try(node)
        elif isinstance(node, ast.With | ast.AsyncWith):
            self._with(node)
        elif isinstance(node, ast.Return):
            if self.function is not None:
                self.origins.join(self.origins.returned, self.function, self._here(self.of(node.value)))
        elif isinstance(node, ast.Assert):
            self._assertion(node)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            self.foreign |= set(node.names)
        elif isinstance(node, ast.ClassDef):
            Scope(self.origins, None, dict(self.names)).walk(node.body)
            # what stands in it is not followed, what is changed in it from outside is
            self._bind(ast.Name(node.name, ast.Store()), Origin.LITERAL)
        elif isinstance(node, ast.Expr):
            self.of(node.value)

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        origin = self.of(node.value)
        if isinstance(node, ast.AugAssign):
            origin |= self.of(node.target) | Origin.COMPUTED
        if node.value is not None:
            if self._restates(node.value):
                origin |= Origin.VERIFIED
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._bind(target, origin)

    def _restates(self, value: ast.expr) -> bool:
        """Whether a verified value is written down anew, alone or in a table."""
        parts = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [value])
        numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
        return any(type(number) is int and number in self.origins.restated for number in numbers)

    def _assertion(self, node: ast.Assert) -> None:
        here = Scope(self.origins, self.function, dict(self.names))
        here.foreign = self.foreign
        self.origins.keep(node, here)
        self.of(node.test)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        head = self.origins.heads.setdefault(node, {})
        self._join_into(head)
        self.names = dict(head)
        control, in_loop, self.in_loop = self.control, self.in_loop, True
        if isinstance(node, ast.While):
            self.control |= self.of(node.test)
        else:
            self.of(node.iter)
            self._bind(node.target, LOOPED)
        self.walk(node.body)
        self._join_into(head)
        self.names = dict(head)
        self.in_loop = in_loop
        # whether a loop is left by a break is up to what it does
        self.control = control | LOOPED
        self.walk(node.orelse)
        self.control = control

    def _join_into(self, head: Environment) -> None:
        for name, origin in self.names.items():
            self.origins.join(head, name, origin)

    def _branches(self, control: Origin, bodies: list[list[ast.stmt]]) -> None:
        before, held, self.control = self.names, self.control, self.control | (control & ~Origin.CONTAINER)
        ends = []
        for body in bodies:
            self.names = dict(before)
            ends.append(self.walk(body))
        self.control = held
        self.names = {name: joined(*(end.get(name, Origin.LITERAL) for end in ends)) for end in ends for name in end}

    def _match(self, node: ast.Match) -> None:
        subject = self.of(node.subject)
        for case in node.cases:
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    self._bind(ast.Name(name, ast.Store()), subject)
            subject |= self.of(case.guard)
        self._branches(subject, [*(case.body for case in node.cases), []])

    def _try(self, node: ast.stmt) -> None:
        assert isinstance(node, ast.Try) or type(node).__name__ == "TryStar"
        body, handlers, orelse, final = (getattr(node, name) for name in ("body", "handlers", "orelse", "finalbody"))
        nodes = [part for statement in body for part in ast.walk(statement)]
        may_fail = any(isinstance(part, ast.Call | ast.BinOp | ast.Assert) for part in nodes)
        self.walk(body)
        control = Origin.COMPUTED if may_fail else Origin.LITERAL
        self._branches(control, [*(handler.body for handler in handlers), orelse])
        self.walk(final)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            origin = self.of(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, origin | Origin.COMPUTED)
        self.walk(node.body)


def joined(*origins: Origin) -> Origin:
    """All of them together."""
    union = Origin.LITERAL
    for origin in origins:
        union |= origin
    return union
