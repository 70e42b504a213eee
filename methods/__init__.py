"""The methods under comparison, one file each, and the one training loop they share."""
