"""MS-AMP's own tests and examples, unchanged, on this distribution (a clone of its repository without its module)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", UNIT_TESTS)
def test_its_unit_tests_pass(original: Path, script_environment: dict[str, str], path: str) -> None:
    environment = {**script_environment, "PYTHONPATH": os.pathsep.join([".", script_environment["PYTHONPATH"]])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cuda_on_cpu", "-p", "no:cacheprovider", path]
    command += ["-k", " and ".join(f"not {name}" for name in UNIT_TESTS[path])] if UNIT_TESTS[path] else []
    done = subprocess.run(command, cwd=original, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 0
