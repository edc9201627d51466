// The page of one run: what came of it, its terms, the loss, one term in detail, texts, all charts.

import { appendRows, appendSkipped } from "./curves.js";
import { chip, el } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import {
  answersView,
  configView,
  driversView,
  findingsList,
  logView,
  samplesView,
  skippedTable,
} from "./records.js";
import { linesOf, Sections } from "./sections.js";
import { termTable } from "./term_tables.js";

const DETAIL_HEIGHT = 150;
const DETAIL_GROUPS = ["values", "rewards", "weights", "gradients", "held_out", "custom"];
const NOT_IN_DETAIL = /\/(share|violation|grad_norm|failed|seconds)$/; // the table has them
const RECORD_SECONDS = 5;
const isConstant = ({ values }) =>
  values.length > 1 && values.every((value) => value === values[0]);
const RECORD_VIEWS = {
  samples: samplesView,
  answers: answersView,
  config: configView,
  log: logView,
};

export class RunPage extends Sections {
  // actions: {record: (kind, run) -> promise, openTerm: name or null, link: name -> address,
  // smooth: factor}
  constructor(element, options, actions) {
    super(element, options);
    this.actions = actions;
  }

  show(view, { term, smoothing, state }) {
    this.clear();
    this.view = view;
    this.smoothing = smoothing;
    this.records = [];
    this.options.last = view.last_step;
    this.options.marks = view.changes;
    this.summary = el("section", { id: "summary" });
    this.tables = el("section", { id: "terms" });
    this.details = el("section", { id: "term-details", "aria-live": "polite", hidden: true });
    this.element.append(this.summary, this.tables, this.details);
    this.showState(state);
    this.fillTables(term);
    const main = this.mainCharts();
    const linesFor = (chart) => linesOf(chart, view.curves);
    this.addMainCharts(main, linesFor, { smoothing, smooth: this.actions.smooth });
    this.openTerm(term);
    this.addTexts();
    const heatMaps = view.cosines ? [new HeatMap(view.cosines, this.options)] : [];
    this.addGroups(view.charts, linesFor, { skip: main, heatMaps });
    this.addConstants();
    this.addSkipped();
    if (this.actions.hasLog) this.addRecord("log", "Log");
  }

  // --- what came of it

  showState(state) {
    this.state = state ?? this.view.state;
    this.fillSummary();
  }

  fillSummary() {
    const { view, state } = this;
    const open = new Set(
      [...this.summary.querySelectorAll("details[open]")].map((details) => details.dataset.key),
    );
    const planned = view.planned ? ` of ${view.planned}` : "";
    const more = view.sentences.length
      ? el(
        "details",
        { class: "more" },
        el("summary", {}, "More in words"),
        el("p", {}, view.sentences.join(" ")),
      )
      : null;
    this.summary.replaceChildren(
      ...[
        el(
          "div",
          { class: "title" },
          el("h1", {}, view.title ?? view.name),
          state ? el("span", { class: `state ${state}` }, state) : null,
          el("span", { class: "soft", id: "about-run" }, `${view.steps}${planned} steps`),
          view.facts.map((fact) => el("span", { class: "fact" }, fact)),
        ),
        this.failure(),
        el("p", { class: "lead" }, view.headline),
        this.damage(),
        view.findings.length ? findingsList(view.findings) : el(
          "p",
          { class: "note healthy" },
          "The doctor has no findings.",
        ),
        this.relatives(),
        this.changes(),
        more,
      ].filter(Boolean),
    );
    for (const details of this.summary.querySelectorAll("details")) {
      details.dataset.key = details.querySelector("summary").textContent;
      details.open = open.has(details.dataset.key);
    }
  }

  failure() {
    const { failure } = this.view;
    if (!failure) return null;
    const reason = failure.reason ? `: ${failure.reason}` : "";
    const text = `Failed at step ${failure.step}: ${failure.error}${reason}`;
    return el("p", { class: "warning problem" }, text);
  }

  damage() {
    const { damaged } = this.view;
    const text = `Damaged lines of the metrics that are left out: ${damaged}.`;
    return damaged ? el("p", { class: "warning" }, text) : null;
  }

