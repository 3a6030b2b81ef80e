"""What the library does on a GPU: `python -m benchmarks.gpu`."""
