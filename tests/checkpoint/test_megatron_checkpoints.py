"""Checkpoints that megatron-core's own model and DistributedOptimizer wrote: masters and moments bit for bit, and the
next steps as Megatron would have taken them.
"""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from fp8_megatron.checkpoint.files import CheckpointError, candidates, megatron_iterations
from fp8_megatron.checkpoint.loading import LoadOptions, load_checkpoint
from fp8_megatron.checkpoint.megatron_layout import Name
from fp8_megatron.checkpoint.megatron_torch_dist import TorchDist
from fp8_megatron.checkpoint.saved_settings import settings_of_checkpoint
from fp8_megatron.checkpoint.weights import places
from fp8_megatron.config.precision import PrecisionConfig
from fp8_megatron.config.schema import CheckpointConfig, Config, ParallelConfig
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.models.registry import weight_shapes
from fp8_megatron.training.build import build_training_state
from fp8_megatron.training.run_start import _keep_megatron_checkpoints, check_what_is_loaded
from tests.harness.megatron_run import AFTER, BEFORE, arguments_of, config_of, megatron_run
from tests.harness.ranks import RankError, RankPool
from tests.harness.tiny_checkpoint import TinyRun, run_tiny_on_a_rank
from tests.harness.tiny_gpt import VOCAB_SIZE

KINDS = ("master", "exp_avg", "exp_avg_sq")

CPU = torch.device("cpu")
FORMATS = ("dp_reshardable", "fully_reshardable", "torch")
#: Both compute logits below 1 in BF16 from the same weights, in other orders of summation: each is off by 2^-9 at most,
#: and the loss by two of them, the target's and the mean of the others.
LOSS_TOLERANCE = 2 * 2.0**-9


