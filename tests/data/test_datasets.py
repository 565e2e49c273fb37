import errno
import io
import itertools
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from fp8_megatron.config.schema import DataConfig
from fp8_megatron.data import datasets as datasets_module
from fp8_megatron.data.datasets import Blend, Datasets, MockDataset, build_datasets
from fp8_megatron.data.splits import process_group
from fp8_megatron.data.tokenizer import NullTokenizer
from fp8_megatron.errors import UserError
from tests.harness.limits import files_limited_to

SEQ = 8
VOCAB = 5000
TOKENIZER = NullTokenizer(VOCAB)


def build(train: int = 0, valid: int = 0, test: int = 0, *, seq_length: int = SEQ, seed: int = 3, **data) -> Datasets:
    return build_datasets(
        DataConfig(**data),
        seq_length=seq_length,
        seed=seed,
        num_train_samples=train,
        num_valid_samples=valid,
        num_test_samples=test,
        tokenizer=TOKENIZER,
    )


def counting(num_documents: int, length: int, start: int = 0) -> list[list[int]]:
    """Documents that count on from one to the next, so that a token says where it is from."""
    tokens = np.arange(start, start + num_documents * length).reshape(num_documents, length)
    return tokens.tolist()


def all_tokens(dataset, num_samples: int | None = None) -> np.ndarray:
    length = len(dataset) if num_samples is None else num_samples
    return np.stack([dataset[index]["tokens"].numpy() for index in range(length)])


def test_samples_are_runs_of_the_text_with_labels_one_ahead(write_tokens):
    prefix = write_tokens("corpus", counting(1, 1000))
    dataset = build(100, data_path=(prefix,), split="1").train
    assert len(dataset) >= 100
    for index in range(100):
        sample = dataset[index]
        tokens, labels = sample["tokens"], sample["labels"]
        assert tokens.tolist() == list(range(int(tokens[0]), int(tokens[0]) + SEQ))
        assert torch.equal(labels, tokens + 1)
        assert sample["position_ids"].tolist() == list(range(SEQ)) and sample["loss_mask"].tolist() == [1.0] * SEQ
    assert len(np.unique(all_tokens(dataset, 100))) == 100 * SEQ, "one epoch: every token once"
    assert not np.array_equal(all_tokens(dataset), all_tokens(build(100, seed=4, data_path=(prefix,), split="1").train))


def test_end_of_document_settings_reach_the_samples(write_tokens):
    prefix = write_tokens("corpus", [[1, 2, TOKENIZER.eod]] * 40)
    options = {"data_path": (prefix,), "split": "1"}
    plain = build(4, **options).train[0]
    assert plain["position_ids"].tolist() == list(range(SEQ)) and plain["loss_mask"].min() == 1
    masked = build(4, eod_mask_loss=True, reset_position_ids=True, **options).train[0]
    assert ((masked["tokens"] == TOKENIZER.eod) == (masked["loss_mask"] == 0)).all()
    assert masked["position_ids"].max() == 2


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_settings_of_ends_that_no_document_has_are_refused(write_tokens, name):
    without = write_tokens("without", counting(10, 50))
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UserError, match=rf"{flag} finds the end of a document by token 4999, which .*without does not"):
        build(5, data_path=(without,), split="1", **{name: True})
    build(5, data_path=(without,), split="1")
    build(5, data_path=(without, write_tokens("with", [[1] * 60, [2, TOKENIZER.eod]])), split="1", **{name: True})
    build(5, data_path=(write_tokens("one", counting(1, 500)),), split="1", **{name: True})


def test_how_files_are_read_changes_no_sample(write_tokens, tmp_path, monkeypatch):
    """Mapped or read, indices built by one thread or four; both settings reach megatron-core."""
    blend = ("0.4", write_tokens("a", counting(30, 50)), "0.6", write_tokens("b", counting(30, 50, start=2000)))
    made, plain = [], datasets_module.FimDatasetConfig

    def config(**settings):
        made.append((settings["mmap_bin_files"], settings["num_dataset_builder_threads"]))
        return plain(**settings)

    monkeypatch.setattr(datasets_module, "FimDatasetConfig", config)
    samples = []
    for mapped, threads in ((True, 1), (False, 4)):
        settings = {"mmap_bin_files": mapped, "num_dataset_builder_threads": threads, "data_path": blend}
        train = build(train=40, valid=0, split="1,0,0", data_cache_path=str(tmp_path / str(threads)), **settings).train
        samples.append([train[index]["tokens"].tolist() for index in range(40)])
    assert samples[0] == samples[1] and made == [(True, 1), (False, 4)]


