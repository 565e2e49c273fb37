import json
import sysconfig
from pathlib import Path

from tools import build_quickstart_corpus


def load(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_corpus_is_the_library_capped_and_the_same_each_time(tmp_path, capsys):
    first, again = tmp_path / "first.jsonl", tmp_path / "again.jsonl"
    for output in (first, again):
        assert build_quickstart_corpus.main(["--output", str(output), "--max-mb", "1"]) == 0
    assert first.read_bytes() == again.read_bytes()
    documents = load(first)
    num_bytes = sum(len(document["text"].encode()) for document in documents)
    assert 0.99e6 < num_bytes <= 1e6
    assert f"{len(documents)} documents, {num_bytes / 1e6:.2f} MB" in capsys.readouterr().out
    library = Path(sysconfig.get_paths()["stdlib"])
    for document in documents[:20]:
        assert (library / document["source"]).read_bytes().decode() == document["text"]


def test_what_is_left_out(tmp_path):
    library = tmp_path / "library"
    prose = "def name(value):\n    return value\n" * 20
    kept = {"a.py": prose, "pkg/b.txt": prose + "b"}
    skipped = {
        "test/c.py": prose + "c",
        "pkg/tests/d.py": prose + "d",
        "site-packages/e.py": prose + "e",
        "config-3.11-x86_64-linux-gnu/f.py": prose + "f",
        "_sysconfigdata__linux.py": prose + "g",
        "copy_of_a.py": prose,
        "short.py": "x = 1\n",
        "table.py": "0x1234, 0x5678, 0x9999,\n" * 100,
        "image.png": prose + "h",
    }
    for name, text in {**kept, **skipped}.items():
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (library / "latin.py").write_bytes("é".encode("latin-1") * 500)
    output = tmp_path / "corpus.jsonl"
    assert build_quickstart_corpus.build(library, output, 10**6, seed=1)[0] == 2
    assert {document["source"]: document["text"] for document in load(output)} == kept


def test_nothing_found_is_an_error(tmp_path, capsys):
    assert build_quickstart_corpus.main(["--output", str(tmp_path / "corpus.jsonl"), "--max-mb", "0.0001"]) == 2
    assert "raise the limit (--max-mb)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