@pytest.fixture(scope="module", params=["gpt3", "llama"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run of megatron-core, in every format."""
    return megatron_run(request.param, tmp_path_factory)


def expected_of(run: Path) -> dict[str, Tensor]:
    """Masters and moments by ``kind/name`` as Megatron had them."""
    return {key: value.float() for key, value in load_file(run / "states.safetensors").items() if key[:7] != "weight/"}


def resumed(
    ranks: RankPool,
    load: Path,
    config: Config,
    *,
    num_ranks: int = 1,
    num_steps: int = AFTER,
    options: LoadOptions | None = None,
) -> TinyRun:
    return ranks.run(run_tiny_on_a_rank, config, num_steps, load, None, options, num_ranks=num_ranks)[0]


def assert_same_state(found: TinyRun, expected: dict[str, Tensor], kinds: tuple[str, ...] = KINDS) -> None:
    own = {key: value for key, value in found.start.items() if key.partition("/")[0] in kinds}
    assert own.keys() == {key for key in expected if key.partition("/")[0] in kinds}
    for key, value in own.items():
        assert torch.equal(value, expected[key].view(value.shape)), key


@pytest.mark.parametrize("saved_as", FORMATS)
def test_a_run_goes_on_as_megatrons_own(ranks: RankPool, run: Path, saved_as: str) -> None:
    found = resumed(ranks, run / saved_as, config_of(run.name))
    assert (found.progress.iteration, found.progress.consumed_samples) == (BEFORE, 12)
    assert (found.progress.scheduled_samples, found.progress.consumed_valid_samples) == (12, 40)
    assert_same_state(found, expected_of(run))
    theirs = json.loads((run / "losses.json").read_text())
    assert found.losses == pytest.approx(theirs, abs=LOSS_TOLERANCE)
    assert len(theirs) == AFTER and theirs[0] != theirs[1]


@pytest.mark.parametrize("style", ["experts", "some_experts"])
def test_a_run_with_experts_goes_on(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, style: str) -> None:
    """The second's layers differ, so that megatron-core saves them one by one."""
    run, config = megatron_run(style, tmp_path_factory), config_of(style)
    theirs = json.loads((run / "losses.json").read_text())
    for size, saved_as in ((1, "dp_reshardable"), (2, "fully_reshardable")):
        parallel = ParallelConfig(expert_model_parallel_size=size)
        found = resumed(ranks, run / saved_as, replace(config, parallel=parallel), num_ranks=size)
        assert_same_state(found, expected_of(run))
        assert found.losses == pytest.approx(theirs, abs=LOSS_TOLERANCE)
    with pytest.raises(RankError, match="holds experts in the format torch; save it again with"):
        resumed(ranks, run / "torch", config)


@pytest.mark.slow
def test_flat_buffers_of_two_ranks_hold_what_keys_of_parameters_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The ranks share experts, which have an optimizer of their own, and are replicas of the rest."""
    run = megatron_run("experts-of-2-ranks", tmp_path_factory)
    flat, by_key = (TorchDist(run / kind / f"iter_{BEFORE:07d}") for kind in ("dp_reshardable", "fully_reshardable"))
    flat.check_moments()
    weights = weight_shapes(config_of(run.name).model, VOCAB_SIZE)
    names = {Name(key, layer) for key, layer, _ in places(weights) if not key.endswith("expert_bias")}
    assert len(names) == 18
    for kind in KINDS:
        for name in names:
            assert torch.equal(flat.read(kind, name), by_key.read(kind, name)), (kind, name)


def test_a_run_of_muon_goes_on(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Momentum beside Adam's moments, under any layout and form; the format torch has them by number."""
    run, config = megatron_run("llama-muon", tmp_path_factory), config_of("llama-muon")
    theirs = json.loads((run / "losses.json").read_text())
    kinds = ("master", "exp_avg", "exp_avg_sq", "momentum_buffer")
    for parallel in (ParallelConfig(), ParallelConfig(tensor_model_parallel_size=2)):
        size = parallel.tensor_model_parallel_size
        found = resumed(ranks, run / "fully_reshardable", replace(config, parallel=parallel), num_ranks=size)
        assert_same_state(found, expected_of(run), kinds)
        assert found.losses == pytest.approx(theirs, abs=LOSS_TOLERANCE)
    fp8 = replace(config, precision=PrecisionConfig(opt_level="O3"))
    assert resumed(ranks, run / "fully_reshardable", fp8).losses == pytest.approx(theirs, abs=0.05)
    with pytest.raises(RankError, match="holds 2 optimizers in the format torch; save it again with --ckpt-format"):
        resumed(ranks, run / "torch", config)


@pytest.mark.parametrize(
    ("style", "rule", "anew"),
    [
        ("gpt3-muon", "muon", {"exp_avg", "exp_avg_sq"}),  # Megatron gives the position embeddings to Muon
        ("llama-muon", "adamw", {"exp_avg", "exp_avg_sq"}),
        ("llama", "muon", {"momentum_buffer"}),
    ],
)
def test_state_that_the_other_optimizer_has_not_starts_anew(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, style: str, rule: str, anew: set[str]
) -> None:
    run, config = megatron_run(style, tmp_path_factory), config_of(style)
    config = replace(config, optimizer=replace(config.optimizer, optimizer=rule))
    found, expected = resumed(ranks, run / "fully_reshardable", config, num_steps=1), expected_of(run)
    for key, value in found.start.items():
        kind = key.partition("/")[0]
        assert torch.equal(value, expected[key].view(value.shape)) if kind not in anew else not value.any(), key
    assert found.progress.iteration == BEFORE and any(key.partition("/")[0] in anew for key in found.start)


def test_another_layout_and_level_read_the_same_values(ranks: RankPool, run: Path) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    found = resumed(ranks, run / "dp_reshardable", replace(config_of(run.name), parallel=parallel), num_ranks=2)
    assert_same_state(found, expected_of(run))
    stages = ParallelConfig(pipeline_model_parallel_size=2)
    found = resumed(ranks, run / "torch", replace(config_of(run.name), parallel=stages), num_ranks=2)
    assert_same_state(found, expected_of(run))
    fp8 = replace(config_of(run.name), precision=PrecisionConfig(opt_level="O3"))
    found = resumed(ranks, run / "torch", fp8)
    theirs = json.loads((run / "losses.json").read_text())
    assert found.losses == pytest.approx(theirs, abs=0.05), "FP8 rounds, but it is the same run"


def test_no_load_optim_and_finetune_take_what_they_say(ranks: RankPool, run: Path) -> None:
    """The weights in BF16, as Megatron does."""
    config, states = config_of(run.name), load_file(run / "states.safetensors")
    weights = {f"master/{key[7:]}": value.float() for key, value in states.items() if key.startswith("weight/")}
    lean = resumed(ranks, run / "torch", config, num_steps=1, options=LoadOptions(optimizer=False))
    assert lean.progress.iteration == BEFORE
    assert_same_state(lean, weights, ("master",))
    assert not any(value.any() for key, value in lean.start.items() if not key.startswith("master/"))
    tuned = resumed(ranks, run / "fully_reshardable", config, num_steps=1, options=LoadOptions(finetune=True))
    assert tuned.progress.iteration == tuned.progress.consumed_samples == 0
    assert_same_state(tuned, weights, ("master",))


def test_an_evaluation_takes_the_masters_alone_or_the_weights(run: Path, tmp_path: Path) -> None:
    """Without a flag, although one checkpoint has no moments."""
    config = config_of(run.name)
    config = replace(config, training=replace(config.training, skip_train=True))
    (tmp_path / f"iter_{BEFORE:07d}" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(BEFORE))
    name = f"iter_{BEFORE:07d}/mp_rank_00/model_optim_rng.pt"
    saved = torch.load(run / "torch" / name, weights_only=False)
    saved["args"].no_save_optim = True
    torch.save({key: value for key, value in saved.items() if not key.startswith("opt")}, tmp_path / name)
    states = load_file(run / "states.safetensors")
    for root, kind in ((run / "torch", "master"), (run / "fully_reshardable", "master"), (tmp_path, "weight")):
        with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
            built = build_training_state(config, VOCAB_SIZE, topology, CPU)
            progress = load_checkpoint(root, built.resumable(VOCAB_SIZE))
            assert progress is not None and progress.iteration == BEFORE
            for space, slot in built.optimizer.slots():
                expected = states[f"{kind}/{slot.name}"].float()
                assert torch.equal(space.get_master(slot), expected.view(slot.param.shape)), slot.name


def test_ranks_of_a_torch_checkpoint_are_merged(ranks: RankPool, run: Path, tmp_path: Path) -> None:
    """Two tensor-parallel ranks by two stages with an optimizer that is not distributed, by Megatron's layout."""
    config, states = config_of(run.name), load_file(run / "states.safetensors")
    folder = _split_over_ranks(states, config, tmp_path)
    found = resumed(ranks, tmp_path, config)
    assert_same_state(found, expected_of(run))
    if run.name == "llama":
        gated = replace(config, model=replace(config.model, swiglu=False, quick_geglu=True))
        _split_over_ranks(states, gated, tmp_path / "quick")
        assert_same_state(resumed(ranks, tmp_path / "quick", gated, num_steps=0), expected_of(run))
    (folder / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(RankError, match=r"mp_rank_01_001/model_optim_rng.pt is missing"):
        resumed(ranks, tmp_path, config)


def test_what_ranks_have_in_common_may_be_an_object(ranks: RankPool, run: Path, tmp_path: Path) -> None:
    """As megatron-core 0.19 writes it: no common.pt, but a list of one dictionary beside the tensors."""
    shutil.copytree(run / "fully_reshardable", tmp_path, dirs_exist_ok=True)
    folder = tmp_path / f"iter_{BEFORE:07d}"
    if not (folder / "common.pt").exists():
        pytest.skip("this megatron-core writes it itself: every other test here reads it")
    common = torch.load(folder / "common.pt", weights_only=False)
    (folder / "common.pt").unlink()
    start = (folder / "__0_0.distcp").stat().st_size
    with (folder / "__0_0.distcp").open("ab") as file:
        torch.save([common], file)
    length = (folder / "__0_0.distcp").stat().st_size - start
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["common_state/shard_0_1"] = BytesStorageMetadata()
    place = _StorageInfo("__0_0.distcp", start, length)
    metadata.storage_data[MetadataIndex("common_state/shard_0_1")] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    found = resumed(ranks, tmp_path, config_of(run.name), num_steps=1)
    assert (found.progress.iteration, found.progress.consumed_samples) == (BEFORE, 12)
    assert_same_state(found, expected_of(run))
    place.length += 1
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    with pytest.raises(RankError, match=r"common_state/shard_0_1 takes bytes \d+ to \+ \d+ of __0_0.distcp"):
        resumed(ranks, tmp_path, config_of(run.name), num_steps=1)


def _split_over_ranks(states: dict[str, Tensor], config: Config, root: Path) -> Path:
    folder = root / f"iter_{BEFORE:07d}"
    root.mkdir(exist_ok=True)
    (root / "latest_checkpointed_iteration.txt").write_text(f"{BEFORE}\n")
    names = [key.removeprefix("weight/") for key in _in_order(key for key in states if key.startswith("weight/"))]
    arguments = arguments_of(config)
    arguments.tensor_model_parallel_size = arguments.pipeline_model_parallel_size = 2
    for rank in range(2):
        for stage in range(2):
            own = {name: _renamed(name, stage) for name in names}
            own = {name: renamed for name, renamed in own.items() if renamed is not None}
            if not config.model.untie_embeddings_and_output_weights and stage == 1:
                own["embedding.word_embeddings.weight"] = "output_layer.weight"
            model = {new: _cut(name, states[f"weight/{name}"], rank, config) for name, new in own.items()}
            kinds = {
                kind: {new: _cut(name, states[f"{kind}/{name}"], rank, config) for name, new in own.items()}
                for kind in KINDS
            }
            content = {
                "args": arguments,
                "iteration": BEFORE,
                "model": model,
                "optimizer": _plain_optimizer(model, kinds),
            }
            path = folder / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(content, path)
    return folder


def _in_order(keys) -> list[str]:
    """The file of states is sorted; Megatron's modules have an order of their own, which need not be this one."""
    return list(keys)


def _renamed(name: str, stage: int) -> str | None:
    """A parameter's name on a stage of one layer; None if it is on the other stage."""
    if name.startswith("decoder.layers."):
        return name.replace(f"layers.{stage}.", "layers.0.") if f"layers.{stage}." in name else None
    return name if name.startswith("embedding.") == (stage == 0) else None


def _cut(name: str, value: Tensor, rank: int, config: Config) -> Tensor:
    """A tensor-parallel rank's part, as Megatron's layers cut it."""
    if config.model.is_gated and "linear_fc1" in name and "norm" not in name:
        gate, up = value.chunk(2)
        return torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]).clone()
    if "norm" in name or "position" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return value.clone()
    axis = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
    return value.chunk(2, axis)[rank].clone()


def _plain_optimizer(model: dict[str, Tensor], kinds: dict[str, dict[str, Tensor]]) -> dict[str, object]:
    """State of Float16OptimizerWithFloat16Params: two groups, by number; matrices are decayed, vectors are not."""
    groups = [[name for name in model if model[name].dim() > 1], [name for name in model if model[name].dim() == 1]]
    number = {name: index for index, name in enumerate(groups[0] + groups[1])}
    state = {
        index: {"step": torch.tensor(float(BEFORE)), **{kind: kinds[kind][name] for kind in KINDS[1:]}}
        for name, index in number.items()
    }
    param_groups = [
        {"params": [number[name] for name in names], "wd_mult": 1.0 - index} for index, names in enumerate(groups)
    ]
    return {
        "optimizer": {"state": state, "param_groups": param_groups},
        "fp32_from_fp16_params": [[kinds["master"][name] for name in names] for names in groups],
    }


def test_a_buffer_in_another_order_is_refused(ranks: RankPool, run: Path, tmp_path: Path) -> None:
    """The masters are compared with the weights: a wrong place is an error, not another model."""
    source = run / "torch" / f"iter_{BEFORE:07d}" / "mp_rank_00"
    folder = tmp_path / f"iter_{BEFORE:07d}" / "mp_rank_00"
    folder.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(BEFORE))
    (folder / "model_optim_rng.pt").write_bytes((source / "model_optim_rng.pt").read_bytes())
    state = torch.load(source / "distrib_optim.pt", weights_only=False)
    buffer = next(iter(state[0].values()))
    buffer["param"] = buffer["param"].roll(64)
    torch.save(state, folder / "distrib_optim.pt")
    with pytest.raises(RankError, match=r"is not its weight before rounding.*or give --no-load-optim"):
        resumed(ranks, tmp_path, config_of(run.name))
    resumed(ranks, tmp_path, config_of(run.name), num_steps=0, options=LoadOptions(optimizer=False))


