"""Functions, classes and constants of a module, read from its source, as linked entries of the reference."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .docstrings import to_markdown

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Member:
    """One public name: its kind in Sphinx's Python domain, its signature, its docstring and inner members."""

    kind: str
    name: str
    signature: str
    docstring: str
    options: tuple[str, ...] = ()
    inner: tuple[Member, ...] = ()
    line: int = 0


def of(tree: ast.Module) -> list[Member]:
    """Return the public members that have a docstring, in the order of the source."""
    found = []
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=False):
        if isinstance(node, Function) and _shown(node):
            found.append(
                Member(
                    "function", node.name, _signature(node), ast.get_docstring(node) or "", line=node.lineno
                )
            )
        elif isinstance(node, ast.ClassDef) and _shown(node):
            found.append(_class(node))
        elif (
            (name := _constant(node))
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            text = after.value.value
            found.append(Member("data", name, name, text if isinstance(text, str) else "", line=node.lineno))
    return found


def render(member: Member, module: str, source: str = "", depth: int = 3) -> str:
    """Return the entry of a member and of its inner members, with a link to its source if that is known."""
    fence = ":" * (depth + (1 if member.inner else 0))
    options = [f":module: {module}", *member.options] if depth == 3 else list(member.options)
    link = [f'<a class="source" href="{source}">source</a>'] if source else []
    body = [*link, to_markdown(member.docstring), *(render(inner, module) for inner in member.inner)]
    lines = [f"{fence}{{py:{member.kind}}} {member.signature}", *options, "", "\n\n".join(body), fence]
    return "\n".join(lines)


def _shown(node: Function | ast.ClassDef) -> bool:
    overloaded = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
    return not node.name.startswith("_") and not overloaded and ast.get_docstring(node) is not None


def _constant(node: ast.stmt) -> str:
    """Return the public name to which a statement assigns a value, or "" if it is no such statement."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(target, ast.Name):
        return ""
    return "" if target.id.startswith("_") else target.id


def _class(node: ast.ClassDef) -> Member:
    inner = []
    for child in node.body:
        if isinstance(child, Function) and _shown(child):
            inner.append(_method(child))
    raised = any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    return Member(
        "exception" if raised else "class",
        node.name,
        node.name + _construction(node),
        ast.get_docstring(node) or "",
        inner=tuple(inner),
        line=node.lineno,
    )


def _method(node: Function) -> Member:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    docstring = ast.get_docstring(node) or ""
    if decorators & {"property", "cached_property", "functools.cached_property"}:
        kind = (f":type: {ast.unparse(node.returns)}",) if node.returns else ()
        return Member("property", node.name, node.name, docstring, kind)
    options = tuple(f":{name}:" for name in ("classmethod", "staticmethod") if name in decorators)
    static = "staticmethod" in decorators
    return Member("method", node.name, _signature(node, own=not static), docstring, options)


def _construction(node: ast.ClassDef) -> str:
    """Return the signature that creates an object.

    It comes from `__init__`, or from the fields of a dataclass or named tuple.
    """
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return _signature(child, own=True).removeprefix("__init__").split(" -> ")[0]
    bases = {ast.unparse(base) for base in node.bases}
    if "NamedTuple" in bases or any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return f"({', '.join(_fields(node))})"
    return ""


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            if child.target.id.startswith("_") or "ClassVar" in ast.unparse(child.annotation):
                continue
            yield f"{child.target.id}: {ast.unparse(child.annotation)}{_default(child.value)}"


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    return " = ..." if isinstance(value, ast.Call) else f" = {ast.unparse(value)}"


def _signature(node: Function, own: bool = False) -> str:
    """Return a function's signature, without its first parameter if that is `self` or `cls`."""
    arguments = node.args
    if own:
        places = arguments.posonlyargs or arguments.args
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs[1:],
            args=arguments.args if arguments.posonlyargs else places[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults,
        )
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(arguments)}){returned}"


def spelled_out(module: str, tree: ast.Module, everything: frozenset[str]) -> ast.Module:
    """Return the module with full names in its annotations, so that no link leads to another name.

    everything: the full names of all entries. Names that are not the last part of one of them are left
    unchanged. The pages show only the last part.
    """
    return ast.fix_missing_locations(_Annotations(_meaning(module, tree, everything)).visit(tree))


def _meaning(module: str, tree: ast.Module, everything: frozenset[str]) -> dict[str, str]:
    """Return the full name of each name that a module imports or defines."""
    ends = {name.rpartition(".")[2] for name in everything}
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            found[statement.name] = f"{module}.{statement.name}"
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found[statement.targets[0].id] = f"{module}.{statement.targets[0].id}"
    return {name: full for name, full in found.items() if name in ends}


class _Annotations(ast.NodeTransformer):
    """Replaces names by full names in annotations, and nowhere else."""

    def __init__(self, meaning: dict[str, str]) -> None:
        self.meaning, self.inside = meaning, False

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = self._annotation(node.annotation)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = self._annotation(node.returns)
        self.visit(node.args)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = self._annotation(node.annotation) or node.annotation
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = self.inside and node.id in self.meaning
        return ast.parse(self.meaning[node.id], mode="eval").body if known else node

    def _annotation(self, annotation: ast.expr | None) -> ast.expr | None:
        self.inside = True
        changed = self.visit(annotation) if annotation else None
        self.inside = False
        return changed
