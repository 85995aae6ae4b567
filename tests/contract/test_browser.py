"""The status page in a real browser: headless Chromium against a live cluster that trains and loses a shard."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.examples import digits
from paramserver_node import tokens

from .browser import MARKS, PHONE, Browser, Pages, fits
from .processes import Nodes, nodes

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "status-page.png"
pytestmark = MARKS


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


def test_the_page_shows_a_training_and_the_death_of_a_shard(tmp_path: Path, browser: Pages) -> None:
    """The page follows a training, shows a killed shard, fits on a phone and logs no error."""
    with training(tmp_path, shards=3, workers=2, minutes=20) as (cluster, model), browser() as seen:
        page = seen.page
        page.goto(cluster.url)
        page.wait_for_selector("#workers tbody tr")
        eventually(lambda: seen.text("#state") == "ok", what="the served model on the page")
        assert model in seen.text("#model-head")
        eventually(lambda: page.locator("#nodes tbody tr").count() == 6, what="all processes on the page")
        assert page.locator("#partitions .cell").count() == cluster.get(f"/models/{model}")["spec"]["partitions"]
        titles = page.locator("#model-charts figcaption > b")
        wanted = {"Loss", "Accuracy", "Push time", "Version lag"}
        eventually(lambda: wanted <= set(titles.all_inner_texts()), within_s=40.0, what="the charts")

        version, drawn = _version(seen), seen.drawn()
        assert len(drawn) >= 10
        eventually(lambda: _version(seen) > version + 5, what="the version's rise on the page")
        eventually(lambda: sum(a != b for a, b in zip(drawn, seen.drawn(), strict=True)) > 6, what="the charts' moving")

        fits(seen)
        page.set_viewport_size(PHONE)
        fits(seen)
        page.emulate_media(color_scheme="dark")
        assert seen.errors == []

        cluster.kill("shard-1")
        row = page.locator("#nodes tbody tr", has_text="shard-1").locator(".pill")
        eventually(lambda: row.inner_text() in ("silent", "dead"), what="the shard's silence on the page")
        eventually(lambda: row.inner_text() == "dead", what="the shard's death on the page")
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
        fits(seen)
        assert seen.errors == []
        assert {url.split("/")[2] for url in seen.asked if not url.startswith("data:")} == {cluster.url.split("/")[2]}


def test_the_page_survives_the_scheduler_and_keeps_its_choices(emptied: Nodes, browser: Pages) -> None:
    """The page shows that the scheduler is gone and back, and keeps the chosen span, theme and model."""
    with browser(viewport=PHONE) as seen:
        page = seen.page
        page.goto(emptied.url)
        page.wait_for_selector("#nodes tbody tr")
        page.wait_for_selector("#model-head:has-text('No model yet')")  # the first status may have an earlier test's
        for name in ("first", "second"):
            emptied.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
        page.wait_for_selector('#models [data-model="first"]')
        page.click('#models [data-model="first"]')
        page.click('#ranges [data-span="3600"]')
        page.click("#theme")
        assert seen.errors == []

        emptied.kill("scheduler")
        eventually(lambda: seen.text("#state") == "no answer", what="the loss on the page")
        page.click('#models [data-model="first"]')
        assert seen.text("#state") == "no answer"
        page.click("#settings summary")
        page.wait_for_selector("#settings .bad:has-text('no answer')")
        assert not page.is_visible("#settings button")
        emptied.start_scheduler()
        eventually(lambda: seen.text("#state") in ("ok", "degraded"), what="the return on the page")
        page.reload()
        page.wait_for_selector("#models [aria-pressed=true]")
        assert seen.text("#models [aria-pressed=true]").startswith("first")
        assert page.locator('#ranges [data-span="3600"]').get_attribute("aria-pressed") == "true"
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_link_leads_to_its_model(emptied: Nodes, browser: Pages) -> None:
    """The address names the model, also when it changes while the page is open; a damaged one shows any model."""
    with browser() as seen:
        page, name = seen.page, seen.page.locator("#model-head .name")
        for model in ("first", "second"):
            emptied.post("/models", {"name": model, "params": {"w": {"shape": [8]}}}, status=201)
        page.goto(f"{emptied.url}#first")
        page.wait_for_selector("#model-head .name:has-text('first')")
        page.goto(f"{emptied.url}#second")
        eventually(lambda: name.inner_text() == "second", what="the model of the other link")
        page.goto("about:blank")
        page.goto(f"{emptied.url}#100%")
        page.wait_for_selector("#model-head .name")
        eventually(lambda: seen.text("#state") == "ok", what="the served models on the page")
        assert seen.errors == []


def test_of_two_models_that_train_alike_one_stays_shown(emptied: Nodes, browser: Pages) -> None:
    """Where nobody has chosen, the model shown stays while it is pushed to, though another is pushed to more often."""
    with browser() as seen:
        for model in ("first", "second"):
            emptied.post("/models", {"name": model, "params": {"w": {"shape": [8]}}}, status=201)
        status, body = emptied.get("/status"), ""
        for second, rates in enumerate([{"first": 10.0, "second": 9.0}, {"first": 9.0, "second": 10.0}]):
            status["cluster"]["map_epoch"] = 4000 + second
            for model in status["models"]:
                model["pushes_per_s"] = rates[model["name"]]
            body += f"event: status\ndata: {json.dumps(status)}\n\n"
        answers = [{"content_type": "text/event-stream", "body": body}]
        seen.page.route("**/status/stream", lambda route: route.fulfill(**answers.pop()) if answers else None)
        seen.page.goto(emptied.url)
        seen.page.wait_for_selector("#facts:has-text('map 4001')")
        assert seen.text("#model-head .name") == "first"


def test_one_of_a_hundred_models_is_chosen_from_a_list(emptied: Nodes, browser: Pages) -> None:
    """Many models are a list; what is chosen there by keyboard stays shown each second, until that model is gone."""
    with browser(viewport=PHONE, color_scheme="dark") as seen:
        page, name = seen.page, seen.page.locator("#model-head .name")
        for i in range(100):
            emptied.post("/models", {"name": f"model-{i}", "params": {"w": {"shape": [2]}}}, status=201)
        page.goto(emptied.url)
        page.wait_for_selector("#models:has-text('100 models')")
        page.focus("#models select")
        page.keyboard.type("model-37")
        eventually(lambda: name.inner_text() == "model-37", what="the chosen model")
        second = seen.text("#live")
        eventually(lambda: seen.text("#live") != second, what="the next second")
        assert name.inner_text() == page.locator("#models select").input_value() == "model-37"
        assert page.evaluate("document.activeElement.tagName") == "SELECT"
        fits(seen)
        emptied.call("DELETE", "/models/model-37")
        eventually(lambda: name.inner_text() != "model-37", what="another model")
        assert seen.text("#models span") == "99 models"
        assert seen.errors == []


def test_the_list_of_models_names_the_one_that_is_shown(emptied: Nodes, browser: Pages) -> None:
    """A model that was chosen from the list stays named there while newer ones are created and deleted."""
    with browser() as seen:
        chosen, name = seen.page.locator("#models select"), seen.page.locator("#model-head .name")
        for i in range(10):
            emptied.post("/models", {"name": f"model-{i}", "params": {"w": {"shape": [2]}}}, status=201)
        seen.page.goto(emptied.url)
        seen.page.wait_for_selector("#models:has-text('10 models')")
        chosen.select_option("model-4")
        emptied.post("/models", {"name": "newer", "params": {"w": {"shape": [2]}}}, status=201)
        seen.page.wait_for_selector("#models:has-text('11 models')")
        assert (chosen.input_value(), name.inner_text()) == ("model-4", "model-4")
        emptied.call("DELETE", "/models/newer")
        seen.page.wait_for_selector("#models:has-text('10 models')")
        assert (chosen.input_value(), name.inner_text()) == ("model-4", "model-4")
        assert seen.errors == []


def test_a_models_first_run_has_the_settings_that_its_form_shows(emptied: Nodes, browser: Pages) -> None:
    """The form for a model's first run shows the model's own settings, and sends all of a new mode that it shows."""
    with browser() as seen:
        page, ssp = seen.page, {"mode": "ssp", "min_workers": 4}
        for name in ("ran", "new"):
            spec = {"name": name, "params": {"w": {"shape": [8]}}, "consistency": ssp}
            emptied.post("/models", spec, status=201)
        emptied.post("/runs", {"model": "ran", "entry": "a.b:c", "evaluate_every": 10}, status=201)
        page.goto(emptied.url)
        page.click("#new-run summary")
        page.wait_for_selector("#new-run [name=evaluate_every]")
        page.select_option("#new-run [name=model]", "new")
        eventually(lambda: page.input_value("#new-run [name=evaluate_every]") == "0", what="the other model's settings")
        page.select_option("#new-run [name='consistency.mode']", "sync")
        assert page.input_value("#new-run [name='consistency.min_workers']") == "4"
        page.click("#new-run button")
        page.wait_for_selector("#new-run .good:has-text('is waiting')")
        spec = emptied.get("/models/new")["spec"]
        shown = spec["evaluate_every"], spec["consistency"]["mode"], spec["consistency"]["min_workers"]
        assert shown == (0, "sync", 4)
        assert seen.errors == []


def test_long_names_and_a_young_model_are_seen(emptied: Nodes, browser: Pages) -> None:
    """On a phone a metric's long name fits, and in the longest range the only value that was reported is drawn."""
    names = {"m" * 64: 123456789.0, "loss": 1e8, "neg": -3.0, "huge": 1e30}
    with browser(viewport=PHONE) as seen:
        emptied.post("/models", {"name": "n" * 64, "params": {"w": {"shape": [8]}}}, status=201)
        emptied.post(f"/models/{'n' * 64}/workers", {"name": "a", "lease_s": 60}, status=201)
        emptied.post(f"/models/{'n' * 64}/metrics", {"worker": f"{'n' * 64}/a", "metrics": names}, status=200)
        seen.page.goto(emptied.url)
        seen.page.wait_for_selector("#model-head .name:has-text('nnn')")
        seen.page.click('#ranges [data-span="86400"]')
        seen.page.wait_for_selector("#model-charts canvas")
        # The only colored pixels are those of the point: the axes are gray.
        # They are read from a copy: a chart that is read again and again makes the browser complain.
        colored = """() => { const c = document.querySelector("#model-charts canvas");
            const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", {willReadFrequently: true});
            copy.drawImage(c, 0, 0);
            const d = copy.getImageData(0, 0, c.width, c.height).data;
            for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200 && d[i + 2] - d[i] > 100) return true;
            return false; }"""
        eventually(lambda: seen.page.evaluate(colored), what="the value in the chart")
        fits(seen)
        value = seen.page.locator("figcaption:has-text('mmm') .num")
        lines = "e => { const r = new Range(); r.selectNodeContents(e); return r.getClientRects().length; }"
        assert value.evaluate(lines) == 1
        assert "1.00e+30" in seen.text("#model-head")
        emptied.post(f"/models/{'n' * 64}/workers", {"name": "w" * 60, "lease_s": 60}, status=201)
        seen.page.set_viewport_size({"width": 1024, "height": 768})
        seen.page.wait_for_selector("#workers tr:has-text('www')")
        inside = "table => table.clientWidth <= table.parentElement.clientWidth"
        assert seen.page.locator("#workers table").evaluate(inside)
        assert seen.errors == []


