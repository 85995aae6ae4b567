// The status of the cluster, once a second, over one long answer; found again by itself when it breaks off.

const SILENCE_MS = 6000;
const RETRY_MS = 1000;

/** A JSON answer of the node; a page without a token goes to ask for one.  Throws an Error with what the node says. */
export async function get(path) {
  const answer = await fetch(path, {headers: {accept: "application/json"}, cache: "no-store"}).catch(() => {
    throw new Error("no answer");
  });
  await check(answer);
  return answer.json();
}

/** All items of a list, which the node answers page by page. */
export async function list(path) {
  const items = [];
  for (let after = 0; after !== null;) {
    const page = await get(`${path}?after=${after}`);
    items.push(...page.items);
    after = page.next;
  }
  return items;
}

async function check(answer) {
  if (answer.status === 401 || answer.status === 403) location.assign("login" + location.hash);
  if (!answer.ok) throw new Error(said(await problemOf(answer)));
}

/** The problem document of a failed answer; what is between page and node may answer without one. */
export async function problemOf(answer) {
  const found = await answer.json().catch(() => null);
  return found?.detail ? found : {detail: `HTTP ${answer.status}`};
}

/** What a problem document says is wrong, and what to do. */
export const said = problem => [problem.detail, problem.hint].filter(Boolean).join("; ");

/** Calls `onStatus` with each status and `onLost` when the connection breaks; for ever.
 *
 *  A hidden page has no connection: a browser opens six to a node for all its pages, and would then send no more requests.
 */
export async function follow(path, onStatus, onLost) {
  let silence = null;
  document.addEventListener("visibilitychange", () => document.hidden && silence?.abort());
  for (;;) {
    while (document.hidden) await new Promise(resolve => document.addEventListener("visibilitychange", resolve, {once: true}));
    silence = new Silence();
    let why = "";
    try {
      const answer = await fetch(path, {
        headers: {accept: "text/event-stream"}, cache: "no-store", signal: silence.signal,
      });
      await check(answer).catch(error => {
        why = error.message;
        throw error;
      });
      for await (const text of events(answer.body, silence)) {
        try {
          onStatus(JSON.parse(text));
        } catch (error) {
          console.error(error);
          why = `this page failed: ${error}`;
          throw error;
        }
      }
    } catch (error) {
      // Said on the page; the next try tells more.
    }
    silence.end();
    onLost(why);
    await new Promise(resolve => setTimeout(resolve, RETRY_MS));
  }
}

/** Breaks the connection off when nothing has come for a while. */
class Silence {
  #abort = new AbortController();
  #timer = 0;

  constructor() { this.heard(); }

  get signal() { return this.#abort.signal; }

  abort() { this.#abort.abort(); }

  heard() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.abort(), SILENCE_MS);
  }

  /** Nothing is left open, also of an answer that was not read to its end. */
  end() {
    clearTimeout(this.#timer);
    this.abort();
  }
}

async function* events(body, silence) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    silence.heard();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter(l => l.startsWith("data: ")).map(l => l.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}
