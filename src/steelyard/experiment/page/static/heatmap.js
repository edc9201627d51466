// Cosines of pairs of terms over time, on a canvas: a row for each pair.

import { colour, el, figureCard, formatNumber, pictureOf } from "./dom.js";

const ROW = 16;

export class HeatMap {
  // cosines: {pairs: {key: label}, steps, end, rows}; the caller appends to it. A column covers
  // the steps from its own to the next, the last one those before `end`. `keys` limits the rows.
  // The map is as wide as the charts: it ends with the last step of `options`, of all runs.
  constructor(cosines, options, { title = "Cosines between gradients", keys = null } = {}) {
    this.cosines = cosines;
    this.options = options;
    this.title = title;
    const all = Object.entries(cosines.pairs);
    this.shown = all
      .map(([key, label], at) => ({ key, label, at }))
      .filter(({ key }) => keys === null || keys.includes(key));
    this.canvas = el("canvas", { role: "img", "aria-label": `${title} over time` });
    this.extent = el("span", {});
    this.hover = el("span", {}, "Point at a field to read it.");
    const labels = this.shown.map(({ label }) => el("div", { title: label }, label));
    this.card = figureCard(
      { title, toCsv: () => this.toCsv(), toCanvas: () => pictureOf(this.canvas, title, []) },
      el("div", { class: "heat" }, el("div", { class: "labels" }, labels), this.canvas),
      el(
        "div",
        { class: "scale" },
        "−1 opposed",
        el("div", { class: "bar" }),
        "+1 aligned",
        this.hover,
        this.extent,
      ),
    );
    this.canvas.addEventListener("pointermove", (event) => this.read(event));
    this.resizing = new ResizeObserver(() => this.changed());
    this.resizing.observe(this.canvas);
  }

  remove() {
    this.resizing.disconnect();
  }

  rebuild() {
    this.changed();
  }

  changed() {
    const { rows, steps, end } = this.cosines;
    const count = this.options.last + 1;
    const width = this.canvas.clientWidth;
    if (width === 0 || steps.length === 0) return;
    const scale = window.devicePixelRatio || 1;
    const height = this.shown.length * ROW;
    const size = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1]) {
      this.canvas.style.height = `${height}px`;
      [this.canvas.width, this.canvas.height] = size;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const [against, neutral, along, gap] = ["against", "neutral", "with", "gap"].map((name) =>
      rgb(colour(name)),
    );
    const bounds = [...steps, end].map((step) => Math.round((step * width) / count));
    this.extent.textContent = `Steps 0 to ${this.options.last}.`;
    this.shown.forEach(({ at: row }, place) => {
      rows[row].forEach((value, at) => {
        context.fillStyle =
          value === null
            ? css(gap)
            : css(mix(neutral, value < 0 ? against : along, Math.min(1, Math.abs(value))));
        const left = bounds[at];
        context.fillRect(left, place * ROW, Math.max(1, bounds[at + 1] - left), ROW - 1);
      });
    });
  }

  read(event) {
    const { rows, steps, end } = this.cosines;
    const area = this.canvas.getBoundingClientRect();
    const place = (event.clientX - area.left) / area.width;
    const step = Math.floor(place * (this.options.last + 1));
    if (step >= end) return; // the run ended before
    const at = steps.findLastIndex((first) => first <= step);
    const row = this.shown[Math.floor((event.clientY - area.top) / ROW)];
    const value = row && rows[row.at][at];
    if (value === undefined) return;
    const text = value === null ? "no value" : formatNumber(value);
    const last = (steps[at + 1] ?? end) - 1;
    const where = last > steps[at] ? `mean of steps ${steps[at]} to ${last}` : `step ${last}`;
    this.hover.textContent = `${row.label}, ${where}: ${text}`;
  }

  toCsv() {
    const { rows, steps } = this.cosines;
    const values = steps.map((step, at) => [step, ...this.shown.map((row) => rows[row.at][at])]);
    return [["step", ...this.shown.map((row) => row.label)], ...values];
  }
}

const rgb = (text) => [1, 3, 5].map((at) => Number.parseInt(text.slice(at, at + 2), 16));
const css = (parts) => `rgb(${parts.map(Math.round).join(" ")})`;
const mix = (from, to, share) => from.map((part, at) => part + (to[at] - part) * share);
