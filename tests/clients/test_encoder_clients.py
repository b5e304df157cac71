"""Encoders in other people's programs: masked words, a classifier, and adapters."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from support.client_cases import SIZES, TEXT, make_tokenizer, run_script
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from modeling_nlq import NLQConfig, NLQForMaskedLM


SWITCHES = (
    {"attention_activation": "softmax", "query_projection": "upcycled"},
    {"attention_activation": "sigmoid", "query_projection": "nonlinear", "sliding_window": 8},
    {"attention_activation": "linear_attention", "query_projection": "nonlinear"},
)
LORA = {"target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module", params=SWITCHES, ids=lambda switches: switches["attention_activation"])
def folder(request, tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("encoder"), make_tokenizer()
    tokenizer.chat_template = None  # sentence-transformers would apply it
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    torch.manual_seed(0)
    tokens = {"mask_token_id": tokenizer.mask_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = NLQForMaskedLM(
        NLQConfig(**{**SIZES, "vocab_size": len(tokenizer)}, is_causal=False, **tokens, **request.param)
    )
    ids = torch.tensor(tokenizer(TEXT).input_ids).unfold(0, 24, 1).tolist()
    Trainer(
        model,
        TrainingArguments(
            str(folder / "run"), max_steps=80, learning_rate=5e-3, report_to=[], save_strategy="no", use_cpu=True
        ),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
    ).train()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


FILL = """
import sys
from transformers import pipeline

fill = pipeline("fill-mask", sys.argv[1], trust_remote_code=True)
print([row["token_str"] for row in fill("one two<|mask|> four five six")])
"""


def test_fill_mask_without_the_package(folder):
    with_package, without = (run_script(FILL, folder, package=package) for package in (True, False))
    assert with_package == without and without.count("'") == 10


def test_a_fine_tuned_classifier_and_its_adapter_load_as_they_were(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [" ".join(words) for words in (["one"] * 3, ["two", "one"], ["six"] * 4, ["seven", "six"])] * 8
    rows = Dataset.from_dict({**tokenizer(texts), "labels": [0, 0, 1, 1] * 8})
    options = {"max_steps": 30, "learning_rate": 5e-3, "report_to": [], "save_strategy": "no", "use_cpu": True}

    def train(model):
        collator = DataCollatorWithPadding(tokenizer)
        trainer = Trainer(
            model, TrainingArguments(str(tmp_path / "run"), **options), collator, rows, eval_dataset=rows
        )
        trainer.train()
        prediction = trainer.predict(rows)
        assert (prediction.predictions.argmax(-1) == prediction.label_ids).mean() > 0.9
        return prediction.predictions

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    before = train(model)
    model.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    with torch.no_grad():
        logits = again(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(logits, before, atol=1e-5)

    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    adapted = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **LORA))
    before = train(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=2)
    for model in (loaded, loaded.merge_and_unload()):
        with torch.no_grad():
            logits = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
        np.testing.assert_allclose(logits, before, atol=2e-5)
