// Line charts and scatter plots: a card with one uPlot chart, drawn when it comes into view.

import { colour, el, figureCard, formatNumber, formatTick, pictureOf } from "./dom.js";

const HEIGHT = 200;
const WHOLE_STEPS = [1, 2, 5]
  .flatMap((n) => Array.from({ length: 12 }, (_, power) => n * 10 ** power))
  .sort((a, b) => a - b);
const SYNC = uPlot.sync("step");
// Looked at on both sides of the pointer for a curve that has no point at its step.
const REACH = 200;
const MARK_REACH = 6; // pixels from the pointer at which a mark says what was changed

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

// What all charts over steps share: log scale, zoom, last step, the marks of changes, and which
// sections are folded. It lasts when a page is loaded again.
export class ChartOptions {
  constructor() {
    this.log = false;
    this.zoom = null; // [first, last step]
    this.last = 0;
    this.marks = []; // [{step, text}]
    this.charts = new Set();
    this.folded = {}; // what the reader has opened or closed, by the id of the section
  }

  zoomTo(range) {
    this.zoom = range;
    for (const chart of this.charts) chart.rescale();
  }
}

export class LineChart {
  // lines: [{label, colour, dash, curve: {steps, values, smooth}}]; the caller appends to curves.
  constructor({ title, y, note, height = HEIGHT, lines }, options) {
    this.title = title;
    this.y = y;
    this.height = height;
    this.lines = lines;
    this.options = options;
    this.hidden = new Set();
    this.plot = null;
    this.isVisible = false;
    this.isStale = true;
    this.box = el("div", { class: "plot" });
    this.box.style.minHeight = `${height}px`;
    this.box.chart = this;
    this.legend = el("div", { class: "legend" });
    this.card = figureCard(
      { title, note, toCsv: () => this.toCsv(), toCanvas: () => this.toCanvas() },
      this.legend,
      this.box,
    );
    this.buildLegend();
    options.charts.add(this);
    visible.observe(this.box);
    resized.observe(this.box);
  }

  remove() {
    this.options.charts.delete(this);
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
    this.changed();
  }

  rescale() {
    if (this.plot) this.plot.setData(this.plot.data);
  }

