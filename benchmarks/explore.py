"""Size of the explorer's page, and the time to make and to open it, for models of several sizes.

    python benchmarks/explore.py                  # random models of 2, 30 and 300 heads
    python benchmarks/explore.py MODEL FILE       # a saved model and a text

Opening is measured in Chromium, if Playwright is installed and CHROMIUM names the browser: the median of five.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.training.explorer.exploring import explore_tokens, load_subjects, prepare


LAYERS_AND_HEADS = ((1, 2), (5, 6), (30, 10))
TOKENS = 512


class Numbers:
    """A tokenizer whose tokens are numbers."""

    all_special_ids = ()

    def __len__(self):
        return 1000

    def decode(self, tokens: list[int], **_) -> str:
        return "".join(f"{token} " for token in tokens)


def open_times(page: Path) -> list[float]:
    """Seconds until the page is loaded and a map is drawn; empty without a browser."""
    if "CHROMIUM" not in os.environ:
        return []
    from playwright.sync_api import expect, sync_playwright

    times = []
    with sync_playwright() as client:
        browser = client.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
        for _ in range(5):
            tab = browser.new_page(offline=True)
            start = time.perf_counter()
            tab.goto(page.as_uri())
            expect(tab.locator("#panels h3").first).not_to_be_empty()
            times.append(time.perf_counter() - start)
            tab.close()
        browser.close()
    return times


def measure(name: str, subjects, tokenizer, tokens: list[int]) -> None:
    start = time.perf_counter()
    done = explore_tokens(subjects, tokenizer, tokens)
    made = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(done.page)
        times = open_times(page)
    opened = f"{statistics.median(times):.2f}" if times else "not measured"
    print(f"| {name} | {len(done.tokens)} | {len(done.page.encode()) / 1e6:.2f} | {made:.1f} | {opened} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| model | tokens | page (MB) | made in (s) | opened in (s) |\n|---|---:|---:|---:|---:|")
    if arguments.model is not None:
        subjects, tokenizer = load_subjects([arguments.model])
        tokens = tokenizer(arguments.file.read_text(), add_special_tokens=False)["input_ids"]
        measure(arguments.model, subjects, tokenizer, tokens)
        return
    torch.manual_seed(0)
    tokens = torch.randint(1000, (TOKENS,)).tolist()
    for layers, heads in LAYERS_AND_HEADS:
        sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 16 * heads}
        # Scores of a trained model are larger than those of a new one
        config = NLQConfig(vocab_size=1000, max_position_embeddings=TOKENS, initializer_range=0.2, **sizes)
        subjects = {"random": prepare(NLQForCausalLM(config))}
        measure(f"random, {layers} x {heads} heads", subjects, Numbers(), tokens)


if __name__ == "__main__":
    main()
