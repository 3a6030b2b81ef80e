"""Loops that people have, as they are: torch's clipping and accumulation, with and without a session, have the same bits."""
