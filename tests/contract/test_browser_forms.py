"""What can be changed from the status page, in a real browser: settings, runs, and the lines for a terminal."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.examples import digits
from paramserver_node import tokens

from .browser import MARKS, PHONE, Pages, fits
from .processes import Nodes, nodes

pytestmark = MARKS


def typed(lines: str, folder: Path) -> None:
    """Run lines copied from the page in a shell that finds psctl, in that folder, and say yes to what it asks."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", lines], cwd=folder, env=env, check=True, input=b"y\n", timeout=100)


def test_an_empty_page_leads_to_a_training_and_a_failed_run_shows_its_traceback(tmp_path: Path, browser: Pages) -> None:
    """The line for a first model and the proposed run train together; a failed run's traceback is unfolded."""
    with nodes(tmp_path / "nodes", shards=1) as cluster, browser() as seen:
        page = seen.page
        cluster.start("worker-0", "paramserver_worker", "--name", "worker-0", "--url", cluster.url)
        page.goto(cluster.url)
        typed(page.locator("#model-head pre").inner_text(), tmp_path)
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


def test_a_run_that_is_refused_leaves_the_settings_of_the_one_that_trains(emptied: Nodes, browser: Pages) -> None:
    """The form for a run on a model that another run trains is refused before it has changed the model's settings."""
    with browser() as seen:
        page = seen.page
        with ps.connect(emptied.url) as client:
            client.create_model("busy", {"w": (2,)})
            run = client.create_run("busy", "elsewhere:train")["id"]
        page.goto(emptied.url)

        page.click("#new-run summary")
        page.select_option("#new-run [name='consistency.mode']", "sync")
        page.click("#new-run button")

        page.wait_for_selector(f"#new-run .bad:has-text(\"run '{run}' is training model 'busy'; stop it first\")")
        assert emptied.get("/models/busy")["revision"] == 0


def test_a_run_is_configured_and_steered_from_the_page(emptied: Nodes, browser: Pages) -> None:
    """The page changes a model's settings, starts a run on a new model like it, and pauses, resumes and stops it."""
    with browser(viewport=PHONE) as seen:
        page = seen.page
        page.on("dialog", lambda dialog: dialog.accept())
        with ps.connect(emptied.url) as client:
            client.create_model("digits", digits.spec(), optimizer=ps.SGD(lr=0.1))
        page.goto(emptied.url)

        page.wait_for_selector("#model-head .name:has-text('digits')")  # the first status may have an earlier test's
        page.click("#settings summary")
        page.fill("#settings [name='optimizer.lr']", "")
        page.click("#settings button")
        page.wait_for_selector("#settings .good:has-text('nothing was changed')")
        assert page.locator("#settings [name='optimizer.lr']").input_value() == "0.1"
        page.fill("#settings [name='optimizer.lr']", "0.05")
        page.select_option("#settings [name='consistency.mode']", "sync")
        page.fill("#settings [name='consistency.quorum']", "7")
        page.click("#settings button")
        page.wait_for_selector("#settings .bad:has-text('quorum')")
        assert emptied.get("/models/digits")["revision"] == 0
        page.fill("#settings [name='consistency.quorum']", "0.75")
        fits(seen)
        page.click("#settings button")
        page.wait_for_selector("#settings .good:has-text('revision 1')")
        spec = emptied.get("/models/digits")["spec"]
        assert spec["optimizer"]["lr"] == 0.05
        assert (spec["consistency"]["mode"], spec["consistency"]["quorum"]) == ("sync", 0.75)

        page.click("#new-run summary")
        page.fill("#new-run [name=fresh]", "digits-2")
        for wrong in ("{oops", "[16]"):
            page.fill("#new-run [name=args]", wrong)
            page.click("#new-run button")
            page.wait_for_selector("#new-run .bad:has-text('must be a JSON object')")
        assert [m["name"] for m in emptied.get("/models")["items"]] == ["digits"]
        page.fill("#new-run [name=args]", '{"batch_size": 16}')
        page.fill("#new-run [name=workers]", "2")
        for earlier in ("clocks", "limit"):  # of the last run of another test
            page.fill(f"#new-run [name={earlier}]", "")
        page.fill("#new-run [name=minutes]", "7")
        page.fill("#new-run [name=metric]", "accuracy")
        page.click("#new-run button")
        page.wait_for_selector("#new-run .bad:has-text('takes its name and its value')")
        page.select_option("#new-run [name=bound]", "at_least")
        page.fill("#new-run [name=limit]", "0.97")
        page.fill("#new-run [name='optimizer.lr']", "0.2")
        page.select_option("#new-run [name='consistency.mode']", "ssp")
        page.fill("#new-run [name='consistency.staleness']", "3")
        fits(seen)
        page.click("#new-run button")
        page.wait_for_selector("#new-run .good:has-text('is waiting')")
        new, run = emptied.get("/models/digits-2")["spec"], emptied.get("/runs")["items"][0]
        assert new["params"] == spec["params"]
        assert (new["optimizer"]["lr"], new["consistency"]["mode"], new["consistency"]["staleness"]) == (0.2, "ssp", 3)
        assert emptied.get("/models/digits")["spec"] == spec
        page.wait_for_selector("#runs button")
        assert page.is_visible("#settings [name='optimizer.lr']")  # not replaced by the newer model's
        stop = {"minutes": 7, "metric": {"name": "accuracy", "at_least": 0.97}}
        wanted = {"model": "digits-2", "workers": 2, "stop": stop, "args": {"batch_size": 16}}
        assert {key: run[key] for key in wanted} == wanted

        for button, state in (("Pause", "paused"), ("Resume", "waiting"), ("Stop", "stopped")):
            page.click(f"#runs button:has-text('{button}')")
            page.wait_for_selector(f"#runs-said:has-text('{run['id']} is {state}')")
            assert emptied.get(f"/runs/{run['id']}")["state"] == state
        eventually(lambda: page.locator("#runs button").count() == 0, what="the end of the run on the page")
        fits(seen)
        assert [e for e in seen.errors if "422" not in e] == []


