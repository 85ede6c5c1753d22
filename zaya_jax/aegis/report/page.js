"use strict";
// Draws the plots, and moves them to another x axis. An axis of integers has no ticks between them, however far a
// reader zooms in.
const { figures, axes } = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
const options = { responsive: true, displaylogo: false, modeBarButtons: buttons };
const titles = { step: "step", tokens: "tokens seen, with padding", hours: "time in steps (h)" };

function keepIntegerTicks(plot) {
  const changes = {};
  for (const letter of plot.layout.meta.integers) {
    const name = `${letter}axis`;
    const [low, high] = plot._fullLayout[name].range;
    const step = plot.layout[name].tickformat && Math.abs(high - low) < 12 ? 1 : null;
    if ((plot.layout[name].dtick ?? null) === step) continue;
    changes[`${name}.dtick`] = step;
    // Otherwise plotly keeps "linear", with a tick at each of thousands of integers.
    changes[`${name}.tickmode`] = step ? "linear" : "auto";
  }
  if (Object.keys(changes).length) Plotly.relayout(plot, changes);
}

// The tokens or hours of a step of a run, between those of the steps that the page has.
function place(run, unit, step) {
  const { step: known, [unit]: values } = axes[run];
  const after = known.findIndex((each) => each >= step);
  if (after <= 0) return after === 0 ? values[0] * (step / known[0]) : values.at(-1);
  const part = (step - known[after - 1]) / (known[after] - known[after - 1]);
  return values[after - 1] + part * (values[after] - values[after - 1]);
}

function moveTo(unit) {
  plots.forEach((plot, index) => {
    const { data, layout } = figures[index];
    if (!layout.meta.steps) return;
    const move = (run, step) => (unit === "step" ? step : place(run, unit, step));
    Plotly.update(plot, { x: data.map((trace) => trace.x.map((step) => move(trace.meta.run, step))) }, {
      "xaxis.title.text": titles[unit], "xaxis.tickformat": unit === "step" ? ",d" : "", "xaxis.dtick": null,
      "xaxis.tickmode": "auto",
      "xaxis.autorange": true,
      shapes: layout.shapes.map((line) => ({ ...line, x0: move(line.name, line.x0), x1: move(line.name, line.x1) })),
    });
  });
}

plots.forEach((plot, index) => {
  // plotly changes what it is given.
  Plotly.newPlot(plot, { ...structuredClone(figures[index]), config: options }).then(
    () => {
      keepIntegerTicks(plot);
      // Only a new range asks for other ticks: those can change the margins and so the range again, without an end.
      plot.on("plotly_relayout", (changes) => {
        if (Object.keys(changes).some((key) => key.includes("range"))) keepIntegerTicks(plot);
      });
    },
    (error) => plot.append(`This plot could not be drawn: ${error}`),
  );
});
const unit = document.getElementById("unit");
unit.parentElement.hidden = axes.some((axis) => !axis.step);
unit.addEventListener("change", () => moveTo(unit.value));
