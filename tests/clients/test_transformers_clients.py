"""Pipelines and `generate` on a trained model, with the package and in a process that cannot import it."""

import pytest
from support.client_cases import CASES, greedy, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer


PIPELINE = """
import sys
from transformers import pipeline

generate = pipeline("text-generation", sys.argv[1], trust_remote_code=True)
print(generate("one two three", max_new_tokens=6, do_sample=False)[0]["generated_text"])
"""


@pytest.mark.parametrize("package", [True, False], ids=["package", "remote_code"])
@pytest.mark.parametrize("activation, query", CASES)
def test_pipeline(activation, query, package, trained):
    folder = trained(activation, query)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("one two three", return_tensors="pt").input_ids[0]
    done = run_script(PIPELINE, folder, package=package)
    assert done.stdout == "one two three" + tokenizer.decode(greedy(model, prompt, 6)) + "\n"
