"""Idempotent producers: ids that are given out once, and batches that are written once.

An id is given out in the log, and told to the producer only when that stands below the high watermark: no later leader
can give it out again (producer_ids.py). What each producer wrote last into a partition (its last five batches) is part
of the log's state, so the check here says the same after a restart and on a promoted follower.

`check` is on the hot path: it looks at numbers from the batch's head, and at nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from chronik_repl.errors import ChronikError, DiskFailed, NotLeader
from chronik_repl.kafka.codec import InitProducerIdResponse
from chronik_repl.kafka.codes import Code, error_code
from chronik_repl.kafka.context import Api, Context
from chronik_repl.positions import Offset, Position
from chronik_repl.wal.state import PartitionState

SEQUENCE_MAX = 0x7FFFFFFF  # then 0 again


class Duplicate(NamedTuple):
    """Written before. Answer with this offset, once `end` is as durable as the acks ask for."""

    base_offset: Offset
    end: Position


def check(
    partition: PartitionState, producer_id: int, epoch: int, base_sequence: int, last_offset_delta: int
) -> Duplicate | Code | None:
    """None: append it. The rules are Kafka's; a producer that is not known here may begin with any sequence."""
    producer = partition.producers.get(producer_id)
    if producer is None:
        return None if epoch >= 0 and base_sequence >= 0 else Code.INVALID_RECORD
    if epoch != producer.epoch:
        if epoch < producer.epoch:
            return Code.INVALID_PRODUCER_EPOCH
        return None if base_sequence == 0 else Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    batches = producer.batches
    if base_sequence == (batches[-1].last_sequence + 1) & SEQUENCE_MAX:
        return None
    last_sequence = (base_sequence + last_offset_delta) & SEQUENCE_MAX
    for written in batches:
        if written.base_sequence == base_sequence and written.last_sequence == last_sequence:
            return Duplicate(written.base_offset, written.end_position)
    return Code.OUT_OF_ORDER_SEQUENCE_NUMBER


async def init_producer_id(context: Context, version: int, request: Any) -> Any:
    """A new id for anyone who asks, of any node, without a transactional id. Transactions are refused for good."""
    if request.transactional_id is not None:
        return InitProducerIdResponse(error_code=Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, producer_epoch=-1)
    try:
        producer_id = await context.door.producer_ids.take()
    except DiskFailed:
        raise
    except ChronikError as error:
        if not isinstance(error, NotLeader):
            return InitProducerIdResponse(error_code=error_code(error), producer_epoch=-1)
        producer_id = None
    if producer_id is None:
        # "Not the coordinator" would make some clients look for a transaction coordinator, which there is not. This
        # makes all of them ask again.
        return InitProducerIdResponse(error_code=Code.COORDINATOR_LOAD_IN_PROGRESS, producer_epoch=-1)
    return InitProducerIdResponse(error_code=Code.NONE, producer_id=producer_id, producer_epoch=0)


APIS = (Api(22, 0, 4, init_producer_id),)
