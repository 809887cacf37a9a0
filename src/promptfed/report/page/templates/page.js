"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const system = matchMedia("(prefers-color-scheme: dark)");

  // ---- light and dark
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const remember = (value) => { try { localStorage.setItem("promptfed-theme", value); } catch { /* private window */ } };
  try {
    const known = localStorage.getItem("promptfed-theme");
    if (known === "dark" || known === "light") root.dataset.theme = known;
  } catch { /* private window */ }

  // ---- tables
  const compare = (a, b, way) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is missing comes last, either way
    const x = Number(a), y = Number(b);
    return way * (Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y);
  };
  const sort = (table, key, way) => {
    const heads = all("thead th", table);
    const at = heads.findIndex((head) => head.dataset.key === key);
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== at ? "none" : way > 0 ? "ascending" : "descending"));
    const body = table.tBodies[0];
    const value = (row) => row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
    [...body.rows].sort((a, b) => compare(value(a), value(b), way)).forEach((row) => body.append(row));
  };
  all("table.headline thead th").forEach((head) => {
    head.querySelector("button").addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const first = head.dataset.first === "ascending" ? 1 : -1;
      const way = now === "descending" ? 1 : now === "ascending" ? -1 : first;
      all("table.headline").forEach((table) => sort(table, head.dataset.key, way));
    });
  });
  const rounds = (kind) => all("[data-rounds]").forEach((one) => { one.hidden = one.dataset.rounds !== kind; });
  all('input[name="rounds"]').forEach((one) => one.addEventListener("change", () => rounds(one.value)));

  // ---- charts
  const views = {};
  const state = { shown: new Set(data.labels), measure: data.measures[0]?.index ?? 0 };
  const config = (width) => ({
    font: getComputedStyle(document.body).fontFamily,
    axisX: { labelOverlap: true, tickCount: width < 500 ? 5 : 10 },
    axisY: { labelLimit: width < 500 ? 112 : 230, tickCount: 6 },
  });
  const draw = async (chart) => {
    const place = document.getElementById(`chart-${chart.name}`);
    let text = JSON.stringify(chart.spec);
    if (dark()) for (const [light, other] of Object.entries(data.dark)) text = text.replaceAll(light, other);
    const spec = JSON.parse(text);
    for (const one of spec.params || []) {
      if (one.name === "shown") one.value = [...state.shown];
      if (one.name === "measure") one.value = state.measure;
    }
    views[chart.name]?.finalize();
    const options = {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, config: config(place.clientWidth),
      tooltip: { disableDefaultStyle: true },
    };
    views[chart.name] = await vegaEmbed(place, spec, options);
    const svg = place.querySelector("svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", chart.alt);
  };
  const drawAll = async () => {
    root.dataset.charts = "drawing";
    try {
      for (const chart of data.charts) await draw(chart);
      root.dataset.charts = "drawn";
    } catch (error) {
      root.dataset.charts = "failed";
      console.error(error);
    }
  };
  const signal = (name, value) => {
    for (const { view } of Object.values(views)) {
      try { view.signal(name, value).runAsync(); } catch { /* a chart without it */ }
    }
  };
  const measure = (name) => {
    const one = data.measures.find((known) => known.name === name);
    state.measure = one.index;
    document.getElementById("measure-title").textContent = one.title;
    signal("measure", one.index);
  };
  all('input[name="measure"]').forEach((one) => one.addEventListener("change", () => measure(one.value)));
  all(".legend button[data-label]").forEach((one) => {
    one.addEventListener("click", () => {
      const label = one.dataset.label;
      if (!state.shown.delete(label)) state.shown.add(label);
      show();
    });
  });
  const show = () => {
    all(".legend button[data-label]").forEach((one) => {
      one.setAttribute("aria-pressed", String(state.shown.has(one.dataset.label)));
    });
    signal("shown", data.labels.filter((label) => state.shown.has(label)));
  };
  all(".legend button[data-all]").forEach((one) => {
    one.addEventListener("click", () => {
      const every = state.shown.size === data.labels.length;
      state.shown = new Set(every ? [] : data.labels);
      show();
    });
  });

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
    drawAll();
  });
  system.addEventListener("change", () => { if (!root.dataset.theme) drawAll(); });

  drawAll();
})();
