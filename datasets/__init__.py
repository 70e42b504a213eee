"""The five benchmark datasets and how their images reach the training loop."""