  resize() {
    const width = this.box.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width)
      this.plot.setSize({ width, height: this.height });
    else if (!this.plot) this.redraw();
  }

  redraw() {
    if (!this.isVisible || !this.isStale || this.box.clientWidth === 0) return;
    this.isStale = false;
    const series = this.series();
    if (this.plot && this.plot.series.length === series.length + 1) {
      this.plot.setData(align(series, this.isLog));
      this.showValues();
      return;
    }
    this.plot?.destroy();
    const values = series.flatMap((line) => line.values);
    this.isLog = this.options.log && values.some((value) => value > 0);
    this.plot = new uPlot(this.settings(series), align(series, this.isLog), this.box);
    this.plot.over.addEventListener("dblclick", () => this.options.zoomTo(null));
    this.showValues();
  }

  // What is drawn: a smoothed curve has its own values behind it, pale and without a legend.
  series() {
    const raw = this.lines
      .filter((line) => line.curve.smooth)
      .map((line) => ({ ...line, ...line.curve, line, pale: true }));
    return [
      ...raw,
      ...this.lines.map((line) => ({ ...line, ...(line.curve.smooth ?? line.curve), line })),
    ];
  }

  buildLegend() {
    this.place = el("span", { class: "place" });
    this.remark = el("span", { class: "remark" });
    this.values = this.lines.map(() => el("b"));
    const entries = this.lines.map((line, at) => {
      const key = el("i", { class: line.dash ? "key dashed" : "key", "aria-hidden": "true" });
      key.style.color = `var(--${line.colour})`;
      const hint = "Click to hide or show";
      return el(
        "button",
        {
          type: "button",
          title: hint,
          "aria-pressed": "true",
          onclick: (event) => this.toggle(line, event.currentTarget),
        },
        key,
        `${line.label} `,
        this.values[at],
      );
    });
    this.legend.replaceChildren(this.place, ...entries, this.remark);
  }

  toggle(line, button) {
    const isShown = this.hidden.delete(line);
    if (!isShown) this.hidden.add(line);
    button.setAttribute("aria-pressed", String(isShown));
    this.series().forEach((part, at) => {
      if (part.line === line) this.plot?.setSeries(at + 1, { show: isShown });
    });
  }

  // Values where the pointer is; while nobody points at a chart, the last ones.
  showValues() {
    const { data, cursor } = this.plot;
    const isPointed = cursor.left >= 0 && cursor.idx !== null && cursor.idx !== undefined;
    const first = data.length - this.lines.length;
    const last = (values) => values.findLastIndex((value) => value !== undefined && value !== null);
    this.lines.forEach((line, at) => {
      const values = data[first + at];
      const index = isPointed ? nearest(this.plot, first + at, cursor.idx) : last(values);
      this.values[at].textContent = formatNumber(values[index]);
    });
    const step = data[0][isPointed ? cursor.idx : data[0].length - 1];
    this.place.textContent = step === undefined ? "" : `step ${step}`;
    const mark = isPointed
      ? this.options.marks.find(
          ({ step: at }) => Math.abs(this.plot.valToPos(at, "x") - cursor.left) <= MARK_REACH,
        )
      : undefined;
    this.remark.textContent = mark ? `step ${mark.step}: ${mark.text}` : "";
  }

  settings(series) {
    const points = Math.max(...series.map((line) => line.steps.length));
    return {
      width: this.box.clientWidth,
      height: this.height,
      legend: { show: false },
      cursor: {
        sync: { key: SYNC.key, setSeries: false },
        drag: { setScale: false },
        dataIdx: nearest,
        points: { size: 6 },
      },
      scales: {
        x: { time: false, range: () => this.options.zoom ?? extent(this.options.last) },
        y: this.isLog ? { distr: 3 } : { range: valueRange },
      },
      axes: [
        { ...axis("step"), incrs: WHOLE_STEPS },
        valueAxis(this.y, this.isLog),
      ],
      series: [
        {},
        ...series.map((line) => ({
          stroke: line.pale ? faded(line.colour) : colour(line.colour),
          width: line.pale ? 1 : 1.7,
          dash: line.dash,
          show: !this.hidden.has(line.line),
          points: { show: points <= 12 && !line.pale, size: 5, fill: colour(line.colour) },
        })),
      ],
      hooks: {
        setSelect: [
          (plot) => {
            const { left, width } = plot.select;
            if (width < 3) return;
            const ends = [left, left + width].map((place) => plot.posToVal(place, "x"));
            plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            this.options.zoomTo(ends);
          },
        ],
        drawAxes: [(plot) => drawMarks(plot, this.options.marks)],
        setCursor: [() => this.plot && this.showValues()],
      },
    };
  }

  toCsv() {
    const data = align(this.lines.map((line) => line.curve), false);
    const rows = data[0].map((step, at) => [step, ...data.slice(1).map((values) => values[at])]);
    return [["step", ...this.lines.map((line) => line.label)], ...rows];
  }

  toCanvas() {
    this.isVisible = true;
    this.redraw();
    const shown = this.lines.filter((line) => !this.hidden.has(line));
    return pictureOf(this.plot.root.querySelector("canvas"), this.title, shown);
  }
}

// Points of trials: a parameter against the objective, two objectives against each other, or the
// history of a search. lines: [{label, colour, points: [[x, y]], path: "none"|"line"|"hv"|"vh"}].
export class ScatterChart extends LineChart {
  constructor(figure) {
    const lines = figure.lines.map((line) => {
      const points = [...line.points].sort((one, other) => one[0] - other[0] || one[1] - other[1]);
      const curve = { steps: points.map(([x]) => x), values: points.map(([, y]) => y) };
      return { ...line, curve };
    });
    super({ ...figure, lines }, new ChartOptions());
    this.x = figure.x;
    this.logX = figure.logX ?? false;
    this.card.classList.add("scatter");
  }

  showValues() {
    const { data, cursor } = this.plot;
    const index = cursor.left >= 0 ? cursor.idx : null;
    this.place.textContent = index === null ? "" : `${this.x} ${formatNumber(data[0][index])}`;
    this.lines.forEach((_, at) => {
      this.values[at].textContent = index === null ? "" : formatNumber(data[at + 1][index]);
    });
  }