def test_the_form_of_a_run_reads_lists_to_their_end(emptied: Nodes, browser: Pages) -> None:
    """The form offers every model, and what the model's last run had, also where the node answers page by page."""
    with browser() as seen:
        for model, workers in (("first", 3), ("second", 2), ("third", 1)):
            emptied.post("/models", {"name": model, "params": {"w": {"shape": [8]}}}, status=201)
            emptied.post("/runs", {"model": model, "entry": "a.b:c", "workers": workers}, status=201)

        def one_item_a_page(route: Any) -> None:
            url = route.request.url
            route.continue_(url=f"{url}{'&' if '?' in url else '?'}limit=1")

        seen.page.route(re.compile(r"/(models|runs)(\?[^/]*)?$"), one_item_a_page)
        seen.page.goto(emptied.url)
        seen.page.click("#new-run summary")
        seen.page.wait_for_selector("#new-run [name=workers]")
        options = seen.page.locator("#new-run [name=model] option")
        assert (options.all_inner_texts(), seen.page.input_value("#new-run [name=workers]")) == (
            ["first", "second", "third"],
            "1",
        )
        seen.page.select_option("#new-run [name=model]", "first")
        eventually(lambda: seen.page.input_value("#new-run [name=workers]") == "3", what="the first model's run")
        assert seen.errors == []


def test_a_new_run_is_evaluated_as_the_last_one_was(emptied: Nodes, browser: Pages) -> None:
    """The form for a run has the evaluations, checkpoints and end that the last run had, and the next one gets them."""
    with browser() as seen:
        emptied.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        stop = {"clocks": 90, "metric": {"name": "loss", "at_most": 0.25}}
        last = {"model": "m", "entry": "a.b:c", "evaluate_every": 10, "checkpoint_every": 500, "stop": stop}
        run = emptied.post("/runs", last, status=201)["id"]
        emptied.call("PATCH", f"/runs/{run}", {"state": "stopped"})
        seen.page.goto(emptied.url)
        seen.page.click("#new-run summary")
        seen.page.wait_for_selector("#new-run [name=evaluate_every]")
        shown = [seen.page.input_value(f"#new-run [name='{n}']") for n in ("evaluate_every", "checkpoint.every_clocks")]
        assert shown == ["10", "500"]
        seen.page.click("#new-run button")
        seen.page.wait_for_selector("#new-run .good:has-text('is waiting')")
        spec = emptied.get("/models/m")["spec"]
        assert (spec["evaluate_every"], spec["checkpoint"]["every_clocks"]) == (10, 500)
        (newest, before) = emptied.get("/runs")["items"][:2]
        assert (before["id"], newest["stop"]) == (run, stop)
        assert seen.errors == []


