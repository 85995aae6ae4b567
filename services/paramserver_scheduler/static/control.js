// Requests that change the cluster.  The page's cookie only permits reading; where the cluster has tokens, the page asks
// for one that permits the change.  It is kept in this module alone, until the page is closed or loaded again.

import {problemOf, said} from "./feed.js";

const $ = id => document.getElementById(id);
let token = "";

/** Send a change and return the answer's document.  Throws an Error that says what is wrong and what to do. */
export async function send(method, path, body) {
  for (;;) {
    const headers = {accept: "application/json", "content-type": "application/json"};
    if (token) headers.authorization = `Bearer ${token}`;
    const answer = await fetch(path, {method, headers, body: JSON.stringify(body)}).catch(() => {
      throw new Error("no answer came: see whether it was done before you try again");
    });
    if (answer.ok) return answer.json();
    const problem = await problemOf(answer);
    const refused = problem.code === "unauthorized" || problem.role !== undefined;
    token = refused ? await askForToken(problem.detail) : token;
    if (!refused || !token) throw new Error(said(problem));
  }
}

/** Ask for a token; "" if the user closes the dialog without one. */
function askForToken(reason) {
  const dialog = $("token"), input = dialog.querySelector("input");
  $("token-reason").textContent = reason;
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", () => {
    document.activeElement.blur();  // what is in the dialog keeps the focus until the next frame, and then it is nowhere
    resolve(dialog.returnValue);
  }, {once: true}));
}

$("token").querySelector("form").addEventListener("submit", e => {
  e.preventDefault();
  $("token").close(e.submitter.value === "ok" ? $("token").querySelector("input").value.trim() : "");
});

/** Run a change; show in `host` what came of it: the text it returns, or its error.  `form` is disabled meanwhile. */
export async function attempt(host, form, change) {
  const focused = document.activeElement;
  host.className = "dim";
  host.textContent = "…";
  form.inert = true;
  try {
    host.textContent = await change();
    host.className = "good";
  } catch (error) {
    host.textContent = error.message;
    host.className = "bad";
  } finally {
    form.inert = false;
    focusAgain(form, focused);
  }
}

/** A form that was disabled has lost the focus, and its fields may have been made anew. */
function focusAgain(form, focused) {
  if (document.activeElement !== document.body) return;  // somewhere else by now
  const field = focused.isConnected ? focused : form.querySelector(`[name="${focused.name}"]`);
  field?.focus({preventScroll: true});
}

/** A folded form: `load` fills it in each time it is unfolded, until then it is hidden; `save` does what it is for. */
export function foldedForm(host, load, save) {
  const form = host.querySelector("form"), output = host.querySelector("output");
  host.addEventListener("toggle", () => {
    form.hidden = true;
    if (host.open) attempt(output, form, load);
  });
  form.addEventListener("submit", e => {
    e.preventDefault();
    attempt(output, form, save);
  });
}