def test_splits_are_disjoint_documents(write_tokens):
    prefix = write_tokens("corpus", counting(100, 20))
    datasets = build(50, 20, 10, data_path=(prefix,), split="80,15,5")
    bounds = [(0, 1600), (1600, 1900), (1900, 2000)]
    for dataset, (low, high) in zip((datasets.train, datasets.valid, datasets.test), bounds, strict=True):
        tokens = all_tokens(dataset)
        assert low <= tokens.min() and tokens.max() < high


def test_a_split_without_samples_is_not_built_even_if_it_would_be_empty(write_tokens):
    prefix = write_tokens("corpus", counting(10, 50))
    datasets = build(5, data_path=(prefix,), split="969,30,1")  # 30/1000 and 1/1000 of 10 documents: none
    assert datasets.valid is None and datasets.test is None and len(datasets.train) >= 5
    assert build(data_path=("absent",)) == Datasets(None, None, None)


def test_too_little_text_for_a_split_is_an_error_with_its_numbers(write_tokens):
    prefix = write_tokens("corpus", counting(10, 50))
    message = (
        r"with --split 969,30,1, the valid part of .*corpus has 0 tokens in 0 of 10 documents, but one valid sample "
        r"takes seq_length \+ 1 = 9: .*--train-data-path …, or turn validation off with --eval-interval 0"
    )
    with pytest.raises(ValueError, match=message):
        build(5, 5, data_path=(prefix,), split="969,30,1")
    with pytest.raises(ValueError, match=r"corpus has 500 tokens in 10 of 10 documents, but one train sample .* = 501"):
        build(5, seq_length=500, train_data_path=(prefix,))
    assert len(build(5, seq_length=499, train_data_path=(prefix,)).train) >= 5


def test_what_to_do_about_too_little_text_is_what_the_run_can_do(write_tokens):
    """--split cuts --data-path alone, beside which a split has no files of its own, and not every run needs a test."""
    prefix = write_tokens("corpus", counting(10, 50))
    without = (
        "or files for each split with --train-data-path …, or do without a test: --split with 0 as its last weight"
    )
    with pytest.raises(ValueError, match=f"the test part of .*larger share in --split, {without}$"):
        build(5, 0, 5, data_path=(prefix,), split="969,30,1")
    with pytest.raises(ValueError, match=r"one test sample takes .*: give more documents, or drop --test-data-path$"):
        build(0, 0, 5, seq_length=500, train_data_path=("absent",), test_data_path=(prefix,))


def test_blends_follow_their_weights_and_files_of_their_own_splits(write_tokens):
    low = write_tokens("low", counting(20, 50))
    high = write_tokens("high", counting(20, 50, start=1000))
    blended = build(200, data_path=("30", low, "0.7e2", high), split="1").train
    share = (all_tokens(blended, 200)[:, 0] >= 1000).mean()
    assert abs(share - 0.7) <= 1 / 200  # the builder keeps within one sample of the weights
    own = build(50, 10, 10, train_data_path=(low,), valid_data_path=(high,), test_data_path=("1", low, "3", high))
    assert all_tokens(own.train).max() < 1000 <= all_tokens(own.valid).min()
    assert (all_tokens(own.test)[:, 0] >= 1000).mean() == pytest.approx(0.75, abs=1 / 10)