  relatives() {
    const { relatives, baseline } = this.view;
    const hasLinks = this.actions.link !== null;
    const link = ({ name, text }) =>
      hasLinks ? el("a", { href: this.actions.link([name]) }, text) : el("span", {}, text);
    const parts = [
      relatives?.parent ? link(relatives.parent) : null,
      ...(relatives?.branches ?? []).map(link),
      baseline && hasLinks ? el("a", { href: this.actions.link([baseline.run, this.view.name]) }, "compare with the baseline") : null,
    ].filter(Boolean);
    return parts.length ? el("p", { class: "relatives" }, parts) : null;
  }

  changes() {
    const { changes } = this.view;
    if (!changes.length) return null;
    const texts = changes.map(
      ({ step, text }) => el("li", {}, el("span", { class: "soft" }, `step ${step}`), ` ${text}`),
    );
    return el("ul", { class: "changes", "aria-label": "Changes while it ran" }, texts);
  }

  // --- the tables, and one term in detail

  fillTables(opened) {
    const { terms, rewards } = this.view;
    const open = (name) => this.actions.openTerm(name === this.opened ? null : name);
    const focused = document.activeElement?.closest?.("#terms tr")?.dataset.name;
    const build = (heading, rows, caption) =>
      rows.length ? termTable(heading, rows, caption, { opened, open }) : null;
    this.tables.replaceChildren(
      ...[
        el("h2", { class: "sr-only" }, "Terms"),
        build("reward", rewards, this.view.rewards_caption),
        build("term", terms, this.view.terms_caption),
      ].filter(Boolean),
    );
    this.tables.hidden = !terms.length && !rewards.length;
    if (focused !== undefined)
      [...this.tables.querySelectorAll("tr")]
        .find((row) => row.dataset.name === focused)
        ?.querySelector("button")
        .focus();
  }

  openTerm(name) {
    this.remove(this.detailed ?? []);
    this.opened = name;
    const row = [...this.view.rewards, ...this.view.terms].find((known) => known.name === name);
    this.details.hidden = !row;
    this.details.replaceChildren();
    this.detailed = [];
    for (const line of this.tables.querySelectorAll("tbody tr")) {
      const isOpen = Boolean(row) && line.dataset.name === name;
      line.classList.toggle("opened", isOpen);
      line.querySelector("button").setAttribute("aria-expanded", String(isOpen));
    }
    if (row) this.fillDetails(row);
  }

  fillDetails(row) {
    const { view } = this;
    const before = this.parts.length;
    const cards = view.charts.flatMap((chart) => this.chartOf(row, chart) ?? []);
    const map = this.cosinesOf(row);
    this.detailed = this.parts.slice(before);
    const facts = [
      ["contribution", row.texts.contribution],
      ["gradient norm", row.texts.grad_norm],
      ["with respect to", row.texts.space],
      ["steps", row.texts.steps],
      ["bound", row.bound && `${row.bound.text}, ${row.bound.text_met}`],
      ["skipped", row.skipped],
    ].filter(([, text]) => text && text !== "–");
    const drivers = el("div", {});
    const close = el(
      "button",
      { type: "button", class: "close", onclick: () => this.actions.openTerm(null) },
      "Close",
    );
    this.details.append(
      el("div", { class: "title" }, el("h2", {}, chip(row.color), row.label), close),
      el(
        "dl",
        { class: "facts" },
        facts.map(([word, text]) => el("div", {}, el("dt", {}, word), el("dd", {}, text))),
      ),
      ...(row.findings.length ? [findingsList(row.findings)] : []),
      el("div", { class: "cards" }, cards, map),
      drivers,
    );
    this.actions.record("drivers", view.name).then(
      (found) => {
        if (!found.steps.some(({ terms }) => terms.some((term) => term.name === row.name))) return;
        drivers.replaceChildren(
          el("h3", {}, "Which examples drive it"),
          ...driversView(found, row.name),
        );
      },
      () => {},
    );
  }

  // A chart of this term, or its own curve of a chart with those of all terms.
  chartOf(row, chart) {
    const all = Object.keys(chart.curves);
    const isOwn = (key) => row.metrics.includes(key) && !NOT_IN_DETAIL.test(key);
    const keys = chart.term === row.name ? all : all.filter(isOwn);
    if (!keys.length || !DETAIL_GROUPS.includes(chart.group)) return null;
    if (keys.every((key) => isConstant(this.view.curves[key]))) return null; // the table has it
    return this.chart(chart, linesOf(chart, this.view.curves, keys), DETAIL_HEIGHT);
  }

