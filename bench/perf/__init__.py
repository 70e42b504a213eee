"""How fast the suite is, in ratios: our loop, the network alone, and the usual way of writing it.

Seconds belong to a machine and to what else runs on it. So every case measures all its arms in one
process, in turns, by processor time, and compares them with the same network on ready tensors.
"""