def test_a_focus_stays_with_its_run_and_its_model(emptied: Nodes, browser: Pages) -> None:
    """By keyboard alone a run is paused, although another run and another model have come before it meanwhile."""
    with browser() as seen:
        page = seen.page
        for model in ("first", "second"):
            emptied.post("/models", {"name": model, "params": {"w": {"shape": [8]}}}, status=201)
        first = emptied.post("/runs", {"model": "first", "entry": "a.b:c", "workers": 1}, status=201)["id"]
        page.goto(emptied.url)
        page.focus(f"#runs [data-run={first}]:has-text('Pause')")  # the first status may have an earlier test's
        second = emptied.post("/runs", {"model": "second", "entry": "a.b:c", "workers": 1}, status=201)["id"]
        page.wait_for_selector(f"#runs [data-run={second}]")
        assert page.evaluate("document.activeElement.dataset.run") == first
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#runs-said:has-text('{first} is paused')")
        eventually(lambda: page.evaluate("document.activeElement.textContent") == "Resume", what="the focus' staying")
        assert [emptied.get(f"/runs/{run}")["state"] for run in (first, second)] == ["paused", "waiting"]

        page.focus('#models [data-model="first"]')
        emptied.post("/models", {"name": "third", "params": {"w": {"shape": [8]}}}, status=201)
        page.wait_for_selector('#models [data-model="third"]')
        page.keyboard.press("Space")
        eventually(lambda: seen.text("#model-head .name") == "first", what="the chosen model")
        assert seen.errors == []


def test_a_run_is_called_the_same_wherever_the_page_names_it(emptied: Nodes, browser: Pages) -> None:
    """The table, the question before a run is stopped and what came of it have both the run's name and its id."""
    with browser() as seen:
        emptied.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        run = emptied.post("/runs", {"name": "nightly", "model": "m", "entry": "a.b:c"}, status=201)["id"]
        named, asked = f"nightly ({run})", []

        def accept(dialog: Any) -> None:
            asked.append(dialog.message)
            dialog.accept()

        seen.page.on("dialog", accept)
        seen.page.goto(emptied.url)
        # Not the first button: the first status may still have an earlier test's run.
        seen.page.click(f"#runs button[aria-label='Stop {named}']")
        seen.page.wait_for_selector(f"#runs-said:has-text('{named} is stopped')")
        assert asked == [f"Stop {named}? A stopped run cannot be resumed."]
        assert seen.page.locator("#runs td").first.inner_text() == named
        assert seen.errors == []


def test_the_buttons_of_a_run_are_whole_at_every_width(emptied: Nodes, browser: Pages) -> None:
    """Beside a long name, a reason for waiting and a run's progress, buttons are in view and one line high."""
    with browser() as seen:
        name = "a-model-with-a-rather-long-name-" + "7" * 32
        emptied.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
        run = emptied.post("/runs", {"model": name, "entry": "a.b:c", "workers": 1}, status=201)["id"]
        eventually(lambda: emptied.get("/status")["runs"][0]["id"] == run, what="the run in the status")
        status = emptied.get("/status")
        (waiting,) = [r for r in status["runs"] if r["id"] == run]
        training = waiting | {"id": "run-0", "model": "short", "state": "running", "reason": "", "progress": 0.5}
        status["runs"] = [waiting, training | {"ran_s": 4000.0}]
        answer = {"content_type": "text/event-stream", "body": f"event: status\ndata: {json.dumps(status)}\n\n"}
        seen.page.route("**/status/stream", lambda route: route.fulfill(**answer))
        seen.page.goto(emptied.url)
        seen.page.wait_for_selector("#runs .reason:has-text('no worker')")
        for width in (1440, 1120, 800, 375):
            seen.page.set_viewport_size({"width": width, "height": 812})
            card = seen.page.locator("#runs").bounding_box()
            buttons = seen.page.locator("#runs button").all()
            assert len(buttons) == 4
            for button in buttons:
                box = button.bounding_box()
                assert card["x"] <= box["x"]
                assert box["x"] + box["width"] <= card["x"] + card["width"], width
                assert box["height"] < 30, width
            fits(seen)


