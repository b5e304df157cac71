"""Writes runs/docstrings.jsonl: the docstrings of the installed Transformers, which are English text about models."""

import ast
import json
from pathlib import Path

import transformers


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)

with open("runs/docstrings.jsonl", "w", encoding="utf-8") as file:
    for path in sorted(Path(transformers.__file__).parent.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts = [text for node in nodes if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))]
        if texts:
            file.write(json.dumps({"text": "\n\n".join(texts)}) + "\n")
