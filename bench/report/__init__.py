"""Tables from stored runs, with the paper's own numbers beside them."""
