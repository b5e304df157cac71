"""Small random models as GGUF files, written as llama.cpp's converter writes them."""

import json
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX


SENTENCES = ["the quick brown fox jumps over the lazy dog", "pack   123 boxes with   45 dozen jugs"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


_CUTS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def make_tokenizer(cut: str = "smollm") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that cuts text as SmolLM's or Qwen's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_CUTS[cut])
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|begin|>", pad_token="<|endoftext|>"
    )


def _permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours, Llama's class halves of a head."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    quantisation: str = "F32",
    types: dict[str, str] | None = None,
    architecture: str | None = None,
    fields: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
    pre_tokenizer: str | None = "smollm",
) -> Path:
    """Writes a model, and a tokenizer if one is given.

    Args:
        quantisation: the type of all matrices, as llama.cpp names it.
        types: of tensors with another one.
        architecture: another name of the architecture.
        fields, tensors: more of them.
        without: tensors to leave out.
        pre_tokenizer: how text is cut, as llama.cpp names it.
    """
    config, kind = model.config, architecture or model.config.model_type
    writer = GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for name, value in (fields or {}).items():  # in place of what was written
        writer.kv_data[0].pop(name, None)
        kinds[type(value)](name, value)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer, pre_tokenizer)
    names = {value: key for key, value in MODEL_ARCH_NAMES.items()}
    mapping = get_tensor_name_map(names[config.model_type], config.num_hidden_layers)
    written = dict(tensors or {})
    for name, parameter in model.named_parameters():
        there, tensor = mapping.get_name(name, try_suffixes=(".weight", ".bias")), parameter.detach().float().numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = _permuted(tensor, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        written[there] = tensor
    for name, tensor in written.items():
        if name not in without:
            of_type = GGMLQuantizationType[(types or {}).get(name, quantisation if tensor.ndim > 1 else "F32")]
            tensor = np.ascontiguousarray(tensor)
            writer.add_tensor(name, quantize(tensor, of_type), raw_dtype=of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre_tokenizer: str | None) -> None:
    writer.add_tokenizer_model("gpt2")
    if pre_tokenizer is not None:
        writer.add_tokenizer_pre(pre_tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
