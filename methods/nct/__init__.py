"""NCT: a tree of easy and hard heads over one backbone, grown from prediction correctness."""
