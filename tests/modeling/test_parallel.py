"""Tensor parallelism on several processes: everything equals one process."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from support.model_cases import GATED_DELTA, PART_SWITCHES, RICH, SWITCHES
from support.paths import TESTS
from transformers.distributed import DistributedConfig

from modeling_nlq import NLQConfig, NLQForConditionalGeneration, NLQSeq2SeqConfig
from modeling_nlq.integrations_nlq import check_distribution


# Few models with many switches each, so that every part that belongs to heads is in one of them
CASES = {name: {"attention_activation": name, **switches} for name, switches in RICH.items()}
# Transformers cannot load a matrix of which a process has no row, so there is a head for each of four processes
CASES |= {"delta": GATED_DELTA}
CASES |= {name: PART_SWITCHES[name] for name in ("all_parts", "more_parts", "output_gate")}
SIZES = {
    "tp2": {"tp_size": 2},
    "tp4": {"tp_size": 4},
    "fsdp2": {"fsdp_size": 2},
    "tp2_fsdp2": {"tp_size": 2, "fsdp_size": 2},
}


def check(cases, make_model, folder):
    """Compares models on several processes with the same models on one; the cases are switches and sizes."""
    described = {}
    for name, (switches, sizes) in cases.items():
        if switches.get("num_key_value_heads", 4) % sizes.get("tp_size", 1):
            switches = {**switches, "num_key_value_heads": 4}
        if "decoder" in switches:
            model = NLQForConditionalGeneration(NLQSeq2SeqConfig(**switches))
        else:
            model = make_model(implementation=None, **switches)
        model.save_pretrained(folder / name)
        described[name] = {"folder": str(folder / name), "sizes": sizes}
    (folder / "cases.json").write_text(json.dumps(described))
    processes = math.prod(sizes.values())  # the same in all cases
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += ["-m", "support.parallel_worker", str(folder / "cases.json"), str(folder / "results.json")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((folder / "results.json").read_text())
    assert results.keys() == cases.keys()
    for name, differences in results.items():
        assert all(difference < 1e-9 for difference in differences.values()), (name, differences)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["tp2", "fsdp2"])
def test_encoder_and_decoder(sizes, make_model, tmp_path):
    half = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    half |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
    half |= {"query_projection": "upcycled", "initializer_range": 0.3}
    crosses = {
        "sigmoid": {"attention_activation": "sigmoid", "query_projection": "nonlinear"},
        "linear": {"attention_activation": "linear_attention", "attention_gate": "headwise"},
        "sink": {"attention_sink": "learned"},
    }
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    cases = {
        name: {"encoder": half, "decoder": {**half, "cross_attention": cross}, **tokens}
        for name, cross in crosses.items()
    }
    check({name: (switches, SIZES[sizes]) for name, switches in cases.items()}, make_model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_every_split(sizes, make_model, tmp_path):
    check({name: (switches, SIZES[sizes]) for name, switches in CASES.items()}, make_model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(5))
def test_every_switch(share, make_model, tmp_path):
    """In five launches, because each model leaves a process group whose threads poll until the process ends."""
    refused = {"differential_attention": "v1", "selective_attention": True, "num_key_value_heads": 1}
    cases = {
        name: (switches, SIZES["tp2"])
        for name, switches in (SWITCHES | PART_SWITCHES).items()
        if not switches.items() & refused.items()
        and (switches.get("gate_source") != "output" or "gate_rank" in switches)
    }
    check(dict(list(cases.items())[share::5]), make_model, tmp_path)


def test_plan_names_existing_modules(make_model):
    """Transformers would only warn of a rule that names nothing."""
    for switches in CASES.values():
        model = make_model(**switches)
        names = {name.replace(".0.", ".*.").replace(".1.", ".*.") for name, _ in model.named_modules()}
        assert model.tp_plan.keys() - names <= {"model.layers.*.self_attn.k_proj"}
        linear = {name for name, module in model.model.layers.named_modules() if isinstance(module, torch.nn.Linear)}
        planned = {name.removeprefix("model.layers.*.") for name in model.tp_plan}
        # One matrix for all heads
        linear = {name.partition(".")[2] for name in linear} - {"self_attn.value_gate_proj"}
        assert linear <= planned, "a linear layer that every process holds"


def test_impossible_sizes():
    config = NLQConfig(num_attention_heads=6, num_key_value_heads=2, hidden_size=24, num_hidden_layers=2)
    check_distribution(config, DistributedConfig(tp_size=2))
    pairs = NLQConfig(query_projection="linear", differential_attention="v1")
    whole = NLQConfig(attention_gate="headwise", gate_source="output")
    for model, sizes, message in (
        (config, {"tp_size": 3}, "tp_size=3 must divide num_attention_heads=6 and num_key_value_heads=2$"),
        (config, {"pp_size": 2}, "pp_size=2: NLQ models have no pipeline stages; use tp_size$"),
        (whole, {"tp_size": 2}, r"tp_size=2: attention_gate \(layer 0\) cannot be split: .*set a gate_rank$"),
        (pairs, {"tp_size": 2}, r"tp_size=2: differential_attention \(layer 0\) cannot be split: .*use 'v2'$"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            check_distribution(model, DistributedConfig(**sizes))