def test_another_models_checkpoint_is_refused_before_there_is_a_model(run: Path) -> None:
    own = config_of(run.name)
    for change in ({"num_layers": 7}, {"hidden_size": 96}, {"norm_epsilon": 1e-6}):
        ((name, value),) = change.items()
        saved = getattr(own.model, name)
        for saved_as in ("torch", "fully_reshardable"):
            checkpoint = CheckpointConfig(load=str(run / saved_as))
            check_what_is_loaded(replace(own, checkpoint=checkpoint))
            other = replace(own, checkpoint=checkpoint, model=replace(own.model, **change))
            expected = rf"was saved with {name}\({saved}\), this run has {name}\({value}\), .*; give --"
            with pytest.raises(CheckpointError, match=expected):
                check_what_is_loaded(other)


def _with_arguments(run: Path, root: Path, **changed: object) -> Path:
    """A copy of a run's torch checkpoint with other arguments of Megatron."""
    shutil.copytree(run / "torch", root)
    (file,) = root.rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    vars(state["args"]).update(changed)
    torch.save(state, file)
    return root


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ({"qk_l2_norm": True}, r"was saved with qk_l2_norm\(True\), which this project does not have"),
        (
            {"multi_latent_attention": True},
            r"was saved with multi_latent_attention\(True\), which this project does not have",
        ),
        ({"position_embedding_type": "mrope"}, r"was saved with position_embedding_type\(mrope\), which this project"),
        ({"normalization": "other"}, r"was saved with normalization\(other\), which this project does not have"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    ranks: RankPool, run: Path, tmp_path: Path, argument: dict[str, object], expected: str
) -> None:
    with pytest.raises(RankError, match=expected):
        resumed(ranks, _with_arguments(run, tmp_path / "changed", **argument), config_of(run.name))


