// Three things, each of which the page can do without: plots that react to the pointer, tables that sort, a tooltip.
(() => {
  "use strict";

  const tip = document.getElementById("tip");

  function showTip(handler, event, item, value) {
    if (value === null || value === undefined || value === "" || typeof value !== "object") {
      tip.hidden = true;
      return;
    }
    tip.replaceChildren(); // text nodes only: nothing here is ever read as markup
    for (const [title, text] of Object.entries(value)) {
      const term = document.createElement("dt");
      const words = document.createElement("dd");
      term.textContent = title;
      words.textContent = String(text);
      tip.append(term, words);
    }
    tip.hidden = false;
    const point = event.changedTouches ? event.changedTouches[0] : event;
    const box = tip.getBoundingClientRect();
    const right = point.clientX + 16 + box.width > window.innerWidth - 8;
    const below = point.clientY + 16 + box.height > window.innerHeight - 8;
    const left = right ? point.clientX - 16 - box.width : point.clientX + 16;
    const top = below ? point.clientY - 16 - box.height : point.clientY + 16;
    tip.style.left = Math.max(8, Math.min(left, window.innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(8, top) + "px";
  }

  async function drawAll() {
    const specs = JSON.parse(document.getElementById("plots").textContent);
    const options = {
      actions: false, ast: true, defaultStyle: false, mode: "vega-lite", renderer: "svg", tooltip: showTip,
      loader: { target: "_self" },
    };
    for (const [name, spec] of Object.entries(specs)) {
      const plot = document.getElementById("plot-" + name);
      await new Promise((resume) => setTimeout(resume)); // the page can be scrolled and read meanwhile
      try {
        await vegaEmbed(plot.querySelector(".live"), spec, options);
        plot.querySelector(".live svg").setAttribute("aria-hidden", "true"); // the figure around it has the alternative text
        plot.classList.add("ready");
      } catch (error) {
        console.error("plot " + name + ": " + error); // the static plot stays
      }
    }
    document.documentElement.dataset.drawn = "yes";
  }

  function key(cell) {
    const text = cell.dataset.value ?? cell.textContent;
    const number = Number(text);
    return text.trim() === "" || Number.isNaN(number) ? text : number;
  }

  function compare(a, b) {
    const empty = (x) => x === "";
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => (down ? -1 : 1) * compare(key(a.cells[column]), key(b.cells[column])));
        table.tBodies[0].append(...rows);
      });
    });
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  window.addEventListener("load", drawAll); // until then the static plots are shown
})();
