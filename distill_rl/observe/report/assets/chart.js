// One chart: a figure of the page, filled by uPlot.

const PALETTE = 8, DASHES = [[], [6, 4], [2, 3]], SMOOTHED_FROM = 20;

class Chart {
  // figure: the element; spec: an entry of the data's `charts`; page: the data, and what the reader has chosen (report.js).
  constructor(figure, spec, page) {
    Object.assign(this, { figure, spec, page, plot: null, axis: null, hidden: new Set(), visible: false, stale: true });
    this.holder = figure.querySelector(".plot");
    this.labels = [...new Set(spec.curves.map((curve) => curve.label))];
    this.addButtons();
  }

  get logarithmic() {
    if (this.spec.stacked) return false;
    const choice = this.axis ?? this.page.axis;
    return choice === "auto" ? this.spec.log : choice === "log";
  }

  // The curves to draw, with the colour and dash of each. One run: a colour per metric. Several: a colour per run, a dash
  // per metric.
  get curves() {
    const several = this.page.runs.length > 1;
    return this.spec.curves
      .map((curve) => {
        const kind = this.labels.indexOf(curve.label), run = this.page.runs[curve.run];
        const name = !several || this.spec.stacked ? curve.label : this.labels.length > 1 ? `${run}, ${curve.label}` : run;
        return { ...curve, name, color: (several && !this.spec.stacked ? curve.run : kind) % PALETTE, dash: several && !this.spec.stacked ? kind % 3 : 0 };
      })
      .filter((curve) => !this.page.hiddenRuns.has(curve.run));
  }

  addButtons() {
    const caption = this.figure.querySelector("figcaption");
    const button = (text, title, onclick) => {
      const element = Object.assign(document.createElement("button"), { textContent: text, title, onclick });
      caption.append(element);
      return element;
    };
    if (!this.spec.stacked)
      this.logButton = button("log", "switch between a linear and a logarithmic axis", () => {
        this.axis = this.logarithmic ? "linear" : "log";
        this.draw();
      });
    button("⤢", "enlarge", () => {
      this.figure.classList.toggle("wide");
      this.draw();
    });
  }

  // Draws now if the figure is on the screen, else when it gets there.
  draw() {
    this.stale = true;
    if (!this.visible || this.holder.clientWidth === 0) return;
    this.stale = false;
    this.plot?.destroy();
    this.holder.replaceChildren();
    const curves = this.curves, shown = curves.filter((curve) => !this.hidden.has(curve.name));
    this.logButton?.setAttribute("aria-pressed", this.logarithmic);
    this.figure.hidden = this.filtered || curves.length === 0;
    this.makeLegend(curves);
    if (shown.length === 0 || this.figure.hidden) return void (this.plot = null);
    const lines = this.spec.stacked ? this.areas(shown) : shown.flatMap((curve) => this.lines(curve));
    const tables = lines.map((line) => [this.page.steps[line.curve.steps], line.values]);
    this.plot = new uPlot(this.options(lines), uPlot.join(tables), this.holder);
    this.shownLines = lines;
    this.zoom(this.page.zoom);
    this.showValues();
  }

  // A curve as one line, or as a faint line of what was measured and its moving average.
  lines(curve) {
    const log = this.logarithmic;
    const values = curve.values.map((value) => (log && value <= 0 ? null : value));
    const weight = this.page.smoothing;
    const line = { curve, values, measured: values, width: 1.8 };
    if (curve.exact || weight === 0 || values.length <= SMOOTHED_FROM) return [line];
    return [{ curve, values, width: 1, faint: true }, { ...line, values: smooth(values, weight) }];
  }

  // Stacked curves as areas, the highest first: each one covers the lower part of those before it.
  areas(curves) {
    const sums = stack(curves.map((curve) => curve.values));
    return curves.map((curve, i) => ({ curve, values: sums[i], measured: curve.values, width: 0, area: true })).reverse();
  }

