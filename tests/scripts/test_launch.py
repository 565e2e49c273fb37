"""scripts/launch.sh, the recipes' scripts and the batch scripts, with stand-ins for Python and Slurm's commands."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
#: Recipe → the smallest number of GPUs that its layout divides evenly: tensor × pipeline size, or that of experts.
RECIPES = {
    "gpt_345m": 1,
    "gpt_1.3b": 1,
    "gpt_7b": 1,
    "gpt_13b": 2,
    "gpt_30b": 4,
    "gpt_175b": 128,
    "llama_7b": 1,
    "llama_8b": 1,
    "llama_70b": 8,
    "mixtral_8x7b": 8,
    "qwen3_30b_a3b": 8,
}
MODES = ("bf16", "te", "fp8")


def write_command(path: Path, body: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def launched(tmp_path: Path, *words: str, status: int = 0, **variables: str) -> list[str]:
    """The words that a script hands to Python; after an error its lines on stderr."""
    python = write_command(tmp_path / "python", 'printf "%s\\n" "$@"')
    # A trainer in this process leaves the place of its rendezvous behind.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    environment |= {"PY": str(python), "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    run = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stderr
    return (run.stderr if status else run.stdout).splitlines()


def flags_after_the_launcher(words: list[str]) -> list[str]:
    """Flags of a rank: without ``-m fp8_megatron.cli train`` and the placement."""
    flags = words[3:]
    for name in ("--gpus", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts"):
        if name in flags:
            del flags[flags.index(name) : flags.index(name) + 2]
    return flags


@pytest.mark.parametrize("mode", ["", *MODES])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_and_precision_is_a_run_that_its_smallest_layout_takes(
    recipe: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "transformer_engine" or found(name))
    script = str(SCRIPTS / f"pretrain_{recipe}.sh")
    words = launched(tmp_path, script, *([mode] if mode else []), "--gpus", "8", "--data-path", "text")
    assert words[:3] == ["-m", "fp8_megatron.cli", "train"]
    config = parse_config([*flags_after_the_launcher(words), "--tokenizer-model", "tokenizer.model"])
    assert config.precision.precision == (mode or "fp8")
    if mode == "te" and config.model.num_experts is not None:
        with pytest.raises(ConfigError, match="choose --precision fp8 or bf16"):
            check_config(config, RECIPES[recipe])
        return
    check_config(config, RECIPES[recipe])
    parallel = config.parallel
    layout = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    assert max(layout, parallel.expert_model_parallel_size) == RECIPES[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_first_try_of_a_few_steps_is_a_run_too(recipe: str) -> None:
    files = [str(ROOT / "configs" / folder / f"{recipe}.yaml") for folder in (".", "recipes")]
    steps = ["--train-samples", "48"] if recipe == "gpt_175b" else ["--train-iters", "20"]  # as its file says
    check_config(parse_config(["--config", *files, "--mock-data", *steps]), RECIPES[recipe])


def test_the_recipe_of_175b_trains_on_300_billion_tokens_while_its_batch_grows() -> None:
    files = [str(ROOT / "configs" / folder / "gpt_175b.yaml") for folder in (".", "recipes")]
    config = parse_config(["--config", *files, "--mock-data"])
    batches = config.batch_schedule(128)
    samples = config.training.train_samples
    assert samples is not None and 0 <= 300e9 - 2048 * samples < 2048 * 1536, "all but an incomplete last batch"
    assert batches.batch_size(0) * 2048 == 32_768 and batches.batch_size(round(12e9 / 2048) + 1) == 1536


def test_every_recipe_has_a_script_and_every_script_a_recipe() -> None:
    found = {path.stem.removeprefix("pretrain_") for path in SCRIPTS.glob("pretrain_*.sh")}
    assert found == set(RECIPES)
    assert {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")} == set(RECIPES)


def test_one_node_takes_the_gpus_that_it_shows(tmp_path: Path) -> None:
    script = str(SCRIPTS / "pretrain_gpt_7b.sh")
    write_command(tmp_path / "nvidia-smi", 'printf "GPU %d: NVIDIA H100\\n" 0 1 2 3')
    assert "--gpus 4" in " ".join(launched(tmp_path, script))
    assert "--gpus 2" in " ".join(launched(tmp_path, script, GPUS_PER_NODE="2"))
    assert "--gpus 4" not in " ".join(launched(tmp_path, script, "--cpu-ranks", "2"))
    write_command(tmp_path / "nvidia-smi", "exit 9")
    [line] = launched(tmp_path, script, status=2)
    assert line == "error: this node shows no GPU; give --gpus N, or --cpu-ranks N"
    assert "--gpus" not in launched(tmp_path, script, "--dry-run")


def test_words_that_are_no_recipe_or_precision_are_one_line(tmp_path: Path) -> None:
    launch = str(SCRIPTS / "launch.sh")
    [line] = launched(tmp_path, launch, "gpt_6b", status=2)
    assert line == "error: no recipe gpt_6b: there is no configs/gpt_6b.yaml"
    [line] = launched(tmp_path, launch, "gpt_7b", "fp16", status=2)
    assert line == "error: the precision fp16 is not one of bf16, te, fp8"
    usage = launched(tmp_path, launch, status=2)
    assert usage[0].startswith("scripts/launch.sh RECIPE")


def test_own_configuration_files_come_after_the_recipes(tmp_path: Path) -> None:
    """`--config` of the user adds to the recipe's files, so that settings of the user's win."""
    fast = str(ROOT / "configs" / "fast.yaml")
    words = launched(tmp_path, str(SCRIPTS / "pretrain_gpt_7b.sh"), "--gpus", "1", "--config", fast, "--mock-data")
    config = parse_config(flags_after_the_launcher(words))
    assert config.precision.fp8_recipe == "delayed" and config.model.hidden_size == 4096


def test_a_step_of_a_slurm_job_fills_in_the_nodes_the_restarts_and_what_to_resume(tmp_path: Path) -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "16", "SLURM_NODEID": "3", "SLURM_GPUS_ON_NODE": "8"}
    slurm |= {"MASTER_ADDR": "node1", "MASTER_PORT": "20017"}
    script = str(SCRIPTS / "pretrain_gpt_175b.sh")
    words = " ".join(launched(tmp_path, script, "--save", "/shared/x", **slurm))
    nodes = "--nnodes 16 --node-rank 3 --master-addr node1 --master-port 20017"
    assert f"--gpus 8 --save-interval 500 {nodes} --max-restarts 3" in words
    assert words.count("--load /shared/x") == 1
    words = " ".join(launched(tmp_path, script, "--save=/shared/x", "--max-restarts", "0", **slurm))
    assert words.count("--load /shared/x") == 1 and words.count("--max-restarts") == 1
    words = " ".join(launched(tmp_path, script, "--save", "/shared/x", "--load", "/other", **slurm))
    assert words.count("--load") == 1


def batch(tmp_path: Path, script: str, *words: str, **variables: str) -> list[str]:
    """The words that a batch script hands to srun."""
    write_command(
        tmp_path / "scontrol",
        'if [[ "$*" == "show job 30017" ]]; then echo "   StdOut=/dev/null"\n'
        'elif [[ "$*" == "show hostnames node[1-20000]" ]]; then seq -f "node%.0f" 20000; else exit 9; fi',
    )
    write_command(tmp_path / "srun", 'printf "%s\\n" "$@" "MASTER=$MASTER_ADDR:$MASTER_PORT" "PY=$PY"')
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[1-20000]", "SLURM_JOB_ID": "30017"}
    return launched(tmp_path, "bash", str(SCRIPTS / "slurm" / script), *words, **slurm, **variables)


def test_a_requeued_job_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    """Whatever its first start loaded; not so before it has saved, or among the checkpoints of other runs."""
    save = tmp_path / "my checkpoints"
    save.mkdir()

    def flags(*words: str, starts: str) -> list[str]:
        step = {"SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": starts}
        words = (
            str(SCRIPTS / "pretrain_gpt_345m.sh"),
            "fp8",
            "--gpus",
            "1",
            *words,
            "--save-interval",
            "5",
            "--seed",
            "7",
        )
        found = flags_after_the_launcher(launched(tmp_path, *words, **step))
        return found[found.index("--precision") + 2 :]

    first = ["--load", "base", "--finetune", "--ckpt-step=3", "--no-load-optim", "--save", str(save)]
    rest = ["--save-interval", "5", "--seed", "7"]
    assert flags(*first, starts="1") == [*first, *rest], "it has not saved"
    (save / "latest_checkpointed_iteration.txt").write_text("20")
    assert flags(*first, starts="0") == [*first, *rest]
    assert flags(*first, starts="1") == ["--load", str(save), "--save", str(save), *rest]
    own = [f"--load={save}/", "--ckpt-step", "3", f"--save={save}"]
    assert flags(*own, starts="1") == [*own, *rest]
    foreign = [*first, "--allow-foreign-checkpoints"]
    assert flags(*foreign, starts="1") == [*foreign, *rest]


def test_the_first_of_many_nodes_is_the_rendezvous(tmp_path: Path) -> None:
    """More names than a pipe holds (64 KiB): a reader that stops after the first ends their writer with SIGPIPE."""
    words = batch(tmp_path, "venv.sbatch", "scripts/pretrain_gpt_7b.sh", "bf16")
    assert words[0] == "slurm job 30017: start 0 on node[1-20000]"
    assert words[1:3] == ["--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert words[3:6] == ["scripts/pretrain_gpt_7b.sh", "bf16", "MASTER=node1:20017"]


def test_containers_stand_between_srun_and_the_recipe(tmp_path: Path) -> None:
    mounts = {"IMAGE": "/shared/image", "MOUNTS": "/data"}
    words = batch(tmp_path, "pyxis.sbatch", "scripts/pretrain_gpt_7b.sh", **mounts)
    assert f"--container-mounts={ROOT}:{ROOT},/data" in words and "--container-image=/shared/image" in words
    assert words.index("scripts/pretrain_gpt_7b.sh") == len(words) - 4
    words = batch(tmp_path, "apptainer.sbatch", "scripts/pretrain_gpt_7b.sh", **mounts)
    after = words[words.index("apptainer") :]
    assert after[:2] == ["apptainer", "exec"]
    assert after[after.index("/shared/image") + 1] == "scripts/pretrain_gpt_7b.sh"


@pytest.mark.parametrize(
    ("fabric", "name", "value"),
    [("ib", "NCCL_IB_TIMEOUT", "22"), ("efa", "FI_PROVIDER", "efa"), ("tcp", "NCCL_IB_TIMEOUT", "unset")],
)
def test_the_network_sets_what_the_user_has_not_set(fabric: str, name: str, value: str, tmp_path: Path) -> None:
    script = f"set -euo pipefail; . {SCRIPTS}/slurm/network.sh; echo ${{{name}-unset}}"
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("NCCL_", "FI_"))}

    def shown(**variables: str) -> str:
        command = ["bash", "-c", script]
        run = subprocess.run(
            command, env=environment | {"FABRIC": fabric} | variables, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    assert shown() == value
    assert shown(**{name: "mine"}) == "mine"
    assert shown(SOCKET_IFNAME="bond0") == value