def test_every_tensor_is_read_or_named(ranks: RankPool, run: Path, tmp_path: Path) -> None:
    """Also beside the layers, and where another rank than the first would have read it."""
    root = _with_arguments(run, tmp_path / "changed")
    (file,) = root.rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    extra = "decoder.final_layernorm.scale"
    torch.save({**state, "model": {**state["model"], extra: torch.ones(128)}}, file)
    own = config_of(run.name)
    for config, num_ranks in ((own, 1), (replace(own, parallel=ParallelConfig(pipeline_model_parallel_size=2)), 2)):
        with pytest.raises(RankError, match=f"holds '{extra}', which this model has not: it is another model's"):
            resumed(ranks, root, config, num_ranks=num_ranks, options=LoadOptions(finetune=True))


def test_positions_are_the_runs_own(ranks: RankPool, run: Path, tmp_path: Path) -> None:
    """A position table is not passed over, whether or not the arguments tell of it."""
    own = config_of(run.name)
    theirs = own.model.position_embedding_type
    other = "rope" if theirs == "learned_absolute" else "learned_absolute"
    config = replace(own, model=replace(own.model, position_embedding_type=other))
    expected = rf"position_embedding_type\({theirs}\), this run has .*; give --position-embedding-type {theirs}"
    with pytest.raises(RankError, match=expected):
        resumed(ranks, run / "fully_reshardable", config)
    if run.name == "gpt3":
        silent = _with_arguments(run, tmp_path / "changed", position_embedding_type=None)
        with pytest.raises(RankError, match=r"holds 'embedding.position_embeddings.weight', which this model has not"):
            resumed(ranks, silent, config)


