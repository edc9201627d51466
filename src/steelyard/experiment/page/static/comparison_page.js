// Several runs together: chosen by hand, of an ablation, of several seeds, or of a search.

import { ScatterChart } from "./charts.js";
import { appendRows } from "./curves.js";
import { chip, colourName, dashOf, el, table } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { IntervalPlot } from "./intervals.js";
import { configView, samplesView } from "./records.js";
import { Sections } from "./sections.js";

export class ComparisonPage extends Sections {
  constructor(element, options, actions) {
    super(element, options);
    this.actions = actions;
  }

  show(comparison, { smoothing }) {
    this.clear();
    this.comparison = comparison;
    this.smoothing = smoothing;
    const views = Object.values(comparison.views);
    this.options.last = Math.max(0, ...views.map((view) => view.last_step));
    this.options.marks = comparison.changes.map(
      ({ step, text, run }) => ({ step, text: `${run}: ${text}` }),
    );
    this.addSummary();
    const [first, ...others] = comparison.tables.map((part) => this.tableCard(part));
    if (first) this.element.append(el("section", {}, first));
    this.addEffects();
    if (comparison.search) this.addSearch(comparison.search);
    const main = this.mainCharts();
    const linesFor = (chart) => this.linesOfChart(chart);
    this.addMainCharts(main, linesFor, { smoothing, smooth: this.actions.smooth });
    if (others.length) this.foldable("tables", "More tables", false, el("div", {}, others));
    this.addGroups(comparison.charts, linesFor, {
      skip: main,
      isFolded: true,
      heatMaps: this.heatMaps(),
    });
    this.addDifferences();
    this.addSamples();
    this.addConfigs();
  }

  addSummary() {
    const { title, headline, sentences, facts, notes, runs } = this.comparison;
    const names = runs.map(({ name, label, color }) =>
      el("li", {}, chip(color), this.link(name, label)),
    );
    this.element.append(
      el(
        "section",
        { id: "summary" },
        el(
          "div",
          { class: "title" },
          el("h1", {}, title),
          facts.map((fact) => el("span", { class: "fact" }, fact)),
        ),
        el("p", { class: "lead" }, headline),
        sentences.length ? el("ul", { class: "sentences" }, sentences.map((text) => el("li", {}, text))) : null,
        notes.map((text) => el("p", { class: "warning" }, text)),
        this.comparison.tables.length ? null : el("ul", { class: "legend-list" }, names),
      ),
    );
  }

