"""The pure nouns everything else stands on: tensors, chunks, planes, traces, slots. Standard library only."""
