"""The status page in a real browser: headless Chromium against a live cluster that trains and loses a shard."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.examples import digits
from paramserver_node import tokens

from .processes import Nodes, nodes

sync_api = pytest.importorskip(
    "playwright.sync_api",
    reason="playwright is not installed: pip install 'paramserver[dev]', or pip install playwright",
)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "status-page.png"
PHONE = {"width": 375, "height": 812}

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium, or CHROMIUM=/path/to/it"),
]


@contextmanager
def training(folder: Path, *, shards: int, workers: int, minutes: float) -> Iterator[tuple[Nodes, str]]:
    """Run a cluster whose worker pool trains a model; yield the cluster and the model's name."""
    with nodes(folder, shards=shards) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            # Several workers share few processors, so BLAS threads would only wait for each other.
            for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                patch.setenv(name, "1")
            for i in range(workers):
                cluster.start(f"worker-{i}", "paramserver_worker", "--name", f"worker-{i}", "--url", cluster.url)
        model = "digits"
        with ps.connect(cluster.url) as client:
            optimizer = ps.Adam(lr=1e-3, schedule=ps.Exponential(gamma=0.9995))
            client.create_model(model, digits.spec(), optimizer=optimizer, partitions=digits.PARTITIONS)
            entry = "paramserver.examples.digits:train"
            client.create_run(model, entry, workers=workers, stop={"minutes": minutes}, evaluate_every=10)
        eventually(lambda: cluster.get(f"/models/{model}")["version"] > 20, within_s=100.0, what="the first versions")
        yield cluster, model


class Browser:
    """One page, with the errors that it logged and the URLs that it requested."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on(
            "console", lambda m: self.errors.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("requestfailed", self._failed)
        self.asked: set[str] = set()
        page.on("request", lambda r: self.asked.add(r.url))

    def _failed(self, request: Any) -> None:
        if "ERR_ABORTED" not in request.failure:  # pending requests are aborted by leaving the page
            self.errors.append(f"{request.url}: {request.failure}")

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return str(self.page.locator(selector).first.inner_text())

    def drawn(self) -> list[str]:
        """The current picture of each chart, as a data URL."""
        return [str(c.evaluate("canvas => canvas.toDataURL()")) for c in self.page.locator("canvas").all()]


@contextmanager
def browser(**options: Any) -> Iterator[Browser]:
    """A fresh browser page, closed with the block."""
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield Browser(chromium.new_page(**options))
        finally:
            chromium.close()


def test_the_page_shows_a_training_and_the_death_of_a_shard(tmp_path: Path) -> None:
    """The page follows a training, shows a killed shard within 6 s, fits on a phone and logs no error."""
    with training(tmp_path, shards=3, workers=2, minutes=20) as (cluster, model), browser() as seen:
        page = seen.page
        page.goto(cluster.url)
        page.wait_for_selector("#workers tbody tr")
        assert seen.text("#state") == "ok"
        assert model in seen.text("#model-head")
        assert page.locator("#nodes tbody tr").count() == 6
        assert page.locator("#partitions .cell").count() == cluster.get(f"/models/{model}")["spec"]["partitions"]
        titles = page.locator("#model-charts figcaption > b")
        wanted = {"Loss", "Accuracy", "Push time", "Version lag"}
        eventually(lambda: wanted <= set(titles.all_inner_texts()), within_s=40.0, what="the charts")

        version, drawn = _version(seen), seen.drawn()
        assert len(drawn) >= 10
        eventually(lambda: _version(seen) > version + 5, what="the version's rise on the page")
        eventually(lambda: sum(a != b for a, b in zip(drawn, seen.drawn(), strict=True)) > 6, what="the charts' moving")

        _fits(seen)
        page.set_viewport_size(PHONE)
        _fits(seen)
        page.emulate_media(color_scheme="dark")
        assert seen.errors == []

        cluster.kill("shard-1")
        row = page.locator("#nodes tbody tr", has_text="shard-1").locator(".pill")
        eventually(lambda: row.inner_text() in ("silent", "dead"), within_s=6.0, what="the shard's silence on the page")
        eventually(lambda: row.inner_text() == "dead", within_s=20.0, what="the shard's death on the page")
        told = "shard-1 is dead, its last heartbeat was"
        eventually(lambda: told in seen.text("#problems"), what="the problem in words")
        assert "its partitions go to the others" in seen.text("#problems")
        # A process that is gone has no load now, whatever it last had.
        eventually(
            lambda: "shard-1 \u2013" in seen.text("#node-charts .legend"), what="the end of its values in the charts"
        )
        eventually(lambda: "shard shard-1 is dead" in seen.text("#events"), what="the event")
        eventually(lambda: "2 / 3" in seen.text("#tiles"), what="the tile")
        version = _version(seen)
        eventually(lambda: _version(seen) > version, within_s=40.0, what="the training's going on")
        _fits(seen)
        assert seen.errors == []
        assert {url.split("/")[2] for url in seen.asked if not url.startswith("data:")} == {cluster.url.split("/")[2]}


def test_the_page_survives_the_scheduler_and_keeps_its_choices(tmp_path: Path) -> None:
    """The page shows that the scheduler is gone and back, and keeps the chosen span, theme and model."""
    with nodes(tmp_path, shards=1) as cluster, browser(viewport=PHONE) as seen:
        page = seen.page
        page.goto(cluster.url)
        page.wait_for_selector("#nodes tbody tr")
        assert "No model yet" in seen.text("#model-head")
        for name in ("first", "second"):
            cluster.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
        page.wait_for_selector('#models [data-model="first"]')
        page.click('#models [data-model="first"]')
        page.click('#ranges [data-span="3600"]')
        page.click("#theme")
        assert seen.errors == []

        cluster.kill("scheduler")
        eventually(lambda: seen.text("#state") == "no answer", what="the loss on the page")
        page.click('#models [data-model="first"]')
        assert seen.text("#state") == "no answer"
        page.click("#settings summary")
        page.wait_for_selector("#settings .bad:has-text('no answer')")
        assert not page.is_visible("#settings button")
        cluster.start_scheduler()
        eventually(lambda: seen.text("#state") in ("ok", "degraded"), what="the return on the page")
        page.reload()
        page.wait_for_selector("#models [aria-pressed=true]")
        assert seen.text("#models [aria-pressed=true]").startswith("first")
        assert page.locator('#ranges [data-span="3600"]').get_attribute("aria-pressed") == "true"
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_form_that_cannot_be_filled_says_why(tmp_path: Path) -> None:
    """A form whose request for the present settings fails shows the node's own words and hint, not only the status."""
    with nodes(tmp_path, shards=1) as cluster, browser() as seen:
        cluster.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        seen.page.goto(f"http://127.0.0.1:{cluster.shard_ports['shard-0']}")
        seen.page.wait_for_selector("#model-head .name")
        cluster.kill("scheduler")
        seen.page.click("#settings summary")
        seen.page.wait_for_selector("#settings .bad", timeout=60_000)
        told = cluster.http.get(f"http://127.0.0.1:{cluster.shard_ports['shard-0']}/models/m").json()
        assert seen.text("#settings output") == "; ".join(told[part] for part in ("detail", "hint") if part in told)


