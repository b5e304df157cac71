"""Exported programs: PyTorch's own operators only, and the model's numbers at other lengths, batch sizes and paddings.

`tests/clients` runs such programs in ONNX Runtime and ExecuTorch.
"""

import copy
import itertools

import pytest
import torch
from support.model_cases import (
    AFTER_THE_HEADS,
    ELEMENTWISE_KINDS,
    LINEAR_KINDS,
    PART_SWITCHES,
    PROJECTIONS,
    ROW_KINDS,
    SOFTMAX_KINDS,
    VOCABULARY,
)
from transformers import DynamicCache
from transformers.exporters.exporter_dynamo import get_auto_dynamic_shapes, register_cache_pytrees_for_model


KINDS = {**SOFTMAX_KINDS, **ELEMENTWISE_KINDS, **ROW_KINDS, **LINEAR_KINDS}
# With a name, PyTorch refuses a program that would fix a length
BATCH, LENGTH = torch.export.Dim("batch"), torch.export.Dim("length", max=32)
# As close as float32 gets: the program takes other paths than the model
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def operators(program: torch.export.ExportedProgram) -> set[str]:
    graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert targets
    return {target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)}


def batch_of(rows: int, length: int, padding: int = 0, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens and a mask. The rows begin with `padding` padded tokens, one less from row to row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : max(padding - row, 0)] = 0
    return {"input_ids": torch.randint(VOCABULARY, (rows, length), generator=generator), "attention_mask": mask}


def check(program, model, inputs) -> None:
    with torch.no_grad():
        expected, found = model(**inputs).logits, program.module()(**inputs).logits
    kept = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)
    torch.testing.assert_close(found[kept], expected[kept], **TOLERANCE)
    assert found.isfinite().all()


def export(model, inputs, strict: bool = False) -> torch.export.ExportedProgram:
    shapes = {name: {0: BATCH, 1: LENGTH} for name in inputs}
    with torch.no_grad():
        return torch.export.export(model, (), copy.deepcopy(inputs), dynamic_shapes=shapes, strict=strict)


def layers_of(kinds) -> dict:
    """Several kinds of layers in one model, each with another query, because an export takes seconds."""
    queries = itertools.cycle(PROJECTIONS)
    layers = {index: {**KINDS[kind], "query_projection": next(queries)} for index, kind in enumerate(kinds)}
    layers[0] |= {} if kinds[0] in LINEAR_KINDS else {"sliding_window": 3}
    return {"num_hidden_layers": len(kinds), "per_layer_config": layers}


GROUPS = [list(KINDS)[start : start + 6] for start in range(0, len(KINDS), 6)]
MODELS = {**PART_SWITCHES, **{"+".join(kinds): layers_of(kinds) for kinds in GROUPS}}
MODELS["rich"] = {
    **AFTER_THE_HEADS,
    "num_key_value_heads": 2,
    "position_embedding": "rope",
    "query_projection": "linear",
    "per_layer_config": {0: {**KINDS["sigmoid"], "qk_norm": "l2"}, 1: {**KINDS["linear_learned"], "qk_norm": "rms"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 2])  # a mask of ones in the sample is not taken for "no padding"
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_prompt_runs_with_other_sizes(make_model, name, padding):
    model = make_model(implementation="nlq", use_cache=False, **MODELS[name])
    program = export(model, batch_of(2, 5, padding=padding))
    assert operators(program) == {"aten"}
    check(program, model, batch_of(3, 11, padding=4))


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [True, False])
def test_the_delta_rule_solves_no_system_in_a_program_for_inference(make_model, is_training):
    """ONNX has no operator for it. A program for training needs the gradient, which a loop would lack."""
    model = make_model(implementation="nlq", use_cache=False, **KINDS["delta_gated"]).train(is_training)
    program = torch.export.export(model, (), batch_of(2, 7))
    assert ("linalg_solve_triangular" in program.graph_module.code) is is_training