def test_charts_have_names_scales_and_present_values(emptied: Nodes, browser: Pages) -> None:
    """A chart has its title's name and, if values differ in their last digit, no scale of that; old values go."""
    with browser() as seen:
        emptied.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        seen.page.goto(emptied.url)
        seen.page.wait_for_selector("#model-head .name:text-is('m')")
        seen.page.get_by_role("figure", name="Push time").wait_for()
        scale = 'import(new URL("static/charts.js", location)).then(m => m.spread(0.93, 0.93 + 2e-16, false))'
        low, high = seen.page.evaluate(scale)
        assert (low, high) == pytest.approx((0.837, 1.023))
        fraction = 'v => import(new URL("static/charts.js", location)).then(m => m.spread(v, v, false, 1))'
        assert [seen.page.evaluate(fraction, v) for v in (1, 50)] == [[0.9, 1], [45, 55]]  # above 1 it is in percent
        percent = 'import(new URL("static/format.js", location)).then(m => [0.93, 93].map(m.percent))'
        assert seen.page.evaluate(percent) == ["93.0 %", "93.0 %"]  # some report an accuracy in percent
        legend = """step => import(new URL("static/charts.js", location)).then(m => {
            const chart = new m.Chart({title: "t"});
            const line = {label: "dead", color: "rgb(0, 0, 0)", values: [1, 1, null]};
            chart.draw([0, step, 2 * step], [line], 0, 3 * step);
            return chart.legend.textContent;
        })"""
        assert [seen.page.evaluate(legend, step) for step in (3, 288)] == ["dead 1", "dead \u2013"]
        assert seen.errors == []


