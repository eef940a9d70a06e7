"""A follower's page in a real browser, before a real cluster. The leader's is looked at in the demo: test_demo.py."""

from __future__ import annotations

from pathlib import Path

import trio

from chronik_repl.demo.cluster import Cluster
from tests.http.browser import open_page


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
            await page.until(
                "document.querySelector('#alert').textContent.includes('node 1 led last (epoch 1): start it')"
            )
            cluster.followers[0].kill()
            await page.until("document.body.classList.contains('lost')")
            await page.until("document.querySelector('#alert').textContent.includes('does not answer since')")
            assert page.complaints == []
    finally:
        await trio.to_thread.run_sync(cluster.stop)


async def test_the_leaders_page_says_when_acks_all_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, followers=1)
    try:
        await trio.to_thread.run_sync(cluster.start)
        async with open_page(cluster.leader.page) as page:
            await page.until("document.querySelector('#acks').textContent.endsWith('the leader and 1 follower')")
            cluster.followers[0].kill()
            await page.until("document.querySelector('#acks').textContent.includes('1 follower; refused now')")
            assert page.complaints == []
    finally:
        await trio.to_thread.run_sync(cluster.stop)