def test_what_the_page_leaves_to_a_terminal_works_as_shown(emptied: Nodes, tmp_path: Path, browser: Pages) -> None:
    """A model with uploaded values is copied by the commands that the form shows, and deleted by the page's line."""
    with browser(viewport=PHONE) as seen:
        page = seen.page
        with ps.connect(emptied.url) as client:
            client.create_model("own", {"w": np.ones(8, np.float32)})
        page.goto(emptied.url)
        page.click("#new-run summary")
        page.wait_for_selector("#new-run .note:has-text('a client uploaded the initial values of w')")
        assert page.locator("#new-run [name=fresh]").count() == 0
        fits(seen)
        typed(page.locator("#new-run .note pre").inner_text(), tmp_path)
        assert emptied.get("/models/own-2")["state"] == "ready"

        page.click("#shard-commands summary")
        assert page.locator("#shard-commands code", has_text=f"psctl scale shards 2 --url {emptied.url}").is_visible()
        page.goto(f"{emptied.url}#own")
        eventually(lambda: seen.text("#model-head .name") == "own", what="the model of the link")
        page.click("#model-commands summary")
        typed(page.locator("#model-commands dd", has_text="DELETE").inner_text(), tmp_path)
        eventually(lambda: "own-2" in seen.text("#model-head"), what="the other model")
        emptied.get("/models/own", status=404)
        fits(seen)
        assert seen.errors == []


def test_lines_that_are_unfolded_stay_those_of_their_model(emptied: Nodes, browser: Pages) -> None:
    """Lines to copy do not become a newer model's while they are read; who chooses that model finds them folded."""
    with browser() as seen:
        emptied.post("/models", {"name": "first", "params": {"w": {"shape": [8]}}}, status=201)
        seen.page.goto(emptied.url)
        seen.page.wait_for_selector("#model-head .name:has-text('first')")
        seen.page.click("#model-commands summary")
        emptied.post("/models", {"name": "second", "params": {"w": {"shape": [8]}}}, status=201)
        seen.page.wait_for_selector('#models [data-model="second"]')
        assert "psctl delete first" in seen.text("#model-commands")
        seen.page.click('#models [data-model="second"]')
        assert seen.text("#model-head .name") == "second"
        assert seen.page.locator("#model-commands").get_attribute("open") is None
        assert seen.errors == []


def test_a_change_from_the_page_needs_a_token_that_permits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Pages
) -> None:
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
        page.locator("#settings button:focus").wait_for()  # the keyboard goes on where it was

        page.click("#settings button")
        page.fill("#token input", made["reader"])
        page.click("#token button[value=ok]")
        page.wait_for_selector("#token-reason:has-text('yours has')")
        fits(seen)
        assert cluster.get("/models/m")["revision"] == 0
        page.fill("#token input", made["admin"] + "\u200b")  # as copied from a page that lets it be broken there
        page.press("#token input", "Enter")
        page.wait_for_selector("#settings .good:has-text('revision 1')")
        page.fill("#settings [name='optimizer.lr']", "0.25")
        page.click("#settings button")
        page.wait_for_selector("#settings .good:has-text('revision 2')")
        assert cluster.get("/models/m")["spec"]["optimizer"]["lr"] == 0.25
        assert not page.is_visible("#token")


def test_a_form_that_cannot_be_filled_says_why(emptied: Nodes, browser: Pages) -> None:
    """A form whose request for the present settings fails shows the node's own words and hint, not only the status."""
    with browser() as seen:
        emptied.post("/models", {"name": "m", "params": {"w": {"shape": [8]}}}, status=201)
        seen.page.goto(f"http://127.0.0.1:{emptied.shard_ports['shard-0']}")
        seen.page.wait_for_selector("#model-head .name")
        emptied.kill("scheduler")  # and the next test's start brings it back
        seen.page.click("#settings summary")
        seen.page.wait_for_selector("#settings .bad", timeout=60_000)
        told = emptied.http.get(f"http://127.0.0.1:{emptied.shard_ports['shard-0']}/models/m").json()
        assert seen.text("#settings output") == "; ".join(told[part] for part in ("detail", "hint") if part in told)