@pytest.mark.parametrize("words", ["A", "1 A", "A B", "B A C", "30 A 0.7e2 B", "A A"])
@pytest.mark.parametrize("has_split_paths", [False, True], ids=["split", "paths"])
@pytest.mark.parametrize("train", [31, 90])
def test_samples_and_their_order_are_those_of_megatrons_own_builder(
    write_tokens, tmp_path, words, has_split_paths, train
):
    """90 are more than one pass over A, and less than one over A and B; the sizes of the files differ."""
    prefixes = {name: write_tokens(name, counting(20, 30 + 7 * i, start=1000 * i)) for i, name in enumerate("ABC")}
    given = [prefixes.get(word, word) for word in words.split()]
    if words[0].isdigit():
        blend = (given[1::2], [float(word) for word in given[::2]])
    else:
        blend = (given, None)
    if has_split_paths:
        sources, own = {"blend_per_split": [blend, blend, None]}, {"train_data_path": given, "valid_data_path": given}
    else:
        sources, own = {"blend": blend, "split": "80,20"}, {"data_path": given, "split": "80,20"}
    config = gpt_config(tmp_path / "megatron", **sources)
    with process_group():
        theirs = BlendedMegatronDatasetBuilder(GPTDataset, [train, 10, 0], lambda: True, config).build()
    ours = build(train, 10, **own)
    for expected, found in zip(theirs[:2], (ours.train, ours.valid), strict=True):
        assert len(found) == len(expected)
        np.testing.assert_array_equal(all_tokens(found), all_tokens(expected))


def test_files_without_weights_are_read_once_and_not_more_often(write_tokens):
    """Megatron's run ends in an error after the last sample."""
    small, large = write_tokens("small", counting(10, 20)), write_tokens("large", counting(10, 60, start=1000))
    number = (10 * 20 - 1) // SEQ + (10 * 60 - 1) // SEQ
    assert len(build(number, data_path=(small, large), split="1").train) == number
    what = rf"{small} {large} without weights is read once, as in Megatron: its {number} train samples are fewer than"
    with pytest.raises(UserError, match=rf"--data-path {what} the 500 of the run; give weights \(weight prefix"):
        build(500, data_path=(small, large), split="1")
    with pytest.raises(UserError, match=r"--valid-data-path .*its \d+ valid samples are fewer than the 500"):
        build(5, 500, train_data_path=(small,), valid_data_path=(small, large))
    assert len(build(500, data_path=("1", small, "3", large), split="1").train) >= 500
    cyclic = build(500, data_path=(small, large), split="1", dataloader_type="cyclic").train
    assert len(cyclic) == number, "the loader reads it again and again"


@pytest.mark.parametrize("with_blend", [False, True])
def test_new_tokens_under_an_old_path_are_read(write_tokens, tmp_path, with_blend):
    other = write_tokens("other", counting(40, 50))

    def samples(documents: list[list[int]] | None = None) -> np.ndarray:
        prefix = write_tokens("corpus", documents) if documents else str(tmp_path / "corpus")
        path = ("1", prefix, "1", other) if with_blend else (prefix,)
        return all_tokens(build(40, data_path=path, split="1").train, 40)

    first = samples(counting(40, 50))
    (folder,) = (tmp_path / "cache").iterdir()
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(written) >= 4
    np.testing.assert_array_equal(samples(), first)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written, "the cache was used, not rewritten"
    second = samples(counting(5, 400, start=2000))
    fresh = second if not with_blend else second[(second >= 2000).all(axis=1)]
    assert len(fresh) >= 20 and fresh.min() >= 2000
    (new_folder,) = (tmp_path / "cache").iterdir()
    assert new_folder != folder, "the cache of the tokens that are gone is gone too"


