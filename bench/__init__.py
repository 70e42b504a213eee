"""The harness: what runs, where it runs, what is kept, what is shown."""

__version__ = "0.1.0"
