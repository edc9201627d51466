// One card with one uPlot chart. It is drawn when it comes into view, and again when data change.

import { colour, el, formatNumber } from "./dom.js";

const HEIGHT = 190;
const WHOLE_STEPS = [1, 2, 5]
  .flatMap((n) => Array.from({ length: 12 }, (_, power) => n * 10 ** power))
  .sort((a, b) => a - b);
const SYNC = uPlot.sync("step");
// Looked at on both sides of the pointer for a curve that has no point at its step.
const REACH = 200;

const visible = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      entry.target.chart.isVisible = entry.isIntersecting;
      if (entry.isIntersecting) entry.target.chart.redraw();
    }
  },
  { rootMargin: "200px" },
);
const resized = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.chart.resize();
});

export class Chart {
  // lines: [{label, colour, dash, curve: {steps, values, smooth}}]; the caller appends to curves.
  constructor(title, lines, options) {
    this.lines = lines;
    this.options = options; // {log}: shared by all charts of the page
    this.plot = null;
    this.isVisible = false;
    this.isStale = true;
    this.isZoomed = false;
    this.box = el("div", { class: "plot" });
    this.box.chart = this;
    this.card = el("figure", { class: "card", "aria-label": title }, el("h3", {}, title), this.box);
    visible.observe(this.box);
    resized.observe(this.box);
  }

  remove() {
    visible.unobserve(this.box);
    resized.unobserve(this.box);
    this.plot?.destroy();
    this.plot = null;
  }

  changed() {
    this.isStale = true;
    this.redraw();
  }

  // After a change of the colours or of the scale, which uPlot takes when it is made.
  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    this.isZoomed = false;
    this.changed();
  }

  resize() {
    if (this.plot && this.box.clientWidth > 0 && this.box.clientWidth !== this.plot.width) {
      this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
    }
  }

  redraw() {
    if (!this.isVisible || !this.isStale || this.box.clientWidth === 0) return;
    this.isStale = false;
    const parts = this.parts();
    if (this.plot && this.plot.series.length === parts.length + 1) {
      this.plot.setData(align(parts, this.isLog), !this.isZoomed);
      if (this.isZoomed) this.plot.redraw();
      this.showLast();
      return;
    }
    this.plot?.destroy();
    this.isLog = this.options.log && parts.some((part) => part.values.some((value) => value > 0));
    this.plot = new uPlot(this.settings(parts), align(parts, this.isLog), this.box);
    this.plot.over.addEventListener("dblclick", () => {
      this.isZoomed = false;
    });
    this.showLast();
  }

  // While nobody points at a chart, its legend has the last values.
  showLast() {
    if (this.plot.cursor.left >= 0) return;
    const idxs = this.plot.data.map((values) =>
      values.findLastIndex((value) => value !== undefined && value !== null),
    );
    this.plot.setLegend({ idxs }, false);
  }

  // What is drawn: a smoothed curve has its own values behind it, pale and without a legend.
  parts() {
    const raw = this.lines
      .filter((line) => line.curve.smooth)
      .map((line) => ({ ...line, ...line.curve, pale: true }));
    return [
      ...raw,
      ...this.lines.map((line) => ({ ...line, ...(line.curve.smooth ?? line.curve) })),
    ];
  }

  settings(parts) {
    const axis = {
      stroke: colour("soft"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { stroke: colour("line") },
      font: "11px system-ui",
      size: 34,
    };
    const points = Math.max(...parts.map((part) => part.steps.length));
    return {
      width: this.box.clientWidth,
      height: HEIGHT,
      cursor: { sync: { key: SYNC.key, setSeries: false }, dataIdx: nearest, points: { size: 6 } },
      scales: { x: { time: false }, y: this.isLog ? { distr: 3 } : { range } },
      axes: [
        { ...axis, incrs: WHOLE_STEPS },
        {
          ...axis,
          size: 58,
          values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatNumber(tick))),
        },
      ],
      series: [
        { label: "step" },
        ...parts.map((part) => ({
          label: part.label,
          stroke: part.pale ? faded(part.colour) : colour(part.colour),
          width: part.pale ? 1 : 1.6,
          dash: part.dash,
          points: { show: points <= 12 && !part.pale },
          value: (_, value) => formatNumber(value),
          class: part.pale ? "pale" : undefined,
        })),
      ],
      hooks: {
        setSelect: [
          (plot) => {
            this.isZoomed = this.isZoomed || plot.select.width > 0;
          },
        ],
        ready: [hidePale],
        setCursor: [() => this.showLast()],
      },
    };
  }
}

// uPlot would draw a curve that is 0 throughout on a scale up to 100.
function range(_, low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const margin = Math.abs(low) / 10 || 1;
  return [low - margin, high + margin];
}

function hidePale(plot) {
  plot.root.querySelectorAll(".u-legend .pale").forEach((row) => {
    row.hidden = true;
  });
}

function faded(name) {
  return `color-mix(in srgb, ${colour(name)} 30%, transparent)`;
}

// Curves have steps of their own, as each was thinned by itself.
function align(parts, isLog) {
  const positive = (values) => values.map((value) => (value > 0 ? value : null));
  return uPlot.join(parts.map((part) => [part.steps, isLog ? positive(part.values) : part.values]));
}

function nearest(plot, series, at) {
  const values = plot.data[series];
  for (let distance = 0; distance <= REACH; distance += 1) {
    if (values[at - distance] !== undefined && values[at - distance] !== null) return at - distance;
    if (values[at + distance] !== undefined && values[at + distance] !== null) return at + distance;
  }
  return at;
}