class Touch:
    """Makes a file when it is un-pickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def reversed_order(file: Path) -> None:
    np.save(file, np.load(file)[::-1].copy())


def other_dtype(file: Path) -> None:
    np.save(file, np.load(file).astype(np.float64))


def shorter(file: Path) -> None:
    np.save(file, np.load(file)[:1])


def flipped_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x80
    file.write_bytes(content)


def zip_of_arrays(file: Path) -> None:
    with file.open("wb") as stream:
        np.savez(stream, a=np.zeros(3))


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Touch(file.with_name("code ran"))))


def cut_to_nothing(file: Path) -> None:
    file.write_bytes(b"")


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = [reversed_order, other_dtype, shorter, flipped_bit, zip_of_arrays, pickled, cut_to_nothing, cut_short]


@pytest.mark.parametrize("has_sums", [True, False], ids=["checksums", "none"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_index_is_made_again(write_tokens, tmp_path, caplog, damage, has_sums):
    """Also one whose header is sound, and one of a cache that was made before there were checksums."""
    low = write_tokens("low", counting(10, 100))
    path = ("1", low, "2", write_tokens("high", counting(10, 100, start=1000)))
    before = all_tokens(build(100, data_path=path, split="1").train, 100)
    files = sorted((tmp_path / "cache").glob("index-*/*_index.npy"))
    assert len(files) == 3 + 3 + 2, "those of two datasets, and of their blend"
    for number in range(0, len(files), 3):
        index = files[number]
        whole = index.read_bytes()
        damage(index)
        if not has_sums:
            for sums in index.parent.glob("*crc32.json"):
                sums.unlink()
        caplog.clear()
        assert np.array_equal(all_tokens(build(100, data_path=path, split="1").train, 100), before)
        assert index.read_bytes() == whole
        assert [one.message for one in caplog.records if "again: " in one.message and one.levelname == "WARNING"] == [
            f"making {index} again: it is damaged"
        ]
    assert not list(tmp_path.rglob("code ran"))


def test_a_cache_of_megatron_itself_is_neither_read_nor_changed(write_tokens, tmp_path):
    """It is keyed on the path alone, and megatron-core un-pickles what it finds there."""
    prefix = write_tokens("corpus", counting(10, 100))
    cache = tmp_path / "megatron"
    config = gpt_config(cache, blend=([prefix], None), split="1")
    with process_group():
        BlendedMegatronDatasetBuilder(GPTDataset, [50, 0, 0], lambda: True, config).build()
    files = {file: file.read_bytes() for file in cache.iterdir()}
    for file in files:
        pickled(file)
    damaged = {file: file.read_bytes() for file in files}
    before = all_tokens(build(50, data_path=(prefix,), split="1").train)
    after = all_tokens(build(50, data_path=(prefix,), split="1", data_cache_path=str(cache)).train)
    assert np.array_equal(before, after)
    assert {file: file.read_bytes() for file in files} == damaged and not list(tmp_path.rglob("code ran"))


def gpt_config(cache: Path, **sources) -> GPTDatasetConfig:
    """The settings that Megatron gives its datasets."""
    return GPTDatasetConfig(
        random_seed=3,
        sequence_length=SEQ,
        path_to_cache=str(cache),
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **sources,
    )


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Starts processes that have imported this module already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@pytest.mark.parametrize("with_blend", [False, True])
def test_a_run_does_not_read_what_another_one_is_writing(write_tokens, with_blend):
    """Two runs miss an index at once. One is in the middle of its last file when the other builds all of them."""
    prefix = write_tokens("corpus", counting(40, 50))
    path = ("1", prefix, "1", write_tokens("other", counting(40, 50))) if with_blend else (prefix,)
    server = fork_server()
    looked, half_written, done, found = server.Event(), server.Event(), server.Event(), server.Queue()
    last = "dataset_sample_index.npy" if with_blend else "shuffle_index.npy"
    runs = [
        server.Process(target=slow_run, args=(path, last, looked, half_written, done, found)),
        server.Process(target=other_run, args=(path, looked, half_written, done, found)),
    ]
    for one in runs:
        one.start()
    for one in runs:
        one.join(90)
    assert [one.exitcode for one in runs] == [0, 0]
    first, second = found.get(timeout=5), found.get(timeout=5)
    assert first == second == all_tokens(build(40, data_path=path, split="1").train).tolist()


def slow_run(path, last, looked, half_written, done, found):
    """Build, and wait for `done` in the middle of the file `last`, which it begins after `looked`."""
    plain = np.save

    def save(name, array, **settings):
        if not str(name).endswith(last):
            plain(name, array, **settings)
            return
        assert looked.wait(60)
        whole = io.BytesIO()
        plain(whole, array, **settings)
        with Path(name).open("wb") as file:
            file.write(whole.getvalue()[:100])
            file.flush()
            half_written.set()
            done.wait(60)
            file.write(whole.getvalue()[100:])

    np.save = save
    found.put(all_tokens(build(40, data_path=path, split="1").train).tolist())


def other_run(path, looked, half_written, done, found):
    """Look at the cache first, and build once the other run is in the middle of a file."""
    plain = datasets_module._check_enough_text

    def check(*args):
        looked.set()
        assert half_written.wait(60)
        plain(*args)

    datasets_module._check_enough_text = check
    try:
        found.put(all_tokens(build(40, data_path=path, split="1").train).tolist())
    finally:
        done.set()


@pytest.mark.parametrize("with_blend", [False, True])
def test_a_disk_that_fills_while_an_index_is_built_is_one_line(write_tokens, tmp_path, with_blend):
    prefix, cache = write_tokens("corpus", counting(40, 50)), tmp_path / "cache"
    path = ("1", prefix, "1", write_tokens("other", counting(40, 50))) if with_blend else (prefix,)
    with files_limited_to(300), pytest.raises(UserError, match=f"--data-cache-path {cache}.* cannot be written"):
        build(400, data_path=path, split="1")
    assert not list(tmp_path.glob("cache/*/building-*"))
    build(400, data_path=path, split="1")


def test_what_a_killed_build_left_is_cleared_and_a_live_one_is_let_alone(write_tokens, tmp_path):
    path = (write_tokens("corpus", counting(40, 50)),)
    server = fork_server()
    begun, done = server.Event(), server.Event()
    live = server.Process(target=waiting_build, args=(path, begun, done))
    killed = server.Process(target=killed_build, args=(path,))
    live.start()
    assert begun.wait(60)
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    of_live = {aside for aside in tmp_path.glob("cache/*/building-*") if f"-{live.pid}-" in aside.name}
    assert len(of_live) == 1 and len(list(tmp_path.glob("cache/*/building-*"))) == 2
    build(40, data_path=path, split="1")
    assert set(tmp_path.glob("cache/*/building-*")) == of_live
    done.set()
    live.join(60)
    assert live.exitcode == 0 and not list(tmp_path.glob("cache/*/building-*"))


def killed_build(path):
    """Be killed at the second file of an index."""
    plain, calls = np.save, itertools.count()
    np.save = lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL) if next(calls) else plain(*args, **named)
    build(40, data_path=path, split="1")


def waiting_build(path, begun, done):
    """Wait for `done` at the first file of an index."""
    plain = np.save

    def save(*args, **named):
        begun.set()
        assert done.wait(60)
        plain(*args, **named)

    np.save = save
    build(40, data_path=path, split="1")


def test_cache_folder_can_be_chosen_and_must_be_writable(write_tokens, tmp_path):
    prefix = write_tokens("corpus", counting(10, 50))
    build(5, data_path=(prefix,), split="1", data_cache_path=str(tmp_path / "elsewhere"))
    assert list((tmp_path / "elsewhere").glob("index-*/*-shuffle_index.npy")) and not (tmp_path / "cache").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write dataset index caches to .*give --data-cache-path a folder"):
        build(5, data_path=(prefix,), split="1", data_cache_path=str(tmp_path / "file" / "cache"))


@pytest.mark.parametrize("has_sums", [True, False], ids=["checksums", "none"])
def test_a_complete_cache_may_be_read_only(write_tokens, tmp_path, monkeypatch, has_sums):
    """Also one that was made before there were checksums: it is compared with what is made in the temporary folder."""
    prefix = write_tokens("corpus", counting(10, 50))
    cache = str(tmp_path / "elsewhere")
    first = build(5, data_path=(prefix,), split="1", data_cache_path=cache)
    (sums,) = Path(cache).glob("index-*/*crc32.json")
    if not has_sums:
        sums.unlink()
    make_folder = os.mkdir

    def read_only(path, *args, **kwargs):
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system")
        make_folder(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", read_only)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    again = build(5, data_path=(prefix,), split="1", data_cache_path=cache)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(first.train, again.train, strict=True))
    with pytest.raises(UserError, match=r"--data-cache-path .*Read-only file system"):
        build(50, data_path=(prefix,), split="1", data_cache_path=cache)
    with pytest.raises(UserError, match=r"cannot write dataset index caches to .*Read-only file system"):
        build(5, data_path=(prefix,), split="1", data_cache_path=str(tmp_path / "new"))
    reversed_order(next(sums.parent.glob("*-shuffle_index.npy")))
    with pytest.raises(UserError, match=r"--data-cache-path .*Read-only file system"):
        build(5, data_path=(prefix,), split="1", data_cache_path=cache)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("0.3", "a", "b"), "--data-path 0.3 a b: weights and prefixes do not alternate"),
        (("0.3", "a", "b", "0.7"), "do not alternate"),
        (("0.3", "0.7"), "do not alternate"),
        (("0", "a", "1", "b"), "weights have to be above 0"),
        (("nan", "a", "1", "b"), "weights have to be above 0"),
        (("inf", "a", "1", "b"), "the sum of the weights is inf; give finite numbers"),
        (("1e308", "a", "1e308", "b"), "the sum of the weights is inf; give finite numbers"),
        (("\uff11", "a", "1", "b"), "do not alternate"),
    ],
)
def test_bad_blends(words, message):
    with pytest.raises(ValueError, match=message):
        Blend.parse("--data-path", words)


def test_bad_settings(write_tokens):
    prefix = write_tokens("corpus", counting(10, 50))
    for options, message in [
        ({}, "no data: give --data-path"),
        ({"data_path": (prefix,), "valid_data_path": (prefix,)}, "exclude each other"),
        ({"data_path": (prefix,), "split": "1,2,3,4"}, "--split 1,2,3,4: give up to three weights"),
        ({"data_path": (prefix,), "split": "-1,2"}, "--split -1,2: give"),
        ({"data_path": (prefix,), "split": "0,0,0"}, "not all 0"),
        ({"data_path": (prefix,), "split": "nan,1,1"}, "--split nan,1,1: give"),
        ({"data_path": (prefix,), "split": "1,inf"}, "--split 1,inf: give"),
        ({"valid_data_path": (prefix,)}, "5 train samples are wanted, but no --train-data-path is given"),
        ({"data_path": (prefix + ".bin",)}, "drop the extension"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(5, **options)


def test_vocabulary_of_the_model_is_checked(write_tokens):
    prefix = write_tokens("corpus", counting(2, 3000))
    with pytest.raises(ValueError, match=r"token id 5999 in .* but the model's vocabulary is 5000"):
        build(5, data_path=(prefix,), split="1")


def test_mock_samples_depend_on_seed_and_index_alone(write_tokens):
    first, again = (build(10, 6, mock_data=True) for _ in range(2))
    assert len(first.train) == 10 and len(first.valid) == 6 and first.test is None
    np.testing.assert_array_equal(all_tokens(first.train), all_tokens(again.train)[np.arange(10)])
    tokens = all_tokens(MockDataset(200, seq_length=100, vocab_size=7, seed=0))
    assert set(np.unique(tokens)) == set(range(7))
    assert len(np.unique(tokens, axis=0)) == 200
    assert not np.array_equal(all_tokens(first.train, 6), all_tokens(first.valid)), "validation is not training again"
    sample = first.train[0]
    assert torch.equal(sample["labels"][:-1], sample["tokens"][1:])
    real = build(5, data_path=(write_tokens("corpus", counting(10, 50)),), split="1").train[0]
    assert {key: (value.dtype, value.shape) for key, value in sample.items()} == {
        key: (value.dtype, value.shape) for key, value in real.items()
    }
    with pytest.raises(IndexError):
        first.train[10]


def build_on_rank(rank: int, world_size: int, folder: str, prefixes: tuple[str, str]) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    datasets = build(60, 10, data_path=("1", prefixes[0], "2", prefixes[1]), split="80,20")
    single = build(60, 10, train_data_path=(prefixes[0],), valid_data_path=(prefixes[1],))
    assert torch.distributed.is_initialized() and not torch.cuda.is_initialized()
    parts = [all_tokens(dataset, 10) for pair in (datasets, single) for dataset in (pair.train, pair.valid)]
    np.save(f"{folder}/rank{rank}.npy", np.stack(parts))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_build_what_one_process_builds(write_tokens, tmp_path):
    prefixes = (write_tokens("low", counting(20, 50)), write_tokens("high", counting(20, 50, start=1000)))
    folder = tmp_path / "ranks"
    folder.mkdir()
    arguments = (2, str(folder), prefixes)
    torch.multiprocessing.start_processes(build_on_rank, arguments, nprocs=2, start_method="fork")
    first, second = (np.load(folder / f"rank{rank}.npy") for rank in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(list(Path(tmp_path / "cache").iterdir())) == 1
    alone = build(60, 10, data_path=("1", prefixes[0], "2", prefixes[1]), split="80,20")
    assert not torch.distributed.is_initialized(), f"no process group is left behind in process {os.getpid()}"
    np.testing.assert_array_equal(first[0], all_tokens(alone.train, 10))
