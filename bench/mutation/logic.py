"""Which parts of a source are logic, and which lines belong together.

No logic are: annotations and aliases of types, docstrings, `__all__`, what is raised (the messages of errors), warnings
and logging, and blocks under `TYPE_CHECKING`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_LOGGING = {"log", "logger", "_log", "_logger", "_LOG", "logging", "warnings"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Position = tuple[int, int]


@dataclass(frozen=True)
class Scope:
    """Where a line stands.

    Attributes:
        statement: Lines of the innermost statement; of one with a body, of its head alone.
        function: Lines of the body of the function whose head it is or whose body it is in; None at the top of a module
            or a class.
        head: Whether it is run as the module is imported.
    """

    statement: range
    function: range | None
    head: bool


class Source:
    """A parsed source.

    Args:
        text: Of it.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._tree = ast.parse(text)
        self._left_out = [self._span(node) for node in _no_logic(self._tree)]
        self._scopes: dict[int, Scope] = {}
        self._note(self._tree.body, None)

    def is_logic(self, position: Position) -> bool:
        """Whether a place, its line from 1 and its column from 0, is logic."""
        return not any(start <= position < end for start, end in self._left_out)

    def scope(self, line: int) -> Scope:
        """Where a line stands."""
        return self._scopes.get(line, Scope(range(line, line + 1), None, True))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[Position, Position]:
        end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self._position(node.lineno, node.col_offset), self._position(*end)

    def _position(self, line: int, column: int) -> Position:
        """A place in characters, of one in bytes."""
        return line, len(self._lines[line - 1].encode()[:column].decode())

    def _note(self, body: list[ast.stmt], function: range | None) -> None:
        for node in body:
            inner = [block for block in _blocks(node) if block]
            first = min((node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))))
            end = node.end_lineno or node.lineno
            last = max(min((block[0].lineno for block in inner), default=end + 1) - 1, first)
            within = range(inner[0][0].lineno, end + 1) if isinstance(node, _FUNCTIONS) else function
            for line in range(first, last + 1):
                self._scopes[line] = Scope(range(first, last + 1), within, function is None)
            for block in inner:
                self._note(block, within)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        block = getattr(node, name, None)
        if not isinstance(block, list):
            continue
        if name in ("handlers", "cases"):
            for part in block:
                yield from _blocks(part)
        else:
            yield block


def _no_logic(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.FunctionDef(returns=ast.expr() as returns) | ast.AsyncFunctionDef(returns=ast.expr() as returns):
                yield returns
            case ast.Expr(value=ast.Constant(value=str())) | ast.Raise():
                yield node
            case ast.Assert(msg=ast.expr() as message):
                yield message
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == "__all__" or _is_type(value):
                yield value
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield node
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in _LOGGING:
                yield node


def _is_type(value: ast.expr) -> bool:
    """Whether an expression is an alias such as `A | B`, which only annotations use."""
    match value:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return all(
                isinstance(side, ast.Name | ast.Subscript | ast.Constant) or _is_type(side) for side in (left, right)
            )
    return False