@pytest.mark.parametrize("is_causal", [True, False])
def test_exported_packing_runs_with_other_documents(make_model, is_causal):
    """Documents begin elsewhere, and are more, than in the sample; `n_i` is counted in each document."""
    linear = KINDS["linear_learned" if is_causal else "linear"]
    layers = {0: KINDS["sigmoid"], 1: linear, 2: KINDS["softmax"]}
    switches = {"num_hidden_layers": 3, "per_layer_config": layers, "is_causal": is_causal}
    model = make_model(implementation="nlq", use_cache=False, **switches)

    def packed(*lengths):
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1).contiguous()
        return {"input_ids": batch_of(*positions.shape)["input_ids"], "position_ids": positions}

    program = export(model, packed(3, 4))
    assert not any("cummax" in str(node.target) for node in program.graph.nodes)  # which ONNX lacks
    for lengths in ((5, 2, 4), (9,)):
        check(program, model, packed(*lengths))


DECODING = {
    "softmax": {0: KINDS["softmax"], 1: KINDS["softmax_sink_learned"]},
    "elementwise": {0: KINDS["sigmoid"], 1: KINDS["squared"]},
    # Without keys, whose length would tell the number of tokens
    "linear": {0: KINDS["linear_learned"], 1: KINDS["linear"]},
    "mixed": {0: KINDS["linear_fixed"], 1: KINDS["sigmoid"]},
    "windows": {0: {**KINDS["softmax"], "sliding_window": 4}, 1: {**KINDS["sigmoid"], "sliding_window": 6}},
}


@pytest.mark.parametrize(
    "layers, padding",
    [
        pytest.param(layers, padding, marks=[] if (layers, padding) == ("elementwise", 2) else pytest.mark.slow)
        for layers in DECODING
        for padding in (0, 2)
    ],
)
def test_an_exported_step_continues_other_caches(layers, padding, make_model):
    """The cache is an input and an output. Its length, the batch and the number of new tokens differ from the
    sample's.
    """
    switches = {"position_embedding": "rope", "num_key_value_heads": 2, "per_layer_config": DECODING[layers]}
    model = make_model(implementation="nlq", **switches)
    register_cache_pytrees_for_model(model)

    def step(rows, cached, new, padding):
        """The tokens and positions of a whole text, and the arguments of a step that adds the last ones."""
        text = batch_of(rows, cached + new, padding)
        text["position_ids"] = (text["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        if not padding:
            del text["attention_mask"]
        cache = DynamicCache(config=None if layers == "windows" else model.config)  # below is the reason
        with torch.no_grad():
            model(**{name: value[:, :cached] for name, value in text.items()}, past_key_values=cache)
        inputs = {name: value if name == "attention_mask" else value[:, cached:] for name, value in text.items()}
        return text, {**inputs, "past_key_values": cache}

    _, sample = step(2, 5, 2, padding)
    shapes = get_auto_dynamic_shapes(sample)
    with torch.no_grad():
        program = torch.export.export(model, (), sample, dynamic_shapes=shapes)
    assert operators(program) == {"aten"}
    for rows, cached, new in ((3, 9, 3), (2, 6, 1)):
        text, inputs = step(rows, cached, new, 4 if padding else 0)
        with torch.no_grad():
            expected = model(**text, use_cache=False).logits[:, cached:]
            outputs = program.module()(**inputs)
        torch.testing.assert_close(outputs.logits, expected, **TOLERANCE)
        assert outputs.past_key_values.get_seq_length() == cached + new


def test_a_cache_that_counts_a_window_is_refused(make_model):
    """Its layers count by a plain number, which a program would keep."""
    model, text = make_model(use_cache=True, sliding_window=4), batch_of(2, 7)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text["input_ids"][:, :5], past_key_values=cache)
        register_cache_pytrees_for_model(model)
        with pytest.raises(ValueError, match=r"layer 0.*without config"):
            torch.export.export(model, (text["input_ids"][:, 5:],), {"past_key_values": cache}, strict=False)
