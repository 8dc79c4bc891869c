"""Names in annotations: which entry of the reference each of them means."""

from __future__ import annotations

import ast


def spelled_out(module: str, tree: ast.Module, everything: frozenset[str]) -> ast.Module:
    """Return the module with full names in its annotations, so that none is linked to a namesake.

    `everything` are the full names of all entries; names that no entry ends in stay as they are. The
    pages show the last part only.
    """
    return ast.fix_missing_locations(_Annotations(_meaning(module, tree, everything)).visit(tree))


def _meaning(module: str, tree: ast.Module, everything: frozenset[str]) -> dict[str, str]:
    """What the names stand for that a module imports or defines."""
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
    """Spells out the names in annotations, and nowhere else."""

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
