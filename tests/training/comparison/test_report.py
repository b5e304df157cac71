"""The report of a comparison: its files say what the results say, and the page needs nothing but itself."""

import copy
import dataclasses
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from support.markdown import html_in

from modeling_nlq.training.comparison.figures import draw_costs, draw_curves, draw_stability
from modeling_nlq.training.comparison.inference import analyse, noise_from_text
from modeling_nlq.training.comparison.ladder import gather_ladder
from modeling_nlq.training.comparison.report import describe, verdicts, write_report
from modeling_nlq.training.comparison.results import losses_by_seed, unsettled_models
from modeling_nlq.training.comparison.sentences import (
    first_warning_sentences,
    noise_floor_sentence,
    protocol_sentences,
    selection_sentences,
    warning_sentences,
)
from modeling_nlq.training.comparison.tables import provenance


RESULTS = Path(__file__).parents[3] / "docs" / "results"
STEPS = 200
NOTHING = "\N{EN DASH}"
FIGURES = ["curves", "flops", "parameters", "stability"]
# Test losses by model and seed; the first model is the baseline, and None is a run that diverged
LOSSES = {
    "linear": {0: 4.600, 1: 4.610, 2: 4.605},
    "nonlinear": {0: 4.570, 1: 4.581, 2: 4.574},
    "identity": {0: 4.651, 1: 4.658, 2: 4.656},
    "residual": {0: 4.601, 1: 4.609, 2: 4.606},
    "relu_squared": {0: 4.700, 1: None, 2: 4.710},
    "tanh": dict.fromkeys(range(3)),
}


def make_run(seed: int, rate: float, loss: float | None) -> dict[str, Any]:
    """A run as `gather` reads it, which ended with a test loss or diverged half way."""
    generator, last = random.Random(seed), STEPS if loss is not None else STEPS // 2
    end = 5.0 if loss is None else loss
    steps = list(range(5, last + 1, 5))
    train = [(step, end + 3.0 * math.exp(-step / 30) + generator.gauss(0.0, 0.02)) for step in steps]
    norms: list[tuple[int, float | None]] = [(step, 1.0 + generator.random()) for step in steps]
    if loss is None:
        norms[-1] = (last, None)
    layers = {
        layer: {
            "entropy": [(step, 4.0 + layer - 0.002 * step) for step in range(0, last + 1, 20)],
            "zero_rows": [(step, 0.0) for step in range(0, last + 1, 20)],
            "largest_score": [(step, (1.0 + layer) * math.exp(step / 20)) for step in range(0, last + 1, 20)],
        }
        for layer in range(2)
    }
    return {
        "folder": f"runs/{seed}",
        "seed": seed,
        "learning_rate": rate,
        "diverged": loss is None,
        "diverged_at": last if loss is None else None,
        "test_loss": loss,
        "validation_loss": None if loss is None else loss + 0.2,
        "train_loss": train[-1][1],
        "bits_per_byte": None,
        "token_accuracy": None,
        "steps": last,
        "tokens_seen": last * 2048,
        "token_stream": f"{seed:08x}" + "e" * 56,
        "train_seconds": 75.25 + seed,
        "tokens_per_second": 5400.0 + seed,
        "peak_memory": 700 * 2**20,
        "attn_implementation": "sdpa",
        "history": {
            "train_loss": train,
            "validation_loss": [(step, end + 0.2 + 3.0 * math.exp(-step / 30)) for step in range(20, last, 20)]
            + [(last, end + 0.2)],
            "gradient_norm": norms,
            "loss_spikes": [last] if loss is None else [],
            "stability": layers,
        },
    }


