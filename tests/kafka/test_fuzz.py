"""Ten thousand mutated requests of every API: an answer or a closed connection, and nothing else."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import structlog
import trio

from chronik_repl.kafka import codec

from .client import batch, connect
from .fuzz import MIB, Maker, rounds
from .house import open_door

REQUESTS = 10_000
SOCKETS = 500
GROWTH_BYTES_MAX = 300 * MIB


def test_mutated_requests_of_every_api() -> None:
    answered: Counter[str] = Counter()
    for found in rounds(REQUESTS, 1, REQUESTS // 2, 2):
        answered.update(found.answered)
        assert found.grown_bytes < GROWTH_BYTES_MAX
    assert len(answered) >= 24
    for name, count in answered.items():
        assert count > REQUESTS / 50, f"{name}: the fuzzer hardly gets past the decoder"


async def test_mutated_requests_over_real_sockets(tmp_path: Path) -> None:
    """Several on a connection, in pieces: whatever it makes of them, the server goes on serving others."""
    maker = Maker(2)
    requests = [
        maker.request(message, maker.random.randint(message._valid_versions[0], min(message.max_version, 12)))
        for message in codec.REQUESTS.values()
        for _ in range(10)
    ]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        async with open_door(tmp_path) as (house, address), connect(address) as steady:
            await steady.make_topic("steady")
            for number in range(SOCKETS):
                data = b"".join(maker.broken(maker.random.choice(requests)) for _ in range(4))
                async with connect(address) as client:
                    with suppress(trio.BrokenResourceError):
                        cut = maker.random.randrange(len(data))
                        await client.stream.send_all(data[:cut])
                        await client.stream.send_all(data[cut:])
                        with trio.move_on_after(0.01):
                            await client.stream.receive_some()
                if number % 50 == 0:
                    done = await steady.produce("steady", batch(b"still here"))
                    assert done.error_code == 0
            while house.meters.values["kafka_connections"][()] > 1:
                await trio.testing.wait_all_tasks_blocked(0.001)
            assert house.meters.values["kafka_inflight_bytes"][()] == 0
    finally:
        structlog.reset_defaults()
