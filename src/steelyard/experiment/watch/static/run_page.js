// What the page shows of the chosen runs: sections with charts, the heat-map and texts.

import { Chart } from "./charts.js";
import { el, formatNumber } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { RECORDS, showRecords, skippedTable } from "./records.js";

const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
const DASHES = [undefined, [2, 3], [8, 4], [8, 3, 2, 3]]; // of the lines whose colours repeat
const GROUPS = {
  loss: ["Loss", true],
  rewards: ["Rewards", true],
  values: ["Every term: its value before the weight, and its bound", true],
  contributions: ["Contributions: weight × value", true],
  gradients: ["Gradient norms", true],
  cosines: ["Cosines between gradients", true],
  weights: ["Weights, multipliers, bounds and factors", true],
  rollouts: ["Rollouts", true],
  held_out: ["Held-out data", true],
  custom: ["Metrics of the terms", false],
  optimizer: ["Optimizer", false],
  time: ["Time", false],
  other: ["Other metrics", false],
};
export const COMPARED = [
  "loss",
  "rewards",
  "values",
  "contributions",
  "gradients",
  "cosines",
  "rollouts",
  "held_out",
];
const WIDE = ["loss", "contributions", "gradients", "weights", "rewards"];
const MAX_NEW_POINTS = 2000; // then the server thins the curves again
const RECORD_SECONDS = 5;

// A term, or a reward, has one colour in all charts of a run.
class Colours {
  constructor() {
    this.names = ["total", "base", "bound"];
  }

  of(name) {
    if (!this.names.includes(name)) this.names.push(name);
    const at = this.names.indexOf(name);
    return at < 3 ? ["total", "base", "base"][at] : COLOURS[(at - 3) % COLOURS.length];
  }
}

export class RunPage {
  constructor(element, options, loadRecords) {
    this.element = element;
    this.options = options;
    this.loadRecords = loadRecords; // (kind, run) -> promise
    this.parts = [];
    this.views = [];
    this.open = {};
  }

  clear() {
    this.parts.forEach((part) => part.remove());
    this.parts = [];
    this.records = [];
    this.element.replaceChildren();
  }

  show(views, smoothing) {
    this.clear();
    this.views = views;
    this.smoothing = smoothing;
    this.newPoints = 0;
    const charts = views.length === 1 ? this.chartsOfOne(views[0]) : this.chartsOfSeveral(views);
    for (const [group, [title, isOpen]] of Object.entries(GROUPS)) {
      const inside = charts.filter((chart) => chart.group === group);
      if (group === "cosines") this.addHeatMaps(title);
      else if (inside.length) this.addCharts(group, title, isOpen, inside);
    }
    if (views.length === 1) {
      this.addSkipped(views[0]);
      for (const [kind, text] of Object.entries(RECORDS)) this.addText(views[0], kind, text);
      return;
    }
    views
      .filter((view) => view.keys.some((key) => key.startsWith("rollouts/")))
      .forEach((view) => this.addText(view, "rollouts", `${RECORDS.rollouts}, ${view.name}`));
  }

  chartsOfOne(view) {
    const terms = new Colours();
    view.charts.filter(({ group }) => group === "values").forEach(({ title }) => terms.of(title));
    return view.charts.map(({ group, title, curves }) => {
      const colours = group === "rewards" ? new Colours() : terms;
      const isAlone = Object.keys(curves).length === 1;
      return {
        group,
        title,
        lines: Object.entries(curves).map(([key, label]) => ({
          label,
          colour:
            label === "value"
              ? colours.of(title)
              : isAlone && !terms.names.includes(label)
                ? "c1"
                : colours.of(label),
          dash: label === "bound" ? [5, 4] : undefined,
          curve: view.curves[key],
        })),
      };
    });
  }

  // A chart for each metric, with a line for each run that has it. The title is part of what is
  // compared: it names the space of a gradient norm, and norms of two spaces have no common scale.
  chartsOfSeveral(views) {
    const found = new Map();
    views.forEach((view, at) => {
      for (const { group, title, curves } of view.charts) {
        for (const [key, label] of Object.entries(curves)) {
          if (label === "bound") continue;
          const isAlone =
            group === "values" || group === "held_out" || Object.keys(curves).length === 1;
          const compared = `${title} ${key}`;
          const chart = found.get(compared) ?? {
            group,
            title: isAlone ? title : `${title}: ${label}`,
            lines: [],
          };
          chart.lines.push({
            label: view.name,
            colour: COLOURS[at % COLOURS.length],
            dash: DASHES[Math.floor(at / COLOURS.length) % DASHES.length],
            curve: view.curves[key],
          });
          found.set(compared, chart);
        }
      }
    });
    return [...found.values()];
  }

  section(id, title, isOpen, body) {
    const details = el(
      "details",
      { open: this.open[id] ?? isOpen },
      el("summary", {}, el("h2", {}, title)),
      body,
    );
    details.addEventListener("toggle", () => {
      this.open[id] = details.open;
    });
    this.element.append(el("section", { id }, details));
    return details;
  }

  addCharts(group, title, isOpen, charts) {
    const made = charts.map((chart) => new Chart(chart.title, chart.lines, this.options));
    this.parts.push(...made);
    const style = WIDE.includes(group) && this.views.length === 1 ? "cards wide" : "cards";
    this.section(
      group,
      title,
      isOpen,
      el("div", { class: style }, ...made.map((chart) => chart.card)),
    );
  }