  settings(series) {
    const settings = super.settings(series);
    const xs = series.flatMap((line) => line.steps);
    const isWhole = xs.every(Number.isInteger);
    return {
      ...settings,
      cursor: { drag: { x: false, y: false }, points: { size: 8 } },
      scales: {
        x: this.logX ? { time: false, distr: 3 } : { time: false, range: valueRange },
        y: { range: valueRange },
      },
      axes: [
        {
          ...(this.logX || !isWhole ? valueAxis(this.x, this.logX) : axis(this.x)),
          ...axis(this.x),
          ...(isWhole ? { incrs: WHOLE_STEPS } : {}),
        },
        valueAxis(this.y, false),
      ],
      series: [
        {},
        ...series.map((line) => ({
          stroke: colour(line.colour),
          width: 1.7,
          paths: PATHS[line.path ?? "none"],
          points: { show: (line.path ?? "none") === "none", size: 7, fill: colour(line.colour) },
        })),
      ],
      hooks: { setCursor: [() => this.plot && this.showValues()] },
    };
  }

  toCsv() {
    const rows = this.lines.flatMap((line) =>
      line.curve.steps.map((x, at) => [line.label, x, line.curve.values[at]]),
    );
    return [["", this.x, this.y], ...rows];
  }
}

const PATHS = {
  none: () => null,
  line: uPlot.paths.linear(),
  hv: uPlot.paths.stepped({ align: 1 }),
  vh: uPlot.paths.stepped({ align: -1 }),
};

function axis(label) {
  return {
    label,
    labelSize: 16,
    labelGap: 0,
    labelFont: "11px system-ui, sans-serif",
    stroke: colour("soft"),
    grid: { stroke: colour("line"), width: 1 },
    ticks: { stroke: colour("line"), size: 4 },
    font: "11px system-ui, sans-serif",
    size: 24,
    gap: 3,
  };
}

function valueAxis(label, isLog) {
  return {
    ...axis(label),
    size: (_, ticks) => 14 + 6.2 * Math.max(3, ...(ticks ?? []).map((tick) => tick?.length ?? 0)),
    values: (_, ticks, __, ___, distance) =>
      ticks.map((tick) => {
        if (tick === null) return "";
        return isLog ? formatNumber(tick) : formatTick(tick, distance);
      }),
  };
}

const extent = (last) => (last > 0 ? [0, last] : [-0.5, 0.5]);

// uPlot would draw a curve that is 0 throughout on a scale up to 100.
function valueRange(_, low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const margin = Math.abs(low) / 10 || 1;
  return [low - margin, high + margin];
}

// A dashed line with a flag at each step at which somebody changed the run.
function drawMarks(plot, marks) {
  const { ctx: context, bbox } = plot;
  const scale = window.devicePixelRatio || 1;
  context.save();
  context.strokeStyle = colour("mark");
  context.fillStyle = colour("mark");
  context.lineWidth = scale;
  for (const { step } of marks) {
    const left = Math.round(plot.valToPos(step, "x", true));
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    context.setLineDash([3 * scale, 3 * scale]);
    context.beginPath();
    context.moveTo(left, bbox.top);
    context.lineTo(left, bbox.top + bbox.height);
    context.stroke();
    context.setLineDash([]);
    context.beginPath();
    context.moveTo(left, bbox.top);
    context.lineTo(left + 7 * scale, bbox.top + 3 * scale);
    context.lineTo(left, bbox.top + 6 * scale);
    context.fill();
  }
  context.restore();
}

const faded = (name) => `color-mix(in srgb, ${colour(name)} 30%, transparent)`;

// Curves have steps of their own, as each was thinned by itself.
function align(series, isLog) {
  const positive = (values) => values.map((value) => (value > 0 ? value : null));
  return uPlot.join(
    series.map((line) => [line.steps, isLog ? positive(line.values) : line.values]),
  );
}

function nearest(plot, series, at) {
  const values = plot.data[series];
  for (let distance = 0; distance <= REACH; distance += 1) {
    if (values[at - distance] !== undefined && values[at - distance] !== null) return at - distance;
    if (values[at + distance] !== undefined && values[at + distance] !== null) return at + distance;
  }
  return at;
}