def test_a_training_that_diverged_is_seen(emptied: Nodes, browser: Pages) -> None:
    """A loss that becomes NaN is told in the worker's row, the model's numbers, the chart and the events."""
    with browser(viewport=PHONE) as seen:
        page = seen.page
        emptied.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        emptied.post("/models/m/workers", {"name": "a", "lease_s": 600}, status=201)
        for loss in (0.5, None):
            emptied.post("/models/m/metrics", {"worker": "m/a", "metrics": {"loss": loss}}, status=200)
        page.goto(emptied.url)
        page.wait_for_selector("#model-head .diverged:has-text('as m/a reports'):has-text('The last number was 0.5')")
        told = seen.text("#model-head [role=alert]")  # it is read aloud whenever it changes
        assert "as m/a reports" in told
        assert "0.5" not in told
        for part in ("#workers", "#model-head dl", "#model-charts figcaption"):
            assert "NaN or ∞" in seen.text(part)
        page.wait_for_selector("#events li:has-text('loss of model m is NaN')")
        fits(seen)
        emptied.post("/models/m/metrics", {"worker": "m/a", "metrics": {"loss": 0.25}}, status=200)
        eventually(lambda: "NaN" not in page.inner_text("#model"), what="the end of the warning")
        assert seen.errors == []