  // A heat-map for each run that has cosines, under its name if there are several runs.
  addHeatMaps(title) {
    const maps = this.views
      .filter((view) => view.cosines)
      .map((view) => new HeatMap(view.cosines, this.views.length > 1 ? view.name : null));
    if (!maps.length) return;
    this.parts.push(...maps);
    this.section("cosines", title, true, el("div", {}, ...maps.map((map) => map.element)));
  }

  addSkipped(view) {
    this.skipped = el("div", { class: "text" }, skippedTable(view.skipped));
    this.section("skipped", "Skipped terms", true, this.skipped).parentElement.hidden =
      view.skipped.length === 0;
  }

  addText(view, kind, title) {
    const at = this.views.length > 1 ? `-${this.views.indexOf(view)}` : "";
    const box = el("div", { class: "text" });
    const details = this.section(`text-${kind}${at}`, title, false, box);
    const record = { kind, run: view.name, box, details, loaded: 0 };
    details.addEventListener("toggle", () => this.refresh(record));
    this.records.push(record);
    this.refresh(record);
  }

  async refresh(record) {
    if (!record.details.open || Date.now() - record.loaded < RECORD_SECONDS * 1000) return;
    record.loaded = Date.now();
    const found = await this.loadRecords(record.kind, record.run).catch((error) => ({
      text: error.message,
      whole: true,
    }));
    const content = JSON.stringify(found);
    if (content === record.content) return; // and what the reader has selected stays
    record.content = content;
    const isAtEnd =
      record.box.scrollTop > 0 &&
      record.box.scrollTop + record.box.clientHeight >= record.box.scrollHeight - 8;
    record.box.replaceChildren(
      ...(found.records || record.kind === "log" || record.kind === "config"
        ? showRecords(record.kind, found)
        : [found.text]),
    );
    if (isAtEnd) record.box.scrollTop = record.box.scrollHeight;
  }

  refreshRecords() {
    for (const record of this.records ?? []) this.refresh(record);
  }

  // Returns false if the run must be loaded again: a new metric, a repeated step, many points.
  append(run, rows, skipped) {
    const view = this.views.find((each) => each.name === run);
    if (!view) return true;
    for (const row of rows) {
      if (row.step <= view.last_step) return false;
      view.last_step = row.step;
      view.steps += 1;
      this.newPoints += 1;
      for (const [key, value] of Object.entries(row)) {
        if (key === "step") continue;
        const curve = view.curves[key];
        if (curve) this.extend(curve, row.step, value);
        else if (!view.keys.includes(key) && !key.includes("skipped/")) return false;
      }
      if (view.cosines) {
        view.cosines.steps.push(row.step);
        view.cosines.end = row.step + 1;
        Object.keys(view.cosines.pairs).forEach((key, at) =>
          view.cosines.rows[at].push(row[key] ?? null),
        );
      }
    }
    for (const { term, reason, step } of skipped) {
      let found = view.skipped.find((each) => each.term === term && each.reason === reason);
      if (!found) view.skipped.push((found = { term, reason, count: 0 }));
      found.count += 1;
      found.last_step = step;
    }
    return this.newPoints <= MAX_NEW_POINTS;
  }

  extend(curve, step, value) {
    curve.steps.push(step);
    curve.values.push(value);
    if (!curve.smooth || value === null) return;
    const last = curve.smooth.values.findLast((each) => each !== null) ?? 0;
    const kept = this.smoothing * curve.smooth.weight;
    curve.smooth.weight = kept + 1;
    curve.smooth.steps.push(step);
    curve.smooth.values.push((kept * last + value) / (kept + 1));
  }

  changed() {
    this.parts.forEach((part) => part.changed());
    if (this.views.length !== 1) return;
    this.skipped.replaceChildren(skippedTable(this.views[0].skipped));
    this.skipped.closest("section").hidden = this.views[0].skipped.length === 0;
  }

  rebuild() {
    this.parts.forEach((part) => (part.rebuild ? part.rebuild() : part.changed()));
  }
}

export function runTitle(views, runs) {
  if (views.length > 1) {
    const rows = views.map((view, at) => {
      const key = el("span", { class: "key" });
      key.style.background = `var(--${COLOURS[at % COLOURS.length]})`;
      const run = runs.find((each) => each.name === view.name);
      return el("li", {}, key, `${view.name}: ${describe(view, run)}`);
    });
    return [el("h2", {}, `${views.length} runs compared`), el("ul", {}, ...rows), ...damage(views)];
  }
  const run = runs.find((each) => each.name === views[0].name);
  return [
    el("h2", {}, views[0].name === "." ? "This run" : views[0].name),
    el("p", { class: "note", id: "about-run" }, describe(views[0], run)),
    ...damage(views),
  ];
}

function describe(view, run) {
  const steps = `${view.steps}${run?.planned ? ` of ${run.planned}` : ""} steps`;
  const loss =
    run?.last.loss_total === undefined ? "" : `, loss ${formatNumber(run.last.loss_total)}`;
  const reward =
    run?.last["rollouts/reward"] === undefined
      ? ""
      : `, reward ${formatNumber(run.last["rollouts/reward"])}`;
  return `${steps}, ${run?.state ?? "removed"}${loss}${reward}`;
}

function damage(views) {
  return views
    .filter((view) => view.damaged)
    .map((view) =>
      el(
        "p",
        { class: "warning" },
        `Damaged lines of the metrics of ${view.name} that are left out: ${view.damaged}.`,
      ),
    );
}