def test_a_link_leads_to_its_model(tmp_path: Path) -> None:
    """The address names the model, also when it changes while the page is open; a damaged one shows any model."""
    with nodes(tmp_path, shards=1) as cluster, browser() as seen:
        page, name = seen.page, seen.page.locator("#model-head .name")
        for model in ("first", "second"):
            cluster.post("/models", {"name": model, "params": {"w": {"shape": [8]}}}, status=201)
        page.goto(f"{cluster.url}#first")
        page.wait_for_selector("#model-head .name")
        assert name.inner_text() == "first"
        page.goto(f"{cluster.url}#second")
        eventually(lambda: name.inner_text() == "second", what="the model of the other link")
        page.goto("about:blank")
        page.goto(f"{cluster.url}#100%")
        page.wait_for_selector("#model-head .name")
        assert seen.text("#state") == "ok"
        assert seen.errors == []


def test_long_names_and_a_young_model_are_seen(tmp_path: Path) -> None:
    """On a phone a metric's long name fits, and in the longest range the only value that was reported is drawn."""
    names = {"m" * 64: 1.0, "loss": 1e8, "neg": -3.0}
    with nodes(tmp_path, shards=1) as cluster, browser(viewport=PHONE) as seen:
        cluster.post("/models", {"name": "n" * 64, "params": {"w": {"shape": [8]}}}, status=201)
        cluster.post(f"/models/{'n' * 64}/workers", {"name": "a", "lease_s": 60}, status=201)
        cluster.post(f"/models/{'n' * 64}/metrics", {"worker": f"{'n' * 64}/a", "metrics": names}, status=200)
        seen.page.goto(cluster.url)
        seen.page.click('#ranges [data-span="86400"]')
        seen.page.wait_for_selector("#model-charts canvas")
        # The only coloured pixels are those of the point: the axes are grey.
        coloured = """() => { const c = document.querySelector("#model-charts canvas");
            const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
            for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200 && d[i + 2] - d[i] > 100) return true;
            return false; }"""
        eventually(lambda: seen.page.evaluate(coloured), what="the value in the chart")
        _fits(seen)
        assert seen.errors == []


