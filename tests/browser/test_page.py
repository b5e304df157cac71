"""The page of the explorer in a real browser, from disk and without a network: it shows what was computed."""

import re
from pathlib import Path

import pytest


playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test-browser")
TEXT = "import json\n\ndef load(path):\n    <script>alert(1)</script> <b>no</b> &amp; return json.load(path)\n"


class Opened:
    """A page that is open, with all that it said and asked for."""

    def __init__(self, browser, address, width=1280):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        playwright.expect(self.page.locator("#panels h3").first).not_to_be_empty()

    def shows(self, selector, pattern):
        """Waits until the first element has a text, and returns its match."""
        playwright.expect(self.page.locator(selector).first).to_have_text(pattern := re.compile(pattern))
        return pattern.search(self.page.locator(selector).first.inner_text())

    def close(self):
        self.context.close()
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(("file:", "data:"))] == []


@pytest.fixture
def open_page(browser):
    """Returns a function that opens a page, and fails if the page logs or requests anything."""
    opened = []

    def open_page(path, **options):
        opened.append(Opened(browser, Path(path).as_uri(), **options))
        return opened[-1]

    yield open_page
    for each in opened:
        each.close()


@pytest.fixture(scope="session")
def explored(run, tmp_path_factory):
    """A page of two models, softmax and one with a layer of linear attention, and what was computed."""
    from transformers import AutoConfig, AutoTokenizer

    from modeling_nlq import NLQForCausalLM
    from modeling_nlq.training.explorer.exploring import explore

    folder = tmp_path_factory.mktemp("explored")
    config = AutoConfig.from_pretrained(
        run[0], attention_activation="tanh", per_layer_config={1: {"attention_activation": "linear_attention"}}
    )
    NLQForCausalLM(config).save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(run[0]).save_pretrained(folder / "other")
    page = folder / "page.html"
    return page, explore(run[0], folder / "other", text=TEXT, output=page)


