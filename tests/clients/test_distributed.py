"""Tensor parallelism of a downloaded model, in processes that cannot import this package."""

import pytest
from support.client_cases import CASES, greedy, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer


SCRIPT = """
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], distributed_config=DistributedConfig(tp_size=2), trust_remote_code=True
)
prompt = torch.tensor([[int(token) for token in sys.argv[2].split()]])
tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
if dist.get_rank() == 0:
    print(*tokens[0, prompt.shape[1] :].tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("activation, query", CASES)
def test_generate_by_remote_code(activation, query, trained, tmp_path):
    folder = trained(activation, query)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("one two three", return_tensors="pt").input_ids[0]
    words = " ".join(map(str, prompt.tolist()))
    done = run_script("import sys\n" + SCRIPT, folder, words, package=False, shared=tmp_path)
    assert done.split() == [str(token) for token in greedy(model, prompt, 6)]
