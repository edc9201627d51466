// The page: live, it asks the server for what the address names, and follows its events; frozen, it
// draws the document that is embedded in the file.

import { ChartOptions } from "./charts.js";
import { ComparisonPage } from "./comparison_page.js";
import { RunControls } from "./controls.js";
import { smoothCurves } from "./curves.js";
import { byId, el } from "./dom.js";
import { RunPage } from "./run_page.js";
import { RunsTable } from "./runs_table.js";

const RETRY_SECONDS = 2;
const RELOAD_SECONDS = 3; // between two reloads of the same runs that events ask for
const SUMMARY_SECONDS = 5; // between two summaries of a run that goes on
const AGE_SECONDS = 10; // between two updates of "5 min ago"
const NARROW = 720;

const frozen = byId("document") ? JSON.parse(byId("document").textContent) : null;
const options = new ChartOptions();
let shown = null; // the page of a run, or of a comparison
let smoothing = 0;

const address = (entries) => `#${new URLSearchParams(entries)}`;
const runAddress = (names) => address(names.map((name) => ["run", name]));
const groupAddress = (name) => address([["group", name]]);

// What the address names: runs or a group, and the term whose details are open.
function chosen() {
  const query = new URLSearchParams(location.hash.slice(1));
  return { runs: query.getAll("run"), group: query.get("group"), term: query.get("term") };
}

function openTerm(name) {
  const query = new URLSearchParams(location.hash.slice(1));
  query.delete("term");
  if (name !== null) query.set("term", name);
  history.replaceState(null, "", `#${query}`);
  shown.openTerm(name);
}

const drawn = () => {
  document.documentElement.dataset.drawn = "1";
};

// --- frozen: a file

function startFrozen() {
  const { run, records = {}, compare, kind } = frozen;
  document.body.classList.add("frozen");
  byId("made").textContent = frozen.made;
  const views = kind === "run" ? [run] : Object.values(compare.views);
  const actions = {
    hasLog: false,
    link: null, // a file cannot open other runs

    openTerm,
    record: async (name) => {
      if (!records[name]) throw new Error("Not in this file.");
      return records[name];
    },
    smooth: (factor) => {
      smoothing = factor;
      views.forEach((view) => smoothCurves(view.curves, factor));
      shown.rebuild();
    },
  };
  const element = byId("sections");
  const PageOfKind = kind === "run" ? RunPage : ComparisonPage;
  shown = new PageOfKind(element, options, actions);
  shown.show(kind === "run" ? run : compare, { smoothing, term: chosen().term, state: run?.state });
  document.title = `${(run ?? compare).title} · Steelyard`;
  requestAnimationFrame(drawn);
}

// --- live: a server

let runs = [];
let groups = [];
let events = null;
let loads = 0;
let lastLoad = 0;
let lastSummary = 0;
let waiting = null;
let positions = []; // [run, position] of the runs that are followed
let controls = null;
let runsTable = null;

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

const findRun = (name) => runs.find((run) => run.name === name);

const liveActions = {
  hasLog: true,
  link: runAddress,
  groupLink: groupAddress,
  choose: (names) => {
    location.hash = runAddress(names);
  },
  openTerm,
  record: (kind, run) => get(`/api/records/${kind}`, { run }),
  smooth: (factor) => {
    smoothing = factor;
    load();
  },
};

async function load() {
  const { runs: names, group, term } = chosen();
  const mine = ++loads;
  lastLoad = lastSummary = Date.now();
  showList();
  byId("hint").hidden = names.length > 0 || group !== null;
  if ((names.length || group !== null) && innerWidth <= NARROW) byId("runs-box").open = false;
  try {
    // `steelyard train --watch` opens the page before its run has a folder.
    const missing = names.filter((name) => !findRun(name));
    if (missing.length) throw new Error(`${missing.join(", ")} has not begun, or was removed`);
    const page = await loadPage(names, group, mine, term);
    if (mine !== loads) return; // another choice was made meanwhile
    shown = page;
    byId("problem").replaceChildren();
    showControls();
    // The summary of a long run takes seconds to make: it comes after its curves.
    if (page.view?.pending) summarize();
  } catch (error) {
    if (mine !== loads) return;
    clear();
    byId("problem").replaceChildren(
      el("p", { class: "warning" }, `Nothing to show yet: ${error.message}.`),
    );
  }
  connect();
  drawn();
}

function clear() {
  shown?.clear();
  shown = null;
  positions = [];
}

