"""MS-AMP's own tests and examples, unchanged, on this distribution (a clone of its repository without its module)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compat.conftest import STAND_INS

pytestmark = pytest.mark.slow

#: Its test files that pass on a CPU, with the tests in them that cannot.
UNIT_TESTS = {
    "tests/common/dtype": [],
    "tests/common/tensor/test_cast.py": [],
    "tests/common/tensor/test_meta.py": [],
    # Asks for a tensor on a GPU.
    "tests/common/tensor/test_tensor.py": ["test_tensor_basic_funcs"],
    "tests/operators/test_gemm.py": [],
    "tests/fake": ["test_nvidia_smi"],
}


def run(words: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program that must end well."""
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def with_images(environment: dict[str, str]) -> dict[str, str]:
    """The stand-in for torchvision in front."""
    folders = [str(STAND_INS / "images"), environment["PYTHONPATH"]]
    return {**environment, "PYTHONPATH": os.pathsep.join(folders), "MNIST_IMAGES": "512"}


def accuracy(output: str) -> float:
    """Percent of the test images, of the last epoch that an example printed."""
    found = re.findall(r"Accuracy: \d+/\d+ \((\d+)(?:\.\d+)?%\)", output)
    return float(found[-1])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_its_mnist_example_learns(original: Path, script_environment: dict[str, str], level: str) -> None:
    flags = ["--no-cuda", "--epochs", "1", "--test-batch-size", "128", "--enable-msamp", "--opt-level", level]
    words = [sys.executable, "mnist.py", *flags, "--save-model"]
    done = run(words, original / "examples", with_images(script_environment))
    assert accuracy(done.stdout) > 90, done.stdout
    saved = torch.load(original / "examples" / "mnist_cnn.pt", weights_only=True)
    assert saved["fc1.weight"].dtype == torch.float32 and type(saved["fc1.weight"]) is torch.Tensor


def test_its_ddp_example_learns(original: Path, script_environment: dict[str, str]) -> None:
    flags = ["--epochs", "1", "--test-batch-size", "128", "--enable-msamp", "--opt-level", "O2"]
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "cuda_on_cpu",
    ]
    done = run([*words, "mnist_ddp.py", *flags], original / "examples", with_images(script_environment))
    assert accuracy(done.stdout) > 90, done.stdout


def test_its_fsdp_example_learns(original: Path, script_environment: dict[str, str]) -> None:
    """Two processes; linear weights, their gathers and gradients take one byte an element."""
    flags = ["--epochs", "1", "--test-batch-size", "64", "--msamp"]
    words = [sys.executable, "-m", "cuda_on_cpu", "mnist_fsdp.py", *flags]
    done = run(words, original / "examples", with_images(script_environment))
    assert accuracy(done.stdout) > 90, done.stdout
    assert "FSDPFP8Linear" in done.stdout


@pytest.mark.parametrize("path", UNIT_TESTS)
def test_its_unit_tests_pass(original: Path, script_environment: dict[str, str], path: str) -> None:
    environment = {**script_environment, "PYTHONPATH": os.pathsep.join([".", script_environment["PYTHONPATH"]])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cuda_on_cpu", "-p", "no:cacheprovider", path]
    command += ["-k", " and ".join(f"not {name}" for name in UNIT_TESTS[path])] if UNIT_TESTS[path] else []
    done = run(command, original, environment)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 0
