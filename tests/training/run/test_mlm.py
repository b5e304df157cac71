"""Masked language modelling: which tokens are masked, and runs, evaluations and comparisons of encoders."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from modeling_nlq import NLQConfig, NLQForMaskedLM
from modeling_nlq.training import evaluate, explore, train
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
        for rows in ([0], [1, 2], range(3, 8)):
            part = masking.mask({key: each[rows] for key, each in batch.items()}, 7)
            assert all(torch.equal(part[name], masked[name][rows]) for name in ("input_ids", "labels"))
        other, whole = Masking(tokenizer, 0.3, 1), masked["labels"]
        assert not torch.equal(masking.mask(batch, 8)["labels"], whole)
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
        texts = [tokenizer("def name(self):" * length).input_ids for length in (2, 9)]
        rows = [{"input_ids": [*text, tokenizer.eos_token_id, 9]} for text in texts]
        collate, masking = BlockCollator(tokenizer.eos_token_id, restart, is_causal=False), Masking(tokenizer, 0.5, 0)
        torch.manual_seed(0)
        config = NLQConfig(is_causal=False, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        model = NLQForMaskedLM(config).eval()
        together, alone = (masking.mask(collate(batch), EVALUATION) for batch in (rows, rows[:1]))
        several, one = together.pop("labels"), alone.pop("labels")
        length = one.shape[1]
        assert torch.equal(several[:1, :length], one) and (several[0, length:] == -100).all() and (one != -100).any()
        torch.testing.assert_close(model(**together).logits[:1, :length], model(**alone).logits)


class TestRun:
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
        for said in ("pipeline_tag: fill-mask", "loss (nats per masked token)", "AutoModelForMaskedLM"):
            assert said in card

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

    def test_what_is_refused(self, encoder_run, recipe_file, tmp_path, capsys):
        assert main(["generate", str(encoder_run[0]), "x"]) == 1
        assert "is an encoder: generation needs a decoder" in capsys.readouterr().err
        with pytest.raises(ValueError, match="is a decoder; set objective: causal; or set is_causal: false"):
            train(recipe_file, output_dir=tmp_path / "run", objective="masked")
        AutoTokenizer.from_pretrained(encoder_run[0], mask_token=None).save_pretrained(tmp_path / "plain")
        with pytest.raises(ValueError, match="plain' has no mask token, which an encoder needs; add one by"):
            train(recipe_file, output_dir=tmp_path / "run", tokenizer=tmp_path / "plain", **MASKED)
