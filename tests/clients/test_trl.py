"""TRL: supervised fine-tuning and preference optimisation, whole and by LoRA."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.client_cases import CASES
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


TEXTS = ["one two three four five six", "seven eight nine", "ten eleven twelve one", "twelve ten"]
SETTINGS = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1}
SETTINGS |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
SETTINGS |= {"gradient_checkpointing": False}


def losses(trainer) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def mean_loss(folder) -> float:
    """The mean over all tokens but the first of each text, computed text by text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total = count = 0
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("activation, query", CASES)
def test_sft_keeps_packed_texts_apart(activation, query, adapter, trained, tmp_path):
    folder, first = trained(activation, query), {}
    for packing in (False, True):
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(folder),
            SFTConfig(tmp_path, packing=packing, max_length=32 if packing else None, **SETTINGS),
            train_dataset=Dataset.from_dict({"text": TEXTS}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "fc1"])
            if adapter
            else None,
        )
        first[packing], *_, last = losses(trainer)
        assert last < first[packing]
    expected = mean_loss(folder)
    assert first == {False: pytest.approx(expected, rel=1e-3), True: pytest.approx(expected, rel=1e-3)}


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("activation, query", CASES)
def test_dpo_trains_and_saves(activation, query, adapter, trained, tmp_path):
    folder = trained(activation, query)
    pairs = {"prompt": ["one two "] * 8, "chosen": ["three four"] * 8, "rejected": ["nine nine"] * 8}
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        args=DPOConfig(tmp_path, **SETTINGS),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear") if adapter else None,
    )
    first, *_, last = losses(trainer)
    assert last < first == pytest.approx(math.log(2), abs=1e-3)  # at first the model is its own reference
