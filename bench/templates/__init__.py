"""What `bench new` writes: a method and a dataset that pass the contract tests as they stand."""
