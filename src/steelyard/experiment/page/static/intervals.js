// Effects with their intervals as a dot plot: a row for each variant, with a zero line.

import { colour, el, figureCard, formatTick, pictureOf } from "./dom.js";

const ROW_HEIGHT = 26;
const AXIS_HEIGHT = 40;

export class IntervalPlot {
  // effect: {title, better, unit, rows: [{label, mean, margin, text, tone}]}
  constructor(effect) {
    this.effect = effect;
    this.rows = effect.rows.filter((row) => row.mean !== null);
    const better = effect.better ? `${effect.better} is better` : null;
    const described = this.rows.map((row) => `${row.label} ${row.text}`).join("; ");
    this.canvas = el("canvas", { role: "img", "aria-label": `${effect.title}: ${described}` });
    this.card = figureCard(
      {
        title: effect.title,
        note: better,
        toCsv: () => this.toCsv(),
        toCanvas: () => pictureOf(this.canvas, effect.title, []),
      },
      this.canvas,
    );
    this.canvas.style.height = `${this.rows.length * ROW_HEIGHT + AXIS_HEIGHT}px`;
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
    const width = this.canvas.clientWidth;
    if (width === 0) return;
    const scale = window.devicePixelRatio || 1;
    const height = this.rows.length * ROW_HEIGHT + AXIS_HEIGHT;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "12px system-ui, sans-serif";
    const widest = (texts) => Math.max(0, ...texts.map((text) => context.measureText(text).width));
    const left = Math.min(width * 0.35, widest(this.rows.map((row) => row.label))) + 12;
    const right = width - Math.min(width * 0.4, widest(this.rows.map((row) => row.text))) - 14;
    const [low, high] = this.range();
    const place = (value) => left + ((value - low) / (high - low)) * (right - left);
    this.drawAxis(context, place, { low, high, bottom: height - AXIS_HEIGHT, left, right });
    this.rows.forEach((row, at) => this.drawRow(context, row, at, place, { left, right, width }));
  }

  range() {
    const ends = this.rows.flatMap(
      ({ mean, margin }) => [mean - (margin ?? 0), mean + (margin ?? 0)],
    );
    const [low, high] = [Math.min(0, ...ends), Math.max(0, ...ends)];
    const margin = (high - low) * 0.06 || 1;
    return [low - margin, high + margin];
  }

  drawAxis(context, place, { low, high, bottom, left, right }) {
    const distance = tickDistance((high - low) / Math.max(2, Math.floor((right - left) / 90)));
    context.strokeStyle = colour("line");
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    for (let n = Math.ceil(low / distance); n * distance <= high; n += 1) {
      const x = Math.round(place(n * distance)) + 0.5;
      context.strokeStyle = colour(n === 0 ? "soft" : "line");
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, bottom + 4);
      context.stroke();
      context.fillText(formatTick(n * distance, distance), x, bottom + 17);
    }
    const unit = this.effect.unit ? ` (${this.effect.unit})` : "";
    context.fillText(
      `difference from the run with all terms${unit}`,
      (left + right) / 2,
      bottom + 34,
    );
  }

  drawRow(context, row, at, place, { left, right, width }) {
    const y = at * ROW_HEIGHT + ROW_HEIGHT / 2;
    const tone = colour({ good: "good", bad: "bad" }[row.tone] ?? "accent");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = colour("ink");
    context.fillText(row.label, left - 10, y, left - 12);
    context.textAlign = "left";
    context.fillText(row.text, right + 10, y, width - right - 12);
    context.textBaseline = "alphabetic";
    context.strokeStyle = context.fillStyle = tone;
    if (row.margin !== null) {
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(place(row.mean - row.margin), y);
      context.lineTo(place(row.mean + row.margin), y);
      context.stroke();
      context.lineWidth = 1;
    }
    context.beginPath();
    context.arc(place(row.mean), y, 4.5, 0, 2 * Math.PI);
    context.fill();
  }

  toCsv() {
    const rows = this.effect.rows.map(({ label, mean, margin }) => [label, mean, margin]);
    return [["", "difference", "margin of the 95 % interval"], ...rows];
  }
}

function tickDistance(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999);
}
