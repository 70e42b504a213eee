"""A package beside this repository: a method and a dataset of its own."""