  tableCard({ title, caption, columns, rows }) {
    const heads = columns.map(({ title: heading, better }) => {
      const hint = better ? el("span", { class: "better", title: `${better} is better` }, better === "lower" ? " ↓" : " ↑") : null;
      return el("th", { scope: "col", class: "number" }, heading, hint);
    });
    const body = rows.map(({ label, run, color, cells }) => {
      const name = run === null ? label : this.link(run, label);
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, color === null ? null : chip(color), name),
        cells.map(({ text, detail, tone }) =>
          el(
            "td",
            { class: "number" },
            text,
            detail ? el("span", { class: `delta ${tone}` }, detail) : null,
          ),
        ),
      );
    });
    const whole = el(
      "table",
      {},
      el("thead", {}, el("tr", {}, el("td", {}), heads)),
      el("tbody", {}, body),
    );
    return el(
      "div",
      { class: "table-card" },
      el("h2", {}, title),
      el("p", { class: "note" }, caption),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, whole),
    );
  }

  link(run, label) {
    return this.actions.link ? el("a", { href: this.actions.link([run]) }, label) : label;
  }

  addEffects() {
    const { effects } = this.comparison;
    if (!effects.length) return;
    const cards = effects.map((effect) => this.keep(new IntervalPlot(effect)));
    this.foldable(
      "effects",
      "Effects with their 95 % intervals",
      true,
      el("div", { class: "cards" }, cards),
    );
  }

  addSearch({ objective, history, parameters, importances, pareto }) {
    const known = history.numbers.map((number, at) => [number, history.values[at]]).filter(
      ([, value]) => value !== null,
    );
    const best = history.numbers.map((number, at) => [number, history.best[at]]).filter(
      ([, value]) => value !== null,
    );
    const scatter = (figure) => this.keep(new ScatterChart(figure));
    const cards = [
      scatter({
        title: "History",
        x: "trial",
        y: objective,
        lines: [
          { label: "best so far", colour: "accent", points: best, path: "hv" },
          { label: "trial", colour: "total", points: known },
        ],
      }),
      ...parameters.map(({ name, log, points }) =>
        scatter(
          {
            title: `${name} against the objective`,
            x: name,
            y: objective,
            logX: log,
            lines: [{ label: "trial", colour: "c1", points: points.map(({ x, y }) => [x, y]) }],
          },
        ),
      ),
    ];
    this.foldable("search", "The search", true, el("div", { class: "cards" }, cards));
    if (importances.length) this.element.append(this.importances(importances));
    if (!pareto.length) return;
    const fronts = pareto.map(({ title, x, y, step, points, note }) => {
      const pick = (isFront) => points.filter(({ front }) => front === isFront).map(
        (point) => [point.x, point.y],
      );
      const lines = [
        { label: "front", colour: "accent", points: pick(true), path: step },
        { label: "not dominated", colour: "accent", points: pick(true) },
        { label: "dominated", colour: "base", points: pick(false) },
      ];
      return scatter(
        {
          title,
          note,
          x,
          y,
          lines: lines.filter(({ points: drawn, path }) => drawn.length > (path ? 1 : 0)),
        },
      );
    });
    this.foldable(
      "pareto",
      "Objectives against each other",
      true,
      el("div", { class: "cards" }, fronts),
    );
  }

  importances(rows) {
    const largest = Math.max(...rows.map(({ value }) => value ?? 0)) || 1;
    const lines = rows.map(({ name, value, text }) => {
      const bar = el("i", { class: "meter", "aria-hidden": "true" }, el("i"));
      bar.firstChild.style.width = `${((value ?? 0) / largest) * 100}%`;
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, name),
        el("td", { class: "bar-cell" }, bar, el("span", {}, text)),
      );
    });
    return el(
      "section",
      {},
      el(
        "div",
        { class: "table-card" },
        el("h2", {}, "Importance of the parameters"),
        table(["parameter", "importance"], lines),
      ),
    );
  }

  linesOfChart({ lines }) {
    const { views } = this.comparison;
    return lines
      .filter(({ run, metric }) => views[run]?.curves[metric])
      .map(({ run, metric, label, color }) => ({
        label,
        colour: colourName(color),
        dash: dashOf(color),
        curve: views[run].curves[metric],
      }));
  }

  // The held-out loss first, which is the same for all runs; a total is that of its own terms.
  mainCharts() {
    const { charts } = this.comparison;
    const main = charts.filter(({ group }) => group === "rewards" || group === "loss");
    const isHeldOut = ({ lines }) => lines.some(({ metric }) => metric.startsWith("held_out/"));
    return [...main.filter(isHeldOut), ...main.filter((chart) => !isHeldOut(chart))].slice(0, 2);
  }

  // The cosines between all gradients, a map for each run.
  heatMaps() {
    const { runs, views } = this.comparison;
    return runs
      .filter(({ name }) => views[name]?.cosines)
      .map(({ name, label }) =>
        new HeatMap(views[name].cosines, this.options, { title: `Cosines between gradients: ${label}` }),
      );
  }

  addDifferences() {
    const { differences, runs } = this.comparison;
    if (!differences.length) return;
    const rows = differences.map(({ key, values }) =>
      el("tr", {}, el("th", { scope: "row" }, key), values.map((value) => el("td", {}, value))),
    );
    const whole = table(
      ["setting", ...runs.map(({ label }) => label)],
      rows,
      { class: "settings" },
    );
    this.foldable(
      "differences",
      "Settings that differ",
      true,
      el("div", { class: "text scroll" }, whole),
    );
  }

  addSamples() {
    const { samples } = this.comparison;
    if (!samples?.prompts.length) return;
    this.foldable("samples", "Samples", true, el("div", { class: "text" }, samplesView(samples)));
  }

  addConfigs() {
    const configs = (this.comparison.configs ?? []).map((config) =>
      el("details", {}, el("summary", {}, config.label), configView(config).filter(Boolean)),
    );
    if (configs.length) this.foldable("configs", "Configs", false, el("div", { class: "text" }, configs));
  }

  // Returns false if the comparison must be loaded again.
  append(run, rows) {
    const view = this.comparison.views[run];
    if (!view) return true;
    const isWhole = appendRows(view, rows, this.smoothing);
    this.options.last = Math.max(this.options.last, view.last_step);
    this.changed();
    return isWhole;
  }
}
