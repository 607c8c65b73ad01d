"""One thread per test process: the models are tiny, and the processes (`pytest -n`) share the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
