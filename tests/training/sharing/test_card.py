"""The card of a published model."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import markdown_it
import pytest
import safetensors.torch
import yaml
from support.markdown import html_in
from support.publishing_cases import RUN_FILES, TOKENIZER, card_of

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.loading import load_config
from modeling_nlq.training.result import Attention, Data, Evaluation, Losses, RunResult
from modeling_nlq.training.sharing.card import render
from modeling_nlq.training.sharing.scrub import without_folders
from modeling_nlq.training.size import measure


# Each block of Python of a card, as it stands, in a namespace of its own
SNIPPETS = """
import re
import sys
from huggingface_hub import ModelCard

for repo in arguments:
    card = ModelCard.load(repo)
    card.validate()
    blocks = re.findall(r"```python\\n(.*?)```", card.text, flags=re.DOTALL)
    assert len(blocks) == 2 and "import modeling_nlq" in blocks[1], blocks
    for block in blocks if sys.modules.get("modeling_nlq") else blocks[:1]:
        names = {}
        exec(block, names)
        assert names["model"].config.model_type == "nlq"
"""


def test_parts_are_named_with_their_source():
    config = load_config("tiny-forget-gate")
    text = str(render("model", config, measure(config)))
    assert "* `forget_gate`: `s_ij + sum" in text
    # The Hub finds papers by these links alone
    assert re.findall(r"\[arXiv ([\d.]+)\]\(https://arxiv.org/abs/\1\)", text) == ["2503.02130", "2603.13381"]
    assert "(Lin et al. 2025, [arXiv 2503.02130](" in text


@pytest.mark.parametrize("name", ["<img src=x>", "a\n```\n\n<b> ````", "` ![x](http://a.b/c) `"])
def test_names_are_no_html(name):
    config = load_config("tiny-linear")
    losses, data = Losses(False, validation=Evaluation(1.0)), Data(1, 1, "", base_model=name, fingerprint=name)
    result = RunResult(losses, data, attention=Attention(kernels=name))
    given = {"dataset": name, "tokenizer": name, "model": name}
    card = render(name, config, measure(config), recipe=given, result=result, comparison=f"| {name} |")
    assert html_in(card.text) == [] and "<img" not in markdown_it.MarkdownIt("commonmark", {"html": False}).render(
        card.text
    )
    assert yaml.safe_load(re.search(r"(````*)yaml\n(.*?)\1\n", card.text, flags=re.DOTALL)[2]) == given
    conversion = {"source": name, "base_model": name, "source_class": "A", "switches": {}, "lost": [name]}
    card = render("a/b", config, measure(config), given, result, conversion, is_adapter=True)
    code = re.search(r"```python\n(.*?)\n```", card.text, flags=re.DOTALL)[1]
    assert html_in(card.text) == [] and repr(name) in ast.unparse(ast.parse(code))
    assert html_in("a <img src=x>") == ["<img src=x>"]


@pytest.mark.parametrize(
    "dataset", ["allenai/c4", "wikitext", "python-stdlib", "~/mine.jsonl", "/gone/text", "/gone/cmudict"]
)
def test_datasets_are_those_of_the_hub(dataset):
    config = load_config("tiny-linear")
    result = RunResult(Losses(False, validation=Evaluation(1.0)), Data(1, 1, ""))
    card = render("model", config, measure(config), recipe={"dataset": dataset}, result=result)
    assert card.data.datasets == ([dataset] if dataset in ("allenai/c4", "wikitext") else None)
    shown = Path(dataset).name if dataset[0] in "/~" else dataset
    assert {result.dataset_type for result in card.data.eval_results} == {shown}
    assert f"Trained on `{shown}`" in card.text
    assert ('tokenizer("import "' in card.text) == dataset.startswith("python-")
    assert card.data.license == ("apache-2.0" if dataset.startswith("python-") else None)


class TestCard:
    def test_of_a_run(self, server, published, run):
        card, metrics = card_of(server, "anna/model"), run[1]
        assert card.data.license is None and card.data.pipeline_tag == "text-generation"
        assert card.data.tags == ["nlq", "custom_code", "attention"] and card.data.library_name == "transformers"
        assert {
            each.metric_type: (each.metric_value, each.dataset_type, each.dataset_split, each.task_type)
            for each in card.data.eval_results
        } == {
            name: (getattr(metrics.losses.validation, name), "corpus.jsonl", "validation", "text-generation")
            for name in ("loss", "perplexity", "bits_per_byte", "token_accuracy")
        }
        assert json.loads(server.files("anna/model")["metrics.json"]) == without_folders(dataclasses.asdict(metrics))
        for said in (
            "# model\n",
            '"anna/model"',
            f"{metrics.size.total:,} parameters",
            f"{metrics.losses.validation.perplexity:.4f}",
            f"{metrics.data.tokens_seen:,} tokens in 8 steps",
            "![Training and validation loss](loss.png)",
            "`query_projection` | `nonlinear`",
            metrics.data.fingerprint,
            "learning_rate: 0.01",
            "@misc{karbevski2026nonlinear",
        ):
            assert said in card.text, said
        assert "## Comparison" not in card.text and "## Origin" not in card.text
        assert str(published.folder) not in card.content and published.folder.name not in card.content
        assert "{{" not in card.content and "{%" not in card.content and "None" not in card.text

    @pytest.mark.slow
    def test_of_a_run_of_a_comparison(self, server, nlq, comparison):
        folder, results = comparison
        name, model = "linear queries", results.largest.models["linear queries"]
        nlq.publish(folder / model.runs[1].folder, "anna/compared", "--comparison", folder)
        files, card = server.files("anna/compared"), card_of(server, "anna/compared")
        figures = {f"comparison/figures/{name}.png" for name in ("curves", "parameters", "stability")}
        assert files.keys() == RUN_FILES | {"comparison/results.md"} | figures
        section = re.search(r"^## Comparison\n(.*?)^## ", card.text, flags=re.DOTALL | re.MULTILINE)[1]
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")
        ]
        verdict = results.largest.statistics.effects[name].verdict
        assert [row[:2] for row in rows[2:]] == [["base", "baseline"], [f"**{name}** (this model)", verdict]]
        assert f"{results.largest.tokens_per_run:,} tokens" in section and "(comparison/results.md)" in section
        for folder_of, text in (("", card.text), ("comparison/", files["comparison/results.md"].decode())):
            for target in re.findall(r"\]\(([^)#]+)\)", text):
                assert target.startswith("https://") or f"{folder_of}{target}" in files, target
        losses = {(each.metric_type, each.dataset_split): each.metric_value for each in card.data.eval_results}
        assert losses["loss", "test"] == model.runs[1].test_loss and ("loss", "validation") in losses

    def test_of_a_converted_model(self, server, nlq, converted):
        for folder, base_model in zip(converted, ("openai-community/gpt2", None)):
            nlq.publish(folder, f"anna/{folder.name}")
            card = card_of(server, f"anna/{folder.name}")
            assert card.data.base_model == base_model and card.data.license is None and card.data.eval_results is None
            assert card.data.datasets is None
            assert "## Origin" in card.text and "GPT2LMHeadModel" in card.text and "Nothing was measured" in card.text
            assert "## Training" not in card.text and "## Results" not in card.text
            weights = safetensors.torch.load(server.files(f"anna/{folder.name}")["model.safetensors"])
            assert f"{sum(value.numel() for value in weights.values()):,} parameters" in card.text
        assert "`query_projection: upcycled`" in card_of(server, "anna/with-card-nlq").text
        expected = RUN_FILES - {"loss.png", "metrics.json", "recipe.yaml"} | {"conversion.json"}
        files = server.files("anna/with-card-nlq")
        assert files.keys() == expected
        assert b"/" not in files["conversion.json"].replace(b"openai-community/gpt2", b"")

    def test_of_a_model_trained_on_from_the_hub(self, server, nlq, published, fine_tune):
        folder = fine_tune("anna/model")
        nlq.publish(folder, "anna/tuned", "--license", "mit")
        card = card_of(server, "anna/tuned")
        assert card.data.base_model == "anna/model" and card.data.license == "mit"
        assert "starting from `anna/model`" in card.text
        nlq.publish(folder, "anna/tuned")
        assert card_of(server, "anna/tuned").data.license is None, "whose weights have one of their own"

    def test_of_other_heads(self, server, heads):
        tags = {
            "AutoModelForSequenceClassification": "text-classification",
            "AutoModelForMaskedLM": "fill-mask",
            "AutoModel": "feature-extraction",
        }
        assert heads.keys() == tags.keys()
        for auto_class, repo in heads.items():
            card = card_of(server, repo)
            assert card.data.pipeline_tag == tags[auto_class]
            assert f"{auto_class}.from_pretrained(" in card.text and "generate(" not in card.text
            assert "generation_config.json" not in server.files(repo)

    @pytest.mark.slow
    def test_snippets_run_as_they_stand(self, nlq, elsewhere, published, heads, converted):
        nlq.publish(converted[0], "anna/with-card-nlq")
        repositories = ["anna/model", "anna/with-card-nlq", *heads.values()]
        for reader in (nlq, elsewhere):
            reader.python(SNIPPETS, *repositories)

    def test_without_tokenizer_none_is_claimed(self, server, nlq, run, tmp_path):
        NLQForCausalLM.from_pretrained(run[0]).save_pretrained(tmp_path / "bare")
        nlq.publish(tmp_path / "bare", "anna/bare")
        card = card_of(server, "anna/bare")
        assert server.files("anna/bare").keys() == RUN_FILES - TOKENIZER - {"loss.png", "metrics.json", "recipe.yaml"}
        assert 'AutoTokenizer.from_pretrained("anna/bare"' not in card.text
        assert "there is none in this folder" in card.text and "loss.png" not in card.text
        assert card.data.eval_results is None and card.data.datasets is None and "Nothing was measured" in card.text
        assert "## Training" not in card.text and "## Results" not in card.text
