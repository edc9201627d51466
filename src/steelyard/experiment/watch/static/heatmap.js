// Cosines of all pairs of terms over time, on a canvas: a row for each pair.

import { colour, el, formatNumber } from "./dom.js";

const ROW = 16;

export class HeatMap {
  // cosines: {pairs: {key: label}, steps, end, rows}; the caller appends to it. A column covers
  // the steps from its own to the next, the last one those before `end`.
  constructor(cosines, run = null) {
    this.cosines = cosines;
    this.canvas = el("canvas", {
      role: "img",
      "aria-label": `Cosines between gradients over time${run === null ? "" : `, ${run}`}`,
    });
    this.hover = el("span", {}, "Point at a field to read it.");
    const labels = Object.values(cosines.pairs).map((label) => el("div", { title: label }, label));
    this.element = el(
      "div",
      {},
      run === null ? null : el("h3", { class: "of-run" }, run),
      el("div", { class: "heat" }, el("div", { class: "labels" }, ...labels), this.canvas),
      el(
        "div",
        { class: "scale" },
        "−1 opposed",
        el("div", { class: "bar" }),
        "+1 aligned",
        this.hover,
      ),
    );
    this.canvas.addEventListener("pointermove", (event) => this.read(event));
    this.resizing = new ResizeObserver(() => this.changed());
    this.resizing.observe(this.canvas);
  }

  remove() {
    this.resizing.disconnect();
  }

  changed() {
    const { rows, steps, end } = this.cosines;
    const width = this.canvas.clientWidth;
    if (width === 0 || steps.length === 0) return;
    const scale = window.devicePixelRatio || 1;
    const height = rows.length * ROW;
    if (
      this.canvas.width !== Math.round(width * scale) ||
      this.canvas.height !== Math.round(height * scale)
    ) {
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const [against, neutral, along, gap] = ["against", "neutral", "with", "gap"].map((name) =>
      rgb(colour(name)),
    );
    const bounds = [...steps, end].map((step) => Math.round((step * width) / end));
    rows.forEach((row, place) => {
      row.forEach((value, at) => {
        context.fillStyle =
          value === null
            ? css(gap)
            : css(mix(neutral, value < 0 ? against : along, Math.min(1, Math.abs(value))));
        context.fillRect(
          bounds[at],
          place * ROW,
          Math.max(1, bounds[at + 1] - bounds[at]),
          ROW - 1,
        );
      });
    });
  }

  read(event) {
    const { pairs, rows, steps, end } = this.cosines;
    const area = this.canvas.getBoundingClientRect();
    const step = Math.floor(((event.clientX - area.left) / area.width) * end);
    const at = steps.findLastIndex((each) => each <= step);
    const place = Math.floor((event.clientY - area.top) / ROW);
    const value = rows[place]?.[at];
    if (value === undefined) return;
    const shown = value === null ? "no value" : formatNumber(value);
    const last = (steps[at + 1] ?? end) - 1;
    const where = last > steps[at] ? `mean of steps ${steps[at]} to ${last}` : `step ${last}`;
    this.hover.textContent = `${Object.values(pairs)[place]}, ${where}: ${shown}`;
  }
}

const rgb = (text) => [1, 3, 5].map((at) => Number.parseInt(text.slice(at, at + 2), 16));
const css = (parts) => `rgb(${parts.map(Math.round).join(" ")})`;
const mix = (from, to, share) => from.map((part, at) => part + (to[at] - part) * share);