def test_a_training_that_diverged_is_seen(tmp_path: Path) -> None:
    """A loss that becomes NaN is told in the worker's row, the model's numbers, the chart and the events."""
    with nodes(tmp_path, shards=1) as cluster, browser(viewport=PHONE) as seen:
        page = seen.page
        cluster.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        cluster.post("/models/m/workers", {"name": "a", "lease_s": 600}, status=201)
        for loss in (0.5, None):
            cluster.post("/models/m/metrics", {"worker": "m/a", "metrics": {"loss": loss}}, status=200)
        page.goto(cluster.url)
        page.wait_for_selector("#model-head [role=alert]:has-text('as m/a reports, the last number was 0.5')")
        for part in ("#workers", "#model-head dl", "#model-charts figcaption"):
            assert "NaN or ∞" in seen.text(part)
        page.wait_for_selector("#events li:has-text('loss of model m is NaN')")
        _fits(seen)
        cluster.post("/models/m/metrics", {"worker": "m/a", "metrics": {"loss": 0.25}}, status=200)
        eventually(lambda: "NaN" not in page.inner_text("#model"), what="the end of the warning")
        assert seen.errors == []


def test_an_empty_page_leads_to_a_training_and_a_failed_run_shows_its_traceback(tmp_path: Path) -> None:
    """The line for a first model and the proposed run train together; a failed run's traceback is unfolded."""
    with nodes(tmp_path, shards=1) as cluster, browser() as seen:
        page = seen.page
        cluster.start("worker-0", "paramserver_worker", "--name", "worker-0", "--url", cluster.url)
        page.goto(cluster.url)
        line = page.locator("#model-head pre").inner_text()
        cluster.post("/models", json.loads(line.partition("--json ")[2].strip("'")), status=201)
        page.wait_for_selector("#model-head .name")
        page.click("#new-run summary")
        page.fill("#new-run [name=clocks]", "20")
        page.press("#new-run [name=clocks]", "Enter")
        page.wait_for_selector("#runs .pill:has-text('finished')", timeout=60_000)
        page.wait_for_selector("#new-run .good")
        assert page.evaluate("document.activeElement.name") == "clocks"

        page.fill("#new-run [name=clocks]", "")
        page.fill("#new-run [name=args]", '{"nonsense": 1}')
        page.press("#new-run [name=args]", "Enter")
        page.wait_for_selector("#new-run .good:has-text('run-2')")
        page.wait_for_selector("#runs .pill:has-text('failed')", timeout=60_000)
        page.click("#runs .reason summary")
        second = seen.text("#live")
        eventually(lambda: seen.text("#live") != second, what="the next second")
        assert "Traceback" in seen.text("#runs .reason pre")
        assert seen.errors == []


def test_the_page_of_the_api_comes_from_the_node_alone(tmp_path: Path) -> None:
    """A node's API page loads everything from that node, and a request tried from it is answered."""
    with nodes(tmp_path, shards=1) as cluster, browser() as seen:
        page = seen.page
        for url, tried in ((cluster.url, "/models"), (f"http://127.0.0.1:{cluster.shard_ports['shard-0']}", "/livez")):
            page.goto(f"{url}/docs")
            operation = page.locator(".opblock-get", has=page.locator(f'[data-path="{tried}"]'))
            operation.locator(".opblock-summary-control").click()
            operation.locator(".try-out__btn").click()
            operation.locator(".execute").click()
            operation.locator(".live-responses-table .response-col_status", has_text="200").wait_for()
            assert {u.split("/")[2] for u in seen.asked if not u.startswith("data:")} == {url.split("/")[2]}
            seen.asked.clear()
        assert seen.errors == []


def test_names_are_never_read_as_markup(tmp_path: Path) -> None:
    """A metric whose name is an HTML tag is shown as plain text."""
    evil = "<img src=x onerror=alert(1)>"
    with nodes(tmp_path, shards=1) as cluster, browser() as seen:
        cluster.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        cluster.post("/models/m/workers", {"name": "a", "lease_s": 60}, status=201)
        cluster.post("/models/m/metrics", {"worker": "m/a", "metrics": {evil: 1.5}}, status=200)
        seen.page.goto(cluster.url)
        seen.page.wait_for_selector("#workers tbody tr")

        eventually(lambda: evil in seen.text("#model-charts"), what="the chart of the metric")
        assert evil in seen.text("#model-head")
        assert seen.page.locator("main img").count() == 0
        assert seen.errors == []


