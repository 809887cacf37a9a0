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
  const paint = () => {
    all("[data-colour]").forEach((one) => {
      const colour = one.dataset.colour;
      one.style.setProperty("--c", dark() ? data.dark[colour] || colour : colour);
    });
  };

  // ---- tables
  const compare = (a, b, way) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is missing comes last, either way
    const x = Number(a), y = Number(b);
    return way * (Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y);
  };
  const sort = (table, key, way) => {
    const heads = all("thead th", table);
    const at = heads.findIndex((head) => head.dataset.key === key);
    if (at < 0) return;
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== at ? "none" : way > 0 ? "ascending" : "descending"));
    const body = table.tBodies[0];
    const value = (row) => row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
    [...body.rows]
      .map((row, i) => [row, i])
      .sort((a, b) => compare(value(a[0]), value(b[0]), way) || a[1] - b[1])
      .forEach(([row]) => body.append(row));
  };
  const sortAll = (key, way) => all("table.headline").forEach((table) => sort(table, key, way));
  all("table.headline thead th").forEach((head) => {
    head.querySelector("button")?.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const first = head.dataset.first === "ascending" ? 1 : -1;
      sortAll(head.dataset.key, now === "descending" ? 1 : now === "ascending" ? -1 : first);
    });
  });
  const rounds = (kind) => all("[data-rounds]").forEach((one) => { one.hidden = one.dataset.rounds !== kind; });
  all('input[name="rounds"]').forEach((one) => one.addEventListener("change", () => rounds(one.value)));

  // ---- charts
  const views = {};
  const state = { shown: new Set(data.labels), measure: data.measures[0]?.index ?? 0 };
  const config = (width) => {
    const style = getComputedStyle(root);
    const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => style.getPropertyValue(name).trim());
    const font = getComputedStyle(document.body).fontFamily;
    return {
      background: null, font, padding: { left: 0, right: 4, top: 4, bottom: 6 },
      view: { stroke: null },
      axis: {
        labelColor: soft, titleColor: soft, gridColor: line, domainColor: soft, tickColor: soft,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", titlePadding: 8, labelPadding: 5, tickSize: 4,
      },
      axisY: { domain: false, ticks: false, labelLimit: width < 500 ? 112 : 230, tickCount: 6 },
      axisX: { grid: false, labelOverlap: true, tickCount: width < 500 ? 5 : 10 },
      legend: { labelColor: ink, titleColor: soft, labelFontSize: 12, symbolType: "square", title: null },
      bar: { cornerRadius: 1 },
    };
  };
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
    paint();
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
    if (!one) return;
    state.measure = one.index;
    const title = document.getElementById("measure-title");
    if (title) title.textContent = one.title;
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

  // ---- #sort=worst&way=ascending&rounds=last&measure=global&theme=dark opens the page in that state
  const follow = () => {
    const words = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    if (words.get("theme")) root.dataset.theme = words.get("theme");
    if (words.get("sort")) sortAll(words.get("sort"), words.get("way") === "ascending" ? 1 : -1);
    for (const name of ["rounds", "measure"]) {
      const input = all(`input[name="${name}"]`).find((one) => one.value === words.get(name) && !one.disabled);
      if (input) {
        input.checked = true;
        (name === "rounds" ? rounds : measure)(input.value);
      }
    }
  };
  follow();
  addEventListener("hashchange", () => { follow(); drawAll(); });
  drawAll();
})();
