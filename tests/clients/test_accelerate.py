"""accelerate: weights on disk, and data-parallel training of whole models and of adapters; FSDP2 of attention and MLP apart."""

import json
import typing

import accelerate
import pytest
import torch
from support.client_cases import CASES, IDS, greedy, load, logits, run_script
from support.model_cases import LINEAR_SWITCHES, PART_SWITCHES, SWITCHES, random_tokens
from torch import nn

from modeling_nlq import AttentionPart, NLQConfig, NLQForCausalLM, ScoreBias, parts_user_nlq, register_attention_part
from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS


@pytest.mark.parametrize("activation, query", CASES)
def test_offloading(activation, query, trained, tmp_path):
    """One layer on disk, and all of them fetched for each call."""
    folder = trained(activation, query)
    model = load(folder)
    others = ("model.embed_tokens", "model.embed_positions", "model.layers.1", "model.norm", "lm_head")
    places = {**dict.fromkeys(others, "cpu"), "model.layers.0": "disk"}
    on_disk = load(folder, device_map=places, offload_folder=tmp_path)
    assert on_disk.model.layers[0].mlp.fc1.weight.is_meta
    out = on_disk.generate(IDS[:1], max_new_tokens=6, do_sample=False)
    assert out[0, IDS.shape[1] :].tolist() == greedy(model, IDS[0], 6)
    for offloaded in (on_disk, accelerate.cpu_offload(load(folder), execution_device="cpu")):
        torch.testing.assert_close(logits(offloaded), logits(model), atol=0, rtol=0)


class EveryHook(AttentionPart):
    """An own part that reads its parameter in every hook."""

    name, state_size, needs_token_context, needs_first_values = "every_hook", 1, True, True

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gain = nn.Parameter(torch.ones(1))

    def change_input(self, call, *states):
        return self.gain * states[-1]

    change_output = change_mlp_input = change_returned_weights = change_input

    def change_qkv(self, call, *states):
        return tuple(self.gain * own for own in states)

    change_cached_qkv = change_mlp_inner = change_qkv

    def token_state(self, call):
        return self.gain * call.hidden_states[:, None, :, :1].expand(-1, call.layer.config.num_key_value_heads, -1, -1)

    def score_bias(self, call, state):
        bias = self.gain * state[:, :1, :, 0].expand(-1, call.layer.num_heads, -1)
        return ScoreBias(bias[..., call.token_context.query_index], bias)

    def change_scores(self, call, scores, visible):
        return self.gain * scores

    def change_weights(self, call, weights, own_columns, key):
        return self.gain * weights


OWN = {"attention_parts": ["every_hook"], "num_hidden_layers": 3}
FILLED = SWITCHES | PART_SWITCHES | {"own_part": OWN, "canon_of_a_plain_mlp": {"canon": "ABCD"}}
FILLED |= {f"linear_{name}": {"attention_activation": "linear_attention", **case} for name, case in LINEAR_SWITCHES.items()}


@pytest.fixture
def own_part(monkeypatch):
    for table in ("_registered", "_latest"):
        monkeypatch.setattr(parts_user_nlq, table, {})
    register_attention_part(EveryHook)


@pytest.mark.parametrize("name", FILLED)
@torch.no_grad()
def test_parameters_are_filled_for_a_call(name, make_model, own_part):
    """Offloading fills the parameters of a module when it is called, so nothing else may read them."""
    tokens = random_tokens(2, 9)
    for implementation in ("nlq", "eager"):
        model = make_model(implementation=implementation, **FILLED[name])
        expected = model(tokens).logits
        offloaded = accelerate.cpu_offload(model, torch.device("cpu"))
        assert all(parameter.is_meta for parameter in offloaded.parameters())
        assert torch.equal(offloaded(tokens).logits, expected), implementation


def test_every_value_of_every_part_is_offloaded():
    for name in ATTENTION_PARTS:
        values = {value for case in FILLED.values() for value in [case.get(name)] if value not in (None, False)}
        hints = typing.get_args(NLQConfig.__annotations__[name])
        assert values and values >= {value for hint in hints for value in typing.get_args(hint)}, name


@torch.no_grad()
def test_most_weights_on_disk(make_model, tmp_path):
    model, tokens = make_model(implementation="nlq", **PART_SWITCHES["more_parts"]), random_tokens(2, 9)
    model.save_pretrained(tmp_path / "saved")
    options = {"device_map": "auto", "max_memory": {"cpu": 6000}, "offload_folder": tmp_path / "disk"}
    loaded = NLQForCausalLM.from_pretrained(tmp_path / "saved", **options, attn_implementation="nlq")
    assert "disk" in loaded.hf_device_map.values()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


FSDP = """
import json
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from modeling_nlq import NLQForCausalLM

output, folder = sys.argv[1:]
dist.init_process_group("gloo")
mesh, ids = init_device_mesh("cpu", (2,)), torch.arange(36).view(4, 9) % 13
losses = {}
for wrapped in ("", "apart", "apart in layers", "apart in layers in model", "grouped in model"):
    for reentrant in (None, False, True):
        model = NLQForCausalLM.from_pretrained(folder).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in model.model.layers if wrapped else ():
            pair = [layer.self_attn, layer.mlp]
            for part in [pair] if "grouped" in wrapped else pair:
                fully_shard(part, mesh=mesh)
            if "layers" in wrapped:
                fully_shard(layer, mesh=mesh)
        if "model" in wrapped:
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        rows = ids.chunk(2)[dist.get_rank()] if wrapped else ids
        found = losses.setdefault(f"{wrapped}, {reentrant}", [])
        for _ in range(3):
            loss = model(rows, labels=rows, use_cache=False).loss
            loss.backward()
            loss = loss.detach().clone()
            plain = [parameter.grad for parameter in model.parameters() if not hasattr(parameter, "full_tensor")]
            for tensor in (loss, *plain) if wrapped else ():
                dist.all_reduce(tensor.div_(2))
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
if dist.get_rank() == 0:
    json.dump(losses, open(output, "w"))
dist.destroy_process_group()
"""


def test_fsdp2_of_attention_and_mlp_apart(make_model, tmp_path):
    """The attention owns parameters of parts that compute in the MLP, and FSDP2 takes them away between the two."""
    make_model(**PART_SWITCHES["more_parts"]).save_pretrained(tmp_path / "saved")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    run_script(FSDP, tmp_path / "losses.json", tmp_path / "saved", launcher=launcher, script_folder=tmp_path)
    losses = json.loads((tmp_path / "losses.json").read_text())
    expected = losses[", None"]
    assert len(losses) == 15 and expected[-1] < expected[0]
    for name, found in losses.items():
        assert found == pytest.approx(expected, rel=1e-5), name


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
