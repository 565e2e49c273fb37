"""Run a script that imports timm beside a torchvision whose C++ operators torch's CPU build cannot load.

PyPI's torchvision is built for CUDA. Its module wants to name its operators when it is imported; models call none of
them. ``python run_with_timm.py SCRIPT WORDS …``
"""

from __future__ import annotations

import runpy
import sys

import torch

_OPERATORS = "nms qnms roi_align _roi_align_backward qroi_align roi_pool _roi_pool_backward ps_roi_align "
_MORE = "_ps_roi_align_backward ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"

if __name__ == "__main__":
    if torch.version.cuda is None:
        for name in (_OPERATORS + _MORE).split():
            torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
