"""The page in a real browser, before a real cluster: a follower is killed, turns, falls behind, and comes back."""

from __future__ import annotations

from pathlib import Path

import trio

from chronik_repl.demo.cluster import Cluster
from chronik_repl.demo.shop import Shop
from tests.http.browser import open_page

STATE = "document.querySelector('#picture [data-node=\"3\"]')?.dataset.state"
LAG = "Number(document.querySelector('#picture [data-node=\"3\"]')?.dataset.lag)"
LINE = "document.querySelector('#lag [data-follower=\"3\"]')?.getAttribute('d')"


async def test_a_killed_follower_turns_falls_behind_and_catches_up(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    shop = None
    try:
        await trio.to_thread.run_sync(cluster.start)
        shop = Shop(cluster.leader.kafka, 500)
        shop.open()
        async with open_page(cluster.leader.page) as page:
            await page.until(f"{STATE} === 'streaming'")
            await page.until("document.querySelector('#picture [data-node=\"1\"]').classList.contains('leader')")
            await page.until("parseFloat(document.querySelector('#rate').textContent) > 0")
            assert await page.value("document.querySelectorAll('#picture .node').length") == 3
            assert await page.value("document.querySelector('#parity').textContent") == "same"
            assert "ready" in await page.value("document.querySelector('#ready').textContent")

            victim = cluster.followers[-1]
            victim.kill()
            await page.until(f"{STATE} === 'connecting'")
            await page.until(f"{LAG} > 20000")
            grown = await page.value(LAG)
            await page.until(f"{LAG} > {grown}")
            await page.until("document.querySelectorAll('#events li.warning').length > 0")
            (tmp_path / "down.png").write_bytes(await page.screenshot())

            await trio.to_thread.run_sync(victim.start)
            await page.until(f"{STATE} === 'streaming' && {LAG} < {grown}")
            await page.until(f"({LINE} || '').split(' L ').length > 5")
            await page.until("document.querySelector('#parity').textContent === 'same'")
            assert page.complaints == []
    finally:
        if shop is not None:
            await trio.to_thread.run_sync(shop.close)
        await trio.to_thread.run_sync(cluster.stop)


async def test_a_followers_page_shows_the_leaders_view_and_survives_its_death(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, followers=1)
    try:
        await trio.to_thread.run_sync(cluster.start)
        async with open_page(cluster.followers[0].page, dark=True) as page:
            await page.until("document.querySelector('#picture [data-node=\"2\"]')?.dataset.state === 'streaming'")
            assert "follower" in await page.value("document.querySelector('#role').textContent")
            assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 28)"
            cluster.leader.kill()
            await page.until("document.querySelector('#picture .leader')?.dataset.state === 'silent'")
            cluster.followers[0].kill()
            await page.until("document.body.classList.contains('lost')")
            await page.until("document.querySelector('#alert').textContent.includes('does not answer since')")
            assert page.complaints == []
    finally:
        await trio.to_thread.run_sync(cluster.stop)