def test_the_page_asks_for_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster with a secret each page leads to the login form, and one valid token opens them all."""
    key = tokens.new_key()
    (tmp_path / "secret").write_text(key)
    monkeypatch.setenv("PARAMSERVER_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("PARAMSERVER_TOKEN", tokens.make(tokens.keys_of(key)[0], "admin"))
    with nodes(tmp_path, shards=1, schedulers=2) as cluster, browser(viewport=PHONE) as seen:
        page = seen.page
        for name in ("first", "second"):
            cluster.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
        page.goto(f"{cluster.urls[1]}#first")
        page.wait_for_selector("input[name=token]")
        _fits(seen)
        page.fill("input[name=token]", "nonsense")
        page.click("button")
        page.wait_for_selector("[role=alert]:has-text('invalid')")
        page.fill("input[name=token]", tokens.make(tokens.keys_of(key)[0], "reader"))
        page.click("button")
        page.wait_for_selector("#model-head .name:has-text('first')")
        for url in (cluster.urls[1], f"http://127.0.0.1:{cluster.shard_ports['shard-0']}", cluster.urls[0]):
            page.goto(url)
            page.wait_for_selector("#nodes tbody tr")
            states = page.locator("#nodes tbody tr .pill").all_inner_texts()
            assert sorted(states) == ["active", "active", "standby"]

        assert any("401" in e for e in seen.errors)  # for the status without a token and the form with an invalid one
        assert [e for e in seen.errors if "401" not in e] == []


def test_a_run_is_configured_and_steered_from_the_page(tmp_path: Path) -> None:
    """The page changes a model's settings, starts a run on a new model like it, and pauses, resumes and stops it."""
    with nodes(tmp_path, shards=1) as cluster, browser(viewport=PHONE) as seen:
        page = seen.page
        page.on("dialog", lambda dialog: dialog.accept())
        with ps.connect(cluster.url) as client:
            client.create_model("digits", digits.spec(), optimizer=ps.SGD(lr=0.1))
        page.goto(cluster.url)

        page.click("#settings summary")
        page.fill("#settings [name='optimizer.lr']", "0.05")
        page.select_option("#settings [name='consistency.mode']", "sync")
        page.fill("#settings [name='consistency.quorum']", "7")
        page.click("#settings button")
        page.wait_for_selector("#settings .bad:has-text('quorum')")
        assert cluster.get("/models/digits")["revision"] == 0
        page.fill("#settings [name='consistency.quorum']", "0.75")
        _fits(seen)
        page.click("#settings button")
        page.wait_for_selector("#settings .good:has-text('revision 1')")
        spec = cluster.get("/models/digits")["spec"]
        assert spec["optimizer"]["lr"] == 0.05
        assert (spec["consistency"]["mode"], spec["consistency"]["quorum"]) == ("sync", 0.75)

        page.click("#new-run summary")
        page.fill("#new-run [name=fresh]", "digits-2")
        page.fill("#new-run [name=args]", "{oops")
        page.click("#new-run button")
        page.wait_for_selector("#new-run .bad:has-text('JSON')")
        assert [m["name"] for m in cluster.get("/models")["items"]] == ["digits"]
        page.fill("#new-run [name=args]", '{"batch_size": 16}')
        page.fill("#new-run [name=workers]", "2")
        page.fill("#new-run [name=minutes]", "7")
        page.fill("#new-run [name='optimizer.lr']", "0.2")
        page.select_option("#new-run [name='consistency.mode']", "ssp")
        page.fill("#new-run [name='consistency.staleness']", "3")
        _fits(seen)
        page.click("#new-run button")
        page.wait_for_selector("#new-run .good:has-text('run-1 is waiting')")
        new, run = cluster.get("/models/digits-2")["spec"], cluster.get("/runs/run-1")
        assert new["params"] == spec["params"]
        assert (new["optimizer"]["lr"], new["consistency"]["mode"], new["consistency"]["staleness"]) == (0.2, "ssp", 3)
        assert cluster.get("/models/digits")["spec"] == spec
        page.wait_for_selector("#runs button")
        assert page.is_visible("#settings [name='optimizer.lr']")  # not replaced by the newer model's
        wanted = {"model": "digits-2", "workers": 2, "stop": {"minutes": 7}, "args": {"batch_size": 16}}
        assert {key: run[key] for key in wanted} == wanted

        for button, state in (("Pause", "paused"), ("Resume", "waiting"), ("Stop", "stopped")):
            page.click(f"#runs button:has-text('{button}')")
            page.wait_for_selector(f"#runs-said:has-text('run-1 is {state}')")
            assert cluster.get("/runs/run-1")["state"] == state
        eventually(lambda: page.locator("#runs button").count() == 0, what="the end of the run on the page")
        _fits(seen)
        assert [e for e in seen.errors if "422" not in e] == []


