"""scripts/pretrain_gpt_slurm.sh with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt_slurm.sh"


def write_command(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_the_first_of_many_nodes_is_the_rendezvous(tmp_path: Path) -> None:
    """More names than a pipe holds (64 KiB): a reader that stops after the first ends their writer with SIGPIPE."""
    write_command(tmp_path / "scontrol", '[[ "$*" == "show hostnames node[1-20000]" ]] && seq -f "node%.0f" 20000')
    write_command(tmp_path / "srun", 'printf "%s\\n" "$@"')
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-20000]",
        "SLURM_JOB_NUM_NODES": "20000",
        "SLURM_JOB_ID": "30017",
    }
    run = subprocess.run(
        ["bash", str(SCRIPT), "--seed", "1"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    words = run.stdout.splitlines()
    assert "--nnodes=20000" in words
    assert "--max-restarts=3" in words
    assert "--rdzv-endpoint=node1:20017" in words
    assert words[-3:] == ["pretrain_gpt.py", "--seed", "1"]
