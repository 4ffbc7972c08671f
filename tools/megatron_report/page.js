// Draws the plots of the page from its JSON, changes their horizontal axis, and fits them to paper.
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const touch = matchMedia("(pointer: coarse)").matches; // a drag has to scroll the page
  const font = { family: "system-ui, sans-serif", size: 13, color: "#1a1a1a" };
  const axis = { gridcolor: "#e4e4e4", zeroline: false, automargin: true, linecolor: "#666666" };
  const PAPER = 680; // pixels between the margins of A4 and Letter

  const place = (trace, name) => (trace.axes ? trace.axes[name] : trace.x);

  for (const [id, plot] of Object.entries(plots)) {
    const curves = plot.traces.some((trace) => trace.axes);
    const traces = plot.traces.map((trace) => ({ ...trace, x: place(trace, "iteration") }));
    const listed = traces.filter((trace) => trace.showlegend !== false).length;
    const layout = {
      height: 360 + (innerWidth < 640 ? 18 * listed : 0), // the legend takes a line for each
      margin: { l: 44, r: 12, t: touch ? 8 : 28, b: 40 },
      font,
      paper_bgcolor: "#ffffff",
      plot_bgcolor: "#ffffff",
      hovermode: "closest",
      dragmode: touch ? false : "zoom",
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 },
      ...plot.layout,
      xaxis: { ...axis, title: { text: curves ? "iteration" : "" }, ...plot.layout.xaxis },
      yaxis: { ...axis, ...plot.layout.yaxis },
    };
    Plotly.newPlot(id, traces, layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: !touch && "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    });
  }

  for (const choice of document.querySelectorAll(".axis input")) {
    choice.addEventListener("change", () => {
      for (const element of choice.closest("section").querySelectorAll(".plot")) {
        const traces = plots[element.id].traces;
        if (!traces.some((trace) => trace.axes)) continue;
        const x = traces.map((trace) => place(trace, choice.value));
        Plotly.update(element, { x }, { "xaxis.title.text": choice.value, "xaxis.autorange": true });
      }
    });
  }

  const each = (change) => document.querySelectorAll(".plot").forEach((e) => Plotly.relayout(e, change));
  addEventListener("beforeprint", () => each({ width: PAPER }));
  addEventListener("afterprint", () => each({ width: null, autosize: true }));
})();
