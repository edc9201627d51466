// The page: the list of runs, the chosen ones in the address, and the events of the server.

import { RunControls } from "./controls.js";
import { byId, el, formatAge, formatNumber } from "./dom.js";
import { COMPARED, RunPage, runTitle } from "./run_page.js";

const RETRY_SECONDS = 2;
const RELOAD_SECONDS = 3; // between two reloads of the same runs that events ask for
const AGE_SECONDS = 10; // between two updates of "5 min ago"
const LISTED = { loss_total: "loss", "held_out/loss": "held-out", "rollouts/reward": "reward" };

const options = { log: false };
const page = new RunPage(byId("sections"), options, (kind, run) =>
  get(`/api/records/${kind}`, { run }),
);
const controls = new RunControls(byId("run-controls"), async (run) =>
  (await get("/api/settings", { run })).settings,
);
const items = new Map();
let runs = [];
let events = null;
let loads = 0;
let lastLoad = 0;
let waiting = null;

const chosen = () => new URLSearchParams(location.hash.slice(1)).getAll("run");
const address = (names) => `#${new URLSearchParams(names.map((name) => ["run", name]))}`;
const isMissing = (name) => !runs.some((run) => run.name === name);
const smoothing = () => Number(byId("smoothing").value);

async function get(path, query) {
  const response = await fetch(`${path}?${new URLSearchParams(query)}`);
  if (response.status === 401)
    throw new Error("the server was started again: open the URL that it printed");
  if (!response.ok)
    throw new Error(
      (await response.json().catch(() => ({}))).detail ?? `the server answered ${response.status}`,
    );
  return response.json();
}

function say(text, kind = "") {
  byId("connection").textContent = text;
  byId("connection").className = kind;
}

async function load() {
  const names = chosen();
  const mine = ++loads;
  lastLoad = Date.now();
  showList();
  byId("hint").hidden = names.length > 0;
  byId("controls").hidden = names.length === 0;
  if (names.length && innerWidth <= 720) byId("runs-box").open = false;
  const missing = names.filter(isMissing);
  try {
    // `steelyard train --watch` opens the page before its run has a folder.
    if (missing.length) throw new Error(`${missing.join(", ")} has not begun, or was removed`);
    const groups = names.length > 1 ? COMPARED.map((group) => ["group", group]) : [];
    const views = await Promise.all(
      names.map((run) => get("/api/run", [["run", run], ["smoothing", smoothing()], ...groups])),
    );
    if (mine !== loads) return; // another choice was made meanwhile
    page.show(views, smoothing());
    showTitle();
  } catch (error) {
    if (mine !== loads) return;
    page.clear();
    page.views = [];
    byId("title").replaceChildren(
      el("p", { class: "warning" }, `Nothing to show yet: ${error.message}.`),
    );
  }
  connect();
}

// Events may ask for a reload again and again, as when new metrics come one by one.
function reloadSoon() {
  if (waiting) return;
  const left = lastLoad + RELOAD_SECONDS * 1000 - Date.now();
  waiting = setTimeout(
    () => {
      waiting = null;
      load();
    },
    Math.max(0, left),
  );
}

function connect() {
  events?.close();
  if (document.hidden) return;
  const query = page.views.flatMap((view) => [
    ["run", view.name],
    ["position", view.position],
  ]);
  const source = new EventSource(`/api/events?${new URLSearchParams(query)}`);
  events = source;
  source.addEventListener("open", () => say("live", "live"));
  source.addEventListener("runs", (event) => {
    const found = JSON.parse(event.data);
    runs = found.runs;
    byId("folder").textContent = found.folder;
    showList();
    showTitle();
    page.refreshRecords();
    if (page.views.length < chosen().length && !chosen().some(isMissing)) reloadSoon();
  });
  source.addEventListener("rows", (event) => {
    const { run, rows, position, skipped } = JSON.parse(event.data);
    const view = page.views.find((each) => each.name === run);
    if (view) view.position = position;
    if (!page.append(run, rows, skipped)) reloadSoon();
    page.changed();
    showTitle();
  });
  source.addEventListener("reset", reloadSoon);
  source.addEventListener("error", () => {
    // The browser would ask for the same rows again; this asks for those that are missing.
    source.close();
    if (events !== source || document.hidden) return;
    say("no connection: is 'steelyard watch' running?", "lost");
    setTimeout(() => {
      if (events === source) get("/api/runs", []).then(connect, retry);
    }, RETRY_SECONDS * 1000);
  });
}

function retry(error) {
  if (error.message.startsWith("the server was")) say(error.message, "lost");
  setTimeout(() => get("/api/runs", []).then(connect, retry), RETRY_SECONDS * 1000);
}

function showTitle() {
  const names = chosen();
  controls.show(names.length === 1 ? runs.find((run) => run.name === names[0]) : undefined);
  if (page.views.length) byId("title").replaceChildren(...runTitle(page.views, runs));
  else if (!chosen().length) byId("title").replaceChildren();
}

// Items stay in place while they change: a click must find the element that it began on.
function showList() {
  const names = chosen();
  byId("no-runs").hidden = runs.length > 0;
  byId("hint").hidden = runs.length === 0 || names.length > 0;
  const shown = runs.map((run) => {
    if (!items.has(run.name)) items.set(run.name, listItem(run.name));
    return items.get(run.name)(run, names.includes(run.name));
  });
  const list = byId("runs");
  shown.forEach((item, at) => {
    if (list.children[at] !== item) list.insertBefore(item, list.children[at] ?? null);
  });
  while (list.children.length > shown.length) list.lastChild.remove();
}

// Makes an item of the list; returns the function that updates it.
function listItem(name) {
  const tick = el("input", { type: "checkbox", "aria-label": `Compare ${name}` });
  tick.addEventListener("change", () => {
    const others = chosen().filter((each) => each !== name);
    location.hash = address(tick.checked ? [...others, name] : others);
  });
  const state = el("span");
  const about = el("div", { class: "about" });
  const steps = el("progress", { "aria-label": "Steps" });
  const item = el(
    "li",
    {},
    tick,
    el("a", { href: address([name]) }, name === "." ? "this run" : name),
    state,
    about,
    steps,
  );
  return (run, isShown) => {
    tick.checked = isShown;
    item.className = isShown ? "shown" : "";
    state.className = `state ${run.state}`;
    state.textContent = run.state;
    const values = Object.entries(LISTED)
      .filter(([key]) => key in run.last)
      .map(([key, label]) => `${label} ${formatNumber(run.last[key])}`);
    about.textContent = [
      `${run.steps}${run.planned ? ` / ${run.planned}` : ""} steps`,
      ...values,
      formatAge(Date.now() / 1000 - run.updated),
    ].join(", ");
    steps.hidden = !run.planned;
    steps.max = run.planned || 1;
    steps.value = run.steps;
    return item;
  };
}

byId("smoothing").addEventListener("input", () => {
  byId("smoothing-value").textContent = byId("smoothing").value;
});
byId("smoothing").addEventListener("change", load);
byId("log-scale").addEventListener("change", () => {
  options.log = byId("log-scale").checked;
  page.rebuild();
});
addEventListener("hashchange", load);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) events?.close();
  else connect();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.rebuild());
setInterval(showList, AGE_SECONDS * 1000);
get("/api/runs", []).then(
  (found) => {
    runs = found.runs;
    byId("folder").textContent = found.folder;
    if (runs.length === 1 && !chosen().length)
      history.replaceState(null, "", address([runs[0].name]));
    load();
  },
  (error) => say(error.message, "lost"),
);
