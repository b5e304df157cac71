"""accelerate: weights on disk, and data-parallel training of whole models and of adapters."""

import json

import accelerate
import pytest
import torch
from support.client_cases import CASES, TEXT, greedy, make_tokenizer, run_script
from transformers import AutoModelForCausalLM


IDS = torch.tensor(make_tokenizer()(TEXT).input_ids[:24]).view(2, 12)


@pytest.mark.parametrize("activation, query", CASES)
def test_offloading(activation, query, trained, tmp_path):
    """One layer on disk, and all of them fetched for each call."""
    folder = trained(activation, query)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(IDS).logits
    others = ("model.embed_tokens", "model.embed_positions", "model.layers.1", "model.norm", "lm_head")
    places = {**dict.fromkeys(others, "cpu"), "model.layers.0": "disk"}
    on_disk = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path)
    assert on_disk.model.layers[0].mlp.fc1.weight.is_meta
    out = on_disk.generate(IDS[:1], max_new_tokens=6, do_sample=False)
    assert out[0, IDS.shape[1] :].tolist() == greedy(model, IDS[0], 6)
    offloaded = accelerate.cpu_offload(AutoModelForCausalLM.from_pretrained(folder), execution_device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(on_disk(IDS).logits, expected, atol=0, rtol=0)
        torch.testing.assert_close(offloaded(IDS).logits, expected, atol=0, rtol=0)


# One global batch of 8 rows, split over the processes
TRAINING = """
import json
import os
import sys
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

output, rows, *folders = sys.argv[1:]
processes = int(os.environ.get("WORLD_SIZE", 1))
losses = {}
for folder in folders:
    for adapter in (False, True):
        set_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        if adapter:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        rows_of_ids = json.load(open(rows))
        arguments = TrainingArguments(
            output + "-run",
            max_steps=3,
            per_device_train_batch_size=8 // processes,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"input_ids": rows_of_ids, "labels": rows_of_ids})
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        losses[f"{folder} {adapter}"] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
if int(os.environ.get("RANK", 0)) == 0:
    json.dump(losses, open(output, "w"))
"""


def test_data_parallel(trained, tmp_path):
    """Two processes by remote code, and one with the package, have the same losses."""
    folders = [trained(*case) for case in CASES]
    rows = IDS.flatten().flip(0).unfold(0, 16, 1)[:8].repeat(3, 1)  # a text that the models do not know
    (tmp_path / "rows.json").write_text(json.dumps(rows.tolist()))
    run_script(TRAINING, tmp_path / "one.json", tmp_path / "rows.json", *folders)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    options = {"package": False, "launcher": launcher, "script_folder": tmp_path}
    run_script(TRAINING, tmp_path / "two.json", tmp_path / "rows.json", *folders, **options)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert len(one) == 2 * len(folders)
    for name, losses in one.items():
        assert losses[-1] < losses[0]
        assert two[name] == pytest.approx(losses, rel=1e-3), name
