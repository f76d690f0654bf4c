// Draws the charts of the page in the page's own colours, and again when the reader changes between light and dark.
const charts = JSON.parse(document.getElementById("charts").textContent);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(chart) {
  const traces = chart.traces.map(({ color: index, ...trace }) => ({
    ...trace,
    line: { color: color(`--curve-${index}`), width: 2 },
    marker: { color: color(`--curve-${index}`), size: 7 },
  }));
  const axis = { gridcolor: color("--line"), linecolor: color("--line"), zeroline: false, automargin: true };
  const reference = chart.reference;
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--ink"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 52, r: 12, t: 8, b: 40 },
    xaxis: { ...axis, title: { text: "step" } },
    yaxis: { ...axis },
    showlegend: traces.length > 1,
    legend: { x: 1, xanchor: "right", y: 1, bgcolor: "rgba(0,0,0,0)" },
    hovermode: "x unified",
    hoverlabel: { bgcolor: color("--panel") },
    shapes: reference
      ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: reference.value, y1: reference.value, line: { color: color("--soft"), width: 1.5, dash: "dash" } }]
      : [],
    annotations: reference
      ? [{ xref: "paper", x: 0.02, xanchor: "left", y: reference.value, yanchor: "bottom", text: reference.text, showarrow: false, font: { color: color("--soft") } }]
      : [],
  };
  Plotly.react(`chart-${chart.id}`, traces, layout, { responsive: true, displayModeBar: false });
}

const drawAll = () => charts.forEach(draw);
drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
