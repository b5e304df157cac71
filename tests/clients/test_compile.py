"""torch.compile and torch.export give one graph of a downloaded model, with its numbers."""

import torch
from support.client_cases import IDS, load, logits, run_script


REMOTE = """
import sys
import torch
from transformers import AutoModelForCausalLM

folder, root = sys.argv[1:]
ids = torch.load(f"{root}/ids.pt")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
    torch.save([compiled, exported.module()(input_ids=ids, use_cache=False).logits], f"{root}/logits.pt")
"""


def test_programs_of_remote_code_compute_the_same(trained, tmp_path):
    folder = trained("sigmoid", "nonlinear")
    torch.save(IDS, tmp_path / "ids.pt")
    run_script(REMOTE, folder, tmp_path, package=False)
    expected = logits(load(folder))
    for result in torch.load(tmp_path / "logits.pt"):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