def test_norm_weights_that_are_stored_less_one(ranks: RankPool, run: Path, tmp_path: Path) -> None:
    found = resumed(
        ranks, _with_arguments(run, tmp_path / "changed", apply_layernorm_1p=True), config_of(run.name), num_steps=0
    )
    expected = expected_of(run)
    norms = [key for key in expected if key.startswith("master/") and key.endswith(("layernorm.weight", "norm_weight"))]
    assert len(norms) > 2
    for key in norms:
        expected[key] = expected[key] + 1.0
    assert_same_state(found, expected)


def test_no_run_replaces_megatrons_checkpoints(run: Path, tmp_path: Path) -> None:
    root = run / "torch"
    assert megatron_iterations(root) == candidates(root) == [BEFORE] == candidates(root, BEFORE)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of Megatron-LM \(iter_0000003\), which this run"):
        _keep_megatron_checkpoints(root, None)
    _keep_megatron_checkpoints(tmp_path, None)


def test_the_model_of_megatrons_arguments_is_a_default(run: Path) -> None:
    config = Config(checkpoint=CheckpointConfig(load=str(run / "torch"), use_checkpoint_args=True))
    found = settings_of_checkpoint(config)
    expected = config_of(run.name).model
    assert found is not None
    names = ("num_attention_heads", "norm_epsilon", "swiglu", "untie_embeddings_and_output_weights", "num_layers")
    assert {name: getattr(found.model, name) for name in names} == {name: getattr(expected, name) for name in names}
