"""SmolLM2-135M: the same as Llama's class in whatever is done with it. What is measured is printed as a table at the
end.
"""

import math
import re

import pytest
import torch
from support.client_cases import greedy
from support.conversion_cases import nlq_fails, run_nlq, upcycle
from support.onnx_programs import decode_greedily, export, left_padded
from support.serving import NEW_TOKENS, chat, complete, server
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TorchAoConfig

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.run.documents import python_documents


LIMIT = 1e-4  # of a logit in float32, where the largest is 34
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Counting: one, two, three,", "1 + 1 ="]
HELD_OUT, WINDOW = 100_000, 1_000  # tokens
# Every switch of the table in docs/conversion.md, and the switches that the model has before
ADDED = {"attention_gate": "elementwise", "canon": "ABCD", "exclusive_attention": "learned"}
ADDED |= {"head_projection": True, "value_residual": "learned"}
SWITCHES = [
    *(({f"{name}_projection": "upcycled"}, {}) for name in ("query", "key", "value")),
    *(({"query_projection": name}, {"query_projection": "identity"}) for name in ("nonlinear", "upcycled", "linear")),
    *(({name: value}, {}) for name, value in ADDED.items()),
    *(({"attention_gate": value}, {}) for value in ("headwise", "value")),
    *(({name: True}, {}) for name in ("parallax", "use_bias", "query_key_value_bias", "mlp_bias")),
    ({"differential_attention": "v2"}, {}),
    ({"attention_output_scaling": 0.5}, {}),
    ({"attention_sink": "learned"}, {"attention_sink": "zero"}),
    ({"num_key_value_heads": 9}, {}),
    ({"intermediate_size": 2048}, {}),
    ({"projection_bottleneck_size": 512}, {"query_projection": "upcycled"}),
    ({"max_position_embeddings": 16384}, {}),
    ({"tie_word_embeddings": False}, {}),
    ({"attention_dropout": 0.1, "eos_token_id": 0}, {}),
    ({"query_projection": "upcycled", **ADDED}, {}),
]
# The only ones that round: W - I, and factors that are no power of two
ROUNDED = [
    ({"query_projection": "residual"}, {}),
    ({"query_projection": "linear"}, {"query_projection": "residual"}),
    ({"attention_scaling": 0.1}, {}),
    ({"attention_output_scaling": 0.7}, {}),
]


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits


def largest(one, other) -> float:
    return float((one.double() - other.double()).abs().max())


@pytest.fixture
def batch(tokenizer):
    return tokenizer(PROMPTS, padding=True, return_tensors="pt")


def words(switches) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in switches.items())


