"""Communication between ranks: tensors, names and tickets. Nothing here knows of models, chunks or plans.

Ranks ── who, a store, groups of our own ──> Watch ── who is gone ──> Collectives ── gather, reduce, agree, over Transport ──> tickets
"""
