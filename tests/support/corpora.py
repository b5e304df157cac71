"""Small corpora and tokenizers for the tests of data."""

import gzip
import json
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


RIGHT = [f"right {index}" for index in range(30)]


def write_documents(path: Path, texts: list[str]) -> Path:
    """A file of documents, in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        plain = write_documents(path.with_name("plain " + path.stem), texts)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    elif path.suffix.lower() == ".txt":
        path.write_text("\n\n".join(texts))
    elif path.suffix == ".csv":
        Dataset.from_dict({"text": texts}).to_csv(path)
    elif path.suffix == ".parquet":
        Dataset.from_dict({"text": texts}).to_parquet(path)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def byte_tokenizer(end_of_text: int) -> PreTrainedTokenizerFast:
    """One token for each byte, at even ids, and end-of-text."""
    vocabulary = {byte: 2 * index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<|endoftext|>": end_of_text}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
