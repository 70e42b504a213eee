"""How fast the suite is, in ratios: our loop, the network alone, and a torch DataLoader.

Seconds belong to a machine and to what else runs on it. So every case measures all its arms in one
process, interleaved, by processor time, and compares them with the same network on ready tensors.
"""

from __future__ import annotations

DEFAULT_DATASETS = ("umnist", "cmnist", "waterbirds")
"""What is measured unless the user names datasets: one for each kind of network and image."""
