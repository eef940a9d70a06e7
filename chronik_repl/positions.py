"""The numbers and their names. Each is a plain int at run time; the types keep them from being mixed.

Ends are exclusive everywhere: a log that ends at position 100 has its last byte at 99, and the next frame
will stand at 100.
"""

from __future__ import annotations

from typing import NewType

Position = NewType("Position", int)  # a byte address in the endless stream of frames
Offset = NewType("Offset", int)  # a record's number in its partition
Epoch = NewType("Epoch", int)  # a leadership; 0 is before the first
Lsn = NewType("Lsn", int)  # Postgres's; never mixed with a Position
NodeId = NewType("NodeId", int)  # a positive i32
Checksum = NewType("Checksum", int)  # CRC32C of a frame; as `previous` of the next one it is the chain

ORIGIN = Position(0)
NO_EPOCH = Epoch(0)
NOBODY = NodeId(0)
CHAIN_SEED = Checksum(0)  # the `previous` of the frame at position 0
