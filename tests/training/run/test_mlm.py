"""Masked language modelling: which tokens are masked, and runs, evaluations and comparisons of encoders."""

import re

import numpy as np
import pytest
import torch
import yaml
from support.runs import interrupt, write_comparison
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    EuroBertConfig,
    EuroBertForMaskedLM,
)

from modeling_nlq import NLQConfig, NLQForMaskedLM
from modeling_nlq.training import convert, evaluate, explore, train
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.run.blocks import BlockCollator
from modeling_nlq.training.run.data import train_byte_pair_encoding
from modeling_nlq.training.run.mlm import EVALUATION, Masking
from nlq import main


ENCODER = {"is_causal": False, "attention_activation": "sigmoid"}
MASKED = {"objective": "masked", "switches": ENCODER}


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_pair_encoding(iter(["def name(self): return 1\n" * 9]), 280)


@pytest.fixture(scope="module")
def encoder_run(recipe_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "run"
    return folder, train(recipe_file, output_dir=folder, **MASKED)


class TestMasking:
    def batch(self, tokenizer, rows=200, length=32):
        ids = np.random.default_rng(0).integers(0, len(tokenizer), (rows, length))
        return BlockCollator(tokenizer.eos_token_id, is_causal=False)([{"input_ids": row} for row in ids])

    def test_rule_of_bert(self, tokenizer):
        batch = self.batch(tokenizer)
        masked = Masking(tokenizer, 0.3, 0).mask(batch, 7)
        ids, labels, before = masked["input_ids"], masked["labels"], batch["input_ids"]
        chosen, special = labels != -100, torch.isin(before, torch.tensor(tokenizer.all_special_ids))
        assert torch.equal(labels[chosen], before[chosen]) and torch.equal(ids[~chosen], before[~chosen])
        assert not (chosen & special).any()
        assert chosen[~special].double().mean() == pytest.approx(0.3, abs=0.02)
        assert (ids[chosen] == tokenizer.mask_token_id).double().mean() == pytest.approx(0.8, abs=0.02)
        assert (ids[chosen] == before[chosen]).double().mean() == pytest.approx(0.1, abs=0.02)

    def test_follows_from_seed_step_and_row_alone(self, tokenizer):
        batch, masking = self.batch(tokenizer, 8), Masking(tokenizer, 0.3, 0)
        masked = masking.mask(batch, 7)
        whole = masked["labels"]
        for name in ("input_ids", "labels"):
            parts = [
                masking.mask({key: each[rows] for key, each in batch.items()}, 7)[name]
                for rows in ([0], [1, 2], range(3, 8))
            ]
            assert torch.equal(torch.cat(parts), masked[name])
        assert not torch.equal(masking.mask(batch, 8)["labels"], whole)
        other = Masking(tokenizer, 0.3, 1)
        assert not torch.equal(other.mask(batch, 7)["labels"], whole)
        assert torch.equal(other.mask(batch, EVALUATION)["labels"], masking.mask(batch, EVALUATION)["labels"])

    def test_row_without_a_chosen_token(self, tokenizer):
        """It gets one: a step without labels would have no loss."""
        batch = self.batch(tokenizer, 40, length=8)
        masked = Masking(tokenizer, 1e-6, 0).mask(batch, 0)
        has_text = ~torch.isin(batch["input_ids"], torch.tensor(tokenizer.all_special_ids)).all(dim=1)
        assert torch.equal((masked["labels"] != -100).sum(dim=1), has_text.long())
        assert (masked["input_ids"][masked["labels"] != -100] == tokenizer.mask_token_id).all()

    @pytest.mark.parametrize("restart", [False, True])
    def test_padding_is_neither_seen_nor_masked(self, tokenizer, restart):
        """Its length depends on the other rows of a batch, so nothing else may."""
        rows = [
            {"input_ids": [*tokenizer("def name(self):" * length).input_ids, tokenizer.eos_token_id, 9]}
            for length in (2, 9)
        ]
        collate, masking = BlockCollator(tokenizer.eos_token_id, restart, is_causal=False), Masking(tokenizer, 0.5, 0)
        torch.manual_seed(0)
        model = NLQForMaskedLM(
            NLQConfig(is_causal=False, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        ).eval()
        together, alone = (masking.mask(collate(batch), EVALUATION) for batch in (rows, rows[:1]))
        length = alone["labels"].shape[1]
        assert (together["labels"][0, length:] == -100).all() and (alone["labels"] != -100).any()
        losses = []
        for batch in (together, alone):
            batch["labels"] = batch["labels"][:1, :length]
            torch.testing.assert_close(batch["labels"], alone["labels"])
            inputs = {name: each for name, each in batch.items() if name != "labels"}
            losses.append(model(**inputs).logits[:1, :length])
        torch.testing.assert_close(*losses)


def test_trains_as_eurobert_does(tokenizer, tmp_path):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 280,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    # Without a pad token, since EuroBERT's embedding passes it no gradient where a random token is the pad token
    EuroBertForMaskedLM(EuroBertConfig(**sizes, pad_token_id=None, mask_token_id=2)).save_pretrained(
        tmp_path / "theirs"
    )
    convert(tmp_path / "theirs", tmp_path / "ours")
    models = [AutoModelForMaskedLM.from_pretrained(tmp_path / name).train() for name in ("theirs", "ours")]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    ids, masking = TestMasking().batch(tokenizer, 40), Masking(tokenizer, 0.3, 0)
    for step in range(5):
        batch, found = masking.mask({name: each[8 * step : 8 * step + 8] for name, each in ids.items()}, step), []
        for model, optimizer in zip(models, optimizers):
            loss = model(**batch).loss
            loss.backward()
            found.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*found, rtol=0, atol=0)


class TestRun:
    @pytest.mark.slow
    def test_goes_on_to_the_same_bits(self, encoder_run, recipe_file, tmp_path):
        interrupt(recipe_file, output_dir=tmp_path / "cut", **MASKED)
        metrics = train(recipe_file, output_dir=tmp_path / "cut", **MASKED)
        assert metrics.data.token_stream == encoder_run[1].data.token_stream
        weights = [(folder / "model.safetensors").read_bytes() for folder in (encoder_run[0], tmp_path / "cut")]
        assert weights[0] == weights[1]

    def test_metrics_are_those_of_masked_tokens(self, encoder_run, corpus):
        folder, metrics = encoder_run
        again = evaluate(folder, corpus, validation_fraction=0.1)
        few = {"validation_fraction": 0.1, "max_validation_documents": 9, "block_size": 24}
        short = [evaluate(folder, corpus, **few, batch_size=size) for size in (1, 7)]
        assert short[0]["eval_loss"] == pytest.approx(short[1]["eval_loss"], rel=1e-6)
        assert again["eval_loss"] == metrics.losses.validation.loss
        assert metrics.losses.validation.perplexity is metrics.losses.validation.bits_per_byte is None
        assert again["eval_pseudo_perplexity"] == pytest.approx(np.exp(metrics.losses.validation.loss))
        card = (folder / "README.md").read_text()
        assert (
            "pipeline_tag: fill-mask" in card
            and "loss (nats per masked token)" in card
            and "AutoModelForMaskedLM" in card
        )

    def test_page_has_maps_of_both_directions(self, encoder_run, tmp_path):
        done = explore(encoder_run[0], text="def f(self): return 1", output=tmp_path / "page.html")
        (page,) = done.models
        assert not page.is_causal and page.layers[0].weights.triu(1).abs().sum() > 0
        model, tokenizer = (each.from_pretrained(encoder_run[0]) for each in (AutoModelForMaskedLM, AutoTokenizer))
        ids = tokenizer("def f(self): return 1", return_tensors="pt", add_special_tokens=False)["input_ids"]
        for place in (1, ids.shape[1] - 1):
            masked = ids.clone()
            masked[0, place] = tokenizer.mask_token_id
            with torch.no_grad():
                loss = -model.eval()(masked).logits[0, place].log_softmax(-1)[ids[0, place]]
            assert page.losses[place - 1].item() == pytest.approx(loss.item(), rel=1e-4)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["generate", "RUN", "x"], "is an encoder: generation needs a decoder"),
            (["evaluate", "RUN", "--tasks", "arc_easy"], "is an encoder: lm_eval needs a decoder"),
            (
                ["train", "RECIPE", "--objective", "masked"],
                "is a decoder; set objective: causal; or set is_causal: false",
            ),
            (
                ["train", "RECIPE", "--set", "is_causal=false"],
                "is an encoder; set objective: masked; or set is_causal: true",
            ),
            (
                ["train", "MASKED", "--tokenizer", "PLAIN"],
                "plain' has no mask token, which an encoder needs; add one by",
            ),
            (["compare", "COMPARISON", "--dry-run"], "tasks=['arc_easy']: lm_eval's tasks need decoders"),
            (["train", "RECIPE", "--mask_probability", "1"], "mask_probability=1.0 must be between 0 and 1"),
        ],
    )
    def test_wrong_recipes_are_refused_in_one_line(
        self, encoder_run, recipe_file, tmp_path, capsys, arguments, message
    ):
        AutoTokenizer.from_pretrained(encoder_run[0], mask_token=None).save_pretrained(tmp_path / "plain")
        recipe = yaml.safe_load(recipe_file.read_text())
        (tmp_path / "masked.yaml").write_text(yaml.safe_dump({**recipe, **MASKED, "model": "tiny-linear"}))
        comparison = write_comparison(
            tmp_path, recipe={**recipe, **MASKED}, models={"base": None, "other": None}, tasks=["arc_easy"]
        )
        places = {"RUN": str(encoder_run[0]), "RECIPE": str(recipe_file), "MASKED": str(tmp_path / "masked.yaml")}
        places |= {"PLAIN": str(tmp_path / "plain"), "COMPARISON": comparison}
        more = ["--output_dir", str(tmp_path / "run")] if arguments[0] == "train" else []
        assert main([*(places.get(word, word) for word in arguments), *more]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_comparison_of_encoders(recipe_file, tmp_path, capsys):
    models = {"base": None, "softmax": {"switches": {"attention_activation": "softmax"}}}
    training = {"max_steps": 6, "save_steps": 3, "logging_steps": 3, "eval_steps": 3, "report_to": "none"}
    fields = {"recipe": str(recipe_file), "models": models, "training": training, "switches": ENCODER}
    options = ["--output_dir", str(tmp_path / "results"), "--objective", "masked"]
    assert main(["compare", write_comparison(tmp_path, **fields), *options]) == 0
    results = read_outcome(tmp_path / "results" / "results.json")
    assert results.largest.same_tokens, "the same masks, too"
    report = (tmp_path / "results" / "results.md").read_text()
    assert "test loss of masked tokens (nats)" in report and "validation loss of masked tokens" in report
    assert "pseudo-perplexity improvement (%)" in report and not re.search(
        "(?<!pseudo-)perplexity|nats per token", report
    )
