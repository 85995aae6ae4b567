"""A status page that stays open for days: hidden for hours, past upgrades, set clocks and workers that come and go."""

import json
import socket
from contextlib import ExitStack

from tests.waiting import eventually

from paramserver import limits

from .browser import MARKS, Browser, Pages
from .processes import Nodes, unique

pytestmark = MARKS


def streams(cluster: Nodes) -> int:
    """How many requests the scheduler is answering: this one, the pages' streams and what shards keep open."""
    lines = cluster.http.get("/metrics").text.splitlines()
    return next(
        int(float(line.split()[1])) for line in lines if line.startswith("paramserver_http_requests_in_flight ")
    )


def hide(seen: Browser, hidden: bool) -> None:
    """Have the page believe that its tab is in the background, or is looked at again."""
    seen.page.evaluate(
        """hidden => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }""",
        hidden,
    )


def test_a_hidden_page_lets_go_of_its_connection(lone: Nodes, browser: Pages) -> None:
    """A page in the background holds none of the six connections that a browser has to a node; it then goes on."""
    with browser() as seen:
        seen.page.goto(lone.url)
        # The page's first status can be the one from before the shard joined; hidden, it would keep that one.
        eventually(lambda: seen.text("#state") == "ok", what="the shard on the page")
        shown = streams(lone)
        hide(seen, True)
        eventually(lambda: streams(lone) < shown, what="the end of the stream")
        assert seen.text("#state") == "ok"
        second = seen.text("#live")
        hide(seen, False)
        eventually(lambda: seen.text("#live") != second, what="the next second")
        assert seen.errors == []


