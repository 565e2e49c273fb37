"""Documents, and a tiny tokenizer for them."""

import json
import sysconfig
from pathlib import Path

import pytest

from fp8_megatron.commands.train_tokenizer import train


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Python files of the standard library, and awkward texts."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text(encoding="utf-8") for path in sorted(library.glob("[a-d]*.py"))]
    return [*sources, "one", "  spaces,\ttabs\n\n", "naïve 漢字 😀", '"quotes" \\n', *sources[:3]]


@pytest.fixture(scope="session")
def corpus(documents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`documents` as JSON lines."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_model(documents, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BPE model of 500 tokens of `documents`."""
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    path.write_bytes(train(documents[:10], vocab_size=500, model_type="bpe", num_threads=1))
    return str(path)
