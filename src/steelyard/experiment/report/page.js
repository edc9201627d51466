"use strict";
// Draws the charts, in the colours of the page: light, dark, and light again on paper.
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

function painted(trace, look) {
  const name = trace.meta.color;
  if (name === "diverging") {
    const colorbar = { ...trace.colorbar, outlinewidth: 0, tickfont: { color: look.soft } };
    return { ...trace, colorscale: look.diverging, colorbar, textfont: { color: look.ink } };
  }
  const color = look.color(name);
  const line = trace.line ? { ...trace.line, color } : undefined;
  return { ...trace, line, marker: { ...trace.marker, color } };
}

function axis(given, look) {
  return {
    gridcolor: look.line,
    linecolor: look.line,
    zerolinecolor: look.line,
    tickcolor: look.line,
    automargin: true,
    ...given,
    tickfont: { color: look.soft, size: 11 },
    title: { ...(given && given.title), font: { color: look.soft, size: 12 }, standoff: 8 },
  };
}

function laidOut(figure, look) {
  const small = figure.size === "small";
  return {
    autosize: true,
    height: figure.height,
    margin: { l: 46, r: 12, t: 12, b: small ? 30 : 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: look.font, color: look.ink, size: 12 },
    hovermode: figure.data[0].type === "heatmap" || figure.data[0].orientation ? "closest" : "x unified",
    hoverlabel: { bgcolor: look.card, bordercolor: look.line, font: { color: look.ink } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: look.soft, activecolor: look.ink },
    showlegend: figure.data.length > 1,
    ...figure.layout,
    xaxis: axis(small ? { ...figure.layout.xaxis, title: undefined } : figure.layout.xaxis, look),
    yaxis: axis(figure.layout.yaxis, look),
  };
}

function draw() {
  const look = theme();
  const done = figures.map((figure) =>
    Plotly.react(
      document.getElementById(figure.key),
      figure.data.map((trace) => painted(trace, look)),
      laidOut(figure, look),
      { responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] },
    ),
  );
  return Promise.all(done);
}

function paper(on) {
  document.documentElement.classList.toggle("paper", on);
  document.querySelectorAll("details").forEach((each) => { each.open = on; });
  draw();
  figures.forEach((figure) => Plotly.Plots.resize(document.getElementById(figure.key)));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("beforeprint", () => paper(true));
addEventListener("afterprint", () => paper(false));
draw().then(() => { document.documentElement.dataset.drawn = String(figures.length); });