def test_the_page_of_the_api_comes_from_the_node_alone(emptied: Nodes, browser: Pages) -> None:
    """A node's API page loads everything from that node, and a request tried from it is answered."""
    with browser() as seen:
        page = seen.page
        for url, tried in ((emptied.url, "/models"), (f"http://127.0.0.1:{emptied.shard_ports['shard-0']}", "/livez")):
            page.goto(f"{url}/docs")
            operation = page.locator(".opblock-get", has=page.locator(f'[data-path="{tried}"]'))
            operation.locator(".opblock-summary-control").click()
            operation.locator(".try-out__btn").click()
            operation.locator(".execute").click()
            operation.locator(".live-responses-table .response-col_status", has_text="200").wait_for()
            assert {u.split("/")[2] for u in seen.asked if not u.startswith("data:")} == {url.split("/")[2]}
            seen.asked.clear()
        assert seen.errors == []


def test_forty_shards_can_be_told_apart(emptied: Nodes, browser: Pages) -> None:
    """The first forty shards and the scheduler have each their own color and stripes; stripes are drawn."""
    with browser() as seen:
        seen.page.goto(emptied.url)
        seen.page.wait_for_selector("#nodes tbody tr")
        looks = seen.page.evaluate("""async () => {
            const {look} = await import(new URL("static/nodes.js", location)), found = [];
            for (const nth of [null, ...Array(40).keys()]) {
                const i = document.querySelector("#nodes .node").appendChild(document.createElement("i"));
                for (const [k, v] of Object.entries(look(nth))) i.style.setProperty(k, v);
                const {backgroundColor, backgroundImage} = getComputedStyle(i);
                found.push(`${backgroundColor} ${backgroundImage}`);
            }
            return found;
        }""")
        assert len(set(looks)) == 41
        assert seen.errors == []


def test_names_are_never_read_as_markup(emptied: Nodes, browser: Pages) -> None:
    """A metric whose name is an HTML tag is shown as plain text."""
    evil = "<img src=x onerror=alert(1)>"
    with browser() as seen:
        emptied.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        emptied.post("/models/m/workers", {"name": "a", "lease_s": 60}, status=201)
        emptied.post("/models/m/metrics", {"worker": "m/a", "metrics": {evil: 1.5}}, status=200)
        seen.page.goto(emptied.url)
        seen.page.wait_for_selector("#model-head .name:text-is('m')")
        seen.page.wait_for_selector("#workers tbody tr")

        eventually(lambda: evil in seen.text("#model-charts"), what="the chart of the metric")
        assert evil in seen.text("#model-head")
        assert seen.page.locator("main img").count() == 0
        assert seen.errors == []


def test_the_page_asks_for_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Pages) -> None:
    """In a cluster with a secret each page leads to the login form, and one valid token opens them all."""
    key = tokens.new_key()
    (tmp_path / "secret").write_text(key)
    monkeypatch.setenv("PARAMSERVER_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("PARAMSERVER_TOKEN", tokens.make(tokens.keys_of(key)[0], "admin"))
    with nodes(tmp_path, shards=1, schedulers=2) as cluster, browser(viewport=PHONE) as seen:
        page = seen.page

        def all_active() -> bool:
            return sorted(page.locator("#nodes tbody tr .pill").all_inner_texts()) == ["active", "active", "standby"]

        for name in ("first", "second"):
            cluster.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
        page.goto(f"{cluster.urls[1]}#first")
        page.wait_for_selector("input[name=token]")
        fits(seen)
        page.fill("input[name=token]", "nonsense")
        page.click("button")
        page.wait_for_selector("[role=alert]:has-text('invalid')")
        page.fill("input[name=token]", tokens.make(tokens.keys_of(key)[0], "reader"))
        page.click("button")
        page.wait_for_selector("#model-head .name:has-text('first')")
        for url in (cluster.urls[1], f"http://127.0.0.1:{cluster.shard_ports['shard-0']}", cluster.urls[0]):
            page.goto(url)
            eventually(all_active, what="both schedulers and the shard on the page")

        assert any("401" in e for e in seen.errors)  # for the status without a token and the form with an invalid one
        assert [e for e in seen.errors if "401" not in e] == []


def _version(seen: Browser) -> int:
    return int(seen.page.locator("#model-head dd").first.inner_text().replace(",", ""))


@pytest.mark.skipif(not os.environ.get("PARAMSERVER_SCREENSHOT"), reason="only for `make screenshot`")
def test_take_the_screenshot(tmp_path: Path, browser: Pages) -> None:
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
