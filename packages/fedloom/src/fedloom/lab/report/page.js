"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  let figures, written;
  function take(payload) {
    written = new Map(payload.map((figure) => [figure.id, JSON.stringify(figure)]));
    figures = new Map(payload.map((figure) => [figure.id, figure]));
    for (const { spec } of figures.values()) {
      for (const [name, { columns, rows }] of Object.entries(spec.datasets)) {
        spec.datasets[name] = rows.map((row) => Object.fromEntries(columns.map((column, i) => [column, row[i]])));
      }
    }
  }
  take(read("figures"));
  const themes = read("themes");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const look = () => chosen ?? (system.matches ? "dark" : "light");

  // Room for the names beside the panels: numbers, or the longest of the texts.
  function besideOf(spec, width) {
    const inner = spec.spec.layer ? spec.spec.layer[0] : spec.spec;
    const y = inner.encoding.y;
    if (y.type !== "nominal") return 56;
    const longest = Math.max(...spec.datasets.rows.map((row) => String(row[y.field]).length));
    return Math.min(width < SMALL ? 116 : 190, 7 * longest) + (y.title ? 34 : 14);
  }

  // Long names in lines of up to `letters` characters, cut between words where there are any.
  function wrapped(name, letters = 19) {
    const lines = [""];
    for (const word of String(name).match(new RegExp(`\\S{1,${letters}}`, "g")) ?? []) {
      const line = lines.at(-1);
      if (!line) lines.splice(-1, 1, word);
      else if (line.length + 1 + word.length <= letters) lines.splice(-1, 1, `${line} ${word}`);
      else lines.push(word);
    }
    return lines;
  }

  function narrow(axis, rows) {
    const names = new Set(rows.flatMap((row) => Object.values(row).filter((value) => typeof value === "string")));
    const lines = JSON.stringify(Object.fromEntries([...names].map((name) => [name, wrapped(name)])));
    const expression = `${lines}[${axis.labelExpr ?? "datum.label"}]`;
    const centred = [2, 3, 4, 5].map((n) => ({ test: `length(${expression}) === ${n}`, value: -5.5 * (n - 1) }));
    return {
      ...axis, labelExpr: expression, labelLimit: 116, labelFontSize: 10, labelLineHeight: 11,
      labelOffset: { condition: centred, value: 0 },
    };
  }

  // Rows as high as the longest of their names.
  function heighten(part, rows) {
    const names = new Set(rows.map((row) => row.row ?? row.method));
    const lines = Math.max(...[...names].map((name) => wrapped(name).length));
    part.height = Math.max(part.height, names.size * (11 * lines + 8));
  }

  const SMALL = 520, SMALLEST = 122, WIDEST = 520, GAP = 30;

  // As many columns as fit, or one less where that leaves fewer gaps in the last line.
  function columnsOf(panels, room) {
    const most = Math.max(1, Math.min(4, panels, room));
    const gaps = (columns) => (columns - (panels % columns)) % columns;
    return most > 2 && gaps(most - 1) < gaps(most) ? most - 1 : most;
  }

  function fitted(figure, width) {
    let text = JSON.stringify(figure.spec);
    const narrower = figure.spec.datasets.rows[0].label_narrow !== undefined;
    if (width < SMALL && narrower) text = text.replaceAll('"field":"label"', '"field":"label_narrow"');
    const short = (_, value) => (width < SMALL && value?.labelLimit === 190 ? narrow(value, figure.spec.datasets.rows) : value);
    const spec = JSON.parse(text, short);
    if (width < SMALL && text.includes('"labelLimit":190')) heighten(spec.spec ?? spec, figure.spec.datasets.rows);
    if (figure.layout === "facet" || figure.layout === "square") {
      const names = besideOf(spec, width);
      const panels = new Set(figure.spec.datasets.rows.map((row) => row[spec.facet.field])).size;
      const columns = columnsOf(panels, Math.floor((width - names + GAP) / (SMALLEST + GAP)));
      const each = Math.min(WIDEST, Math.floor((width - names - GAP * (columns - 1)) / columns));
      spec.columns = columns;
      spec.spec.width = each;
      const heads = [...new Set(figure.spec.datasets.rows.map((row) => row[spec.facet.field]))];
      const lines = Object.fromEntries(heads.map((head) => [head, wrapped(head, Math.floor(each / 7.5))]));
      Object.assign(spec.facet.header, { labelLimit: each, labelExpr: `${JSON.stringify(lines)}[datum.label]` });
      if (figure.layout === "square") spec.spec.height = each;
    } else if (figure.layout === "beside") {
      const side = width < SMALL ? 64 : 110;
      spec.hconcat[0].width = Math.min(980, width - side - 84);
      spec.hconcat[1].width = side;
    } else {
      spec.width = width;
      spec.autosize = { type: "fit-x", contains: "padding" };
    }
    return spec;
  }

  const options = (figure, config) => ({
    actions: false, ast: true, mode: "vega-lite", config, renderer: figure.canvas ? "canvas" : "svg",
    tooltip: { disableDefaultStyle: false },
  });

  async function draw(place) {
    const figure = figures.get(place.dataset.figure);
    const width = Math.floor(place.clientWidth);
    if (!width || place.dataset.drawn === `${width} ${look()}`) return;
    place.dataset.drawn = `${width} ${look()}`;
    const made = (room) => vegaEmbed(place, fitted(figure, room), options(figure, themes[look()]));
    let { view } = await made(width);
    const over = place.querySelector(".marks").getBoundingClientRect().width - width;
    if (over > 0.5) {  // names longer than expected
      view.finalize();
      ({ view } = await made(width - Math.ceil(over)));
    }
    place.view?.finalize();
    place.view = view;
  }

  async function drawAll() {
    document.documentElement.dataset.look = look();
    document.querySelector('[data-do="look"]').textContent = look() === "dark" ? "Light mode" : "Dark mode";
    for (const place of document.querySelectorAll(".chart")) {
      if (place.offsetParent === null) continue;
      await draw(place);
      await new Promise((next) => setTimeout(next));
    }
    document.documentElement.dataset.ready = "yes";
  }

  function save(name, text, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const quoted = (cell) => {
    const formula = typeof cell === "string" && /^[=+\-@\t\r]/.test(cell);
    const text = cell === null || cell === undefined ? "" : `${formula ? "'" : ""}${cell}`;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };

  function table(figure) {
    const rows = figure.spec.datasets[figure.table];
    const names = Object.keys(rows[0]).filter((name) => !figure.hidden.includes(name));
    return [names, ...rows.map((row) => names.map((name) => row[name]))];
  }

  async function saveSvg(figure) {
    const place = document.createElement("div");
    place.style.cssText = "position:absolute;left:-9999px;width:960px";
    document.body.append(place);
    const { view } = await vegaEmbed(place, fitted(figure, 960), { ...options(figure, themes.light), renderer: "svg" });
    save(`${figure.id}.svg`, await view.toSVG(), "image/svg+xml");
    view.finalize();
    place.remove();
  }

  const actions = {
    svg: (button) => saveSvg(figures.get(button.value)),
    csv: (button) => {
      const text = table(figures.get(button.value)).map((row) => row.map(quoted).join(",")).join("\n");
      save(`${button.value}.csv`, `${text}\n`, "text/csv");
    },
    text: (button) => save(button.dataset.name, document.getElementById(button.value).textContent, "text/plain"),
    file: (button) => save(button.dataset.name, read(button.value), button.dataset.type),
    look: () => { chosen = look() === "dark" ? "light" : "dark"; drawAll(); },
    sort: (button) => sort(button.closest("th")),
  };

  function sort(head) {
    const down = head.getAttribute("aria-sort") !== "descending";
    const body = head.closest("table").tBodies[0];
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.children[head.cellIndex].dataset.value ?? "";
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const step = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -step : step;
    };
    body.append(...[...body.rows].sort(order));
  }

  const LIMIT = 300;

  function fill(details) {
    const place = details.querySelector(".scroll");
    if (place.firstChild) return;
    const [names, ...rows] = table(figures.get(details.dataset.data));
    const made = document.createElement("table");
    const line = (parent, cells, tag) => {
      const row = parent.insertRow();
      for (const cell of cells) {
        const made = document.createElement(tag);
        made.textContent = cell ?? "";
        if (tag === "th") made.scope = "col";
        row.append(made);
      }
    };
    line(made.createTHead(), names, "th");
    const body = made.createTBody();
    for (const row of rows.slice(0, LIMIT)) line(body, row, "td");
    if (rows.length > LIMIT) line(body, [`the first ${LIMIT} of ${rows.length} rows; the CSV has all`], "td");
    place.append(made);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-do]");
    if (button) actions[button.dataset.do](button);
  });
  document.addEventListener("change", (event) => {
    if (!event.target.matches(".tabs input")) return;
    for (const input of document.getElementsByName(event.target.name)) {
      document.getElementById(input.value).hidden = !input.checked;
    }
    drawAll();
  });
  document.addEventListener("toggle", ({ target }) => target.matches("details[data-data]") && fill(target), true);

  // A newer page of the same run, from `fedloom watch`: tabs, folds, place and focus stay, and charts of the same data.
  window.renewReport = (text) => {
    const page = new DOMParser().parseFromString(text, "text/html");
    const reachable = () => [...document.querySelectorAll("a[href], button, input, summary, .scroll")];
    const focus = reachable().indexOf(document.activeElement);
    const before = written;
    take(JSON.parse(page.getElementById("figures").textContent));
    for (const { value } of document.querySelectorAll(".tabs input:checked")) {
      const same = page.querySelector(`.tabs input[value="${value}"]`);
      for (const input of same ? page.getElementsByName(same.name) : []) {
        input.toggleAttribute("checked", input === same);
        page.getElementById(input.value).hidden = input !== same;
      }
    }
    for (const place of page.querySelectorAll(".chart")) {
      const id = place.dataset.figure;
      const shown = document.querySelector(`.chart[data-figure="${id}"]`);
      if (shown && before.get(id) === written.get(id)) place.replaceWith(shown);
      else if (shown) place.style.minHeight = `${shown.offsetHeight}px`;
    }
    for (const { dataset: { data } } of document.querySelectorAll("details[data-data][open]")) {
      page.querySelector(`details[data-data="${data}"]`)?.toggleAttribute("open", true);
    }
    for (const part of ["header", "nav", "main"]) {
      document.querySelector(part).replaceChildren(...page.querySelector(part).childNodes);
    }
    for (const { id, textContent } of page.querySelectorAll('script[type="application/json"]')) {
      document.getElementById(id).textContent = textContent;
    }
    document.querySelectorAll("details[data-data][open]").forEach(fill);
    if (focus >= 0) reachable()[focus]?.focus({ preventScroll: true });
    drawAll();
  };
  system.addEventListener("change", drawAll);
  let pause;
  addEventListener("resize", () => { clearTimeout(pause); pause = setTimeout(drawAll, 150); });
  drawAll();
})();
