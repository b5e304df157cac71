"""Hooks of MkDocs: pages from files outside of docs/, the reference of the commands, and what a search finds first."""

import ast
import posixpath
import re
import textwrap
from pathlib import Path

from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click
from typer.main import get_command

from nlq import app


REPOSITORY = Path(__file__).parent.parent
# Pages of the site from files in the root of the repository
ROOT_PAGES = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
SOURCE = "source"  # the folder of files that are linked, but are no pages


def on_files(files: Files, config) -> Files:
    """Adds the pages of the root, the commands, and every file outside of docs/ that a page links to."""
    for name, place in ROOT_PAGES.items():
        files.append(
            File.generated(config, place, content=_linked((REPOSITORY / name).read_text(encoding="utf-8"), name))
        )
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    texts = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in ROOT_PAGES}
    texts |= {f"docs/{page.src_uri}": Path(page.abs_src_path).read_text(encoding="utf-8") for page in _written(files)}
    targets = {
        target for name, text in texts.items() for target in (_in_repository(name, link) for link in _links(text))
    }
    for target in sorted(targets):
        if not target.startswith("docs/") and target not in ROOT_PAGES and (REPOSITORY / target).is_file():
            files.append(File.generated(config, f"{SOURCE}/{target}", abs_src_path=str(REPOSITORY / target)))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Fills in tables of fields, and points the links of a page in docs/ to where the site has what is outside of
    docs/. A search finds reports and changes after pages that explain.
    """
    if page.file.src_uri.startswith("results/") or page.file.src_uri == "CHANGELOG.md":
        page.meta["search"] = {"boost": 0.1}
    markdown = re.sub(r"\{fields of (?P<name>\w+) in (?P<file>\S+)\}", _fields, markdown)
    return markdown if page.file.generated_by else _linked(markdown, f"docs/{page.file.src_uri}")


def _written(files: Files) -> list[File]:
    return [file for file in files if file.is_documentation_page() and not file.generated_by]


def _links(text: str) -> list[str]:
    return [link.partition("#")[0] for link in re.findall(r"\]\(([^)#:\s][^):\s]*)\)", text)]


def _in_repository(name: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def _linked(text: str, name: str) -> str:
    """Rewrites the relative links of a file of the repository for its place in the site."""
    here = posixpath.dirname(ROOT_PAGES.get(name, name.removeprefix("docs/")))

    def rewrite(match: re.Match) -> str:
        link, _, anchor = match[1].partition("#")
        target = _in_repository(name, link)
        place = ROOT_PAGES.get(target) or (
            target.removeprefix("docs/") if target.startswith("docs/") else f"{SOURCE}/{target}"
        )
        return f"]({posixpath.relpath(place, here or '.')}{f'#{anchor}' if anchor else ''})"

    return re.sub(r"\]\(([^)#:\s][^):\s]*)\)", rewrite, re.sub(r'src="docs/', 'src="', text))


def _commands() -> str:
    """The help of every command, as Markdown."""
    command = get_command(app)
    context = command.make_context("nlq", [], resilient_parsing=True)
    return get_docs_for_click(obj=command, ctx=context, name="nlq", title="Commands")


def _fields(match: re.Match) -> str:
    """A table of the fields of a configuration: name, type, default, and what the docstring says of it."""
    tree = ast.parse((REPOSITORY / match["file"]).read_text(encoding="utf-8"))
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == match["name"])
    meanings = {}
    entries = textwrap.dedent(ast.get_docstring(node).partition("Args:\n")[2])
    for names, meaning in re.findall(r"^(\w[\w, ]*): (.*?)(?=^\w|\Z)", entries, flags=re.MULTILINE | re.DOTALL):
        meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in node.body:
        if isinstance(field, ast.AnnAssign):
            name = field.target.id
            kind, default = (f"`{ast.unparse(part)}`" for part in (field.annotation, field.value))
            cells = (f'<a id="{name}"></a>`{name}`', kind, default, meanings.get(name, ""))
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)