def test_a_page_says_why_its_node_sends_no_status(lone: Nodes, browser: Pages) -> None:
    """A node that answers, but with an error, is quoted; "no answer" alone would tell nobody to close a page."""
    with browser() as seen, ExitStack() as open_sockets:
        for _ in range(limits.STATUS_STREAMS_MAX):
            other = open_sockets.enter_context(socket.create_connection(("127.0.0.1", lone.port)))
            other.sendall(b"GET /status/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert other.recv(12) == b"HTTP/1.1 200"
        seen.page.goto(lone.url)
        seen.page.wait_for_selector("#problems:has-text('open status streams is reached')")
        open_sockets.close()
        eventually(lambda: seen.text("#state") == "ok", what="the status")
        assert seen.page.inner_text("#problems") == ""


def test_a_browser_that_denies_storage_shows_the_page(lone: Nodes, browser: Pages) -> None:
    """Where a page may store nothing, it works all the same, and only forgets the theme and the span."""
    with browser() as seen:
        denied = "get() { throw new DOMException('denied', 'SecurityError'); }"
        seen.page.add_init_script(f"Object.defineProperty(window, 'localStorage', {{{denied}}})")
        seen.page.goto(lone.url)
        eventually(lambda: seen.text("#state") == "ok", what="the status")
        seen.page.click('#ranges [data-span="300"]')
        seen.page.click("#theme")
        assert seen.page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert seen.errors == []


def test_an_upgraded_cluster_loads_the_page_again(lone: Nodes, browser: Pages) -> None:
    """A page of another version than the scheduler may misread what it says."""
    with browser() as seen:
        old = lone.http.get("/status").text.replace(f'"version":"{_version(lone)}"', '"version":"0.0.1"', 1)
        answer = {"content_type": "text/event-stream", "body": f"event: status\ndata: {old}\n\n"}
        seen.page.route("**/status/stream", lambda route: route.fulfill(**answer))
        seen.page.goto(lone.url)
        seen.page.wait_for_selector("#facts:has-text('0.0.1')")
        seen.page.evaluate("window.before = true")
        seen.page.unroute("**/status/stream")
        eventually(lambda: not seen.page.evaluate("window.before"), what="the new page")
        seen.page.wait_for_selector(f"#facts:has-text('{_version(lone)}')")
        seen.page.evaluate("window.before = true")
        second = seen.text("#live")
        eventually(lambda: seen.text("#live") != second, what="the next second")
        assert seen.page.evaluate("window.before")


def _version(cluster: Nodes) -> str:
    return str(cluster.get("/status")["cluster"]["version"])


def test_metrics_may_have_any_name(rest_cluster: Nodes, browser: Pages) -> None:
    """A metric with a comma in its name has a past, and one that is called like a panel of the page has its own."""
    with browser() as seen:
        name = unique("named")
        rest_cluster.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
        rest_cluster.post(f"/models/{name}/metrics", {"metrics": {"top-1, top-5": 0.5, "push": 3.0}}, status=200)
        asked = f"/status/series?metric=reported.top-1, top-5,model.version,reported.push,&model={name}"
        named = ["reported.top-1, top-5", "model.version", "reported.push"]

        def are_told() -> bool:
            push = {"model": name, "grads": {"w": [1] * 8}}  # in a cluster of many models, idle ones have no past
            rest_cluster.post("/push", push)
            return [i["metric"] for i in rest_cluster.get(asked)["items"]] == named

        eventually(are_told, what="the metrics")
        seen.page.goto(f"{rest_cluster.url}#{name}")
        seen.page.get_by_role("figure", name="Push", exact=True).wait_for()
        titles = seen.page.locator("#model-charts figcaption > b").all_inner_texts()
        assert {"Push", "Push time", "Top-1, top-5"} <= set(titles)
        assert seen.errors == []


def test_metrics_may_be_called_like_what_every_object_has(rest_cluster: Nodes, browser: Pages) -> None:
    """A metric whose name is that of a property of all objects is a number like others."""
    with browser() as seen:
        name = unique("named")
        rest_cluster.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
        rest_cluster.post(f"/models/{name}/metrics", {"metrics": {"constructor": 0.5, "toString": 3.0}}, status=200)
        seen.page.goto(f"{rest_cluster.url}#{name}")
        fact = seen.page.locator("#model-head dl.facts > div", has_text="constructor")
        assert fact.locator("dd").inner_text() == "0.5"
        assert fact.get_attribute("title") is None
        seen.page.get_by_role("figure", name="ToString", exact=True).wait_for()
        assert seen.errors == []


def test_the_version_lag_is_that_of_live_workers_first(rest_cluster: Nodes, browser: Pages) -> None:
    """Of more workers than are drawn it is the dead ones that are left out; where two runs are drawn, each is named."""
    with browser() as seen:
        name = unique("lagging")
        rest_cluster.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)

        def join(worker: str) -> None:
            rest_cluster.post(f"/models/{name}/workers", {"name": worker, "lease_s": 600}, status=201)
            report = {"worker": worker, "metrics": {"lag": 2.0}}
            rest_cluster.post(f"/models/{name}/metrics", report, status=200)

        def legend() -> list[str]:
            return [text.rpartition(" ")[0] for text in lag.locator(".legend > span").all_inner_texts()]

        for i in range(10):
            join(f"run-1/w{i}")
        seen.page.goto(f"{rest_cluster.url}#{name}")
        lag = seen.page.get_by_role("figure", name="Version lag")
        eventually(lambda: legend() == [f"w{i}" for i in range(10)], what="the first run")
        for i in range(10):
            rest_cluster.call("DELETE", f"/models/{name}/workers/run-1/w{i}")
        for worker in ("run-2/w10", "run-2/w2"):
            join(worker)
        wanted = ["run-2/w2", "run-2/w10", *(f"run-1/w{i}" for i in range(8))]
        eventually(lambda: legend()[:10] == wanted, what="the second run")
        assert "and 2 more, not drawn" in lag.inner_text()
        assert seen.errors == []


def test_live_nodes_are_drawn_before_dead_ones(lone: Nodes, browser: Pages) -> None:
    """Of more shards than are drawn it is the dead ones that are left out."""
    with browser() as seen:
        eventually(lambda: lone.get("/status")["cluster"]["state"] == "ok", what="the shard")
        status = lone.get("/status")
        (shard,) = (n for n in status["nodes"] if n["role"] == "shard")
        status["nodes"] += [shard | {"name": f"dead-{i}", "alive": False, "state": "dead"} for i in range(12)]
        answer = {"content_type": "text/event-stream", "body": f"event: status\ndata: {json.dumps(status)}\n\n"}
        seen.page.route("**/status/stream", lambda route: route.fulfill(**answer))
        seen.page.goto(lone.url)
        legend = seen.page.get_by_role("figure", name="Gradients in").locator(".legend > span")
        legend.first.wait_for()
        assert legend.first.inner_text().startswith("shard-0 ")
        assert legend.last.inner_text() == "and 3 more, not drawn"


def test_a_fault_of_the_page_is_told_as_that(rest_cluster: Nodes, browser: Pages) -> None:
    """A page that cannot draw says so, writes the error to the console, and leaves no connection open for each try."""
    with browser() as seen:
        before = streams(rest_cluster)
        seen.page.goto(rest_cluster.url)
        eventually(lambda: seen.text("#live") != "", what="the first second")
        seen.page.evaluate("document.getElementById('events').remove()")
        seen.page.wait_for_selector("#problems:has-text('this page failed: TypeError')")
        # The page's text is asked for, as only then the browser's errors are taken in.
        eventually(lambda: seen.text("#state") and sum("TypeError" in e for e in seen.errors) > 3, what="some tries")
        eventually(lambda: streams(rest_cluster) <= before + 1, what="the end of the earlier tries")