def test_cross_attention(open_page, tmp_path):
    """A click on a map of the source's tokens names the key in the source, and paints the source."""
    from support.corpora import byte_tokenizer

    from modeling_nlq import NLQForConditionalGeneration, NLQSeq2SeqConfig
    from modeling_nlq.training.explorer.exploring import explore

    half = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = NLQSeq2SeqConfig(encoder=half, decoder=half, decoder_start_token_id=0, pad_token_id=0)
    NLQForConditionalGeneration(config).save_pretrained(tmp_path)
    byte_tokenizer(2).save_pretrained(tmp_path)
    done = explore(tmp_path, text="abcdefg", target="xyz", output=tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html")
    page = opened.page
    page.locator(".heads").first.get_by_role("button").nth(3).click()
    opened.shows("#panels h3", "layer 0 cross, head 1 ")
    page.locator("#colour").select_option("attention 0")
    box, (_, rows, columns) = page.locator("canvas").bounding_box(), done.models[0].layers[1].weights.shape
    page.locator("canvas").click(position={"x": 5.5 / columns * box["width"], "y": 2.5 / rows * box["height"]})
    shown = opened.shows("#panels .readout", r"Weight (\S+) of key 5 “f”; Query 2 “y”\.$")
    assert float(shown[1]) == pytest.approx(done.models[0].layers[1].weights[1, 2, 5].item(), rel=0.02)
    assert page.locator("#source .token.key").inner_text() == "f" and page.locator("#text .token.key").count() == 0
    assert page.locator("#source .token").nth(5).evaluate("token => token.style.background") != "transparent"


@pytest.mark.parametrize("width", [400, 1280, 2000])
def test_it_fits(open_page, explored, width):
    assert open_page(explored[0], width=width).page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_text_is_shown_and_never_run(open_page, explored):
    opened = open_page(explored[0])
    shown = opened.page.evaluate("document.getElementById('text').textContent")
    assert shown.replace("↵", "") == "".join(explored[1].tokens)
    assert "<script>alert(1)</script>" in shown
    assert opened.page.locator("#text script, #text b").count() == 0


def test_opens_on_what_is_worth_seeing(open_page, explored):
    """The token with the largest difference of losses, and the head with the largest share of a pattern."""
    _, done = explored
    opened = open_page(explored[0])
    first, second = (model.losses for model in done.models)
    token = int((second - first).abs().argmax())
    shown = opened.shows("#token", rf"^Token {token + 1}: .*difference (\S+)\.$")
    assert float(shown[1]) == pytest.approx(float(second[token] - first[token]), abs=1e-3)
    patterns = [
        (layer.numbers[name][head].item(), f"layer {layer.name}, head {head} ")
        for name in ("induction", "previous_token")
        for layer in done.models[0].layers
        for head in range(layer.heads)
    ]
    opened.shows("#panels h3", max(patterns)[1])
    titles = [title.split(": ")[1] for title in opened.page.locator("#panels h3").all_inner_texts()]
    assert [title.partition(" (")[0] for title in titles] == [max(patterns)[1].strip()] * 2, "the same head of both"
    first, second = (model.name for model in done.models)
    opened.shows("#text-scale", f"blue: {second} is better, orange: {first} is better$")


def test_squares_are_said_to_be_layers_and_heads(open_page, explored):
    grid = open_page(explored[0]).page.locator(".heads").first
    assert grid.locator("span").all_inner_texts() == ["head", "layer", "0", "1", "0", "1"]


def test_numbers_of_heads(open_page, explored):
    _, done = explored
    opened = open_page(explored[0])
    page, model = opened.page, done.models[0]
    for layer in range(2):
        for head in range(2):
            page.locator(".heads").first.get_by_role("button").nth(2 * layer + head).click()
            opened.shows("#panels h3", f"layer {layer}, head {head} ")
            rows = page.locator("#panels table").first.locator("tr").all()
            shown = {row.locator("th").inner_text().replace(" ", "_"): row.locator("td").inner_text() for row in rows}
            assert shown.keys() == model.layers[layer].numbers.keys()
            for name, values in model.layers[layer].numbers.items():
                assert float(shown[name]) == pytest.approx(values[head].item(), rel=1e-3), (layer, head, name)


def test_the_map_is_drawn_and_a_cell_shows_its_weight(open_page, explored):
    """The largest weight of a row has the full colour, a later key the colour of what is not seen."""
    _, done = explored
    opened, row, size = open_page(explored[0]), done.models[0].layers[0].weights[0, 9], len(done.tokens)
    page = opened.page
    page.locator(".heads").first.get_by_role("button").first.click()
    opened.shows("#panels h3", "layer 0, head 0 ")
    box = page.locator("canvas").first.bounding_box()
    page.locator("canvas").first.click(position={"x": 4.5 / size * box["width"], "y": 9.5 / size * box["height"]})
    shown = opened.shows("#panels .readout", r"Weight (\S+) of key 4 ")
    assert float(shown[1]) == pytest.approx(row[4].item(), abs=row.abs().max().item() / 254 * 1.01)
    page.locator(".token").first.click()  # the selected row is darker
    opened.shows("#panels .readout", "^Query 0 ")
    image = page.evaluate("[...document.querySelector('canvas').getContext('2d').getImageData(0, 9, 16, 1).data]")
    pixels = [image[4 * key : 4 * key + 3] for key in range(16)]
    assert pixels[row.argmax()] == [0xD1, 0x57, 0x0B] and pixels[12] == [0xD6, 0xDB, 0xE1]
    assert pixels[row[:10].argmin()][2] > pixels[row.argmax()][2]
    assert "in the selected row" in page.locator("#panels .scale").first.inner_text()


def test_what_a_layer_lacks_is_said(open_page, explored):
    opened = open_page(explored[0])
    opened.page.locator("#together").uncheck()
    opened.page.locator(".heads").nth(1).get_by_role("button").nth(2).click()
    panel = opened.page.locator("#panels > div").nth(1)
    playwright.expect(panel).to_contain_text("layer 1, head 0 (linear_attention)")
    playwright.expect(panel).to_contain_text("No map: linear attention has no weight")
    assert not panel.locator("canvas").is_visible()
    opened.page.locator("#colour").select_option("attention 1")
    opened.shows("#text-scale", "no weights")


def test_keys_move_the_selection(open_page, explored):
    opened = open_page(explored[0])
    page, last = opened.page, len(explored[1].tokens) - 1
    page.locator(".token").nth(3).click()
    page.keyboard.press("ArrowRight")
    opened.shows("#token", "^Token 4:")
    page.keyboard.press("End")
    opened.shows("#token", f"^Token {last}:")
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"colour", "quantity", "together", "SPAN", "BUTTON"} <= reached


def test_the_text_is_coloured_by_the_choice(open_page, explored):
    opened = open_page(explored[0])
    page = opened.page
    painted = "[...document.querySelectorAll('.token')].map((token) => token.style.background)"
    before = page.evaluate(painted)
    page.locator("#colour").select_option("loss 0")
    losses = page.evaluate(painted)
    assert losses != before and losses[0] == "transparent"
    page.locator("#colour").select_option("attention 0")
    page.locator(".token").nth(5).click()
    page.wait_for_timeout(100)
    attention = page.evaluate(painted)
    assert all(colour == "transparent" for colour in attention[6:]) and "transparent" not in attention[0].split(",")[0]