def make_results(losses: dict[str, dict[int, float | None]], rates: list[float]) -> dict[str, Any]:
    """Results as they are read from `results.json`."""
    baseline, seeds, models = next(iter(losses)), list(next(iter(losses.values()))), {}
    for index, (name, runs) in enumerate(losses.items()):
        # A seed that diverged at every rate reports the run at the smallest
        own = {seed: rates[-1] if loss is not None else rates[0] for seed, loss in runs.items()}
        models[name] = {
            "given": {"switches": {"query_projection": name}, "training": None},
            "parameters": 1_082_496 + 512 * index,
            "trained_parameters": 1_082_496 + 512 * index,
            "non_embedding_parameters": 787_584 + 512 * index,
            "flops_per_token": 7_864_320 + 3072 * index,
            "intermediate_size": 512,
            "learning_rates": rates,
            "search": None,
            "edges": {seed: "largest" for seed, loss in runs.items() if loss is not None and len(rates) > 1},
            "tried": [
                make_run(seed, rate, None if loss is None else 4.7)
                for seed, loss in runs.items()
                for rate in rates
                if rate != own[seed]
            ],
            "runs": [make_run(seed, own[seed], loss) for seed, loss in runs.items()],
        }
    results = {
        "name": "queries",
        "baseline": baseline,
        "seeds": seeds,
        "tokens_per_run": STEPS * 2048,
        "dataset_fingerprint": None,
        "train_tokens": 10_367_360,
        "validation_tokens": 68_350,
        "test_tokens": 77_773,
        "device": "cpu",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "comparison": {"recipe": {"model": "tiny-linear"}, "models": {name: model["given"] for name, model in models.items()}},
        "token_streams": {},
        "same_tokens": True,
        "command": "nlq compare synthetic",
        "models": models,
        "statistics": dataclasses.asdict(analyse(losses, baseline)),
        "tasks": {},
    }
    return json.loads(json.dumps(results, allow_nan=False))


def table_after(markdown: str, heading: str) -> list[dict[str, str]]:
    """The first table below a heading."""
    lines = markdown.split(f"\n## {heading}\n")[1].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    header, _, *body = rows
    return [dict(zip(header, row, strict=True)) for row in body]


class Page(HTMLParser):
    """What a browser would show, and would ask for."""

    def __init__(self, text: str):
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.style, self.text = "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open += [tag] if tag not in ("meta", "link", "img", "br") else []
        for name, value in attributes:
            if name in ("src", "href", "srcset", "action", "data", "poster"):
                self.addresses.append(value)
            if name == "style":
                self.style += value
            if name == "alt":
                assert value

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == "style":
            self.style += text
        else:
            self.text += text


@pytest.fixture(scope="module")
def results():
    results = make_results(LOSSES, [2e-3, 4e-3])
    results["models"]["nonlinear"]["given"]["switches"]["label"] = "<script>alert('1 < 2 & 3')</script>"
    return results


