"""The longest sequence fits, and the next one does not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.models.registry import architecture_of
from fp8_megatron.planning.layouts import ROOM, Cluster, largest_peak
from fp8_megatron.planning.longest import CHUNK, Longest, longest_sequences
from tests.planning.recorded_runs import ROOT


def found(flags: str, gpus: int, memory_gb: float) -> tuple[list[Longest], Cluster]:
    words = ["--config", str(ROOT / "configs" / "llama_8b.yaml"), str(ROOT / "configs" / "fast.yaml"), "--mock-data"]
    cluster = Cluster(gpus, 8, memory_gb * 1e9, 50e9)
    return list(longest_sequences(parse_config([*words, *flags.split()]), cluster)), cluster


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ("--global-batch-size 1", 1),
        ("--global-batch-size 4 --context-parallel-size 2 --pipeline-model-parallel-size 2", 4),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ],
)
def test_it_fits_and_the_next_length_does_not(flags: str, gpus: int) -> None:
    forms, cluster = found(flags, gpus, 141)
    whole = [(False, False, False), (True, False, False), (True, False, True)]
    cut = [(True, True, False), (True, True, True)]
    assert [(one.recomputed, one.cuts_loss, one.cuts_mlps, one.offloads) for one in forms] == [
        (name, *form) for name in ("nothing", "mlp", "full") for form in (whole if name == "nothing" else whole + cut)
    ]
    for one in forms:
        assert one.config is not None
        check_config(one.config, gpus, on_this_machine=False)
        parallel, model, training = one.config.parallel, one.config.model, one.config.training
        assert training.loss_chunk_size == (CHUNK if one.cuts_loss else None)
        assert (training.mlp_chunks_for_training > 1) == one.cuts_mlps
        assert (training.cpu_offloading_num_layers > 0) == one.offloads == (one.host_bytes > 0)
        assert largest_peak(one.config, gpus)[1].total == one.peak_bytes <= ROOM * cluster.memory_bytes
        step = 2048 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
        longer = replace(one.config, model=replace(model, seq_length=model.seq_length + step))
        assert largest_peak(longer, gpus)[1].total > ROOM * cluster.memory_bytes
    lengths = {
        (one.recomputed, one.cuts_loss, one.cuts_mlps, one.offloads): one.config.model.seq_length
        for one in forms
        if one.config is not None
    }
    for name in ("nothing", "mlp", "full"):
        first, with_loss, moved = (lengths[name, *form] for form in whole)
        assert first <= with_loss < moved
    for name in ("mlp", "full"):
        for offloads in (False, True):
            assert lengths[name, True, True, offloads] > lengths[name, True, False, offloads]
    firsts = [lengths[name, *whole[0]] for name in ("nothing", "mlp", "full")]
    assert firsts == sorted(firsts) and firsts[0] < firsts[2]


@pytest.mark.parametrize(("flags", "modules"), [("", "moe"), ("--moe-layer-freq 2", "mlp moe")])
def test_experts_take_all_tokens_at_once(flags: str, modules: str) -> None:
    forms, _ = found(f"--num-experts 8 --moe-ffn-hidden-size 1024 {flags}", 8, 141)
    assert {(one.recomputed, one.cuts_mlps) for one in forms} == {
        (name, False) for name in ("nothing", modules, "full")
    }
    for one in forms:
        assert one.config is not None
        check_config(one.config, 8, on_this_machine=False)
    lengths = [one.config.model.seq_length for one in forms if not one.cuts_loss and one.config is not None]
    assert lengths[0] < lengths[1] < lengths[2]


def test_a_model_that_does_not_fit_has_none() -> None:
    forms, _ = found("--global-batch-size 1", 1, 40)
    assert all(one.config is None for one in forms)


def _word(value: bool) -> str:
    return "yes" if value else "no"


def test_the_table_of_the_docs() -> None:
    forms, _ = found("--global-batch-size 1", 1, 141)
    text = (ROOT / "docs" / "llama.md").read_text(encoding="utf-8").split("## Long sequences in memory")[1]
    rows = [
        f"| {one.recomputed} | {' | '.join(map(_word, (one.cuts_loss, one.cuts_mlps, one.offloads)))} "
        f"| {one.config.model.seq_length:,} | {one.peak_bytes / 1e9:.1f} | {one.host_bytes / 1e9:.1f} |"
        for one in forms
        if one.config is not None
    ]
    shown = [line for line in text.splitlines() if re.match(r"\| (nothing|mlp|full) \|", line)]
    assert len(shown) == 6 and [row for row in rows if row in shown] == shown
    shared, _ = found("--global-batch-size 1 --context-parallel-size 4", 4, 141)
    ends = [shared[index].config for index in (0, -1)]
    assert "from {:,} to {:,} tokens".format(*(one.model.seq_length for one in ends if one is not None)) in text


def test_what_a_layer_keeps() -> None:
    """The table of bytes in docs/llama.md."""
    text = (ROOT / "docs" / "llama.md").read_text(encoding="utf-8").split("## Long sequences in memory")[1]
    quoted = [
        int(row.split("|")[2].replace(",", "")) for row in text.splitlines() if ", BF16 |" in row or ", FP32 |" in row
    ]
    (whole,) = (int(row.split("|")[2].replace(",", "")) for row in text.splitlines() if row.startswith("| all but"))
    config = parse_config(["--config", str(ROOT / "configs" / "llama_8b.yaml"), "--mock-data"])
    kept = architecture_of(config.model).kept_bytes(config, 0)
    assert kept == sum(quoted) and whole == kept - 2 * config.model.hidden_size