def test_what_the_page_leaves_to_a_terminal_works_as_shown(tmp_path: Path) -> None:
    """A model with uploaded values is copied by the commands that the form shows, and deleted by the page's line."""
    with nodes(tmp_path, shards=2) as cluster, browser(viewport=PHONE) as seen:
        page = seen.page

        def typed(lines: str) -> None:
            """Run these lines in a shell that finds psctl, as copied from the page."""
            env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
            subprocess.run(
                ["bash", "-ec", lines], cwd=tmp_path, env=env, check=True, stdin=subprocess.DEVNULL, timeout=100
            )

        with ps.connect(cluster.url) as client:
            client.create_model("own", {"w": np.ones(8, np.float32)})
        page.goto(cluster.url)
        page.click("#new-run summary")
        page.wait_for_selector("#new-run .note:has-text('a client uploaded the initial values of w')")
        assert page.locator("#new-run [name=fresh]").count() == 0
        _fits(seen)
        typed(page.locator("#new-run .note pre").inner_text())
        assert cluster.get("/models/own-2")["state"] == "ready"

        page.click("#shard-commands summary")
        assert page.locator("#shard-commands code", has_text=f"psctl scale shards 3 --url {cluster.url}").is_visible()
        page.goto(f"{cluster.url}#own")
        page.click("#model-commands summary")
        typed(page.locator("#model-commands dd", has_text="DELETE").inner_text())
        eventually(lambda: "own-2" in seen.text("#model-head"), what="the other model")
        cluster.get("/models/own", status=404)
        _fits(seen)
        assert seen.errors == []


def test_a_change_from_the_page_needs_a_token_that_permits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster with a secret the page asks for a token before its first change, again if its role is too low."""
    key = tokens.new_key()
    made = {role: tokens.make(tokens.keys_of(key)[0], role) for role in ("reader", "admin")}
    (tmp_path / "secret").write_text(key)
    monkeypatch.setenv("PARAMSERVER_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("PARAMSERVER_TOKEN", made["admin"])
    with nodes(tmp_path, shards=1) as cluster, browser(viewport=PHONE) as seen:
        page = seen.page
        cluster.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        page.goto(f"http://127.0.0.1:{cluster.shard_ports['shard-0']}")
        page.fill("input[name=token]", made["reader"])
        page.click("button")
        page.click("#settings summary")
        page.fill("#settings [name='optimizer.lr']", "0.5")
        page.click("#settings button")
        page.click("#token button[value=cancel]")
        page.wait_for_selector("#settings .bad:has-text('requires a token')")

        page.click("#settings button")
        page.fill("#token input", made["reader"])
        page.click("#token button[value=ok]")
        page.wait_for_selector("#token-reason:has-text('yours has')")
        _fits(seen)
        assert cluster.get("/models/m")["revision"] == 0
        page.fill("#token input", made["admin"])
        page.press("#token input", "Enter")
        page.wait_for_selector("#settings .good:has-text('revision 1')")
        page.fill("#settings [name='optimizer.lr']", "0.25")
        page.click("#settings button")
        page.wait_for_selector("#settings .good:has-text('revision 2')")
        assert cluster.get("/models/m")["spec"]["optimizer"]["lr"] == 0.25
        assert not page.is_visible("#token")


def _version(seen: Browser) -> int:
    return int(seen.page.locator("#model-head dd").first.inner_text().replace(",", ""))


def _fits(seen: Browser) -> None:
    """Assert that no part of the page is wider than the window."""
    wide, window = seen.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= window


@pytest.mark.skipif(not os.environ.get("PARAMSERVER_SCREENSHOT"), reason="only for `make screenshot`")
def test_take_the_screenshot(tmp_path: Path) -> None:
    """Take the picture for the README: the page after 90 s of training."""
    with training(tmp_path, shards=3, workers=4, minutes=3) as (cluster, _):
        with browser(viewport={"width": 1440, "height": 960}, color_scheme="dark", device_scale_factor=1) as seen:
            seen.page.goto(cluster.url)
            eventually(
                lambda: cluster.get("/status")["runs"][0]["ran_s"] > 90, within_s=200.0, what="a minute and a half"
            )
            PICTURE.parent.mkdir(parents=True, exist_ok=True)
            below = seen.page.evaluate("Math.ceil(document.getElementById('model').getBoundingClientRect().bottom)")
            seen.page.set_viewport_size({"width": 1440, "height": below + 14})
            seen.page.screenshot(path=str(PICTURE))
            assert seen.errors == []
