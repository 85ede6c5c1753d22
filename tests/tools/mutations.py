"""Small faults in Python sources, drawn at random."""

import ast
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("zaya_jax", "pallas_kernels", "benchmarks")
_COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
                ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
                ast.NotIn: ast.In}  # fmt: skip
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
              ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
              ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Mult}  # fmt: skip


class Mutant(NamedTuple):
    """One fault: in `file`, the text `before` at a line's column becomes `after`."""

    number: int
    room: str  # package of zaya_jax, or pallas_kernels
    file: str
    line: int  # from 1
    column: int
    source: str  # the whole line, to find it again in another tree
    occurrence: int  # of lines with this text in the file, from 0
    before: str
    after: str
    operator: str


class Site(NamedTuple):
    """Where a fault can be put; lines from 1, columns in characters."""

    line: int
    column: int
    end_line: int
    end_column: int
    after: str
    operator: str


def sites(source: str) -> list[Site]:
    """List all faults that can be put into a file."""
    return sorted(set(_visit(ast.parse(source), source.splitlines())))


def _visit(node: ast.AST, lines: list[str]) -> Iterator[Site]:
    for site, operator in _faults(node):
        target, replacement = site
        text = ast.unparse(replacement)
        if isinstance(replacement, ast.expr) and not isinstance(replacement, ast.Constant):
            text = f"({text})"
        yield Site(
            target.lineno, _characters(lines[target.lineno - 1], target.col_offset),
            target.end_lineno, _characters(lines[target.end_lineno - 1], target.end_col_offset), text, operator,
        )  # fmt: skip
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _visit(child, lines)


def _faults(node: ast.AST) -> Iterator[tuple[tuple[ast.AST, ast.AST], str]]:
    """Yield (what is replaced, replacement), and the name of the fault."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operation]) if type(operation) in _COMPARISONS:
            changed.ops = [_COMPARISONS[type(operation)]()]
            yield (node, changed), "comparison"
        case ast.BinOp(op=operation) if type(operation) in _OPERATORS:
            changed.op = _OPERATORS[type(operation)]()
            yield (node, changed), "arithmetic"
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
            yield (node, changed), "logic"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield (node, changed.operand), "sign"
        case ast.Constant(value=bool()):
            yield (node, ast.Constant(not changed.value)), "constant"
        case ast.Constant(value=int()):
            yield (node, ast.Constant(changed.value + 1)), "constant"
        case ast.Constant(value=float()):
            yield (node, ast.Constant(changed.value * 2 or 1.0)), "constant"
        case ast.If() | ast.While() | ast.IfExp():
            yield (node.test, ast.UnaryOp(ast.Not(), changed.test)), "condition"
        case ast.Return(value=ast.expr()):
            yield (node, ast.Return(ast.Constant(None))), "return"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield (node, ast.Pass()), "omission"
        case ast.Break():
            yield (node, ast.Continue()), "loop"
        case ast.Continue():
            yield (node, ast.Break()), "loop"


def _characters(line: str, offset: int) -> int:
    """Convert the offset of `ast`, in UTF-8 bytes, to characters."""
    return len(line.encode()[:offset].decode())


def draw(tree: Path, seed: int, count: int) -> list[Mutant]:
    """Draw `count` mutants, in proportion to the lines of each package; within one, every site is as likely."""
    rooms: dict[str, list[Path]] = {}
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.py")):
            parts = path.relative_to(tree).parts
            rooms.setdefault(parts[1] if package == "zaya_jax" and len(parts) > 2 else parts[0], []).append(path)
    lines = {room: sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
             for room, paths in rooms.items()}  # fmt: skip
    shares = {room: count * size / sum(lines.values()) for room, size in lines.items()}
    counts = {room: int(share) for room, share in shares.items()}
    for room in sorted(shares, key=lambda room: counts[room] - shares[room])[: count - sum(counts.values())]:
        counts[room] += 1
    random_state, mutants = random.Random(seed), []
    for room in sorted(rooms):
        all_sites = [(path, site) for path in rooms[room] for site in sites(path.read_text(encoding="utf-8"))]
        for path, site in random_state.sample(all_sites, counts[room]):
            text = path.read_text(encoding="utf-8").splitlines()
            source = text[site.line - 1]
            mutants.append(Mutant(
                len(mutants), room, str(path.relative_to(tree)), site.line, site.column, source,
                text[: site.line - 1].count(source), _between(text, site), site.after, site.operator,
            ))  # fmt: skip
    return mutants


def _between(lines: list[str], site: Site) -> str:
    if site.line == site.end_line:
        return lines[site.line - 1][site.column : site.end_column]
    first, last = lines[site.line - 1][site.column :], lines[site.end_line - 1][: site.end_column]
    return "\n".join([first, *lines[site.line : site.end_line - 1], last])


def apply(mutant: Mutant, text: str) -> tuple[str, range]:
    """Put the fault into a file's text; returns that, and the lines it touches.

    Raises:
      LookupError: the line is not in the text.
    """
    lines = text.splitlines(keepends=True)
    places = [index for index, line in enumerate(lines) if line.rstrip("\n") == mutant.source]
    if len(places) <= mutant.occurrence:
        raise LookupError(f"{mutant.file} has no line {mutant.occurrence} that reads {mutant.source!r}.")
    line = places[mutant.occurrence]
    rest = "".join(lines[line:])
    if not rest[mutant.column :].startswith(mutant.before):
        raise LookupError(f"{mutant.file}:{line + 1} does not continue with {mutant.before!r}.")
    changed = rest[: mutant.column] + mutant.after + rest[mutant.column + len(mutant.before) :]
    mutated = "".join(lines[:line]) + changed
    compile(mutated, mutant.file, "exec")
    return mutated, range(line + 1, line + 2 + mutant.before.count("\n"))