class TestLlama:
    def test_size_and_chat_template_are_llamas(self, nlq, llama, tokenizer):
        assert nlq.num_parameters() == llama.num_parameters() == 134_515_008
        messages = [{"role": "user", "content": "Hello"}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")

    def test_conversion_back_gives_the_same_bits(self, llama, llama_folder, measured):
        back = LlamaForCausalLM.from_pretrained(llama_folder)
        theirs, ours = llama.state_dict(), back.state_dict()
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
        # Where the weights came from, and what only a tokenizer reads
        without = (
            "dtype",
            "architectures",
            "_name_or_path",
            "_model_name_or_path",
            "quantization_config",
            "unk_token_id",
        )
        before, after = (
            {k: v for k, v in each.config.to_dict().items() if k not in without} for each in (llama, back)
        )
        assert before == after
        measured("weights and configuration, back by `--to llama`", "the file, read by Transformers", "bit-identical")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("implementation", ["eager", None], ids=["eager", "default"])
    @pytest.mark.parametrize("is_padded", [False, True], ids=["one_text", "padded"])
    def test_logits_are_llamas(self, is_padded, implementation, dtype, folder, make_llama, tokenizer, measured):
        """Padding takes positions in Llama's class and none here, so rotary angles are those of other numbers."""
        batch = tokenizer(PROMPTS if is_padded else "\n".join(PROMPTS), padding=is_padded, return_tensors="pt")
        options = {} if implementation is None else {"attn_implementation": implementation}
        nlq = NLQForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
        llama = make_llama(**options).to(dtype)
        kept = batch["attention_mask"].bool()  # what padding computes is nobody's output
        ours, theirs = logits(nlq, batch)[kept], logits(llama, batch)[kept]
        error = largest(ours, theirs)
        kind = f"{'eager' if implementation else 'default attention'}, {str(dtype).removeprefix('torch.')}"
        measured(f"logits, {'padded batch' if is_padded else 'one text'}, {kind}", "Llama", error)
        if dtype == torch.float32:
            assert error < LIMIT
        else:
            rounding = largest(theirs, logits(make_llama(**options), batch)[kept])
            measured("the same, Llama in bfloat16", "Llama in float32", rounding)
            assert error < 2 * rounding

    def test_gradients_are_llamas(self, folder, make_llama, batch, tokenizer, measured):
        names, gradients = {"input_layernorm": "self_attn_norm", "post_attention_layernorm": "mlp_norm"}, []
        for model in (NLQForCausalLM.from_pretrained(folder), make_llama(), make_llama().double()):
            loss = model(**batch, labels=batch["input_ids"].where(batch["attention_mask"].bool(), -100)).loss
            loss.backward()
            found = {name: value.grad for name, value in model.named_parameters()} | {"loss": loss.detach()}
            # Llama's class gives the embedding of the padding token none, which is the end of a turn here
            found["model.embed_tokens.weight"][tokenizer.pad_token_id] = 0
            gradients.append(
                {re.sub("|".join(names), lambda each: names[each[0]], name): found[name] for name in found}
            )
        ours, theirs, exact = gradients
        assert ours.keys() == theirs.keys()
        error, rounding = (
            max(largest(one[name], other[name]) / float(exact[name].abs().max()) for name in exact)
            for one, other in ((ours, theirs), (theirs, exact))
        )
        measured("loss and gradients of all weights", "Llama", f"{error:.1e} of the largest")
        measured("the same, Llama in float32", "Llama in float64", f"{rounding:.1e} of the largest")
        assert error < rounding

    @pytest.mark.parametrize(
        "kind", ["greedy", "padded", "beams", "assisted", "prompt lookup", "static cache", "sampled"]
    )
    def test_generated_tokens_are_llamas(self, kind, nlq, llama, tokenizer, measured):
        texts = PROMPTS if kind == "padded" else PROMPTS[1:2]
        inputs, generated = tokenizer(texts, padding=True, return_tensors="pt"), []
        for model, other in ((nlq, llama), (llama, nlq)):
            options = {
                "beams": {"num_beams": 4},
                "assisted": {"assistant_model": other},
                "prompt lookup": {"prompt_lookup_num_tokens": 3},
                "static cache": {"cache_implementation": "static"},
                "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
            }.get(kind, {})
            torch.manual_seed(0)
            generated.append(
                model.generate(**inputs, **{"do_sample": False, "max_new_tokens": 40, **options}).tolist()
            )
        assert generated[0] == generated[1]
        measured(f"generation of 40 tokens, {kind}", "Llama", "the same tokens")

    @pytest.mark.timeout(3600)
    def test_perplexity_is_llamas(self, nlq, llama, tokenizer, measured):
        ids: list[int] = []
        for document in python_documents(""):
            ids += tokenizer(document["text"]).input_ids
            if len(ids) >= HELD_OUT:
                break
        windows = torch.tensor(ids[:HELD_OUT]).view(-1, WINDOW)
        perplexities = []
        for model in (nlq, llama):
            with torch.no_grad():
                losses = [model(row[None], labels=row[None], use_cache=False).loss.double().item() for row in windows]
            perplexities.append(math.exp(sum(losses) / len(losses)))
        ours, theirs = perplexities
        error = abs(ours - theirs) / theirs
        measured(f"perplexity of {HELD_OUT:,} tokens of Python, {ours:.6f}", "Llama", f"{error:.1e} of it")
        assert error < 1e-5


class TestChanged:
    @pytest.mark.parametrize(
        "switches, before", SWITCHES + ROUNDED, ids=lambda value: "+".join(map(str, value.values())) or "llama"
    )
    def test_starts_without_effect(self, switches, before, folder, batch, measured):
        base = NLQForCausalLM.from_pretrained(folder, attn_implementation="eager", **before).eval()
        changed = upcycle(base, switches).eval()
        changed.set_attn_implementation("eager")
        for name, value in switches.items():
            assert getattr(changed.config, name) == value
        kept = batch["attention_mask"].bool()
        error = largest(logits(changed, batch)[kept], logits(base, batch)[kept])
        measured(words(switches), words(before) or "the converted model, eager", error)
        assert error < LIMIT if (switches, before) in ROUNDED else error == 0

    def test_an_upcycled_model_keeps_the_logits(self, folder, llama, batch, tmp_path, measured, capsys):
        """By the command, into a folder, and back to the same bits without `f`."""
        assert run_nlq("convert", folder, tmp_path / "upcycled", "--upcycle") == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "upcycled", attn_implementation="eager").eval()
        plain = NLQForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        kept = batch["attention_mask"].bool()
        error = largest(logits(model, batch)[kept], logits(plain, batch)[kept])
        measured("`nlq convert --upcycle`, saved and loaded", "the converted model, eager", error)
        assert error == 0
        back = ("convert", tmp_path / "upcycled", tmp_path / "back", "--to", "llama")
        assert "--allow-lossy goes on without" in nlq_fails(capsys, *back)
        assert run_nlq(*back, "--allow-lossy") == 0
        weights = LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
        assert all(torch.equal(weights[name], value) for name, value in llama.state_dict().items())
        measured(
            "weights, upcycled and back by `--to llama --allow-lossy`",
            "the file, read by Transformers",
            "bit-identical",
        )


