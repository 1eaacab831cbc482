// The page: reads the data, makes the charts, and applies what the reader chooses to all of them.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

const page = {
  ...data,
  smoothing: Number(byId("smoothing").value),
  axis: "auto",
  zoom: null,
  hiddenRuns: new Set(),
  setZoom(range) {
    page.zoom = range;
    byId("reset").hidden = !range;
    charts.forEach((chart) => (chart.spec.ceiling == null ? chart.zoom(range) : chart.draw()));
  },
};
const figures = [...document.querySelectorAll("figure")];
const charts = data.charts.map((spec, i) => new Chart(figures[i], spec, page));
const drawAll = () => charts.forEach((chart) => chart.draw());

function start() {
  document.querySelector(".controls").hidden = charts.length === 0;
  document.querySelector(".final")?.removeAttribute("open"); // open only for readers without scripts
  byId("smoothing").oninput = (event) => setSmoothing(Number(event.target.value));
  byId("axis").onchange = (event) => {
    page.axis = event.target.value;
    charts.forEach((chart) => (chart.axis = null));
    drawAll();
  };
  byId("search").oninput = (event) => filter(event.target.value.toLowerCase());
  byId("reset").onclick = () => page.setZoom(null);
  setSmoothing(page.smoothing);
  if (data.runs.length > 1) makeRunLegend();
  makeSamples(document.querySelector(".completions"), data.samples, data.runs);
  drawWhenVisible();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => charts.forEach((chart) => ((chart.visible = true), chart.draw())));
}

function setSmoothing(weight) {
  page.smoothing = weight;
  byId("weight").textContent = weight ? weight.toFixed(2) : "off";
  drawAll();
}

// Shows the charts whose title or curves contain the text, and the sections that have any.
function filter(text) {
  charts.forEach((chart) => {
    const names = [chart.spec.title, ...chart.labels];
    chart.filtered = !names.some((name) => name.toLowerCase().includes(text));
    chart.figure.hidden = chart.filtered;
  });
  for (const section of document.querySelectorAll(".section")) {
    const found = section.querySelector("figure:not([hidden])");
    section.hidden = !found;
    if (text && found) section.open = true;
  }
}

function makeRunLegend() {
  const list = document.querySelector(".runs .legend");
  document.querySelector(".runs").hidden = false;
  const items = data.runs.map((name, run) => {
    const item = legendItem(name, `c${run % PALETTE}`, "d0", true, () => {
      if (!page.hiddenRuns.delete(run)) page.hiddenRuns.add(run);
      item.button.setAttribute("aria-pressed", !page.hiddenRuns.has(run));
      drawAll();
    });
    return item;
  });
  list.replaceChildren(...items.map((item) => item.element));
}

// A chart is drawn when it comes near the screen, and again when its width changes.
function drawWhenVisible() {
  const chartOf = new Map(charts.map((chart) => [chart.holder, chart]));
  const seen = new IntersectionObserver(
    (entries) =>
      entries.forEach((entry) => {
        const chart = chartOf.get(entry.target);
        chart.visible = entry.isIntersecting;
        if (chart.visible && chart.stale) chart.draw();
      }),
    { rootMargin: "300px" },
  );
  const sized = new ResizeObserver((entries) =>
    entries.forEach((entry) => {
      const chart = chartOf.get(entry.target), { width, height } = entry.contentRect;
      if (chart.plot && width > 0 && (chart.plot.width !== width || chart.plot.height !== height)) chart.plot.setSize({ width, height });
      else if (chart.stale && width > 0) chart.draw();
    }),
  );
  charts.forEach((chart) => {
    seen.observe(chart.holder);
    sized.observe(chart.holder);
  });
}

start();
window.report = { page, charts, smooth }; // for the console
