"use strict";
// Draws the charts in the colours of the page: light or dark, and light in print.
const figures = JSON.parse(document.getElementById("figures").textContent);

function theme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: get("ink"),
    soft: get("soft"),
    line: get("line"),
    card: get("card"),
    font: getComputedStyle(document.body).fontFamily,
    color: (name) => get(name),
    diverging: [[0, get("against")], [0.5, get("neutral")], [1, get("with")]],
  };
}

// A trace with the colour that its meta names; cosines get the diverging colour scale.
function withColors(trace, colors) {
  const name = trace.meta.color;
  if (name === "diverging") {
    const colorbar = { ...trace.colorbar, outlinewidth: 0, tickfont: { color: colors.soft } };
    return { ...trace, colorscale: colors.diverging, colorbar, textfont: { color: colors.ink } };
  }
  const color = colors.color(name);
  const line = trace.line ? { ...trace.line, color } : undefined;
  const fill = trace.fill ? { fillcolor: `${color}2b` } : {}; // mostly transparent
  return { ...trace, ...fill, line, marker: { ...trace.marker, color } };
}

function axis(given, colors) {
  return {
    gridcolor: colors.line,
    linecolor: colors.line,
    zerolinecolor: colors.line,
    tickcolor: colors.line,
    automargin: true,
    ...given,
    tickfont: { color: colors.soft, size: 11 },
    title: { ...(given && given.title), font: { color: colors.soft, size: 12 }, standoff: 8 },
  };
}

function layoutOf(figure, colors) {
  const small = figure.size === "small";
  return {
    autosize: true,
    height: figure.height,
    margin: { l: 46, r: 12, t: 12, b: small ? 30 : 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: colors.font, color: colors.ink, size: 12 },
    hovermode: figure.data[0].type === "heatmap" || figure.data[0].orientation ? "closest" : "x unified",
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.line, font: { color: colors.ink } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colors.soft, activecolor: colors.ink },
    showlegend: figure.data.length > 1,
    ...figure.layout,
    xaxis: axis(small ? { ...figure.layout.xaxis, title: undefined } : figure.layout.xaxis, colors),
    yaxis: axis(figure.layout.yaxis, colors),
  };
}

function draw() {
  const colors = theme();
  const drawn = figures.map((figure) =>
    Plotly.react(
      document.getElementById(figure.key),
      figure.data.map((trace) => withColors(trace, colors)),
      layoutOf(figure, colors),
      { responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] },
    ),
  );
  return Promise.all(drawn);
}

// Print layout is applied before printing, while the charts can still be measured and resized.
function setPrintLayout(on) {
  document.documentElement.classList.toggle("paper", on);
  document.querySelectorAll("details").forEach((details) => {
    if (on) details.dataset.opened = details.open; // by the reader
    details.open = on || details.dataset.opened === "true";
  });
  draw();
  figures.forEach((figure) => Plotly.Plots.resize(document.getElementById(figure.key)));
}

// The driving examples of one step at a time; without JavaScript, those of the last.
const driverSteps = document.getElementById("driver-steps");
if (driverSteps) {
  driverSteps.hidden = false;
  driverSteps.querySelector("select").addEventListener("change", ({ target }) => {
    document.querySelectorAll(".driven").forEach((driven) => {
      driven.hidden = driven.dataset.step !== target.value;
    });
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("beforeprint", () => setPrintLayout(true));
addEventListener("afterprint", () => setPrintLayout(false));
draw().then(() => { document.documentElement.dataset.drawn = String(figures.length); });
