"""Pipelines and assisted decoding on trained models."""

import pytest
import torch
from support.client_cases import CASES, continuation, greedy, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer


PIPELINE = """
import sys
from transformers import pipeline

generate = pipeline("text-generation", sys.argv[1], trust_remote_code=True)
print(generate("one two three", max_new_tokens=6, do_sample=False)[0]["generated_text"])
"""


@pytest.mark.parametrize("package", [True, False], ids=["package", "remote_code"])
@pytest.mark.parametrize("activation, query", CASES)
def test_a_pipeline_generates_greedy_tokens(activation, query, package, trained):
    folder = trained(activation, query)
    done = run_script(PIPELINE, folder, package=package)
    assert done.stdout == "one two three" + continuation(folder, "one two three", 6) + "\n"


@pytest.mark.parametrize("activation, query", CASES)
def test_assisted_decoding(activation, query, trained):
    """The tokens are those of greedy decoding, whoever drafts them. A state cannot go back, which is refused."""
    folder = trained(activation, query)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assistant = AutoModelForCausalLM.from_pretrained(trained("softmax", "linear"))
    prompt = tokenizer("one two three four five six seven one two three", return_tensors="pt").input_ids
    for helper in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False, **helper}
        if activation == "linear_attention":
            with pytest.raises(RuntimeError, match="cannot go back"):
                model.generate(prompt, **options)
        else:
            assert model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() == greedy(model, prompt[0], 8)
