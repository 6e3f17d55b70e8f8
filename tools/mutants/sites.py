"""Where a source text can be changed into a mutant: one small change that a test should notice."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
OPERATORS = (
    "argument",
    "arithmetic",
    "boolean",
    "comparison",
    "condition",
    "constant",
    "return",
    "statement",
)


@dataclass(frozen=True)
class Site:
    """One mutant: bytes `start` to `end` of a file become `after`."""

    operator: str
    file: str
    line: int
    function: str  # its qualified name, "" for code that runs when the module is imported
    start: int
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """The name of the mutant, which no other mutant of the same file has."""
        return f"{self.file}:{self.start}-{self.end}:{self.operator}:{self.after}"

    def applied_to(self, source: bytes) -> bytes:
        """Returns the source of the mutant."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def sites_of(path: Path, root: Path) -> list[Site]:
    """Returns every site of a file, in the order of the source; some may be no mutants."""
    finder = _Finder(path.read_bytes(), path.relative_to(root).as_posix())
    finder.visit(finder.tree)
    return sorted(finder.sites, key=lambda site: (site.start, site.end, site.operator, site.after))


def is_mutant(site: Site, source: bytes) -> bool:
    """Returns whether a site changes a program into another program, not only its spaces."""
    try:
        mutated = ast.parse(site.applied_to(source))
    except SyntaxError:
        return False
    return ast.dump(mutated) != ast.dump(ast.parse(source))


class _Finder(ast.NodeVisitor):
    """Walks over a module and notes sites.

    It passes over annotations, decorators, assertions and what only a person reads: docstrings, the
    texts of errors, `__repr__` and `__str__`.
    """

    def __init__(self, source: bytes, file: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self.file = file
        self.sites: list[Site] = []
        self._scopes: list[str] = []
        self._functions = 0
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self._scopes.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1
        self._scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scopes.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("statement", node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            self._add("statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self._add("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement", node, "pass")
        sign = ARITHMETIC.get(type(node.op))
        if sign is not None:
            target = self._text(node.target)
            self._add("arithmetic", node, f"{target} {sign}= {self._text(node.value)}")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        self._add("return", node, "return None")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            sign = COMPARISONS[type(node.ops[0])]
            left = self._text(node.left)
            self._add("comparison", node, f"{left} {sign} {self._text(node.comparators[0])}")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        parts = [f"({self._text(value)})" for value in node.values]
        self._add("boolean", node, f"({word.join(parts)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("boolean", node, f"bool({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sign = ARITHMETIC.get(type(node.op))
        if sign is not None and not _is_text(node.left) and not _is_text(node.right):
            left = self._text(node.left)
            self._add("arithmetic", node, f"(({left}) {sign} ({self._text(node.right)}))")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for dropped in node.keywords:
            if dropped.arg is None:
                continue
            kept = [*node.args, *(word for word in node.keywords if word is not dropped)]
            arguments = ", ".join(self._text(argument) for argument in kept)
            self._add("argument", node, f"{self._text(node.func)}({arguments})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add("constant", node, repr(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def _negate(self, test: ast.expr) -> None:
        self._add("condition", test, f"(not ({self._text(test)}))")

    def _add(self, operator: str, node: ast.stmt | ast.expr, after: str) -> None:
        start, end = self._span(node)
        before = self.source[start:end].decode()
        function = ".".join(self._scopes) if self._functions else ""
        site = Site(operator, self.file, node.lineno, function, start, end, before, after)
        self.sites.append(site)

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._line_starts[node.lineno - 1] + node.col_offset  # pyright: ignore
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset  # pyright: ignore
        return start, end


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def functions_of(source: bytes) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields every function of a module with its qualified name."""

    def walk(node: ast.AST, scopes: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = (*scopes, child.name)
                if isinstance(child, ast.FunctionDef):
                    yield ".".join(inner), child
                yield from walk(child, inner)
            else:
                yield from walk(child, scopes)

    yield from walk(ast.parse(source), ())
