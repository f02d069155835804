/* Charts of the dashboard, drawn with uPlot from the JSON in `data-series`. A page without uPlot shows none.

   windlass.js calls `charts` after each refresh and each change of the theme. */
"use strict";

const charts = (() => {
  const main = document.getElementById("main");
  const CHART_HEIGHT = 132;
  // Element id to its element, its data and the uPlot object.
  const drawn = new Map();

  function redraw() {
    for (const id of [...drawn.keys()]) removeChart(id);
    draw();
  }

  function removeChart(id) {
    drawn.get(id).plot.destroy();
    drawn.delete(id);
  }

  function draw() {
    if (typeof uPlot === "undefined") return;
    for (const [id, { element }] of [...drawn]) if (!element.isConnected) removeChart(id);
    for (const element of main.querySelectorAll(".chart[data-series]")) {
      const data = JSON.parse(element.dataset.series);
      const labels = data.series.map((series) => series.label).join();
      const chart = drawn.get(element.id);
      if (chart?.labels === labels) {
        chart.data = data;
        chart.plot.setData(columns(data));
      } else {
        if (chart) removeChart(element.id);
        drawn.set(element.id, { element, labels, data, plot: createPlot(element, data) });
      }
    }
  }

  // Stacked series are drawn as sums, the largest first, so that each covers the lower part of the one before.
  function columns({ at, series, isStacked }) {
    if (!isStacked) return [at, ...series.map(({ values }) => values)];
    const sums = [];
    series.forEach(({ values }, index) => {
      sums.push(values.map((value, point) => (value ?? 0) + (index ? sums[index - 1][point] : 0)));
    });
    return [at, ...sums.reverse()];
  }

  function createPlot(element, data) {
    const series = data.isStacked ? [...data.series].reverse() : data.series;
    const ink = colour("--ink-soft");
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const readout = document.createElement("div");
    readout.className = "readout";
    readout.hidden = true;
    const plot = new uPlot({
      width: Math.max(element.clientWidth, 120),
      height: CHART_HEIGHT,
      padding: [8, 26, 2, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: !data.isStacked, size: 7 } },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.08, data.least ?? 1)] } },
      axes: [
        { stroke: ink, font, size: 24, gap: 4, space: 64, grid: { show: false }, ticks: { show: false },
          values: (_, marks) => marks.map((mark) => axisLabel(mark, marks)) },
        { stroke: ink, font, size: data.unit ? 50 : 34, gap: 4, space: 24, grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
          incrs: data.isWhole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] : undefined,
          values: (_, marks) => marks.map(shortNumber) },
      ],
      series: [{}, ...series.map((each) => ({
        label: each.label,
        stroke: colour(each.colour),
        width: data.isStacked ? 1.25 : 1.75,
        fill: colour(each.colour).replace("rgb(", "rgba(").replace(")", data.isStacked ? ", 0.35)" : ", 0.10)"),
        points: { show: false },
        paths: data.isStacked || data.isStepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        spanGaps: false,
      }))],
      // Each area is filled down to the one below it.
      bands: data.isStacked ? series.slice(1).map((_, index) => ({ series: [index + 1, index + 2] })) : [],
      hooks: {
        setCursor: [(hovered) => showReadout(hovered, drawn.get(element.id)?.data, readout)],
        draw: [(drawnPlot) => drawMarks(drawnPlot, drawn.get(element.id)?.data ?? data)],
      },
    }, columns(data), element);
    plot.over.append(readout);
    return plot;
  }

  // The computed value of a colour of the style sheet, in the current theme.
  function colour(name) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    main.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  }

  function clock(seconds, hasSeconds) {
    const parts = { hour: "2-digit", minute: "2-digit", ...(hasSeconds ? { second: "2-digit" } : {}) };
    return new Date(seconds * 1000).toLocaleTimeString([], { ...parts, hourCycle: "h23", timeZone: "UTC" });
  }

  const DAY_S = 86400;

  // Days for a chart of several days, and at midnight; otherwise the time of day.
  function axisLabel(mark, marks) {
    const step = marks.length > 1 ? marks[1] - marks[0] : 0;
    if (step >= DAY_S || (step > 3 * 3600 && mark % DAY_S === 0)) return day(mark);
    return clock(mark, step < 60);
  }

  function day(seconds) {
    return new Date(seconds * 1000).toLocaleDateString([], { day: "numeric", month: "short", timeZone: "UTC" });
  }

  // A thin line at each change of the fleet.
  function drawMarks(plot, { marks = [] }) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--ink-soft");
    ctx.globalAlpha = 0.4;
    ctx.setLineDash([2, 3]);
    for (const { at } of marks) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // The change nearest to the pointer, if it is within a few pixels.
  function markAt(plot, { marks = [] }, left) {
    const near = marks.map((mark) => ({ ...mark, distance: Math.abs(plot.valToPos(mark.at, "x") - left) }))
      .sort((one, other) => one.distance - other.distance)[0];
    return near && near.distance < 8 ? near : null;
  }

  function shortNumber(number) {
    if (number >= 1e6) return `${+(number / 1e6).toFixed(1)}M`;
    if (number >= 1e4) return `${+(number / 1e3).toFixed(1)}k`;
    return `${+number.toFixed(4)}`;
  }

  // The values at the pointer.
  function showReadout(plot, data, readout) {
    const { idx, left } = plot.cursor;
    if (!data || idx === null || idx === undefined || left < 0) {
      readout.hidden = true;
      return;
    }
    const title = document.createElement("b");
    const range = data.at[data.at.length - 1] - data.at[0];
    const mark = markAt(plot, data, left);
    const at = mark?.at ?? data.at[idx];
    title.textContent = `${range > DAY_S ? `${day(at)} ` : ""}${clock(at, range <= DAY_S)}`;
    const rows = data.series.map(({ label, values }) => {
      const value = values[idx];
      const row = document.createElement("span");
      const number = document.createElement("span");
      number.textContent = value === null ? "–" : `${data.unit ? `${data.unit} ` : ""}${+value.toFixed(data.unit ? 4 : 1)}`;
      row.append(label, number);
      return row;
    });
    const decision = document.createElement("em");
    decision.textContent = mark?.text ?? "";
    readout.replaceChildren(title, ...rows, ...(mark ? [decision] : []));
    readout.hidden = false;
    const width = readout.offsetWidth;
    const x = left > plot.over.clientWidth / 2 ? left - width - 10 : left + 10;
    readout.style.transform = `translate(${Math.max(0, Math.min(x, plot.over.clientWidth - width))}px, 4px)`;
  }

  new ResizeObserver(() => {
    for (const { plot, element } of drawn.values()) {
      const width = Math.max(element.clientWidth, 120);
      if (width !== plot.width) plot.setSize({ width, height: CHART_HEIGHT });
    }
  }).observe(main);

  return { draw, redraw, clock, has: (id) => drawn.has(id) };
})();
