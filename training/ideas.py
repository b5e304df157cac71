"""`nlq new`: copies an example of an attention part, and writes a comparison with and without it."""

import re
from importlib.resources import files
from pathlib import Path

from modeling_nlq import ATTENTION_PARTS, load_attention_parts

from ..configuration import suggestion
from .disk import resolve_user_path, write_text
from .files import parse_yaml
from .text import check_name


_EXAMPLES = files("modeling_nlq.examples")
IDEAS = sorted(
    Path(file.name).stem for file in _EXAMPLES.iterdir() if file.name.endswith(".py") and file.name[0] != "_"
)


def new_idea(file: str | Path, source: str = "bias") -> tuple[Path, Path]:
    """Copies one of the `IDEAS` to a Python file, and writes a comparison beside it; returns both paths.

    Raises `ValueError` for an unknown idea, an existing file, or an impossible name.
    """
    file = resolve_user_path(file)
    if source not in IDEAS:
        raise ValueError(f"--from {source!r} is unknown; {suggestion(source, IDEAS, is_short=True)}")
    if file.stem in (*ATTENTION_PARTS, "without"):  # the name of the baseline
        raise ValueError(f"{file}: {file.stem!r} is taken; choose another name")
    text = _EXAMPLES.joinpath(f"{source}.py").read_text(encoding="utf-8")
    text = re.sub(r'(?<=    name = )".*"', f'"{file.stem}"', text)
    load_attention_parts(file, text)  # raises for a name that a part cannot have
    check_name(str(file), parse_yaml(file.stem))  # the comparison names a model so, and YAML reads `on` as true
    comparison = file.with_suffix(".yaml")
    for path in (file, comparison):
        if path.exists():
            raise ValueError(f"{path} exists; choose another name")
    write_text(file, text)
    template = _EXAMPLES.joinpath("comparison.yaml").read_text(encoding="utf-8")
    write_text(comparison, template.replace("my_idea", file.stem))
    return file, comparison
