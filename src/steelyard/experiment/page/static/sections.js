// Sections of a page: cards with charts, texts that fold, and what all of its charts share.

import { LineChart } from "./charts.js";
import { colourName, dashOf, el } from "./dom.js";

// Title of each group of charts, and whether it is open at first.
export const GROUPS = {
  loss: ["Loss", true],
  rewards: ["Rewards", true],
  values: ["Every term: its value before the weight, and its bound", false],
  contributions: ["Contributions: weight × value", true],
  gradients: ["Gradient norms", true],
  cosines: ["Cosines between gradients", true],
  weights: ["Weights, multipliers, bounds and factors", false],
  rollouts: ["Rollouts", false],
  held_out: ["Held-out data", false],
  custom: ["Metrics of the terms", false],
  optimizer: ["Optimizer", false],
  time: ["Time", false],
  other: ["Other metrics", false],
};

const MAIN_HEIGHT = 220;

const axisTitle = ({ y, unit }) => (unit ? `${y} (${unit})` : y);

// Lines of a chart of one run; of all its metrics, or of those in `keys`.
export function linesOf({ curves: labels, colors, dashed }, curves, keys = Object.keys(labels)) {
  return keys.map((key) => ({
    label: keys.length === 1 && labels[key].includes("/") ? "value" : labels[key],
    colour: colourName(colors[key]),
    dash: dashed.includes(key) ? [5, 4] : dashOf(colors[key]),
    curve: curves[key],
  }));
}

export class Sections {
  constructor(element, options) {
    this.element = element;
    this.options = options;
    this.parts = []; // charts, heat maps and interval plots
  }

  clear() {
    this.parts.forEach((part) => part.remove());
    this.parts = [];
    this.element.replaceChildren();
  }

  changed() {
    this.parts.forEach((part) => part.changed());
  }

  rebuild() {
    this.parts.forEach((part) => part.rebuild());
  }

  keep(part) {
    this.parts.push(part);
    return part.card;
  }

  remove(parts) {
    parts.forEach((part) => part.remove());
    this.parts = this.parts.filter((part) => !parts.includes(part));
  }

  // A section whose heading folds it; it is appended to the page.
  foldable(id, title, isOpen, body, opened = () => {}) {
    const { folded } = this.options;
    const details = el(
      "details",
      { open: folded[id] ?? isOpen },
      el("summary", {}, el("h2", {}, title)),
      body,
    );
    details.addEventListener("toggle", () => {
      if (details.open === isOpen) delete folded[id];
      else folded[id] = details.open;
      if (details.open) opened();
    });
    if (details.open) opened();
    const section = el("section", { id, class: "foldable" }, details);
    this.element.append(section);
    return section;
  }

  // Charts of all groups but those that are shown already; `isFolded` closes them all at first.
  addGroups(charts, linesFor, { skip = [], isFolded = false, heatMaps = [] }) {
    for (const [group, [title, isOpen]] of Object.entries(GROUPS)) {
      const inside = charts.filter((chart) => chart.group === group && !skip.includes(chart));
      const cards = inside.map((chart) => this.chart(chart, linesFor(chart)));
      if (group === "cosines") cards.push(...heatMaps.map((map) => this.keep(map)));
      if (cards.length)
        this.foldable(
          `charts-${group}`,
          title,
          isOpen && !isFolded,
          el("div", { class: "cards" }, cards),
        );
    }
  }

  // The charts that say what came of it, and the switches of all charts. `smooth` is called with
  // the factor of the moving average.
  addMainCharts(charts, linesFor, { smoothing, smooth }) {
    const cards = charts.map((chart) => this.chart(chart, linesFor(chart), MAIN_HEIGHT));
    const rebuild = () => this.rebuild();
    this.element.append(
      el(
        "section",
        { id: "loss" },
        el("h2", { class: "sr-only" }, "Loss or reward"),
        cards.length ? el("div", { class: "cards wide" }, cards) : null,
        chartSwitches(this.options, { smoothing, smooth, rebuild }),
      ),
    );
  }

  chart(chart, lines, height) {
    const figure = { title: chart.title, y: axisTitle(chart), note: chart.note, height, lines };
    return this.keep(new LineChart(figure, this.options));
  }
}

// `smooth` is called when the slider rests.
function chartSwitches(options, { smoothing, smooth, rebuild }) {
  const shown = el("output", {}, smoothing);
  const slider = el("input", {
    id: "smoothing",
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: smoothing,
    oninput: () => {
      shown.textContent = slider.value;
    },
    onchange: () => smooth(Number(slider.value)),
  });
  const log = el("input", {
    id: "log-scale",
    type: "checkbox",
    checked: options.log,
    onchange: () => {
      options.log = log.checked;
      rebuild();
    },
  });
  return el(
    "div",
    { class: "switches" },
    el("label", {}, "Smoothing ", slider, shown),
    el("label", {}, log, " Log scale"),
    el("button", { type: "button", onclick: () => options.zoomTo(null) }, "All steps"),
    el("span", { class: "note" }, "Drag across a chart to zoom."),
  );
}
