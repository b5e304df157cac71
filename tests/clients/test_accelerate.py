"""accelerate: weights on disk, and FSDP2 of attention and MLP apart."""

import json

import accelerate
import pytest
import torch
from support.client_cases import CASES, IDS, greedy, load, logits, run_script
from support.model_cases import PART_SWITCHES, SWITCHES, parametrize_switches, random_tokens


@pytest.mark.parametrize("activation, query", CASES)
def test_an_offloaded_model_computes_the_same(activation, query, trained, tmp_path):
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


@parametrize_switches(SWITCHES | PART_SWITCHES)
@torch.no_grad()
def test_parameters_are_filled_for_a_call(switches, make_model):
    """Offloading fills the parameters of a module when it is called, so nothing else may read them."""
    tokens = random_tokens(2, 9)
    model = make_model(implementation="nlq", **switches)
    expected = model(tokens).logits
    offloaded = accelerate.cpu_offload(model, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(offloaded(tokens).logits, expected)


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
for wrapped in ("", "apart", "apart in layers in model"):
    for reentrant in (None, False, True):
        model = NLQForCausalLM.from_pretrained(folder).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in model.model.layers if wrapped else ():
            for part in (layer.self_attn, layer.mlp):
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
    run_script(FSDP, tmp_path / "losses.json", tmp_path / "saved", shared=tmp_path)
    losses = json.loads((tmp_path / "losses.json").read_text())
    expected = losses[", None"]
    assert len(losses) == 9 and expected[-1] < expected[0]
    for name, found in losses.items():
        assert found == pytest.approx(expected, rel=1e-5), name