def test_only_a_fraction_is_shown_in_percent(rest_cluster: Nodes, browser: Pages) -> None:
    """An accuracy is shown in percent, under any name; what only contains its letters is a plain number."""
    with browser() as seen:
        name = unique("named")
        rest_cluster.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
        metrics = {"val_acc": 0.5, "acc1": 0.25, "top_accuracy": 0.75, "grad_acc_steps": 4, "accum": 8}
        rest_cluster.post(f"/models/{name}/metrics", {"metrics": metrics}, status=200)
        seen.page.goto(f"{rest_cluster.url}#{name}")
        seen.page.wait_for_selector("#model-head dt:has-text('val_acc')")
        facts = dict(
            seen.page.locator("#model-head dl.facts > div").evaluate_all(
                "all => all.map(e => [e.querySelector('dt').textContent, e.querySelector('dd').textContent])"
            )
        )
        wanted = {"val_acc": "50.0 %", "acc1": "25.0 %", "top_accuracy": "75.0 %", "grad_acc_steps": "4", "accum": "8"}
        assert {k: facts[k] for k in wanted} == wanted
        assert seen.errors == []


def test_a_map_of_partitions_is_drawn_again_only_when_it_changes(rest_cluster: Nodes, browser: Pages) -> None:
    """While no partition changes its owner, each second leaves the map alone; another model has its own map."""
    with browser() as seen:
        names = [unique("mapped") for _ in range(2)]
        for name, count in zip(names, (3, 5), strict=True):
            spec = {"name": name, "params": {"w": {"shape": [8]}}, "partitions": count}
            rest_cluster.post("/models", spec, status=201)
        eventually(lambda: all(rest_cluster.get(f"/models/{n}")["served"] for n in names), what="the partitions")
        seen.page.goto(f"{rest_cluster.url}#{names[0]}")
        seen.page.wait_for_selector("#partitions .cell")
        cells = seen.page.locator("#partitions .cell")
        loaded = seen.page.locator("#partitions .cell:not(.orphan, .loading)")  # the first status may be from before
        eventually(lambda: loaded.count() == 3, what="the map")
        cells.first.evaluate("cell => { cell.title = 'left alone'; }")
        second = seen.text("#live")
        eventually(lambda: seen.text("#live") != second, what="the next second")
        assert cells.first.get_attribute("title") == "left alone"
        seen.page.goto(f"{rest_cluster.url}#{names[1]}")
        eventually(lambda: cells.count() == 5, what="the other map")
        assert str(cells.first.get_attribute("title")).startswith("partition 0: shard-")
        assert seen.errors == []


def test_charts_follow_a_clock_and_forget_what_is_gone(rest_cluster: Nodes, browser: Pages) -> None:
    """A chart goes on when the cluster's clock is set back, and keeps no line that has no value in its range."""
    with browser() as seen:
        seen.page.goto(rest_cluster.url)
        lines = """() => import(new URL("static/series.js", location)).then(({Series}) => {
            const kept = new Series({metric: []}, "worker");
            for (let now = 1000; now < 1400; now++) kept.add(now, 300, {a: now, [`worker ${now}`]: 1, b: null});
            const size = kept.lines.size;
            kept.add(1399.5 - 5, 300, {a: 0});  // a status that is a little older than the past that was read
            const late = [kept.times.at(-1), kept.times.length];
            kept.add(1200, 300, {a: 1});
            kept.add(1201, 300, {a: 2});
            return [size, late, kept.times.at(-1), kept.of("a").slice(-3)];
        })"""
        assert seen.page.evaluate(lines) == [303, [1399, 302], 1201, [1199, 1, 2]]


def test_an_event_of_another_day_has_its_date(rest_cluster: Nodes, browser: Pages) -> None:
    """A time of day alone says nothing of what happened days ago."""
    with browser(timezone_id="UTC") as seen:
        seen.page.goto(rest_cluster.url)
        moments = (
            'n => import(new URL("static/format.js", location)).then(m => [n, n - 86400].map(t => m.moment(t, n)))'
        )
        assert seen.page.evaluate(moments, 1_700_000_000) == ["22:13:20", "Nov 13 22:13:20"]