async function loadPage(names, group, mine, term) {
  const element = byId("sections");
  if (names.length === 1 && group === null) {
    const view = await get("/api/run", { run: names[0], smoothing });
    if (mine !== loads) return null;
    clear();
    const page = new RunPage(element, options, liveActions);
    page.show(view, { term, smoothing, state: findRun(names[0])?.state });
    positions = [[view.name, view.position]];
    return page;
  }
  if (!names.length && group === null) {
    clear();
    return null;
  }
  const query = group === null ? names.map((name) => ["run", name]) : [["group", group]];
  const comparison = await get("/api/compare", [...query, ["smoothing", smoothing]]);
  if (mine !== loads) return null;
  clear();
  const page = new ComparisonPage(element, options, liveActions);
  page.show(comparison, { smoothing });
  positions = Object.entries(comparison.views).map(([run, view]) => [run, view.position]);
  return page;
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
  const query = positions.flatMap(([run, position]) => [
    ["run", run],
    ["position", position],
  ]);
  const source = new EventSource(`/api/events?${new URLSearchParams(query)}`);
  events = source;
  source.addEventListener("open", () => say("live", "live"));
  source.addEventListener("runs", (event) => takeRuns(JSON.parse(event.data)));
  source.addEventListener("rows", (event) => takeRows(JSON.parse(event.data)));
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

function takeRuns(listed) {
  const wasEmpty = runs.length === 0;
  ({ runs, groups } = listed);
  byId("folder").textContent = listed.folder;
  showList();
  if (wasEmpty && runs.length && openNewest()) return;
  showControls();
  const { runs: names, group } = chosen();
  if (shown instanceof RunPage) {
    shown.refreshRecords();
    const state = findRun(shown.view.name)?.state ?? "removed";
    if (state !== shown.state) {
      shown.showState(state);
      summarizeSoon();
    }
  }
  if (!shown && (names.length || group !== null) && names.every(findRun)) reloadSoon();
}

function takeRows({ run, rows, position, skipped }) {
  positions = positions.map(([name, before]) => [name, name === run ? position : before]);
  if (!shown) return;
  const isWhole =
    shown instanceof RunPage ? shown.append(rows, skipped) : shown.append(run, rows);
  if (!isWhole) reloadSoon();
  else summarizeSoon();
}

let summarizing = null;

function summarizeSoon() {
  if (summarizing || !(shown instanceof RunPage)) return;
  const left = lastSummary + SUMMARY_SECONDS * 1000 - Date.now();
  summarizing = setTimeout(summarize, Math.max(0, left));
}

async function summarize() {
  summarizing = null;
  lastSummary = Date.now();
  const page = shown;
  if (!(page instanceof RunPage)) return;
  const summary = await get("/api/summary", { run: page.view.name }).catch(() => null);
  if (summary && page === shown) page.update(summary);
}

function showControls() {
  const { runs: names, group } = chosen();
  controls.show(names.length === 1 && group === null ? findRun(names[0]) : undefined);
}

function showList() {
  byId("no-runs").hidden = runs.length > 0;
  byId("hint").hidden = runs.length === 0 || Boolean(location.hash.slice(1));
  runsTable.show({ runs, groups }, chosen());
}

// Returns whether the address was empty, and the newest run was opened.
function openNewest() {
  if (location.hash.slice(1) || !runs.length) return false;
  history.replaceState(null, "", runAddress([runs[0].name]));
  load();
  return true;
}

function startLive() {
  controls = new RunControls(
    byId("run-controls"),
    async (run) => (await get("/api/settings", { run })).settings,
  );
  runsTable = new RunsTable(byId("runs-table"), liveActions);
  byId("widen").addEventListener("click", () => {
    const isWide = document.body.classList.toggle("runs-wide");
    byId("widen").setAttribute("aria-pressed", String(isWide));
    byId("widen").textContent = isWide ? "Less" : "All columns";
  });
  addEventListener("hashchange", load);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) events?.close();
    else connect();
  });
  setInterval(showList, AGE_SECONDS * 1000);
  get("/api/runs", []).then(
    (listed) => {
      ({ runs, groups } = listed);
      byId("folder").textContent = listed.folder;
      if (!openNewest()) load();
    },
    (error) => say(error.message, "lost"),
  );
}

// Paper is white: charts are drawn again in its colours, and what stands in sections is unfolded,
// but for the whole config.
function setPaper(isPaper) {
  document.documentElement.classList.toggle("paper", isPaper);
  for (const details of document.querySelectorAll(".foldable > details, #summary details")) {
    if (isPaper) details.dataset.opened = details.open;
    details.open = isPaper || details.dataset.opened === "true";
  }
  shown?.parts.forEach((part) => {
    part.isVisible = true;
    part.rebuild();
    part.resize?.();
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown?.rebuild());
addEventListener("beforeprint", () => setPaper(true));
addEventListener("afterprint", () => setPaper(false));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names runs
  byId("sections").focus();
});
if (frozen) startFrozen();
else startLive();