class TestOtherPrograms:
    def test_quantized_logits_are_near_llamas(self, folder, llama_folder, batch, measured):
        options = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "attn_implementation": "eager"}
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(each, **options).eval() for each in (folder, llama_folder)
        )
        assert type(ours.model.layers[0].mlp.gate_proj.weight).__name__ == "Int8Tensor"
        kept = batch["attention_mask"].bool()
        error = largest(logits(ours, batch)[kept], logits(theirs, batch)[kept])
        measured("logits, int8 weights (torchao), eager", "Llama, int8 weights", error)
        assert error < LIMIT

    def test_a_server_generates_the_same_text(self, folder, llama, tokenizer, tmp_path, measured):
        """`transformers serve`, without this package."""

        def expected(text):
            return tokenizer.decode(greedy(llama, tokenizer(text, return_tensors="pt").input_ids[0], NEW_TOKENS))

        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPTS[0]}], tokenize=False, add_generation_prompt=True
        )
        with server(tmp_path / "log", package=False) as client:
            assert complete(client, folder, PROMPTS[0]) == expected(PROMPTS[0])
            assert chat(client, folder, PROMPTS[0], stream=True) == expected(rendered)
        measured("`transformers serve` without this package, completion and chat", "Llama, greedy", "the same text")

    @pytest.mark.timeout(3600)
    def test_onnx_generates_the_same_tokens(self, nlq, llama, tokenizer, tmp_path, measured):
        ids = [tokenizer(prompt, return_tensors="pt").input_ids[0] for prompt in PROMPTS]
        programs = export(nlq, left_padded(ids[:2]), tmp_path)
        error, tokens = decode_greedily(llama, *programs, ids, steps=8)
        assert tokens.tolist() == [greedy(llama, prompt, 8) for prompt in ids]
        measured("logits of ONNX Runtime, prompt and 8 decoded tokens", "Llama", error)
        assert error < 10 * LIMIT
