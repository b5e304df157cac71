"""What a published model contains."""

from pathlib import Path

import modeling_nlq


FILES = sorted(Path(modeling_nlq.__file__).parent.glob("*_nlq.py"))
LARGEST = {"files": 18, "lines": 6_610, "bytes": 325_500}


def test_published_code_stays_small_enough_to_be_read():
    """Who sets `trust_remote_code=True` reads it first."""
    texts = [file.read_bytes() for file in FILES]
    sizes = {"files": len(FILES), "lines": sum(text.count(b"\n") for text in texts), "bytes": sum(map(len, texts))}
    assert not {name: size for name, size in sizes.items() if size > LARGEST[name]}
