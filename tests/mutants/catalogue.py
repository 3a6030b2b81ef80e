"""Every mutant, in the order in which they run."""

from __future__ import annotations

from tests.mutants.assembled import ASSEMBLED
from tests.mutants.binding import BINDING
from tests.mutants.blocks import BLOCKS
from tests.mutants.blocks_2d import BLOCKS_2D
from tests.mutants.bounds import BOUNDS
from tests.mutants.changes import CHANGES
from tests.mutants.elastic import ELASTIC
from tests.mutants.engine import ENGINE
from tests.mutants.forecasts import FORECASTS
from tests.mutants.homes import HOMES
from tests.mutants.long_sequences import LONG_SEQUENCES
from tests.mutants.moving import MOVING
from tests.mutants.mutant import Mutant
from tests.mutants.outside import OUTSIDE
from tests.mutants.planning import PLANNING
from tests.mutants.ranks import RANKS
from tests.mutants.sixteen_bits import SIXTEEN_BITS
from tests.mutants.streams import STREAMS
from tests.mutants.tiles import TILES
from tests.mutants.training import TRAINING
from tests.mutants.updates import UPDATES
from tests.mutants.whole import WHOLE
from tests.mutants.whole_chunks import WHOLE_CHUNKS

MUTANTS: tuple[Mutant, ...] = (
    *BINDING,
    *BOUNDS,
    *ASSEMBLED,
    *CHANGES,
    *PLANNING,
    *MOVING,
    *TRAINING,
    *UPDATES,
    *WHOLE_CHUNKS,
    *WHOLE,
    *BLOCKS,
    *OUTSIDE,
    *SIXTEEN_BITS,
    *TILES,
    *FORECASTS,
    *ENGINE,
    *HOMES,
    *STREAMS,
    *RANKS,
    *LONG_SEQUENCES,
    *ELASTIC,
    *BLOCKS_2D,
)
