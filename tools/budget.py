"""Checks the size and shape budgets of the package; exits with 1 and says where, if one is broken.

Budgets: 6,600 lines in the core, which is all but the benches, the command line and training; 400 a file; 60 a
function, nine in ten at most 30; 6 parameters; folders two deep;
no `isinstance` on speculators, no "if speculating" outside `speculate/`, no `print`, no environment variables.
Lines are those that hold code: blank lines, comments and docstrings are free.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "tandem"
OUTSIDE = ("bench", "cli", "training")
"""Folders that no served token passes through: not part of the core."""

# The core was meant to have 6,000 lines. Heads take 1,000: reading seven published layouts, which agree on little, 600.
CORE, FILE, FUNCTION, USUAL, PARAMETERS, DEPTH = 6600, 400, 60, 30, 6, 2
FORBIDDEN = {
    r"(?<![\w.])print\(": "print",
    r"\bos\.(environ|getenv)": "an environment variable",
    r"isinstance\([^)]*(Speculator|Lookup|DraftModel|NoSpeculation)": "isinstance on a speculator",
}


def code_lines(source: str, tree: ast.AST) -> int:
    """Lines that hold a token of code."""
    kept: set[int] = set()
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                kept.difference_update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return len(kept)


def main() -> int:
    """Print the totals and every breach."""
    breaches: list[str] = []
    lengths: list[int] = []
    total = core = 0
    for path in sorted(ROOT.rglob("*.py")):
        source, name = path.read_text(), path.relative_to(ROOT.parent)
        tree = ast.parse(source)
        size = code_lines(source, tree)
        total += size
        core += size * (path.relative_to(ROOT).parts[0] not in OUTSIDE)
        if (lines := source.count("\n")) > FILE:
            breaches.append(f"{name}: {lines} lines, at most {FILE}")
        if len(path.relative_to(ROOT).parts) > DEPTH:
            breaches.append(f"{name}: folders deeper than {DEPTH - 1} below the package")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                lengths.append(length)
                if length > FUNCTION:
                    breaches.append(f"{name}:{node.lineno} {node.name}: {length} lines, at most {FUNCTION}")
                args = [a for a in [*node.args.posonlyargs, *node.args.args] if a.arg not in ("self", "cls")]
                if len(args) > PARAMETERS and "cli" not in path.parts:  # a command's options are its parameters
                    breaches.append(f"{name}:{node.lineno} {node.name}: {len(args)} parameters, at most {PARAMETERS}")
        for number, line in enumerate(source.splitlines(), 1):
            breaches += [f"{name}:{number}: {what}" for rule, what in FORBIDDEN.items() if re.search(rule, line)]
            if "speculate" not in path.parts and re.search(r"\bif\b.*\bspeculat(ing|es)\b", line):
                breaches.append(f"{name}:{number}: a branch on speculation outside speculate/")
    usual = sum(n <= USUAL for n in lengths) / len(lengths)
    if core > CORE:
        breaches.append(f"the core has {core} lines of code, at most {CORE}")
    if usual < 0.9:
        breaches.append(f"{usual:.0%} of the functions have at most {USUAL} lines; nine in ten must")
    sys.stdout.write(
        f"{core} of {CORE} lines of code in the core, {total} in all, "
        f"{usual:.0%} of {len(lengths)} functions within {USUAL} lines\n"
    )
    sys.stdout.writelines(f"over budget: {b}\n" for b in breaches)
    return bool(breaches)


if __name__ == "__main__":
    sys.exit(main())
