"""`nlq explore --serve`: the page of the explorer with a field for the text, by Gradio."""

import html
import os
from pathlib import Path

from ..text import check_number, one_line
from .exploring import Text, explore_text, load_subjects, read_text


# It runs the page's script, which reaches nothing else of this site
_FRAME = '<iframe sandbox="allow-scripts" title="page" style="width:100%;height:90vh;border:0" srcdoc="{}"></iframe>'


def make_app(
    model: str, other: str | None = None, text: str = "", max_tokens: int | None = None, trust_remote_code: bool = False
):
    """Loads the models, and makes Gradio's app of them; raises as `serve` does."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
    except ImportError as error:
        raise ImportError('--serve needs Gradio: pip install "modeling-nlq[explore]"') from error
    check_number("max_tokens", max_tokens, 2)
    models, tokenizer = load_subjects([name for name in (model, other) if name is not None], trust_remote_code)

    def show(text: str) -> str:
        try:
            page = explore_text(models, tokenizer, Text(text, [text]), max_tokens).page
        except ValueError as error:
            raise gradio.Error(one_line(error), print_exception=False) from error
        return _FRAME.format(html.escape(page))

    with gradio.Blocks(title=f"Attention of {' and '.join(models)}", analytics_enabled=False) as app:
        field = gradio.Textbox(text, label="Text", lines=4)
        gradio.Button("Show", variant="primary").click(show, field, gradio.HTML())
    return app


def serve(
    model: str,
    other: str | None = None,
    *,
    text: str | None = None,
    file: str | None = None,
    max_tokens: int | None = None,
    host: str | None = None,
    port: int | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Serves the page until it is interrupted.

    Args:
        model, other, text, file, max_tokens: as in `explore`; the text, or that of the file, is in the field at first.
        host: the address to listen at; by default this machine alone.
        port: by default the first free one from 7860.
        trust_remote_code: as in `load_model`.

    Raises:
        ImportError: if Gradio is not installed.
        ValueError: as `explore` does.
        OSError: if the port is taken.
    """
    check_number("port", port, 1, 65535)
    text = text if file is None else read_text(Path(file)).shown
    app = make_app(model, other, text or "", max_tokens, trust_remote_code)
    app.launch(server_name=host or "127.0.0.1", server_port=port, share=False)