  options(lines) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { stroke: () => color("soft"), font: "11px system-ui, sans-serif", grid: { stroke: () => color("rule"), width: 1 }, ticks: { show: false } };
    const format = (_, ticks) => ticks.map((tick) => (tick == null ? "" : shortNumber(tick)));
    const { clientWidth: width, clientHeight: height } = this.holder;
    return {
      width,
      height,
      legend: { show: false },
      padding: [10, 18, 0, 0],
      scales: { x: { time: false }, y: { distr: this.logarithmic ? 3 : 1, range: this.range() } },
      axes: [
        { ...axis, size: 28, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7], values: format },
        { ...axis, size: 54, values: format, grid: this.logarithmic ? { ...axis.grid, filter: decades } : axis.grid },
      ],
      series: [
        {},
        ...lines.map((line) => ({
          label: line.curve.name,
          stroke: () => color(`c${line.curve.color}`) + (line.faint ? "48" : ""),
          fill: line.area ? () => color(`c${line.curve.color}`) : undefined,
          width: line.width,
          dash: DASHES[line.curve.dash],
          points: { show: !line.faint && !line.area && line.values.length <= 30, size: 5, fill: () => color(`c${line.curve.color}`) },
        })),
      ],
      cursor: {
        y: false,
        points: { size: 7, show: (plot, i) => (lines[i - 1].faint || lines[i - 1].area ? false : dot(lines[i - 1].curve.color)) },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => (this.page.setZoom(null), null) },
        sync: { key: "steps", setSeries: false, scales: ["x", null], filters: { pub: isHover, sub: isHover } },
      },
      hooks: { setCursor: [() => this.showValues()], setSelect: [(plot) => this.zoomToSelection(plot)] },
    };
  }

  // The range of the axis of values.
  range() {
    const { ceiling, stacked } = this.spec;
    return (plot, low, high) => {
      if (this.logarithmic) return low > 0 ? [roundDown(low), -roundDown(-high)] : [0.1, 1];
      if (stacked) return [0, ceiling != null && !this.page.zoom ? ceiling : high * 1.03 || 1];
      if (low == null) return [0, 1];
      if (low === high) return [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
      return low > 0 && low < 0.5 * high ? [0, high * 1.03] : [low - (high - low) * 0.04, high + (high - low) * 0.04];
    };
  }

  zoomToSelection(plot) {
    if (plot.select.width < 4) return;
    const { left, width } = plot.select;
    this.page.setZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  zoom(range) {
    const steps = this.plot?.data[0];
    if (!steps?.length) return;
    const [first, last] = range ?? [steps[0], steps[steps.length - 1]];
    this.plot.setScale("x", first === last ? { min: first - 1, max: last + 1 } : { min: first, max: last });
  }

  makeLegend(curves) {
    this.items = curves.map((curve) => {
      const item = legendItem(curve.name, `c${curve.color}`, `d${curve.dash}`, !this.hidden.has(curve.name), () => {
        if (!this.hidden.delete(curve.name)) this.hidden.add(curve.name);
        this.draw();
      });
      item.value = document.createElement("b");
      item.button.append(item.value);
      return { ...item, name: curve.name };
    });
    this.step = Object.assign(document.createElement("li"), { className: "step" });
    this.figure.querySelector(".legend").replaceChildren(this.step, ...this.items.map((item) => item.element));
  }

  // Writes the values under the cursor into the legend, or the last ones if it is elsewhere.
  showValues() {
    if (!this.plot || !this.shownLines) return;
    const { idxs, left } = this.plot.cursor, isOver = left != null && left >= 0;
    this.shownLines.forEach((line, i) => {
      if (line.faint) return;
      const values = this.plot.data[i + 1];
      let index = isOver ? idxs?.[i + 1] : values.length - 1;
      while (!isOver && index > 0 && values[index] == null) index--;
      const item = this.items.find((item) => item.name === line.curve.name);
      if (index == null || !item) return void (item.value.textContent = "");
      const step = this.plot.data[0][index], at = this.page.steps[line.curve.steps].indexOf(step);
      const measured = line.measured[at];
      item.value.textContent = shortNumber(measured);
      if (line.values !== line.measured && !line.area) {
        const mean = document.createElement("small");
        mean.textContent = ` (~ ${shortNumber(values[index])})`;
        item.value.append(mean);
      }
      item.button.title = `step ${step}: ${shortNumber(measured)}`;
    });
    const index = isOver ? this.plot.cursor.idx : null;
    this.step.textContent = index == null ? "last" : `step ${this.plot.data[0][index].toLocaleString("en")}`;
  }
}

const isHover = (type) => type === "mousemove" || type === "mouseleave";

// The next number below a value, or for a negative one above its size, with one significant digit.
function roundDown(value) {
  const power = 10 ** Math.floor(Math.log10(Math.abs(value)));
  return Math.floor(value / power + 1e-9) * power;
}

// Of the splits of a logarithmic axis, those that get a line: powers of ten, or all if there are fewer than two.
function decades(plot, splits) {
  const isPower = (value) => value != null && Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
  return splits.filter(isPower).length < 2 ? splits : splits.map((value) => (isPower(value) ? value : null));
}

// The dot on a curve under the cursor.
function dot(color) {
  const element = document.createElement("div");
  element.className = `u-cursor-pt dot c${color}`;
  return element;
}

// An entry of a legend: a button that switches something off and on.
function legendItem(name, color, dash, pressed, onclick) {
  const element = document.createElement("li"), button = document.createElement("button"), mark = document.createElement("i");
  mark.className = `${color} ${dash}`;
  button.append(mark, name);
  button.setAttribute("aria-pressed", pressed);
  button.onclick = onclick;
  element.append(button);
  return { element, button };
}