@pytest.fixture(scope="module")
def folder(results, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(results, folder)
    return folder


def test_figures_are_pictures(folder):
    assert sorted(path.name for path in (folder / "figures").iterdir()) == [f"{name}.png" for name in FIGURES]
    for path in (folder / "figures").iterdir():
        picture = imread(path)
        assert picture.shape[0] > 600 and picture.shape[1] > 1200
        assert picture[..., :3].std() > 0.05  # not blank


def test_table_holds_the_numbers_of_the_results(results, folder):
    rows = {row["model"]: row for row in table_after((folder / "results.md").read_text(), "Models")}
    assert list(rows) == list(LOSSES)
    assert rows["linear"]["test loss (nats)"] == "4.6050 ± 0.0050"
    assert rows["linear"]["verdict"] == "baseline" and rows["linear"]["loss improvement (%)"] == NOTHING
    for name, effect in results["statistics"]["effects"].items():
        row, model = rows[name], results["models"][name]
        assert row["verdict"] == effect["verdict"]
        assert (
            row["parameters"] == f"{model['parameters']:,}" and row["non-embedding"] == f"{model['non_embedding_parameters']:,}"
        )
        assert row["FLOPs per token"] == f"{model['flops_per_token']:,}"
        if effect["mean_loss"] is not None:
            assert float(row["test loss (nats)"].split()[0]) == pytest.approx(effect["mean_loss"], abs=5e-5)
        for measure in ("loss", "perplexity"):
            numbers = [float(number) for number in re.findall(r"[+-][\d.]+", row[f"{measure} improvement (%)"])]
            value, ends = effect[f"{measure}_improvement"], effect[f"{measure}_improvement_interval"]
            assert numbers == pytest.approx([] if value is None else [value, *(ends or [])], abs=0.005)
        if effect["holm_p"] is not None:
            assert float(row["Holm p"].removeprefix("< ")) == pytest.approx(max(effect["holm_p"], 1e-4), rel=0.06)
    assert rows["nonlinear"]["learning rate"] == "0.004 (edge)" and rows["tanh"]["learning rate"] == "none"
    assert rows["nonlinear"]["tokens/s"] == "5,401" and rows["nonlinear"]["peak memory (MiB)"] == "700"
    assert [rows[name]["diverged"] for name in ("linear", "relu_squared", "tanh")] == ["0 of 3", "1 of 3", "3 of 3"]


def test_every_run_is_listed(results, folder):
    markdown = (folder / "results.md").read_text()
    rows = table_after(markdown, "Every run")
    runs = [(name, run) for name, model in results["models"].items() for run in [*model["tried"], *model["runs"]]]
    assert len(rows) == len(runs) == 6 * 3 * 2
    for row, (name, run) in zip(rows, runs):
        assert (row["model"], row["seed"], row["learning rate"]) == (name, str(run["seed"]), f"{run['learning_rate']:g}")
        assert row["kind"] == ("reported" if run in results["models"][name]["runs"] else "tried")
        assert row["outcome"] == ("diverged at step 100" if run["diverged"] else "finished")
        assert row["test loss"] == (NOTHING if run["diverged"] else f"{run['test_loss']:.4f}")
        assert row["largest gradient norm"] == ("not finite" if run["diverged"] else row["largest gradient norm"])
        assert row["tokens seen"] == run["token_stream"][:8]
    rates = {row["model"]: row for row in table_after(markdown, "Learning rates")}
    assert rates["linear"] == {"model": "linear", "0.002": "4.9000", "0.004": "✓ 4.8050"}
    assert rates["tanh"] == {"model": "tanh", "0.002": "diverged", "0.004": "diverged"}


def texts_of(results, folder) -> dict[str, str]:
    """All that is said of a comparison, without line breaks."""
    write_report(results, folder)
    texts = {
        "markdown": (folder / "results.md").read_text(),
        "page": Page((folder / "report.html").read_text()).text,
        "terminal": describe(results),
        "card": verdicts(results, "nonlinear"),
    }
    return {kind: " ".join(text.split()) for kind, text in texts.items()}


def test_unequal_noise_is_warned_of(tmp_path):
    def planted(**steps):
        return make_results({name: {seed: 4.6 + step * seed for seed in range(3)} for name, step in steps.items()}, [4e-3])

    said = "The test losses of the other model vary 8.0 times as much from seed to seed as those of the baseline. If noise is"
    for kind, text in texts_of(planted(linear=0.01, nonlinear=0.08), tmp_path).items():
        assert text.count(said) == 1, kind
    (warning,) = warning_sentences(planted(linear=0.08, nonlinear=0.01, identity=0.01))
    assert warning.startswith(
        "The test losses of the baseline vary 8.0 times as much from seed to seed as those of the other models."
    )
    assert warning_sentences(planted(linear=0.02, nonlinear=0.01)) == []
    untested = make_results(
        {name: {seed: 4.6 + step * seed for seed in range(3)} for name, step in (("linear", 0.01), ("nonlinear", 0.02))}
        | {"identity": {0: 4.6, 1: 5.6, 2: None}},
        [4e-3],
    )
    assert not any("times as much" in warning for warning in warning_sentences(untested))


@pytest.mark.slow
def test_risk_of_choosing_a_rate_is_named_everywhere(results, tmp_path):
    words = "p and the intervals include the risk of that choice"
    for kind, text in texts_of(results, tmp_path).items():
        assert text.count(words) == 1, kind
    # Without a choice there is no such risk, and without a test nothing that includes it
    for losses, rates in ((LOSSES, [4e-3]), ({name: {0: 4.6} for name in LOSSES}, [2e-3, 4e-3])):
        for kind, text in texts_of(make_results(losses, rates), tmp_path).items():
            assert words not in text, kind


@pytest.mark.parametrize(
    ("search", "after"),
    [
        (None, "the file asked for just these rates, and a better one may lie beyond."),
        ({"limit": 2}, "the search stopped at its limit of 2 rates, so there is no verdict."),
    ],
)
def test_a_best_rate_at_an_edge_is_said_first(results, tmp_path, search, after):
    edged = copy.deepcopy(results)
    for name, model in edged["models"].items():
        model["search"], model["edges"] = search, {"0": "largest", "2": "largest"} if name == "nonlinear" else {}
    said = f"nonlinear did best at 0.004, the largest learning rate tried, in 2 of 3 seeds: {after}"
    outcomes = dict.fromkeys(("markdown", "page", "card"), "Baseline: linear.") | {"terminal": "model test loss (nats)"}
    for kind, text in texts_of(edged, tmp_path).items():
        assert text.count(said) == 1 and text.index(said) < text.index(outcomes[kind]), kind
    ladder = json.loads((RESULTS / "ladder" / "blocks" / "results.json").read_text())
    for found in ladder["scales"].values():
        found["models"]["cosine scores"]["search"], found["models"]["cosine scores"]["edges"] = search, {"1": "smallest"}
    write_report(ladder, tmp_path / "ladder")
    texts = {
        "markdown": (tmp_path / "ladder" / "results.md").read_text(),
        "page": Page((tmp_path / "ladder" / "report.html").read_text()).text,
        "card": verdicts(ladder, "cosine scores"),
        "terminal": describe(ladder),
    }
    for kind, text in texts.items():
        text = " ".join(text.split())
        outcome = text.index("model 25k (%)" if kind == "terminal" else "Baseline: standard.")
        for name in ladder["scales"]:
            label = "" if kind == "card" and name == "83k" else f"Scale {name}: "
            place = text.index(f"{label}cosine scores did best at")
            assert place < outcome and after in text[place:outcome], kind


def test_a_search_that_diverged_at_every_rate_is_said_first(results, tmp_path):
    """In one seed of a model, and in all of another: no rate was chosen there."""
    lost = copy.deepcopy(results)
    for name, model in lost["models"].items():
        model["search"], model["edges"] = {"limit": 2}, {}
        if name == "residual":
            model["runs"][0]["learning_rate"] = 2e-3
    end = "the search stopped at its limit of 2 rates, and smaller rates were not tried."
    for kind, text in texts_of(lost, tmp_path).items():
        outcome = text.index("model test loss (nats)" if kind == "terminal" else "Baseline: linear.")
        for said in (
            "relu_squared diverged at every learning rate tried, in 1 of 3 seeds: ",
            "tanh diverged at every learning rate tried (0.002, 0.004): ",
        ):
            assert text.count(said) == 1 and text.index(said + end) < outcome, kind
        assert text.count("tanh diverged at") == 1, kind
    rows = {row["model"]: row for row in table_after((tmp_path / "results.md").read_text(), "Models")}
    assert [rows[name]["learning rate"] for name in ("residual", "relu_squared", "tanh")] == [
        "0.002 (1) 0.004 (2)", "0.004 (2)", "none"
    ]  # fmt: skip
    rates = {row["model"]: row for row in table_after((tmp_path / "results.md").read_text(), "Learning rates")}
    assert rates["tanh"]["0.002"] == "diverged" and rates["relu_squared"]["0.004"].startswith("✓ 2: ")


def test_a_run_that_only_chose_a_rate_is_not_taken_for_a_reported_one(results):
    found = copy.deepcopy(results)
    found["models"]["linear"]["runs"][0]["folder"] = "runs/linear/rate-0.004-seed-0"
    for run in (None, "rate-0.004-seed-0"):
        text = verdicts(found, "linear", run)
        assert "**linear** (this model)" in text and "none of those" not in text
    text = verdicts(found, "linear", "rate-0.002-seed-0")
    assert "(this model)" not in text
    assert "It is the run rate-0.002-seed-0 of linear, which was trained to choose a learning rate, and is not" in text


def test_a_choice_in_each_seed_is_part_of_the_test(results):
    assert "Each seed tried the learning rates of a model by itself" in " ".join(protocol_sentences(results))
    assert selection_sentences(results) != selection_sentences(make_results(LOSSES, [4e-3]))
    assert "another rate suits it better" in selection_sentences(make_results(LOSSES, [4e-3]))[0]


def test_names_break_neither_table_nor_figure(results, tmp_path):
    named = copy.deepcopy(results)
    named["name"] = r"a|b $\frac$"  # no formula
    named["comparison"]["recipe"]["dataset"] = "a|b\nc.txt"
    named["command"] = "nlq ` <img src=x> `"
    named["versions"]["torch"] = "<script>alert(1)</script>"
    write_report(named, tmp_path)
    assert html_in((tmp_path / "results.md").read_text()) == html_in(verdicts(named)) == []
    assert sorted(path.stem for path in (tmp_path / "figures").iterdir()) == FIGURES
    assert r"| corpus | a\|b c.txt |" in (tmp_path / "results.md").read_text().splitlines()
    assert r"a|b $\frac$" in Page((tmp_path / "report.html").read_text()).text


def test_page_shows_all_and_asks_for_nothing(results, folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert len(page.addresses) == len(FIGURES) + 1  # and the icon that a browser asks for otherwise
    assert all(address.startswith("data:") for address in page.addresses)
    assert "url(" not in page.style and "@import" not in page.style and "script" not in page.tags and "://" not in text
    for name, effect in results["statistics"]["effects"].items():
        assert name in page.text and effect["verdict"] in page.text
    for row in table_after((folder / "results.md").read_text(), "Every run"):
        assert all(cell in page.text for cell in row.values())
    assert page.text.index("Models") < page.text.index("Losses over steps") < page.text.index("Every run")
    assert "<script>alert('1 < 2 & 3')</script>" in page.text


def test_nothing_missing_is_printed_raw(folder, results):
    for text in ((folder / "results.md").read_text(), Page((folder / "report.html").read_text()).text, describe(results)):
        assert not re.search(r"\b(nan|NaN|None|inf|True|False)\b", text)


def test_same_results_are_the_same_bytes(results, folder, tmp_path):
    write_report(copy.deepcopy(results), tmp_path)
    for name in ("results.md", "report.html"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_terminal_has_a_line_for_each_model(results):
    lines = describe(results).splitlines()
    assert max(map(len, lines)) <= 128
    header = next(index for index, line in enumerate(lines) if line.startswith("model "))
    assert all(line.startswith(("warning: ", "  ")) for line in lines[:header])
    for name, line in zip(LOSSES, lines[header + 1 :]):
        verdict = results["statistics"]["effects"].get(name, {"verdict": "baseline"})["verdict"]
        assert line.startswith(f"{name} ") and line.endswith(f" {verdict}")
    assert lines[header + len(LOSSES) + 1].startswith("Noise floor: the test loss of the baseline linear varies by 0.005 nats")
    assert sum(line.startswith("warning: tanh diverged at every learning rate") for line in lines) == 1
    assert sum(line.startswith("warning: relu_squared diverged in 1 of 3 runs") for line in lines) == 1


@pytest.mark.parametrize(
    ("share", "tokens", "words"),
    [
        (
            0.1234,
            222336,
            " about 12 % of this variance comes from the choice of the test text of 222,336 tokens, the rest from training.",
        ),
        (0.001, None, "; less than 1 % of this variance comes from the choice of the test text, the rest from training."),
        (1.0, None, "; all of this variance may come from the choice of the test text."),
        (None, 1000, "(standard deviation)."),
    ],
)
def test_noise_floor_has_two_parts(results, share, tokens, words):
    assert noise_floor_sentence({**results, "noise_from_text": share, "test_tokens": tokens}).endswith(words)


def test_curves_are_means_of_finished_runs(results):
    losses, improvements = draw_curves(results).axes
    solid, dashed = losses.lines[0], losses.lines[1]
    assert solid.get_linestyle() == "-" and dashed.get_linestyle() == "--"
    assert solid.get_ydata()[-1] == pytest.approx(4.605 + 0.2)
    # The zero line, then the models that both they and the baseline finished
    assert len(improvements.lines) == 1 + 4
    nonlinear, relu_squared = improvements.lines[1], improvements.lines[4]
    assert nonlinear.get_ydata()[-1] == pytest.approx(100 * 0.03 / 4.805)
    # Seeds 0 and 2 only, of the baseline as well
    assert relu_squared.get_ydata()[-1] == pytest.approx(-100 * (4.705 - 4.6025) / 4.8025)
    band = improvements.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(100 * 0.005 / (4.605 + 0.2 + 3.0 * math.exp(-STEPS / 30)), rel=0.01)


def test_stability_takes_the_extreme_layer_and_shows_diverged_runs(results):
    figure = draw_stability(results)
    panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    # zero_rows is 0 always
    assert list(panels) == ["Entropy, mean over layers", "Largest score of any layer", "Gradient norm before clipping"]
    assert panels["Entropy, mean over layers"].lines[0].get_ydata()[0] == pytest.approx(4.5)
    assert panels["Largest score of any layer"].lines[0].get_ydata()[-1] == pytest.approx(2 * math.exp(STEPS / 20))
    assert panels["Largest score of any layer"].get_yscale() == "log"
    dotted = [line for line in panels["Entropy, mean over layers"].lines if line.get_linestyle() == ":"]
    assert len(dotted) == 1 + 3  # a run of relu_squared, all of tanh
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "relu_squared (1 of 3 diverged, 1 loss spike)" in labels and "tanh (3 of 3 diverged, 3 loss spikes)" in labels


def test_points_of_one_size_stand_side_by_side(results):
    equal = copy.deepcopy(results)
    for model in equal["models"].values():
        model["non_embedding_parameters"] = 1000
    axes = draw_costs(equal, "non_embedding_parameters", "parameters").axes[0]
    places = [container.lines[0].get_xdata()[0] for container in axes.containers]
    assert len(places) == 5 and np.mean(places) == pytest.approx(1000)
    assert np.diff(places) == pytest.approx(np.full(4, 30.0))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1,000 (all models)"]


def test_ten_models_look_different(results):
    many = make_results({f"model {index}": {0: 4.0 + index, 1: 4.1 + index} for index in range(10)}, [1e-3])
    handles = draw_costs(many, "flops_per_token", "FLOPs").legends[0].legend_handles[:10]
    assert len({handle.get_color() for handle in handles}) == 10


def test_one_seed_one_rate_other_tokens_and_no_stability(tmp_path):
    results = make_results({"linear": {0: 4.6}, "nonlinear": {0: 4.5}}, [4e-3])
    results["same_tokens"] = False
    for model in results["models"].values():
        for run in model["runs"]:
            run["history"]["stability"] = {}
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "stability.png").touch()  # of a run before
    write_report(results, tmp_path)
    assert sorted(path.stem for path in (tmp_path / "figures").iterdir()) == ["curves", "flops", "parameters"]
    markdown, text = (tmp_path / "results.md").read_text(), describe(results)
    row = table_after(markdown, "Models")[1]
    assert row["verdict"] == "too few seeds: no verdict" and row["test loss (nats)"] == "4.5000"
    assert row["learning rate"] == "0.004 (no choice)" and row["loss improvement (%)"] == "+2.17"
    assert "no verdict is possible" in text and "Noise floor: unknown" in text
    assert "## Learning rates" not in markdown
    assert markdown.index("DID NOT SEE THE SAME TOKENS") < markdown.index("no verdict is possible") < markdown.index("\n|")
    assert "warning: THE MODELS DID NOT SEE THE SAME TOKENS" in text


@pytest.mark.parametrize("rates", [[4e-3], [2e-3, 4e-3]], ids=["one rate", "two rates"])
def test_everything_diverged(rates, tmp_path):
    results = make_results({"linear": {0: None, 1: None}, "nonlinear": {0: None, 1: None}}, rates)
    write_report(results, tmp_path)
    assert [path.stem for path in (tmp_path / "figures").iterdir()] == ["stability"]
    assert [row["verdict"] for row in table_after((tmp_path / "results.md").read_text(), "Models")] == ["baseline", "diverged"]
    assert Page((tmp_path / "report.html").read_text()).open == []
    assert "diverged" in describe(results)


# Published results


def rounded(value: Any) -> Any:
    """`value` to seven digits: quantiles of older and newer SciPy differ in the eleventh, more in a difference near zero."""
    return json.loads(json.dumps(value), parse_float=lambda number: f"{float(number):.7g}")


def check_statistics(results: dict[str, Any]) -> None:
    models = results["models"]
    most = len(results["comparison"]["seeds"]) if results["comparison"].get("stop") else None
    found = analyse(losses_by_seed(models), results["baseline"], unsettled=unsettled_models(models), most=most)
    assert rounded(dataclasses.asdict(found)) == rounded(results["statistics"])
    if None not in (parts := [run.get("test_loss_parts") for run in models[results["baseline"]]["runs"]]):
        assert results["noise_from_text"] == pytest.approx(noise_from_text(parts))
    runs = [run for model in models.values() for run in [*model["tried"], *model["runs"]]]
    assert results["tokens_per_run"] == max(run["tokens_seen"] for run in runs)


def check_files(results: dict[str, Any], published: Path, folder: Path) -> None:
    write_report(results, folder)
    assert (published / "results.md").read_text() == (folder / "results.md").read_text()
    assert {path.name for path in (published / "figures").iterdir()} == {path.name for path in (folder / "figures").iterdir()}


@pytest.mark.parametrize(
    "file",
    [*sorted(RESULTS.glob("*/results.json")), RESULTS / "screening" / "385k" / "results.json"],
    ids=lambda path: path.parent.name,
)
def test_published_results_are_what_their_runs_say(file, tmp_path):
    results = json.loads(file.read_text())
    check_statistics(results)
    check_files(results, file.parent, tmp_path)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("ladder/*/results.json")), ids=lambda path: path.parent.name)
def test_published_ladders_are_what_their_runs_say(file, tmp_path):
    results = json.loads(file.read_text())
    for scale in results["scales"].values():
        check_statistics(scale)
    ladder = SimpleNamespace(
        name=results["name"],
        baseline=results["baseline"],
        command=results["command"],
        given=results["comparison"],
    )
    assert rounded(gather_ladder(ladder, results["scales"])["trend"]) == rounded(results["trend"])
    check_files(results, file.parent, tmp_path)


def test_runs_that_different_kernels_computed(results):
    assert not any("different ways" in sentence for sentence in first_warning_sentences(results))
    name = next(iter(results["models"]))
    results["models"][name]["kernels"] = ["attention by nlq_cpp", "attention by nlq_tiled"]
    assert (
        f"The runs of {name} were computed in different ways: attention by nlq_cpp | attention by nlq_tiled."
        in first_warning_sentences(results)
    )
    assert provenance(results)[f"kernels of {name}"] == "attention by nlq_cpp | attention by nlq_tiled"