  cosinesOf(row) {
    const { cosines } = this.view;
    const keys = Object.entries(cosines?.pairs ?? {})
      .filter(([, label]) => label.split(" · ").includes(row.name))
      .map(([key]) => key);
    if (!keys.length) return null;
    return this.keep(
      new HeatMap(cosines, this.options, {
        title: `Cosines of ${row.label} with the others`,
        keys,
      }),
    );
  }

  // --- charts and texts

  mainCharts() {
    const of = (group) => this.view.charts.filter((chart) => chart.group === group);
    const [reward] = this.view.rewards.length ? of("rewards") : [];
    return reward ? [reward, ...of("loss").slice(0, 1)] : of("loss");
  }

  addTexts() {
    const pair = el("div", { class: "pair" });
    const hasAnswers = this.view.keys.some((key) => /^(rewards|rollouts)\//.test(key));
    const samples = hasAnswers
      ? this.addRecord("answers", "Answers", true)
      : this.addRecord("samples", "Samples, before and after", true);
    const config = this.addRecord("config", "What differs from the defaults", true);
    pair.append(samples, config);
    this.element.append(pair);
    if (hasAnswers) this.addRecord("samples", "Samples, before and after");
  }

  addRecord(kind, title, isOpen = false) {
    const box = el("div", { class: "text", id: `text-${kind}` });
    const record = { kind, box, loaded: 0 };
    this.records.push(record);
    const section = this.foldable(`record-${kind}`, title, isOpen, box, () => this.refresh(record));
    record.section = section;
    return section;
  }

  async refresh(record) {
    if (Date.now() - record.loaded < RECORD_SECONDS * 1000) return;
    record.loaded = Date.now();
    const found = await this.actions.record(record.kind, this.view.name).catch(
      (error) => ({ error: error.message }),
    );
    const content = JSON.stringify(found);
    if (content === record.content) return; // and what the reader has selected stays
    record.content = content;
    const { box } = record;
    const isAtEnd = box.scrollTop > 0 && box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
    const parts = found.error ? [found.error] : RECORD_VIEWS[record.kind](found);
    box.replaceChildren(...parts.flat().filter(Boolean));
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  refreshRecords() {
    for (const record of this.records)
      if (record.section.firstChild.open) this.refresh(record);
  }

  addConstants() {
    const { constants } = this.view;
    if (!constants.length) return;
    const items = constants.map(
      ({ label, text }) => el(
        "span",
        { class: "constant" },
        el("span", { class: "soft" }, label),
        ` ${text}`,
      ),
    );
    this.element.append(
      el("section", { id: "constants" }, el("h2", {}, "Never changed"), el("p", {}, items)),
    );
  }

  addSkipped() {
    this.skipped = el("div", { class: "text scroll" });
    this.skippedSection = this.foldable("skipped", "Skipped terms", true, this.skipped);
    this.fillSkipped();
  }

  fillSkipped() {
    this.skipped.replaceChildren(skippedTable(this.view.skipped));
    this.skippedSection.hidden = this.view.skipped.length === 0;
  }

  // --- what comes later

  // Returns false if the run must be loaded again.
  append(rows, skipped) {
    appendSkipped(this.view, skipped);
    const isWhole = appendRows(this.view, rows, this.smoothing);
    this.options.last = this.view.last_step;
    this.changed();
    this.fillSkipped();
    const planned = this.view.planned ? ` of ${this.view.planned}` : "";
    this.summary.querySelector("#about-run").textContent = `${this.view.steps}${planned} steps`;
    return isWhole;
  }

  // The summary without its curves, as it is after more steps.
  update(summary) {
    const { changes } = this.view;
    Object.assign(this.view, summary);
    this.fillSummary();
    this.fillTables(this.opened);
    if (this.opened && this.details.hidden) this.openTerm(this.opened);
    this.options.marks = summary.changes;
    if (summary.changes.length === changes.length) return;
    this.rebuild();
    if (this.opened) this.openTerm(this.opened); // a weight that was constant may have a chart
  }
}
