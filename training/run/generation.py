"""`nlq generate`: continues a text."""

import torch
from torch import nn
from transformers import set_seed

from ..loading import load_model
from ..size import ModelKind, positions_of
from ..text import check_number


_GENERATING = (ModelKind.DECODER, ModelKind.ENCODER_DECODER)


def generate_text(
    model: str,
    prompt: str,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> str:
    """Continues a text with a saved model; an encoder and decoder writes the target for the prompt.

    A special token in the prompt is read as one. By default there are 100 new tokens, or as many as the model has
    positions for. A temperature of 0 takes the likeliest token each time, a `top_k` of 0 samples among all. Raises
    `ValueError` for an empty prompt, or one that leaves no position.
    """
    check_number("max_new_tokens", max_new_tokens, 1)
    loaded, tokenizer = load_model(model, trust_remote_code, _GENERATING, "generation")
    loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    set_seed(seed)
    # As in training: some tokenizers would end the prompt with end-of-text
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(loaded.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("the prompt is empty")
    if loaded.config.is_encoder_decoder:  # sources end in end-of-text
        inputs = {name: nn.functional.pad(row, (0, 1), value=1) for name, row in inputs.items()}
        inputs["input_ids"][:, -1] = tokenizer.eos_token_id
        if (positions := positions_of(loaded.config, "encoder")) is not None and length >= positions:
            raise ValueError(f"a source of {length + 1} tokens does not fit {positions} positions")
        length = 1
    if (positions := positions_of(loaded.config)) is not None:
        room = positions + 1 - length  # the last new token is not read
        max_new_tokens = min(100, room) if max_new_tokens is None else max_new_tokens
        if not 0 < max_new_tokens <= room:
            raise ValueError(
                f"a prompt of {length} tokens and max_new_tokens={max_new_tokens} do not fit {positions} positions"
            )
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    output = loaded.generate(**inputs, max_new_tokens=100 if max_new_tokens is None else max_new_tokens, **sampling)
    return tokenizer.decode(output[0], skip_special_tokens=True)
