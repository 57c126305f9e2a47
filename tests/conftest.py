"""Test modules import each other's helpers by name; the parent of all forked ranks is single-threaded."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
