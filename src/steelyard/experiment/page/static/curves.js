// Curves of a run that grow while it is trained, and their smoothing in a file without a server.

const MAX_NEW_POINTS = 2000; // then the server thins the curves again

// Append new rows to the curves of a view. Returns false if the run must be loaded again: a new
// metric, one that was constant and is no more, a repeated step, or many points.
export function appendRows(view, rows, smoothing) {
  const constant = new Set((view.constants ?? []).map(({ key }) => key));
  for (const row of rows) {
    if (row.step <= view.last_step) return false;
    view.last_step = row.step;
    view.steps += 1;
    view.added = (view.added ?? 0) + 1;
    for (const [key, value] of Object.entries(row)) {
      if (key === "step") continue;
      const curve = view.curves[key];
      if (constant.has(key) && value !== curve?.values.at(-1)) return false;
      if (curve) extend(curve, row.step, value, smoothing);
      else if (!view.keys.includes(key) && !key.includes("skipped/")) return false;
    }
    if (view.cosines) appendCosines(view.cosines, row);
  }
  return view.added <= MAX_NEW_POINTS;
}

function appendCosines(cosines, row) {
  cosines.steps.push(row.step);
  cosines.end = row.step + 1;
  Object.keys(cosines.pairs).forEach((key, at) => cosines.rows[at].push(row[key] ?? null));
}

function extend(curve, step, value, smoothing) {
  curve.steps.push(step);
  curve.values.push(value);
  if (!curve.smooth || value === null) return;
  const last = curve.smooth.values.findLast((known) => known !== null) ?? 0;
  const kept = smoothing * curve.smooth.weight;
  curve.smooth.weight = kept + 1;
  curve.smooth.steps.push(step);
  curve.smooth.values.push((kept * last + value) / (kept + 1));
}

export function appendSkipped(view, skipped) {
  for (const { term, reason, step } of skipped) {
    let entry = view.skipped.find((known) => known.term === term && known.reason === reason);
    if (!entry) view.skipped.push((entry = { term, reason, count: 0 }));
    entry.count += 1;
    entry.last_step = step;
  }
}

// The moving average of the points that a file has; the server takes it over all steps.
export function smoothCurves(curves, smoothing) {
  for (const curve of Object.values(curves)) {
    delete curve.smooth;
    if (!smoothing) continue;
    const { steps, values } = curve;
    curve.smooth = { steps: [], values: [], weight: 0 };
    const raw = { steps: [], values: [], smooth: curve.smooth };
    steps.forEach((step, at) => extend(raw, step, values[at], smoothing));
  }
}
